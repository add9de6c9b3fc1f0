"""The ranking constraints of the augmented Lagrangian method, exact at any batch size.

Every critical sample j has one constraint, q_j = 0 with q_j = sum_k max(0, delta - (p_j - n_k)): its score p_j has to
lie above the score n_k of every negative by the margin delta. :func:`class_scores` turns logits into what is compared,
the functions ``*_violation`` compute q, and :class:`RankingConstraint` holds the options. The functions are pure, work
on CPU and CUDA alike and compute in float64, so that neither large scores nor large batches cost accuracy.

References:
    Sangalli, Erdil, Hoetker, Donati, Konukoglu, "Constrained Optimization to Train Neural Networks on Critical and
    Under-Represented Classes", NeurIPS 2021: Eq. 4 (binary), Eq. 6 and 7 (multi-class 1 and 2), section 3.2 (ablation).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mri_alm.errors import InputError, numbers_only, one_of

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


_BROADCAST_PAIRS = 100_000  # where sorting overtakes the (P, N) matrix: see benchmarks/constraint.py


def ranking_violation(score: Tensor, label: Tensor, delta: float) -> Tensor:
    """Binary constraint of each positive: how far, in total, the negatives reach above its score minus ``delta``.

    The negatives are summed by sorting when the batch is large, in O((P + N) log(P + N)) time and O(P + N) memory; the
    gradient is exact on both paths, with zero for a pair exactly at the margin. Gradients of gradients exist for small
    batches only; autograd raises beyond.

    Args:
        score: ``(B,)`` floating point, logit or probability of the critical class; ``delta`` is in the same units.
        label: ``(B,)``, 1 for critical and 0 for the others; bool, integer or floating point.
        delta: Margin, finite and >= 0.

    Returns:
        ``(P,)`` q_j >= 0 in the order of the positives in the batch; float32, or float64 for float64 scores. Without
        positives it is empty and without negatives zero, in both cases still tied to the graph. The values of ``score``
        are not checked, as this would stall a GPU: a NaN score makes q NaN, never silently zero.

    Raises:
        InputError: If a shape or type is wrong, a label is not 0 or 1, or ``delta`` is negative or not finite.

    References:
        q_j of Eq. 4 in the paper.
    """
    positive, negative = _split(score, label, delta)
    return _hinge_sums(positive, negative, delta).to(_result_type(score))


def mirrored_violation(score: Tensor, label: Tensor, delta: float) -> Tensor:
    """The opposite constraint, one per negative: ``(N,)`` sum_j max(0, delta - (p_j - n_k)), for the ablation.

    It favours true positives at a low false-positive rate, the reverse of what the method wants. Arguments, dtype
    and errors are those of `ranking_violation`.

    References:
        Section 3.2 of the paper.
    """
    positive, negative = _split(score, label, delta)
    return _hinge_sums(-negative, -positive, delta).to(_result_type(score))


def pair_violation(score: Tensor, label: Tensor, delta: float) -> Tensor:
    """One constraint per pair: ``(P, N)`` max(0, delta - (p_j - n_k)), for the ablation.

    It has no preference between the two ends of the ROC curve. Arguments, dtype and errors are those of
    `ranking_violation`.

    References:
        Section 3.2 of the paper.
    """
    positive, negative = _split(score, label, delta)
    return _hinge_matrix(positive, negative, delta).to(_result_type(score))


def multiclass_violation(
    score: Tensor,
    label: Tensor,
    *,
    critical: Sequence[int],
    delta: float,
    kind: int = 1,
    between_critical: bool = False,
) -> Tensor:
    """Multi-class constraint of each critical sample, with one or several critical classes.

    Kind 1 compares, in the column of its own class, a critical sample with every non-critical one. Kind 2 adds, for
    every non-critical class i, that column i should be lower for the critical sample than for the samples of class i.
    The paper gives no normaliser; with P = ``len(q)`` critical and N = ``B - len(q)`` non-critical samples in the batch
    P * N is the one that gives the binary constraint its own.

    Args:
        score: ``(B, C)`` floating point, probabilities in the paper (logits work as well).
        label: ``(B,)`` integer class in [0, C).
        critical: The critical classes, distinct, at least one, not all C.
        delta: Margin, finite and >= 0, in the units of ``score``.
        kind: 1 for Eq. 6 of the paper, 2 for Eq. 7.
        between_critical: Also treat the other critical classes as negatives (not in the paper).

    Returns:
        ``(P,)`` q >= 0 in the order of the critical samples in the batch; dtype, empty batches and NaN as in
        `ranking_violation`.

    Raises:
        InputError: If a shape, type, class or option is wrong, or ``delta`` is negative or not finite.
    """
    _check_multiclass(score, label, critical, delta, kind)
    exact = score.double()
    is_critical = torch.stack([label == c for c in critical]).any(0)
    parts = [torch.empty(0, dtype=torch.float64, device=score.device)]
    rows = [torch.empty(0, dtype=torch.int64, device=score.device)]
    for own in critical:
        row = _rows(label == own)
        others = _rows(label != own if between_critical else ~is_critical)
        positive, negative = exact.index_select(0, row), exact.index_select(0, others)
        q = _hinge_sums(positive[:, own], negative[:, own], delta)
        if kind == 2:
            q = q + _other_class_sums(positive, negative, label[others], delta)
        parts.append(q)
        rows.append(row)
    return torch.cat(parts)[torch.cat(rows).argsort()].to(_result_type(score))


def _other_class_sums(positive: Tensor, negative: Tensor, label: Tensor, delta: float) -> Tensor:
    """Sum over negatives k of class i: max(0, f^i(x_j) - f^i(x_k) + delta), for ``positive`` (P, C) -> (P,)."""
    own = negative.gather(1, label.long().unsqueeze(1)).squeeze(1)
    if positive.shape[0] * negative.shape[0] <= _BROADCAST_PAIRS:
        return torch.relu(positive[:, label.long()] + delta - own).sum(1)
    sums = [_hinge_sums(-positive[:, i], -own[label == i], delta) for i in torch.unique(label).tolist()]
    return torch.stack(sums).sum(0)


def _hinge_sums(positive: Tensor, negative: Tensor, delta: float) -> Tensor:
    """q_j for float64 scores (P,) and (N,) -> (P,), by whichever path is faster."""
    if positive.numel() * negative.numel() <= _BROADCAST_PAIRS:
        return _hinge_matrix(positive, negative, delta).sum(1)
    q: Tensor = _SortedHingeSums.apply(positive, negative, delta)  # type: ignore[no-untyped-call]
    return q


def _hinge_matrix(positive: Tensor, negative: Tensor, delta: float) -> Tensor:
    # relu and not clamp: its gradient at exactly zero is zero.
    return torch.relu(negative - (positive - delta).unsqueeze(1))


class _SortedHingeSums(torch.autograd.Function):
    """The row sums of `_hinge_matrix` without the matrix.

    With the negatives in descending order n_(1) >= n_(2) >= ... and t = p_j - delta, Q[i], the sum over the i largest
    of n_(m) - n_(i), grows by i (n_(i) - n_(i+1)): only non-negative numbers are added, so nothing cancels, unlike
    with prefix sums of the scores. If C negatives lie above t, q_j = Q[C] + C (n_(C) - t).
    """

    @staticmethod
    def forward(ctx: Any, positive: Tensor, negative: Tensor, delta: float) -> Tensor:
        descending, order = negative.sort(descending=True)
        threshold = positive - delta
        # searchsorted wants ascending values; negation is exact and keeps the comparison strict. A NaN is the largest
        # for sort and, in this left search, below every threshold: it enters every count, so q is NaN.
        count = torch.searchsorted(-descending, -threshold)
        excess = torch.zeros_like(negative)
        gaps = torch.sub(descending[:-1], descending[1:], out=excess[1:])
        gaps.masked_fill_(descending[:-1] == descending[1:], 0)  # of two infinite scores too
        gaps.mul_(torch.arange(1, negative.numel(), dtype=torch.float64, device=negative.device)).cumsum_(0)
        last = (count - 1).clamp_(min=0)
        ctx.save_for_backward(count, order)
        q = torch.where(count > 0, excess[last] + count * (descending[last] - threshold), 0.0)
        # Infinite on both sides: no difference exists, as in the matrix.
        met = positive.isinf() & ((positive == descending[0]) | (positive == descending[-1]))
        return q.masked_fill(met, torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        count, order = ctx.saved_tensors
        # The negative of rank r (from 0) is above threshold j where count_j > r: a suffix sum over counts.
        by_count = torch.zeros(order.numel() + 1, dtype=upstream.dtype, device=upstream.device)
        by_count.index_add_(0, order.numel() - count, upstream)
        by_rank = by_count.cumsum(0)[:-1].flip(0)
        return -count * upstream, torch.empty_like(by_rank).scatter_(0, order, by_rank), None


def _split(score: Tensor, label: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Check the arguments of a binary constraint; scores of positives and negatives in float64."""
    _check(score, label, delta, dimensions=1)
    positive, negative = _rows(label == 1), _rows(label == 0)
    # The two counts are on the host already, so this costs no further synchronisation.
    if positive.numel() + negative.numel() != label.numel():
        bad = label[(label != 0) & (label != 1)]
        raise InputError(f"labels must be 0 or 1, found {bad[0].item()} ({bad.numel()} of {label.numel()} are neither)")
    exact = score.double()
    return exact.index_select(0, positive), exact.index_select(0, negative)


