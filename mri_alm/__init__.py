"""Classifiers that hardly ever miss the rare, critical class: ALM-constrained training on MONAI.

Importing the package imports its modules, so that ``$import mri_alm`` in a bundle config reaches them all.
"""

from importlib.metadata import version

from mri_alm import (
    batches,
    bundle,
    cohort,
    engine,
    ensemble,
    job,
    losses,
    losses_monai,
    losses_multiclass,
    networks,
    phantom_io,
    processes,
    ranking,
    schedule,
    scoring,
    transforms,
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
    "cohort",
    "engine",
    "ensemble",
    "job",
    "losses",
    "losses_monai",
    "losses_multiclass",
    "networks",
    "phantom_io",
    "processes",
    "ranking",
    "ranking_violation",
    "schedule",
    "scoring",
    "transforms",
]
