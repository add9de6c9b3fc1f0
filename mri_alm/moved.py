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

MODULES = {  # to where their names are looked for
    "allowed_names": "bundle.inspection", "atomic": "runtime.atomic", "batches": "alm.batches networks",
    "benchmark_multiclass": "cifar.long_tail_report", "benchmark_plan": "cifar.table",
    "benchmark_report": "cifar.report", "benchmark_run": "cifar.training", "cache": "bundle.transforms",
    "calibration": "metrics.calibration", "cells": "runtime.tables", "cifar_batches": "cifar.batches",
    "cifar_job": "cifar.job", "cifar_sets": "cifar.sets", "cohort_check": "cohort.overview",
    "cohort_rules": "cohort.rules cohort.names", "cohort_text": "cohort.overview", "comparison": "metrics.comparison",
    "constraint": "alm.constraint", "content": "imaging.plausibility",
    "dicom": "imaging.exam runtime.pseudonyms",
    "dicom_file": "imaging.dicom_files", "diffusion": "imaging.diffusion", "engine": "training.engine networks",
    "ensemble": "bundle.trained_run bundle.transforms runtime.progress", "epoch_sums": "alm.lagrangian",
    "evaluation_data": "evaluation.data", "evaluation_files": "evaluation.report",
    "evaluation_tables": "evaluation.tables", "explain": "scoring.explain bundle.trained_run",
    "files": "runtime.files imaging.image_file bundle.checkpoints runtime.tables runtime.pseudonyms",
    "full_evaluation": "evaluation.analysis", "headers": "imaging.dicom_files", "html_figures": "evaluation.figures",
    "html_report": "evaluation.report", "image_file": "imaging.image_file",
    "images": "imaging.exam imaging.registration",
    "inspection": "bundle.inspection", "job": "training.run", "labels": "cohort.labels", "layouts": "cohort.layouts",
    "locks": "runtime.locks", "losses": "alm.losses", "losses_auc": "alm.losses", "losses_monai": "alm.losses_monai",
    "losses_multiclass": "alm.losses_multiclass networks", "model_card": "evaluation.model_card",
    "named_files": "cohort.layouts", "networks_cifar": "cifar.networks", "operating_point": "metrics.threshold",
    "phantom_anatomy": "phantom.anatomy", "phantom_canvas": "phantom.canvas", "phantom_dicom": "phantom.dicom",
    "phantom_io": "phantom.cohort", "preparation": "cohort.prepare_study", "prepared_cohort": "cohort.prepare_cohort",
    "processes": "alm.processes", "qc_page": "cohort.prepare_cohort", "qc_picture": "imaging.pictures",
    "ranking": "alm.constraint", "registration": "imaging.registration", "report": "imaging.pictures",
    "run_record": "bundle.run_folder", "schedule": "alm.schedule", "scores": "alm.constraint",
    "search": "cifar.training", "selection": "imaging.choose_series", "series": "imaging.series",
    "sources": "cohort.layouts runtime.files", "split_training": "training.member",
    "statistics": "metrics.uncertainty", "structured_report": "scoring.structured_report runtime.pseudonyms",
    "summary": "training.run", "tables": "evaluation.tables", "tasks": "runtime.tasks",
    "threshold": "metrics.threshold", "tracking": "training.tracking", "trade_off": "evaluation.analysis",
    "transforms": "bundle.transforms bundle.old_runs", "volume": "imaging.volume", "workers": "cohort.prepare_cohort",
    "zoo": "bundle.export bundle.trained_run",
}  # fmt: skip

RENAMED = {
    "engine.Selection": "CheckpointRule", "processes.rank": "process_rank", "dicom.Study": "Exam",
    "atomic.complete": "write_atomically", "atomic.told": "explain_os_errors", "locks.only_user": "exclusive_lock",
    "tasks.Outcome": "TaskResult", "job.Job": "TrainingRun", "cells.neutral": "escape_formula",
    "cells.plain": "unescape_formula", "benchmark_plan.Table": "BenchmarkTable",
    "prepared_cohort.Outcome": "PreparedCohort", "preparation.Job": "StudyTask", "sources.Source": "StudySource",
    "evaluation_data.Model": "ModelScores", "trade_off.Step": "ThresholdChoice",
    "comparison.Comparison": "TrainingComparison", "comparison.compare": "compare_trainings",
    "comparison.Estimate": "FigureEstimates",
}  # fmt: skip


class _Moved(MetaPathFinder, Loader):
    """Gives an old module: nothing of its own, every name from where it is now."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        package, _, module = name.partition(".")
        return ModuleSpec(name, self) if package == "mri_alm" and module in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.partition(".")[2]
        rooms = MODULES[old].split()

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