def _rows(mask: Tensor) -> Tensor:
    # Twice as fast as indexing by the mask itself, forward and backward.
    return torch.nonzero(mask).squeeze(1)


def _check(score: Tensor, label: Tensor, delta: float, *, dimensions: int) -> None:
    shape = "(B,)" if dimensions == 1 else "(B, C)"
    if not score.is_floating_point() or score.dim() != dimensions:
        raise InputError(f"score must be floating point of shape {shape}, got {score.dtype} of {tuple(score.shape)}")
    if label.shape != score.shape[:1]:
        raise InputError(f"label must have shape {tuple(score.shape[:1])} like score, got {tuple(label.shape)}")
    if not 0 <= delta < math.inf:
        raise InputError(f"delta must be a finite margin >= 0, got {delta}")


def _check_multiclass(score: Tensor, label: Tensor, critical: Sequence[int], delta: float, kind: int) -> None:
    _check(score, label, delta, dimensions=2)
    classes = score.shape[1]
    if label.is_floating_point() or bool(((label < 0) | (label >= classes)).any()):
        raise InputError(f"label must hold integer classes from 0 to {classes - 1}, one per column of score")
    if not 0 < len(set(critical)) == len(critical) < classes or not all(0 <= c < classes for c in critical):
        raise InputError(f"critical must list some, not all, of the classes 0 to {classes - 1} once, got {critical}")
    if kind not in (1, 2):
        raise InputError(f"kind must be 1 or 2 (multi-class constraint 1 or 2), got {kind}")


