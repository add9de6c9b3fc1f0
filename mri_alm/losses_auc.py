"""Pairwise losses of the binary tables: surrogates of the AUC and of its part at high true-positive rates.

Called as the losses of `mri_alm.losses` are. They are comparison rows, for use without the constraint.
"""

import math

import torch
from torch import Tensor, nn

from mri_alm.errors import InputError
from mri_alm.losses import checked_pair


class MiniBatchAUC(nn.Module):
    """Mean over all pairs of the batch of (1 - (p - n))^2, the square surrogate of the AUC (MBAUC).

    A comparison row of the binary tables, never combined with the constraint. The mean over pairs is
    (1 - mean(p) + mean(n))^2 + var(p) + var(n), so no pair is ever formed; this is also the min-max form of the AUC
    loss with its inner variables solved for exactly on the batch.

    References:
        Gultekin, Saha, Ratnaparkhi, Paisley, "MBA: Mini-Batch AUC Optimization", IEEE TNNLS 2020. Ying, Wen, Lyu,
        "Stochastic Online AUC Maximization", NeurIPS 2016, for the min-max form.
    """

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar; zero if one class is missing."""
        logits = checked_pair(logits, label)
        positive = (label == 1).to(logits.dtype)
        mean_positive, variance_positive = _moments(logits, positive)
        mean_negative, variance_negative = _moments(logits, 1 - positive)
        loss = (1 - mean_positive + mean_negative).square() + variance_positive + variance_negative
        return torch.where((label == 1).any() & (label != 1).any(), loss, 0 * logits.sum())


class PartialAUC(nn.Module):
    """Squared hinge over the pairs of the batch with its hardest negatives, a surrogate of the one-way partial AUC.

    A comparison row: what else aims at few false positives at the highest true-positive rates. For each positive the
    mean over the worst share of the negatives is its conditional value at risk (CVaR); the surrogate grows with the
    negative's score, so all positives share the same worst negatives. Never combined with the constraint.

    Args:
        max_fpr: Share of the negatives of the batch that count, in (0, 1], rounded up to whole negatives.
        margin: By which positives are to exceed them, in units of the probability, > 0.

    Raises:
        InputError: If a value is out of its range.

    References:
        Zhu, Li, Wang, Wu, Yang, "When AUC meets DRO: Optimizing Partial AUC for Deep Learning with Non-Convex
        Convergence Guarantee", ICML 2022: one-way partial AUC with CVaR, its inner variable solved on the batch.
    """

    def __init__(self, max_fpr: float = 0.3, *, margin: float = 1.0) -> None:
        super().__init__()
        if not 0 < max_fpr <= 1 or not 0 < margin < math.inf:
            raise InputError(f"max_fpr must be in (0, 1] and margin > 0 and finite, got {max_fpr} and {margin}.")
        self.max_fpr, self.margin = max_fpr, margin

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar; zero if one class is missing."""
        score = checked_pair(logits, label).sigmoid()
        positive, negative = score[label == 1], score[label != 1]
        if not len(positive) or not len(negative):
            return 0 * score.sum()
        hardest = negative.topk(math.ceil(self.max_fpr * len(negative))).values
        return (self.margin - positive[:, None] + hardest).clamp(min=0).square().mean()


def _moments(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of the values with weight one; zeros if there are none."""
    count = weight.sum().clamp(min=1)
    mean = (weight * values).sum() / count
    return mean, (weight * (values - mean).square()).sum() / count
