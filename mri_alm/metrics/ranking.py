"""How well scores find a critical class: AUC, false-positive rates at few misses, multi-class errors.

A score is of the critical class and of any kind that grows with suspicion (logit or probability): only its order
matters. A sample is called positive iff ``score >= threshold``, so tied samples are always called together. These are
evaluations on labelled data; the threshold to ship is in :mod:`mri_alm.metrics.threshold`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import roc_curve

from mri_alm.errors import InputError

Floats = NDArray[np.float64]
FprRule = Literal["lowest", "interpolate", "official"]
FALSE_NEGATIVES = (0, 1, 2, 5)  # columns of the paper's Table 3
TRUE_POSITIVE_RATES = (98, 95, 92, 90)  # percent, those of its other tables


def check_binary(label: ArrayLike, score: ArrayLike, *, per_class: int = 1) -> tuple[NDArray[np.bool_], Floats]:
    """Labels as ``(B,)`` booleans and scores as ``(B,)`` float64, or a sentence on what is wrong with them.

    Args:
        label: ``(B,)`` in {0, 1}; 1 is the critical class.
        score: ``(B,)``, finite.
        per_class: Least number of samples that either class must have.

    Raises:
        InputError: If the shapes differ, a label is neither 0 nor 1, a score is not finite, or a class is too small.
    """
    label, score = np.asarray(label), np.asarray(score, dtype=np.float64)
    if label.ndim != 1 or label.shape != score.shape:
        raise InputError(
            f"label and score must be one-dimensional and equally long, found shapes {label.shape} and {score.shape}."
        )
    wrong = np.flatnonzero((label != 0) & (label != 1))
    if wrong.size:
        raise InputError(f"Labels must be 0 or 1, found {label[wrong[0]]} at position {wrong[0]}.")
    _check_finite(score)
    positive = label == 1
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if min(n_positive, n_negative) < per_class:
        raise InputError(
            f"At least {per_class} positive and {per_class} negative labels are needed, "
            f"found {n_positive} positive and {n_negative} negative."
        )
    return positive, score


def auc(label: ArrayLike, score: ArrayLike) -> float:
    """Area under the ROC curve: the chance that a positive outscores a negative, a tie counting one half.

    By binary search, so that thousands of bootstrap draws are cheap.

    Args:
        label: ``(B,)`` in {0, 1}.
        score: ``(B,)``, any kind.

    Raises:
        InputError: See :func:`check_binary`; one class alone has no AUC.
    """
    positive, score = check_binary(label, score)
    negatives, positives = np.sort(score[~positive]), score[positive]
    below, not_above = (np.searchsorted(negatives, positives, side=side).sum() for side in ("left", "right"))
    return float((below + not_above) / (2 * negatives.size * positives.size))


def fpr_at_fn(label: ArrayLike, score: ArrayLike, k: int) -> float:
    """Lowest false-positive rate of any threshold with at most ``k`` false negatives (the paper's MRI tables).

    ``k`` is spent on the very labels that are scored: a description of a ranking, not a promise for new patients.

    Args:
        label: ``(B,)`` in {0, 1}.
        score: ``(B,)``, any kind.
        k: Allowed false negatives, 0 <= k < number of positives.

    Raises:
        InputError: See :func:`check_binary`; or ``k`` is out of range.
    """
    return float(fpr_at_each_fn(label, score, [k])[0])


def fpr_at_each_fn(label: ArrayLike, score: ArrayLike, ks: Sequence[int] | NDArray[np.int64]) -> Floats:
    """:func:`fpr_at_fn` for several ``k``, ``(K,)``: with every k it is the ROC, read from the side of the misses."""
    positive, score = check_binary(label, score)
    positives, negatives = np.sort(score[positive]), np.sort(score[~positive])
    for k in ks:
        if not 0 <= k < positives.size:
            raise InputError(
                f"Cannot allow {k} false negatives among {positives.size} positives: "
                f"k must be between 0 and {positives.size - 1}."
            )
    below = np.searchsorted(negatives, positives[np.asarray(ks, dtype=np.int64)])
    return np.asarray((negatives.size - below) / negatives.size)


def allowed_misses(n_positive: int, tpr: float) -> int:
    """How many of the positives may be missed at this true-positive rate, in (0, 1].

    Raises:
        InputError: If ``tpr`` is out of range.
    """
    if not 0 < tpr <= 1:
        raise InputError(f"The true-positive rate must lie in (0, 1], found {tpr}.")
    # The slack keeps 0.29 * 100 = 28.999999999999996 and its like from asking for one positive more or less.
    return n_positive - math.ceil(tpr * n_positive - 1e-9)


def midway_below(score: Floats, at: Floats) -> Floats:
    """Halfway from each of ``at`` to the next lower score, so that both are decided alike when they move a little.

    Where no score is lower, a ten-thousandth of its size below; where no number lies between the two, itself.

    Args:
        score: ``(B,)``, all held-out scores of both classes, of any kind.
        at: ``(K,)`` of them.
    """
    ascending = np.unique(score)
    place = np.searchsorted(ascending, at)
    lower = np.where(place > 0, ascending[np.maximum(place - 1, 0)], at - 2e-4 * np.abs(at))
    middle = lower + (at - lower) / 2
    return np.where(middle > lower, middle, at)


def fpr_at_tpr(label: ArrayLike, score: ArrayLike, tpr: float, *, rule: FprRule = "lowest") -> float:
    """False-positive rate at a true-positive rate.

    Args:
        label: ``(B,)`` in {0, 1}.
        score: ``(B,)``, any kind.
        tpr: Wanted true-positive rate, 0 < tpr <= 1.
        rule: ``"lowest"`` (the paper) is the lowest rate of any threshold that reaches ``tpr``. ``"interpolate"`` walks
            the straight ROC segments, which differs where scores tie. ``"official"`` is what the authors' code reports:
            on the ROC without its collinear points, the first rate at exactly ``tpr``; else at a TPR that rounds to it
            at two decimals; else the mean of the first rates one hundredth below and above; else **0**, which looks
            perfect (always so with 8 or 13 positives at 0.98, 0.95 and 0.9).

    Raises:
        InputError: See :func:`check_binary`; or ``tpr`` is out of range, or ``rule`` unknown.
    """
    positive, score = check_binary(label, score)
    allowed = allowed_misses(int(positive.sum()), tpr)
    if rule == "lowest":
        return fpr_at_fn(positive, score, allowed)
    if rule == "interpolate":
        false_rate, true_rate, _ = roc_curve(positive, score, drop_intermediate=False)
        right = int(np.searchsorted(true_rate, tpr))
        share = (tpr - true_rate[right - 1]) / (true_rate[right] - true_rate[right - 1])
        return float(false_rate[right - 1] + share * (false_rate[right] - false_rate[right - 1]))
    if rule == "official":
        return _official_fpr_at_tpr(positive, score, tpr)
    raise InputError(f"Unknown rule {rule!r}: use 'lowest', 'interpolate' or 'official'.")


def _official_fpr_at_tpr(positive: NDArray[np.bool_], score: Floats, tpr: float) -> float:
    """The authors' rounding rule, kept for reproduction only: see :func:`fpr_at_tpr`."""
    false_rate, true_rate, _ = roc_curve(positive, score)
    hundredths = np.rint(100 * true_rate)
    at, below, above = (false_rate[np.isclose(hundredths, 100 * tpr + step)] for step in (0, -1, 1))
    matches = np.concatenate([false_rate[true_rate == tpr], at])
    if matches.size:
        return float(matches[0])
    return float((below[0] + above[0]) / 2) if below.size and above.size else 0.0


@dataclass(frozen=True)
class Accuracies:
    """Shares of samples given their own class, each in [0, 1].

    Attributes:
        critical: Accuracy of each critical class, by class number.
        other: Accuracy over all samples of the other classes together.
        overall: Accuracy over all samples.
    """

    critical: dict[int, float]
    other: float
    overall: float


def class_accuracies(label: ArrayLike, predicted: ArrayLike, *, critical: Sequence[int]) -> Accuracies:
    """Accuracy of each critical class and of the others (the paper's table of several critical classes).

    Args:
        label: ``(B,)`` class numbers.
        predicted: ``(B,)`` class numbers: the argmax of the logits, or :func:`predict_at_tpr`.
        critical: The critical classes.

    Raises:
        InputError: If the shapes differ, or a critical class or the rest has no sample.
    """
    label, predicted = np.asarray(label), np.asarray(predicted)
    is_critical = _critical_mask(label, critical)
    if predicted.shape != label.shape:
        raise InputError(f"label and predicted must be equally long, found shapes {label.shape} and {predicted.shape}.")
    right = predicted == label
    return Accuracies(
        critical={int(c): float(right[label == c].mean()) for c in critical},
        other=float(right[~is_critical].mean()),
        overall=float(right.mean()),
    )


def predict_at_tpr(label: ArrayLike, score: ArrayLike, tpr: float, *, critical: Sequence[int]) -> NDArray[np.int64]:
    """Classes ``(B,)`` when the critical score is thresholded to reach a true-positive rate.

    A sample's critical score is the largest over the critical columns. The threshold is the highest at which a share
    ``tpr`` of all samples of critical classes is flagged as critical, whichever; samples tied with it are flagged too.
    Flagged samples take their best critical class, the rest their best other class; the lower class number wins ties.

    Args:
        label: ``(B,)`` class numbers, used only to place the threshold.
        score: ``(B, C)``, logits or probabilities. The two are thresholded differently: the paper takes logits.
        tpr: Wanted true-positive rate, 0 < tpr <= 1.
        critical: The critical classes, at least one column being left to the others.

    Raises:
        InputError: If shapes or class numbers do not fit, a score is not finite, or a critical class has no sample.
    """
    label, score = np.asarray(label), np.asarray(score, dtype=np.float64)
    is_critical = _critical_mask(label, critical)
    if score.ndim != 2 or len(score) != len(label):
        raise InputError(f"score must be of shape ({len(label)}, classes), found {score.shape}.")
    if label.min() < 0 or label.max() >= score.shape[1]:
        raise InputError(f"Labels must lie in 0 to {score.shape[1] - 1}, found {label.min()} to {label.max()}.")
    columns = np.unique(np.asarray(critical, dtype=np.int64))
    others = np.setdiff1d(np.arange(score.shape[1]), columns)
    _check_finite(score)
    critical_score = score[:, columns].max(axis=1)
    threshold = np.sort(critical_score[is_critical])[allowed_misses(int(is_critical.sum()), tpr)]
    best_critical = columns[score[:, columns].argmax(axis=1)]
    best_other = others[score[:, others].argmax(axis=1)]
    return np.where(critical_score >= threshold, best_critical, best_other)


def error_at_tpr(label: ArrayLike, score: ArrayLike, tpr: float, *, critical: Sequence[int]) -> float:
    """Share of non-critical samples misclassified at a critical true-positive rate (the paper's long-tailed tables).

    Arguments and errors are those of :func:`predict_at_tpr`; a non-critical sample flagged as critical is an error.
    """
    return 1.0 - class_accuracies(label, predict_at_tpr(label, score, tpr, critical=critical), critical=critical).other


def _check_finite(score: Floats) -> None:
    wrong = np.argwhere(~np.isfinite(score))
    if wrong.size:
        row = wrong[0, 0]
        raise InputError(f"Scores must be finite, found {score[row]} at position {row}: leave that study out.")


def _critical_mask(label: NDArray[np.generic], critical: Sequence[int]) -> NDArray[np.bool_]:
    """Which samples belong to a critical class, having checked that each such class and the rest have some."""
    is_critical = np.isin(label, critical)
    missing = [c for c in critical if not np.any(label == c)]
    if missing:
        raise InputError(f"Class {missing[0]} is critical but no sample has that label.")
    if label.ndim != 1 or is_critical.all() or not is_critical.any():
        raise InputError(
            "Labels must be one-dimensional with critical and other classes among them, "
            f"found shape {label.shape} with {int(is_critical.sum())} critical of {label.size} samples."
        )
    return is_critical
