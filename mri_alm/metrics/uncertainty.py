"""How sure we are: DeLong's tests of AUCs, Holm's correction, stratified bootstrap, partial AUC, correlation of gains.

Scores are of the critical class, of any kind that grows with suspicion; labels lie in {0, 1}. All intervals are 95 %.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import chi2, norm, pearsonr, rankdata

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import check_binary

Array = NDArray[np.float64]


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


@dataclass(frozen=True)
class ContrastTest:
    """Joint test that several contrasts of AUCs are zero: chi2 with ``df`` degrees of freedom."""

    aucs: tuple[float, ...]
    chi2: float
    df: int
    p_value: float


def delong_auc(label: ArrayLike, score: ArrayLike) -> AucEstimate:
    """AUC with DeLong's variance and interval.

    Args:
        label: ``(B,)`` in {0, 1}, at least two of each.
        score: ``(B,)``, any kind.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`.
    """
    aucs, covariance = _auc_contrasts(*_placements(label, [score]), np.eye(1))
    half = _Z * np.sqrt(covariance[0, 0])
    interval = float(max(aucs[0] - half, 0.0)), float(min(aucs[0] + half, 1.0))
    return AucEstimate(auc=float(aucs[0]), variance=float(covariance[0, 0]), interval=interval)


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
    of_positives, of_negatives = _placements(label, [score_a, score_b])
    aucs = of_positives.mean(axis=0) / len(of_negatives)
    (difference,), ((variance,),) = _auc_contrasts(of_positives, of_negatives, np.array([[1.0, -1.0]]))
    if variance == 0 and difference != 0:
        raise InputError(_NO_VARIANCE)
    error = np.sqrt(variance)
    half = _Z * error
    z = float(difference / error) if variance > 0 else 0.0
    return DelongTest(
        auc_a=float(aucs[0]),
        auc_b=float(aucs[1]),
        difference=float(difference),
        interval=(float(difference - half), float(difference + half)),
        z=z,
        p_value=float(2 * norm.sf(abs(z))),
    )


def delong_contrast(label: ArrayLike, scores: Sequence[ArrayLike], contrast: ArrayLike) -> ContrastTest:
    """Test jointly whether contrasts of K AUCs of the same samples are zero.

    Args:
        label: ``(B,)`` in {0, 1}, at least two of each.
        scores: K scores of shape ``(B,)``, any kind.
        contrast: ``(L, K)``, one contrast a row, summing to 0: ``[[1, -1, 0], [0, -1, 1]]`` compares with the second.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`; a wrong ``contrast``; or see :func:`delong_test`.
    """
    contrast = np.atleast_2d(np.asarray(contrast, dtype=np.float64))
    if contrast.shape[1] != len(scores) or not np.allclose(contrast.sum(axis=1), 0):
        raise InputError(
            f"A contrast needs {len(scores)} columns, one per score, and rows that sum to 0; found {contrast.tolist()}."
        )
    of_positives, of_negatives = _placements(label, scores)
    differences, covariance = _auc_contrasts(of_positives, of_negatives, contrast)
    inverse = np.linalg.pinv(covariance, hermitian=True, rcond=1e-10)
    if not np.allclose(covariance @ inverse @ differences, differences, rtol=0, atol=1e-9):
        raise InputError(_NO_VARIANCE)
    statistic = float(differences @ inverse @ differences)
    df = int(np.linalg.matrix_rank(inverse, hermitian=True))
    p_value = float(chi2.sf(statistic, df)) if df else 1.0
    aucs = of_positives.mean(axis=0) / len(of_negatives)
    return ContrastTest(tuple(aucs.tolist()), statistic, df, p_value)


def holm(p_values: ArrayLike) -> Array:
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
    metric: Callable[[NDArray[np.generic], Array], ArrayLike],
    label: ArrayLike,
    score: ArrayLike,
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Array:
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


def baseline_gain_correlation(baseline: ArrayLike, improved: ArrayLike) -> tuple[float, float]:
    """Pearson correlation of baseline metrics with their gains (paper, section 5: -0.85).

    Negative even without any effect where the baselines carry noise, for a gain contains minus its baseline.

    Args:
        baseline: ``(K,)``, such as the AUC of each base loss alone.
        improved: ``(K,)``, the same with the constraint added.

    Returns:
        Pearson's r and its two-sided p.

    Raises:
        InputError: If there are under three pairs, the lengths differ, or the baselines or the gains are all equal.
    """
    baseline, improved = np.asarray(baseline, dtype=np.float64), np.asarray(improved, dtype=np.float64)
    if baseline.ndim != 1 or baseline.shape != improved.shape or baseline.size < 3:
        raise InputError(f"At least three pairs are needed, found shapes {baseline.shape} and {improved.shape}.")
    gain = improved - baseline
    if np.ptp(baseline) == 0 or np.ptp(gain) == 0:
        raise InputError("Baselines or gains are all equal: a correlation is not defined.")
    result = pearsonr(baseline, gain)
    return float(result.statistic), float(result.pvalue)


_Z = float(norm.isf(0.025))
_NO_VARIANCE = (
    "The AUCs differ but their estimated variance is zero (a constant or perfectly separating score): "
    "DeLong's test does not apply; report the AUCs without a p-value."
)


def _placements(label: ArrayLike, scores: Sequence[ArrayLike]) -> tuple[Array, Array]:
    """Per positive ``(P, K)`` the number of negatives below it, per negative ``(N, K)`` that of positives above it.

    Ties count one half. Numbers rather than shares, for halves are exact: no variance is then exactly zero variance.
    """
    of_positives, of_negatives = [], []
    for raw in scores:
        positive, score = check_binary(label, raw, per_class=2)
        rank = rankdata(score)
        of_positives.append(rank[positive] - rankdata(score[positive]))
        of_negatives.append(positive.sum() - rank[~positive] + rankdata(score[~positive]))
    return np.column_stack(of_positives), np.column_stack(of_negatives)


def _auc_contrasts(of_positives: Array, of_negatives: Array, contrast: Array) -> tuple[Array, Array]:
    """Contrasts ``(L,)`` of the AUCs and their covariance ``(L, L)``; contrasted first, so that equal scores give 0."""
    pairs = len(of_positives) * len(of_negatives)
    counts = [placement @ contrast.T for placement in (of_positives, of_negatives)]
    covariance = sum(len(count) * np.atleast_2d(np.cov(count, rowvar=False)) for count in counts) / pairs**2
    return counts[0].sum(axis=0) / pairs, np.asarray(covariance)
