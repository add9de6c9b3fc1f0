"""Classifiers that hardly ever miss the rare, critical class: ALM-constrained training on MONAI.

Importing the package imports its modules, so that ``$import mri_alm`` in a bundle config reaches them all.
"""

from importlib.metadata import version

from mri_alm import (
    bundle,
    calibration_cohort,
    cohort,
    engine,
    ensemble,
    job,
    losses,
    networks,
    phantom_io,
    scoring,
    transforms,
)
from mri_alm.alm import AugmentedLagrangian, MuSchedule
from mri_alm.constraint import ranking_violation

__version__ = version("mri-alm")

__all__ = [
    "AugmentedLagrangian",
    "MuSchedule",
    "bundle",
    "calibration_cohort",
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
