"""Which samples own a constraint, what it compares, how it is normalised: the options behind the Lagrangian's q."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mri_alm.constraint import mirrored_violation, multiclass_violation, pair_violation, ranking_violation
from mri_alm.errors import InputError, one_of
from mri_alm.scores import ScoreKind, class_scores


@dataclass(frozen=True)
class Violations:
    """The constraints of one batch.

    Attributes:
        q: ``(K,)`` float64 violations >= 0, tied to the graph.
        owner: ``(K,)`` int64, the position in the batch of the sample that owns each constraint; ``(K, 2)``, critical
            sample and negative, for constraints per pair.
        normaliser: The term's ``|p||n|``, 1 at least; ``|p|`` with the mean normalisation.
        active: Whether the batch has both classes, so that q means something.
    """

    q: Tensor
    owner: Tensor
    normaliser: int
    active: bool


@dataclass(frozen=True)
class RankingConstraint:
    """A critical sample's score has to exceed the others' by a margin.

    Args:
        delta: The margin, >= 0, in units of the score.
        score: What is compared, see :func:`mri_alm.scores.class_scores`.
        normalisation: ``"paper"``: q_j sums over the negatives, and the term has ``1 / (|p||n|)``. ``"mean"``: ``q_j
            / |n|`` in its place and ``1 / |p|``, so that mu does not depend on the batch size (``mu_mean = mu_paper *
            |n|`` is the same term).
        critical: The critical classes, for logits ``(B, C)``; None for logits ``(B,)`` with labels 0 and 1.
        kind: 1 or 2, the paper's two multi-class constraints.
        between_critical: Also compare critical classes with one another (multi-class; not in the paper).
        per: Who owns a constraint: every ``"positive"`` (the method), every ``"negative"`` or every ``"pair"`` (section
            3.2's comparison, binary only).
        scale: LDAM's factor on its cosines; 1 for all other losses.

    Raises:
        InputError: If a value is out of its range, or options contradict one another.
    """

    delta: float = 0.25
    score: ScoreKind = "probability"
    normalisation: Literal["paper", "mean"] = "paper"
    critical: Sequence[int] | None = None
    kind: int = 1
    between_critical: bool = False
    per: Literal["positive", "negative", "pair"] = "positive"
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if not 0 <= self.delta < float("inf"):
            raise InputError(f"delta must be 0 or more, got {self.delta}: it is the margin a positive must win by.")
        one_of("score", self.score, get_args(ScoreKind))
        one_of("normalisation", self.normalisation, ("paper", "mean"))
        one_of("per", self.per, ("positive", "negative", "pair"))
        if self.critical is not None and self.per != "positive":
            raise InputError(
                f'Constraints per "{self.per}" exist for two classes with one logit only: set critical to None.'
            )
        if not 0 < self.scale < float("inf"):
            raise InputError(f"scale must be greater than 0, got {self.scale}.")

    def __call__(self, logits: Tensor, label: Tensor, bank: Tensor | None = None) -> Violations:
        """The constraints of a batch.

        Args:
            logits: ``(B,)``, or ``(B, C)`` with ``critical``; float32 or float64.
            label: ``(B,)``, 0 or 1, or the class in [0, C).
            bank: ``(K,)`` scores of further negatives, without gradient (binary, per positive).

        Raises:
            InputError: If a shape, a type or a label is wrong.
        """
        score = class_scores(logits, self.score, scale=self.scale)
        if self.critical is None:
            positive = label == 1
            if bank is not None:
                score, label = torch.cat([score, bank]), torch.cat([label, label.new_zeros(len(bank))])
            function = {"positive": ranking_violation, "negative": mirrored_violation, "pair": pair_violation}[self.per]
            q = function(score, label, self.delta)
        else:
            positive = torch.isin(label, label.new_tensor(list(self.critical)))
            q = multiclass_violation(
                score,
                label,
                critical=self.critical,
                delta=self.delta,
                kind=self.kind,
                between_critical=self.between_critical,
            )
        owner, owners = self._owner(positive), q.numel()
        pairs = int(positive.sum()) * (len(label) - int(positive.sum()))
        active = pairs > 0
        q = q.double().flatten()
        if self.normalisation == "paper":
            return Violations(q, owner, max(pairs, 1), active)
        return Violations(q / max(pairs // max(owners, 1), 1), owner, max(owners, 1), active)

    def _owner(self, positive: Tensor) -> Tensor:
        rows = torch.nonzero(positive).squeeze(1)
        if self.per == "positive":
            return rows
        others = torch.nonzero(~positive).squeeze(1)
        return others if self.per == "negative" else torch.cartesian_prod(rows, others)
