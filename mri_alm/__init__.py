"""Classifiers that hardly ever miss the rare, critical class: ALM-constrained training on MONAI.

The names below are the public face, loaded when first used: torch and MONAI take seconds, and reading DICOM needs
neither. ``import mri_alm`` is all a bundle config needs; the sub-packages are loaded in the same way.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from mri_alm import moved
from mri_alm.runtime.faces import faces

if TYPE_CHECKING:
    from mri_alm.alm.constraint import RankingConstraint as RankingConstraint
    from mri_alm.alm.constraint import ranking_violation as ranking_violation
    from mri_alm.alm.lagrangian import AugmentedLagrangian as AugmentedLagrangian
    from mri_alm.alm.schedule import MuSchedule as MuSchedule
    from mri_alm.bundle.trained_run import TrainedRun as TrainedRun
    from mri_alm.cohort.manifest import Cohort as Cohort
    from mri_alm.errors import InputError as InputError
    from mri_alm.errors import StudyError as StudyError
    from mri_alm.evaluation.analysis import evaluate as evaluate
    from mri_alm.metrics.threshold import OperatingPoint as OperatingPoint
    from mri_alm.metrics.threshold import fixed_fn_threshold as fixed_fn_threshold
    from mri_alm.metrics.threshold import neyman_pearson_threshold as neyman_pearson_threshold

__version__ = version("mri-alm")

__getattr__, _, __all__ = faces(
    __name__,
    {
        "": [
            "alm", "bundle", "cifar", "cohort", "evaluation", "imaging", "metrics", "networks", "phantom", "runtime",
            "programs", "scoring", "training", *moved.MODULES,
        ],
        "alm.constraint": ["RankingConstraint", "ranking_violation"],
        "alm.lagrangian": ["AugmentedLagrangian"],
        "alm.schedule": ["MuSchedule"],
        "bundle.trained_run": ["TrainedRun"],
        "cohort.manifest": ["Cohort"],
        "errors": ["InputError", "StudyError"],
        "evaluation.analysis": ["evaluate"],
        "metrics.threshold": ["OperatingPoint", "fixed_fn_threshold", "neyman_pearson_threshold"],
    },
)  # fmt: skip
__all__ = [name for name in __all__ if name not in moved.MODULES]
moved.install()


def __dir__() -> list[str]:
    return __all__
