"""The method, in plain PyTorch: constraints, multipliers, penalty schedule, base losses, batches, processes.

Nothing here imports MONAI, but for the one base loss that is MONAI's own (``AUCMargin``, loaded when it is used).
"""

from typing import Any

from mri_alm.alm.batches import ProcessShare, StratifiedBatchSampler, positives_in_batch
from mri_alm.alm.constraint import (
    RankingConstraint,
    Violations,
    class_scores,
    mirrored_violation,
    multiclass_violation,
    pair_violation,
    ranking_violation,
)
from mri_alm.alm.lagrangian import AugmentedLagrangian
from mri_alm.alm.losses import (
    AsymmetricFocal,
    AsymmetricMargin,
    BinaryCrossEntropy,
    ClassBalancedBinaryCrossEntropy,
    LossConditional,
    MiniBatchAUC,
    PartialAUC,
    SmoothedBinaryCrossEntropy,
    SymmetricFocal,
    SymmetricMargin,
    VectorScaling,
    WeightedBinaryCrossEntropy,
)
from mri_alm.alm.losses_multiclass import (
    LDAM,
    BinaryLDAM,
    ClassBalancedCrossEntropy,
    CrossEntropy,
    MulticlassAsymmetricFocal,
    MulticlassAsymmetricMargin,
    MulticlassFocal,
    MulticlassMargin,
)
from mri_alm.alm.processes import process_rank, stop, world_size
from mri_alm.alm.schedule import MuSchedule, preset

__all__ = [
    "LDAM",
    "AUCMargin",
    "AsymmetricFocal",
    "AsymmetricMargin",
    "AugmentedLagrangian",
    "BinaryCrossEntropy",
    "BinaryLDAM",
    "ClassBalancedBinaryCrossEntropy",
    "ClassBalancedCrossEntropy",
    "CrossEntropy",
    "LossConditional",
    "MiniBatchAUC",
    "MuSchedule",
    "MulticlassAsymmetricFocal",
    "MulticlassAsymmetricMargin",
    "MulticlassFocal",
    "MulticlassMargin",
    "PartialAUC",
    "ProcessShare",
    "RankingConstraint",
    "SmoothedBinaryCrossEntropy",
    "StratifiedBatchSampler",
    "SymmetricFocal",
    "SymmetricMargin",
    "VectorScaling",
    "Violations",
    "WeightedBinaryCrossEntropy",
    "class_scores",
    "mirrored_violation",
    "multiclass_violation",
    "pair_violation",
    "positives_in_batch",
    "preset",
    "process_rank",
    "ranking_violation",
    "stop",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """The loss that needs MONAI."""
    if name == "AUCMargin":
        from mri_alm.alm.losses_monai import AUCMargin

        return AUCMargin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
