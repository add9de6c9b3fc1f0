"""Where the modules of version 0.1.0 went: their names keep working, with a warning, until 1.0.

Configs of runs and bundles made before name them, and so do people's programs.
"""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES: dict[str, tuple[str, ...]] = {
    "batches": ("alm.batches", "networks"),
    "cache": ("bundle.transforms",),
    "calibration": ("metrics.calibration",),
    "cifar_batches": ("cifar.batches",),
    "cifar_job": ("cifar.job",),
    "cifar_sets": ("cifar.sets",),
    "comparison": ("cifar.comparison",),
    "constraint": ("alm.constraint",),
    "content": ("imaging.map_kind",),
    "dicom": ("imaging.exam", "runtime.pseudonyms"),
    "diffusion": ("imaging.diffusion",),
    "engine": ("training.engine", "networks"),
    "ensemble": ("bundle.trained_run", "bundle.transforms", "runtime.progress"),
    "evaluation_data": ("evaluation.data",),
    "explain": ("scoring.explain", "bundle.trained_run"),
    "files": ("runtime.files", "imaging.image_file", "bundle.checkpoints", "runtime.tables", "runtime.pseudonyms"),
    "full_evaluation": ("evaluation.analysis",),
    "image_file": ("imaging.image_file",),
    "images": ("imaging.exam",),
    "job": ("training.run",),
    "losses": ("alm.losses",),
    "losses_auc": ("alm.losses",),
    "losses_monai": ("alm.losses_monai",),
    "losses_multiclass": ("alm.losses_multiclass", "networks"),
    "networks_cifar": ("cifar.networks",),
    "operating_point": ("metrics.threshold",),
    "phantom_io": ("phantom.cohort",),
    "prepared_cohort": ("cohort.prepare_cohort",),
    "processes": ("alm.processes",),
    "ranking": ("alm.constraint",),
    "registration": ("imaging.registration",),
    "schedule": ("alm.schedule",),
    "scores": ("alm.constraint",),
    "series": ("imaging.series",),
    "statistics": ("metrics.uncertainty",),
    "structured_report": ("scoring.structured_report", "runtime.pseudonyms"),
    "tasks": ("runtime.tasks",),
    "threshold": ("metrics.threshold",),
    "transforms": ("bundle.transforms", "bundle.old_runs"),
    "volume": ("imaging.volume",),
    "zoo": ("bundle.export", "bundle.trained_run"),
}

RENAMED = {"engine.Selection": "CheckpointRule", "processes.rank": "process_rank", "dicom.Study": "Exam"}


class _Moved(MetaPathFinder, Loader):
    """Gives an old module: nothing of its own, every name from where it is now."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        package, _, module = name.partition(".")
        return ModuleSpec(name, self) if package == "mri_alm" and module in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.partition(".")[2]
        rooms = MODULES[old]

        def find(name: str) -> Any:
            now = RENAMED.get(f"{old}.{name}", name)
            for room in rooms if not name.startswith("_") else ():
                home = import_module(f"mri_alm.{room}")
                if hasattr(home, now):
                    text = f"{module.__name__}.{name} is now mri_alm.{room}.{now}; the old name goes in version 1.0."
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                    return getattr(home, now)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = find  # type: ignore[method-assign]


def install() -> None:
    """Make the old modules importable."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
