"""How sure we are: intervals and DeLong's tests of AUCs, Holm's correction, stratified bootstrap, partial AUC.

Scores are of the critical class, of any kind that grows with suspicion; labels lie in {0, 1}. All intervals are 95 %.
Where patients have several exams, each function takes ``patient``, whose exam each row is: patients, not exams, are
then the independent draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.stats import norm, rankdata

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import Floats, auc, check_binary

_Z = float(norm.isf(0.025))


@dataclass(frozen=True)
class AucEstimate:
    """One AUC with DeLong's variance and Newcombe's interval, which holds the AUC and has a width also at 0 and 1."""

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


def newcombe_interval(value: float, positives: float, negatives: float) -> tuple[float, float]:
    """Interval of an AUC, which also few positives and an AUC of 1 do not make too narrow.

    Its ends are the AUCs from which the one seen is 1.96 standard errors away, those of Hanley and McNeil, at the end
    itself and with the mean of both numbers of samples in place of each. ``benchmarks/coverage.py`` has how often it
    holds the AUC.

    Args:
        value: The AUC, in [0, 1].
        positives: Number of independent positives, > 0; a fraction where exams of one patient count as fewer.
        negatives: Likewise.

    Raises:
        InputError: If an argument is out of its range.

    References:
        Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic. Part 2",
        Statistics in Medicine 25:559, 2006, method 5.
    """
    if not (0 <= value <= 1 and 0 < positives < np.inf and 0 < negatives < np.inf):
        raise InputError(
            f"An AUC from 0 to 1 and positives and negatives are needed, found {value}, {positives} and {negatives}."
        )
    return _newcombe_low(value, positives, negatives), 1 - _newcombe_low(1 - value, positives, negatives)


def _newcombe_low(value: float, positives: float, negatives: float) -> float:
    mean = max((positives + negatives) / 2 - 1, 0.0)

    def beyond(low: float) -> float:
        spread = 1 + mean * (1 - low) / (2 - low) + mean * low / (1 + low)
        return (value - low) ** 2 - _Z**2 * low * (1 - low) * spread / (positives * negatives)

    return float(brentq(beyond, 0.0, value * (1 - 1e-9), xtol=1e-12)) if value > 1e-9 else 0.0


def delong_auc(label: ArrayLike, score: ArrayLike, patient: Sequence[str] | None = None) -> AucEstimate:
    """AUC with DeLong's variance and Newcombe's interval.

    With several exams of a patient the variance is Obuchowski's, and the interval that of fewer samples: by the factor
    that this variance is larger than DeLong's (never more samples); where both are 0, as at an AUC of 1, by what the
    exams of each class would be worth if those of a patient were alike, (sum of exams)^2 / sum of squares.

    Args:
        label: ``(B,)`` in {0, 1}, at least two of each.
        score: ``(B,)``, any kind.
        patient: ``(B,)``, whose exam; None: of a different patient each.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`; or there is not one patient per score.

    References:
        Obuchowski, "Nonparametric analysis of clustered ROC curve data", Biometrics 53:567, 1997.
    """
    placements = _placements(label, score)
    value, plain = _mean_and_variance(*placements)
    counts: list[float] = [len(of) for of in placements]
    if patient is None:
        return AucEstimate(value, plain, newcombe_interval(value, *counts))
    owners = _owners(label, patient)
    _, variance = _mean_and_variance(*placements, owners)
    if plain > 0:
        counts = [count / max(variance / plain, 1.0) for count in counts]
    else:
        exams = [np.unique(of, return_counts=True)[1] for of in owners]
        counts = [float(each.sum() ** 2 / (each**2).sum()) for each in exams]
    return AucEstimate(value, variance, newcombe_interval(value, *counts))


def delong_test(
    label: ArrayLike, score_a: ArrayLike, score_b: ArrayLike, patient: Sequence[str] | None = None
) -> DelongTest:
    """Test whether two scores of the same samples have the same AUC, in O(n log n).

    The trained models are taken as given: it says nothing of the methods that they were trained by, as another
    training of one and the same method differs too (:mod:`mri_alm.metrics.comparison`).

    Args:
        label: ``(B,)`` in {0, 1}, at least two of each.
        score_a: ``(B,)``, any kind.
        score_b: ``(B,)``, any kind, not necessarily that of ``score_a``.
        patient: See :func:`delong_auc`; the variance is then Obuchowski's.

    Raises:
        InputError: See :func:`delong_auc`; or the AUCs differ although their estimated variance is zero, where the
            test does not apply.

    References:
        DeLong, DeLong, Clarke-Pearson, "Comparing the areas under two or more correlated receiver operating
        characteristic curves", 1988; mid-ranks: Sun and Xu, 2014.
    """
    a, b = _placements(label, score_a), _placements(label, score_b)
    owners = None if patient is None else _owners(label, patient)
    difference, variance = _mean_and_variance(a[0] - b[0], a[1] - b[1], owners)
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


def _owners(label: ArrayLike, patient: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the patients whose positives ``(P,)`` and negatives ``(N,)`` are compared."""
    positive = np.asarray(label) == 1
    if len(patient) != positive.size:
        raise InputError(f"Each of the {positive.size} scores needs its patient, found {len(patient)} patients.")
    number = np.unique(np.asarray(patient), return_inverse=True)[1]
    return number[positive], number[~positive]


def _mean_and_variance(
    of_positives: Floats, of_negatives: Floats, owners: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
) -> tuple[float, float]:
    """AUC and DeLong's variance from placements; of differences of placements, the difference and its variance.

    With owners Obuchowski's variance, which sums over patients; with one exam each it is DeLong's.
    """
    pairs = of_positives.size * of_negatives.size
    if owners is None:
        variance = sum(count.size * np.cov(count) for count in (of_positives, of_negatives)) / pairs**2
        return float(of_positives.sum() / pairs), float(variance)
    patients = 1 + max(int(of.max()) for of in owners)
    p, n = (
        np.bincount(of, count - count.mean(), patients)
        for of, count in zip(owners, (of_positives, of_negatives), strict=True)
    )
    several = [np.unique(of).size for of in owners]
    if min(several) < 2:
        raise InputError("At least 2 patients with positive and 2 with negative exams are needed.")
    both = np.unique(np.concatenate([np.unique(of) for of in owners])).size
    parts = [count / (count - 1) * (sums**2).sum() for count, sums in zip(several, (p, n), strict=True)]
    covariance = 2 * both / (both - 1) * (p * n).sum()
    return float(of_positives.sum() / pairs), max(float((sum(parts) + covariance) / pairs**2), 0.0)


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
    patient: Sequence[str] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> Floats:
    """Percentile interval of any metric, samples drawn with replacement within each class.

    With several exams of a patient, patients are drawn with all their exams, among those that have exams of the same
    classes.

    Whole rows are drawn: with scores ``(B, K)``, ``lambda y, s: auc(y, s[:, 0]) - auc(y, s[:, 1])`` is a paired
    comparison. Metrics of an extreme score, such as the FPR at 0 false negatives, get intervals that are too narrow
    whatever the number of draws, since no draw holds a lower score than the sample does.

    Args:
        metric: From labels ``(B,)`` and scores to a number, or to an array (such as an ROC on a grid).
        label: ``(B,)``, class numbers.
        score: ``(B,)`` or ``(B, K)``.
        patient: ``(B,)``, whose exam; None: of a different patient each.
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
    if patient is None:
        strata = [np.flatnonzero(label == value) for value in np.unique(label)]
    else:
        strata, exams = _patients_of(label, patient)
    values = []
    for _ in range(draws):
        rows = np.concatenate([rng.choice(members, members.size) for members in strata])
        if patient is not None:
            rows = np.concatenate([exams[one] for one in rows])
        values.append(np.asarray(metric(label[rows], score[rows]), dtype=np.float64))
    return np.asarray(np.quantile(values, [0.025, 0.975], axis=0))


def _patients_of(
    label: NDArray[np.generic], patient: Sequence[str]
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Patients by the classes of their exams, and the rows of each patient."""
    if len(patient) != len(label):
        raise InputError(f"Each of the {len(label)} scores needs its patient, found {len(patient)} patients.")
    number = np.unique(np.asarray(patient), return_inverse=True)[1]
    exams = np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])
    kinds = [tuple(np.unique(label[rows]).tolist()) for rows in exams]
    strata = [np.array([i for i, kind in enumerate(kinds) if kind == one]) for one in sorted(set(kinds))]
    return strata, exams


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
