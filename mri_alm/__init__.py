"""Classifiers that hardly ever miss the rare, critical class: ALM-constrained training on MONAI.

``import mri_alm`` reaches every module named here, so that ``$import mri_alm`` is all a bundle config needs. They are
loaded when first used: torch and MONAI take seconds, and reading DICOM needs neither.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mri_alm import (
        batches,
        bundle,
        cache,
        cifar_batches,
        cifar_job,
        cifar_sets,
        cohort,
        engine,
        ensemble,
        job,
        losses,
        losses_auc,
        losses_monai,
        losses_multiclass,
        networks,
        networks_cifar,
        phantom_io,
        processes,
        ranking,
        schedule,
        scoring,
        tasks,
        transforms,
        zoo,
    )
    from mri_alm.alm import AugmentedLagrangian
    from mri_alm.constraint import ranking_violation
    from mri_alm.ranking import RankingConstraint
    from mri_alm.schedule import MuSchedule

__version__ = version("mri-alm")

__all__ = [
    "AugmentedLagrangian",
    "MuSchedule",
    "RankingConstraint",
    "batches",
    "bundle",
    "cache",
    "cifar_batches",
    "cifar_job",
    "cifar_sets",
    "cohort",
    "engine",
    "ensemble",
    "job",
    "losses",
    "losses_auc",
    "losses_monai",
    "losses_multiclass",
    "networks",
    "networks_cifar",
    "phantom_io",
    "processes",
    "ranking",
    "ranking_violation",
    "schedule",
    "scoring",
    "tasks",
    "transforms",
    "zoo",
]
_NAMES = {
    "AugmentedLagrangian": "alm",
    "MuSchedule": "schedule",
    "RankingConstraint": "ranking",
    "ranking_violation": "constraint",
}


def __getattr__(name: str) -> Any:
    """A module or name of ``__all__``, loaded on first use (PEP 562)."""
    if name in _NAMES:
        return getattr(import_module(f"mri_alm.{_NAMES[name]}"), name)
    if name in __all__:
        return import_module(f"mri_alm.{name}")
    raise AttributeError(f"module 'mri_alm' has no attribute {name!r}")