def _result_type(score: Tensor) -> torch.dtype:
    return torch.float64 if score.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Violations:
    """The constraints of one batch.

    Attributes:
        q: ``(K,)`` float64 violations >= 0, tied to the graph.
        owner: ``(K,)`` int64, the position in the batch of the sample that owns each constraint; ``(K, 2)``, critical
            sample and negative, for constraints per pair.
        normaliser: The term's ``|p||n|``, 1 at least; ``|p|`` with the mean normalisation.
        slack: What each q may be: a constraint holds where ``q <= slack``. The constraint's ``tolerance`` times |n|.
        active: Whether the batch has both classes, so that q means something.
        score: What was compared, of the batch's own samples, as :func:`mri_alm.alm.class_scores` gives it.
    """

    q: Tensor
    owner: Tensor
    normaliser: int
    slack: float
    active: bool
    score: Tensor


@dataclass(frozen=True)
class RankingConstraint:
    """A critical sample's score has to exceed the others' by a margin.

    Args:
        delta: The margin, >= 0, in units of the score.
        score: What is compared, see :func:`mri_alm.alm.class_scores`.
        normalisation: ``"paper"``: q_j sums over the negatives, and the term has ``1 / (|p||n|)``. ``"mean"``: ``q_j
            / |n|`` in its place and ``1 / |p|``, so that mu does not depend on the batch size (``mu_mean = mu_paper *
            |n|`` is the same term).
        critical: The critical classes, for logits ``(B, C)``; None for logits ``(B,)`` with labels 0 and 1.
        kind: 1 or 2, the paper's two multi-class constraints.
        between_critical: Also compare critical classes with one another (multi-class; not in the paper).
        per: Who owns a constraint: every ``"positive"`` (the method), every ``"negative"`` or every ``"pair"`` (section
            3.2's comparison, binary only).
        scale: LDAM's factor on its cosines; 1 for all other losses.
        tolerance: e >= 0, in units of the score: the constraint is ``q_j <= e |n|``, so that a sample may lack the
            margin by e on average over the others. 0 (the paper): q_j = 0.

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
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        numbers_only(delta=self.delta, scale=self.scale, tolerance=self.tolerance, kind=self.kind)
        if self.kind not in (1, 2):
            raise InputError(f"kind must be 1 or 2 (multi-class constraint 1 or 2), got {self.kind}.")
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
        if not 0 <= self.tolerance < math.inf:
            raise InputError(f"tolerance must be 0 or more, got {self.tolerance}: it is what a mean of q may be.")

    def __call__(self, logits: Tensor, label: Tensor, bank: Tensor | None = None) -> Violations:
        """The constraints of a batch.

        Args:
            logits: ``(B,)``, or ``(B, C)`` with ``critical``; float32 or float64.
            label: ``(B,)``, 0 or 1, or the class in [0, C).
            bank: ``(K,)`` scores of further negatives, without gradient (binary, per positive).

        Raises:
            InputError: If a shape, a type or a label is wrong.
        """
        score = own = class_scores(logits, self.score, scale=self.scale)
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
        others = max(pairs // max(owners, 1), 1)
        tolerance = self.tolerance * active  # without both classes there is nothing to tolerate either
        if self.normalisation == "paper":
            return Violations(q, owner, max(pairs, 1), tolerance * others, active, own)
        return Violations(q / others, owner, max(owners, 1), tolerance, active, own)

    def _owner(self, positive: Tensor) -> Tensor:
        rows = torch.nonzero(positive).squeeze(1)
        if self.per == "positive":
            return rows
        others = torch.nonzero(~positive).squeeze(1)
        return others if self.per == "negative" else torch.cartesian_prod(rows, others)
