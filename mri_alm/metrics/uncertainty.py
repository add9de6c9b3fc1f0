"""How sure we are: DeLong's tests of AUCs, Holm's correction, stratified bootstrap, partial AUC.

Scores are of the critical class, of any kind that grows with suspicion; labels lie in {0, 1}. All intervals are 95 %.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm, rankdata

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import Floats, auc, check_binary

_Z = float(norm.isf(0.025))


@dataclass(frozen=True)
class AucEstimate:
    """One AUC with DeLong's variance and Wald interval, cut to [0, 1] (of no width when the AUC is 0 or 1)."""

    auc: float
    variance: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class DelongTest:
    """Paired comparison of two AUCs: difference = auc_a - auc_b, its Wald interval, z and two-sided p."""

    auc_a: float
    auc_b: float
    difference: float
    interval: tuple[float, float]
    z: float
    p_value: float


def delong_auc(label: ArrayLike, score: ArrayLike) -> AucEstimate:
    """AUC with DeLong's variance and interval.

    Args:
        label: ``(B,)`` in {0, 1}, at least two of each.
        score: ``(B,)``, any kind.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`.
    """
    value, variance = _mean_and_variance(*_placements(label, score))
    half = _Z * variance**0.5
    return AucEstimate(auc=value, variance=variance, interval=(max(value - half, 0.0), min(value + half, 1.0)))


def delong_test(label: ArrayLike, score_a: ArrayLike, score_b: ArrayLike) -> DelongTest:
    """Test whether two scores of the same samples have the same AUC, in O(n log n).

    Args:
        label: ``(B,)`` in {0, 1}, at least two of each.
        score_a: ``(B,)``, any kind.
        score_b: ``(B,)``, any kind, not necessarily that of ``score_a``.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`; or the AUCs differ although their estimated variance
            is zero, where the test does not apply.

    References:
        DeLong, DeLong, Clarke-Pearson, "Comparing the areas under two or more correlated receiver operating
        characteristic curves", 1988; mid-ranks: Sun and Xu, 2014.
    """
    a, b = _placements(label, score_a), _placements(label, score_b)
    difference, variance = _mean_and_variance(a[0] - b[0], a[1] - b[1])
    if variance == 0 and difference != 0:
        raise InputError(
            "The AUCs differ but their estimated variance is zero (a constant or perfectly separating score): "
            "DeLong's test does not apply; report the AUCs without a p-value."
        )
    error = variance**0.5
    z = difference / error if variance > 0 else 0.0
    return DelongTest(
        auc_a=auc(label, score_a),
        auc_b=auc(label, score_b),
        difference=difference,
        interval=(difference - _Z * error, difference + _Z * error),
        z=z,
        p_value=float(2 * norm.sf(abs(z))),
    )


def _placements(label: ArrayLike, raw: ArrayLike) -> tuple[Floats, Floats]:
    """Per positive ``(P,)`` the number of negatives below it, per negative ``(N,)`` that of positives above it.

    Ties count one half. Numbers rather than shares, for halves are exact: no variance is then exactly zero variance.
    """
    positive, score = check_binary(label, raw, per_class=2)
    rank = rankdata(score)
    of_positives = rank[positive] - rankdata(score[positive])
    return of_positives, positive.sum() - rank[~positive] + rankdata(score[~positive])


def _mean_and_variance(of_positives: Floats, of_negatives: Floats) -> tuple[float, float]:
    """AUC and DeLong's variance from placements; of differences of placements, the difference and its variance."""
    pairs = of_positives.size * of_negatives.size
    variance = sum(count.size * np.cov(count) for count in (of_positives, of_negatives)) / pairs**2
    return float(of_positives.sum() / pairs), float(variance)


def holm(p_values: ArrayLike) -> Floats:
    """Holm's adjusted p-values ``(K,)`` of a family of tests: below alpha is significant with family-wise error alpha.

    Args:
        p_values: ``(K,)``, in [0, 1].

    Raises:
        InputError: If a value is not in [0, 1].
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or not np.all((p >= 0) & (p <= 1)):
        raise InputError(f"p-values must be a list of numbers in [0, 1], found {p.tolist()}.")
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)), 1.0)
    return adjusted


def bootstrap_interval(
    metric: Callable[[NDArray[np.generic], Floats], ArrayLike],
    label: ArrayLike,
    score: ArrayLike,
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Floats:
    """Percentile interval of any metric, samples drawn with replacement within each class.

    Whole rows are drawn: with scores ``(B, K)``, ``lambda y, s: auc(y, s[:, 0]) - auc(y, s[:, 1])`` is a paired
    comparison. Metrics of an extreme score, such as the FPR at 0 false negatives, get intervals that are too narrow
    whatever the number of draws, since no draw holds a lower score than the sample does.

    Args:
        metric: From labels ``(B,)`` and scores to a number, or to an array (such as an ROC on a grid).
        label: ``(B,)``, class numbers.
        score: ``(B,)`` or ``(B, K)``.
        draws: Number of resamples.
        seed: Of the draws; the same seed gives the same interval.

    Returns:
        ``(2,)`` + the metric's shape: lower and upper ends.

    Raises:
        InputError: If the lengths differ.
    """
    label, score = np.asarray(label), np.asarray(score, dtype=np.float64)
    if len(label) != len(score):
        raise InputError(f"label and score must be equally long, found {len(label)} and {len(score)}.")
    rng = np.random.default_rng(seed)
    classes = [np.flatnonzero(label == value) for value in np.unique(label)]
    values = []
    for _ in range(draws):
        rows = np.concatenate([rng.choice(members, members.size) for members in classes])
        values.append(np.asarray(metric(label[rows], score[rows]), dtype=np.float64))
    return np.asarray(np.quantile(values, [0.025, 0.975], axis=0))


def partial_auc(label: ArrayLike, score: ArrayLike, *, min_tpr: float) -> float:
    """Area under the part of the ROC with TPR >= ``min_tpr``, where a critical class is operated.

    McClish's standardisation: 0.5 for chance, 1 for a perfect score; ``min_tpr = 0`` is the AUC.

    Args:
        label: ``(B,)`` in {0, 1}.
        score: ``(B,)``, any kind.
        min_tpr: Lowest true-positive rate of interest, in [0, 1).

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`; or ``min_tpr`` is out of range.
    """
    positive, score = check_binary(label, score)
    if not 0 <= min_tpr < 1:
        raise InputError(f"min_tpr must lie in [0, 1), found {min_tpr}.")
    # The curve of specificity over miss rate, threshold rising, up to the highest miss rate of interest.
    values, place = np.unique(score, return_inverse=True)
    missed, spared = (
        np.append(0, np.bincount(place[of], minlength=values.size).cumsum() / of.sum()) for of in (positive, ~positive)
    )
    most = 1 - min_tpr
    inside = missed <= most
    area = np.trapezoid(np.append(spared[inside], np.interp(most, missed, spared)), np.append(missed[inside], most))
    return float(0.5 + 0.5 * (area - most**2 / 2) / (most - most**2 / 2))
