"""From logits to scores: the one place where networks' outputs become what constraints compare and metrics rank."""

from typing import Literal, get_args

import torch
from torch import Tensor

from mri_alm.errors import one_of

ScoreKind = Literal["probability", "logit", "log_odds"]


def class_scores(logits: Tensor, kind: ScoreKind, *, scale: float = 1.0) -> Tensor:
    """Scores of every column of the logits; a larger score speaks for the column's class.

    Args:
        logits: ``(B,)``, of the critical class, or ``(B, C)``, a column per class; for LDAM's normalised head cosines.
        kind: ``"probability"`` (the paper): sigmoid, or softmax. ``"logit"`` (the authors' code): the logits as they
            are; for LDAM the cosine, unscaled. ``"log_odds"``: the logit of the probability; a column minus the
            log-sum-exp of the others. It orders samples as the probability does, without saturating; with two columns
            it is z1 - z0, which a single column of ``"logit"`` orders differently.
        scale: Factor on the logits before softmax or sigmoid, > 0: LDAM's scale (30), else 1.

    Returns:
        Scores of the shape and type of ``logits``.

    Raises:
        InputError: If ``kind`` is unknown.
    """
    one_of("score", kind, get_args(ScoreKind))
    if kind == "logit":
        return logits
    scaled = scale * logits
    if logits.dim() == 1:
        return torch.sigmoid(scaled) if kind == "probability" else scaled
    if kind == "probability":
        return scaled.softmax(1)
    others = scaled.unsqueeze(1).masked_fill(
        torch.eye(scaled.shape[1], dtype=torch.bool, device=scaled.device), -torch.inf
    )
    return scaled - others.logsumexp(2)
