"""Classifiers that hardly ever miss the rare, critical class: ALM-constrained training on MONAI.

``import mri_alm`` reaches every module named here, so that ``$import mri_alm`` is all a bundle config needs. They are
loaded when first used: torch and MONAI take seconds, and reading DICOM needs neither.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mri_alm import bundle, cohort, engine, ensemble, job, losses, networks, phantom_io, scoring, transforms
    from mri_alm.alm import AugmentedLagrangian, MuSchedule
    from mri_alm.constraint import ranking_violation

__version__ = version("mri-alm")

__all__ = [
    "AugmentedLagrangian",
    "MuSchedule",
    "bundle",
    "cohort",
    "engine",
    "ensemble",
    "job",
    "losses",
    "networks",
    "phantom_io",
    "ranking_violation",
    "scoring",
    "transforms",
]
_NAMES = {"AugmentedLagrangian": "alm", "MuSchedule": "alm", "ranking_violation": "constraint"}


def __getattr__(name: str) -> Any:
    """A module or name of ``__all__``, loaded on first use (PEP 562)."""
    if name in _NAMES:
        return getattr(import_module(f"mri_alm.{_NAMES[name]}"), name)
    if name in __all__:
        return import_module(f"mri_alm.{name}")
    raise AttributeError(f"module 'mri_alm' has no attribute {name!r}")
