"""Whether probabilities mean what they say, and whether acting on them helps: calibration and decision curves.

Everything here takes **probabilities** of the critical class, not logits.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import binomtest, norm
from sklearn.calibration import calibration_curve as binned_rates
from sklearn.linear_model import LogisticRegression

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import Floats, check_binary

_Z = float(norm.isf(0.025))
_NEAREST_TO_0 = 1e-9  # probabilities of 0 and 1 count as this and its complement: their log odds are finite


@dataclass(frozen=True)
class CalibrationCurve:
    """One entry per non-empty bin of equal width: mean probability, share of positives, number of samples."""

    mean_probability: Floats
    positive_rate: Floats
    count: NDArray[np.int64]


@dataclass(frozen=True)
class SmoothCurve:
    """Share of positives by probability, ``(T,)`` each: probability, share in [0, 1], its pointwise 95 % interval."""

    probability: Floats
    positive_rate: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class DecisionCurve:
    """Net benefit per sample, in true positives, at each threshold probability; treating nobody is 0.

    Attributes:
        threshold: ``(T,)``, the probability at which one is indifferent to the examination.
        model: ``(T,)``, examining those with probability >= threshold.
        low: ``(T,)``, lower end of its pointwise 95 % interval.
        high: ``(T,)``, upper end.
        everyone: ``(T,)``, examining everyone.
    """

    threshold: Floats
    model: Floats
    low: Floats
    high: Floats
    everyone: Floats


def calibration_curve(label: ArrayLike, probability: ArrayLike, *, bins: int = 10) -> CalibrationCurve:
    """Share of positives against mean probability in bins [0, 1/bins], ..., (1 - 1/bins, 1].

    Args:
        label: ``(B,)`` in {0, 1}.
        probability: ``(B,)``, in [0, 1].
        bins: Number of bins, >= 1.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`; or a probability lies outside [0, 1].
    """
    positive, probability = _check_probability(label, probability)
    positive_rate, mean_probability = binned_rates(positive, probability, n_bins=bins)
    # scikit-learn tells no counts: the same bins again.
    count = np.bincount(_bin(probability, bins))
    return CalibrationCurve(mean_probability, positive_rate, count[count > 0])


def expected_calibration_error(label: ArrayLike, probability: ArrayLike, *, bins: int = 10) -> float:
    """Mean gap between probability and share of positives over the bins of :func:`calibration_curve`, in [0, 1].

    Depends on ``bins`` and is biased upward in small cohorts: quote it with both. Arguments and errors are those of
    :func:`calibration_curve`.
    """
    positive, probability = _check_probability(label, probability)
    gaps = np.bincount(_bin(probability, bins), weights=probability - positive)
    return float(np.abs(gaps).sum() / positive.size)


def brier_score(label: ArrayLike, probability: ArrayLike) -> float:
    """Mean squared difference of probability and label, in [0, 1]; arguments as in :func:`calibration_curve`."""
    positive, probability = _check_probability(label, probability)
    return float(np.mean((probability - positive) ** 2))  # scikit-learn's takes a millisecond, too slow to bootstrap


def recalibration(label: ArrayLike, probability: ArrayLike) -> dict[str, tuple[float, float, float]]:
    """How far probabilities are from the truth as a whole: each figure with both ends of its 95 % interval.

    ``observed_expected`` is the number of positives over the sum of the probabilities (1 is right, more is too low a
    probability), with Clopper and Pearson's interval of the former. ``calibration_intercept`` is what has to be added
    to the log odds so that the two agree (0 is right). ``calibration_slope`` is what they have to be multiplied by in
    a logistic regression (1 is right, less is too extreme a probability); it is left out where all probabilities are
    the same, or where one separates the classes, as no finite slope fits then. Intervals of the latter two are Wald's.

    Args:
        label: ``(B,)`` in {0, 1}, both present.
        probability: ``(B,)``, in [0, 1]; 0 and 1 count as 1e-9 and 1 - 1e-9, whose log odds are finite.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`; or a probability lies outside [0, 1].

    References:
        Van Calster et al., "A calibration hierarchy for risk models was defined", 2016.
    """
    positive, probability = _check_probability(label, probability)
    count, n = int(positive.sum()), positive.size
    probability = np.clip(probability, _NEAREST_TO_0, 1 - _NEAREST_TO_0)
    odds, expected = logit(probability), float(probability.sum())
    furthest = float(np.abs(odds).max() + np.log(n) + 1)
    intercept = float(brentq(lambda shift: expit(odds + shift).sum() - count, -furthest, furthest))
    share = binomtest(count, n).proportion_ci(0.95, "exact")
    found = {
        "observed_expected": (count / expected, share.low * n / expected, share.high * n / expected),
        "calibration_intercept": _wald(intercept, 1 / _information(odds + intercept).sum()),
    }
    of_positives, of_negatives = odds[positive], odds[~positive]
    if of_positives.min() < of_negatives.max() and of_negatives.min() < of_positives.max():
        fit = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-10).fit(odds[:, None], positive)
        design = np.column_stack([np.ones(n), odds])
        weight = _information(fit.decision_function(odds[:, None]))
        variance = np.linalg.inv((design.T * weight) @ design)[1, 1]
        found["calibration_slope"] = _wald(float(fit.coef_[0, 0]), float(variance))
    return found


def smooth_calibration(
    label: ArrayLike, probability: ArrayLike, *, span: float = 0.75, points: int = 50
) -> SmoothCurve:
    """Share of positives as a smooth function of probability, over the range of these probabilities.

    Straight lines are fitted locally with tricube weights over the nearest ``span`` of the samples. The interval is
    Wilson's, with the effective number of samples behind each point; it is approximate and pointwise.

    Args:
        label: ``(B,)`` in {0, 1}, both present.
        probability: ``(B,)``, in [0, 1].
        span: Share of the samples that each point rests on, in (0, 1].
        points: Number of points.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`; or a probability lies outside [0, 1].

    References:
        Cleveland, "Robust locally weighted regression and smoothing scatterplots", 1979; for calibration: Austin,
        Steyerberg, "Graphical assessment of internal and external calibration of logistic regression models by using
        loess smoothers", 2014.
    """
    positive, x = _check_probability(label, probability)
    at = np.linspace(x.min(), x.max(), points)
    distance = np.abs(at[:, None] - x)
    nearest = int(np.ceil(span * x.size)) - 1
    reach = np.maximum(np.partition(distance, nearest)[:, nearest, None], 1e-9) * (1 + 1e-6)
    weight = (1 - np.minimum(distance / reach, 1) ** 3) ** 3
    weight /= weight.sum(axis=1, keepdims=True)
    mean = weight @ x
    aside = x - mean[:, None]
    variance = (weight * aside**2).sum(axis=1)
    steep = np.divide(at - mean, variance, out=np.zeros(points), where=variance > 1e-12)
    weight *= 1 + steep[:, None] * aside
    rate = np.clip(weight @ positive, 0, 1)
    n = 1 / (weight**2).sum(axis=1)
    middle, half = rate + _Z**2 / (2 * n), _Z * np.sqrt(rate * (1 - rate) / n + (_Z / (2 * n)) ** 2)
    shrink = 1 + _Z**2 / n
    return SmoothCurve(at, rate, (middle - half) / shrink, (middle + half) / shrink)


def decision_curve(label: ArrayLike, probability: ArrayLike, threshold: ArrayLike) -> DecisionCurve:
    """Net benefit TP / B - FP / B * t / (1 - t) of the model and of examining everyone.

    It is a mean over samples: its interval is that of a mean, 1.96 standard errors to each side.

    Args:
        label: ``(B,)`` in {0, 1}.
        probability: ``(B,)``, in [0, 1].
        threshold: ``(T,)`` probabilities t, in [0, 1).

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`; a probability lies outside [0, 1], or a threshold [0, 1).

    References:
        Vickers, Elkin, "Decision curve analysis: a novel method for evaluating prediction models", 2006.
    """
    positive, probability = _check_probability(label, probability)
    threshold = np.atleast_1d(np.asarray(threshold, dtype=np.float64))
    if not np.all((threshold >= 0) & (threshold < 1)):
        raise InputError(f"Threshold probabilities must lie in [0, 1), found {threshold.min()} to {threshold.max()}.")
    odds = threshold / (1 - threshold)
    prevalence = positive.mean()
    true_positives = _at_or_above(probability[positive], threshold) / positive.size
    false_positives = _at_or_above(probability[~positive], threshold) / positive.size
    benefit = true_positives - false_positives * odds
    variance = true_positives + false_positives * odds**2 - benefit**2
    half = _Z * np.sqrt(np.maximum(variance, 0) / (positive.size - 1))
    return DecisionCurve(threshold, benefit, benefit - half, benefit + half, prevalence - (1 - prevalence) * odds)


def _information(odds: Floats) -> Floats:
    """Fisher's information of each sample on its log odds."""
    return np.asarray(expit(odds) * expit(-odds))


def _wald(value: float, variance: float) -> tuple[float, float, float]:
    half = _Z * float(variance) ** 0.5
    return value, value - half, value + half


def _bin(probability: Floats, bins: int) -> NDArray[np.int64]:
    """The bin of each probability."""
    return np.asarray(np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], probability))


def _at_or_above(probability: Floats, threshold: Floats) -> NDArray[np.int64]:
    """How many probabilities reach each threshold."""
    return np.asarray(probability.size - np.searchsorted(np.sort(probability), threshold))


def _check_probability(label: ArrayLike, probability: ArrayLike) -> tuple[NDArray[np.bool_], Floats]:
    positive, probability = check_binary(label, probability)
    if probability.min() < 0 or probability.max() > 1:
        raise InputError(
            f"Probabilities must lie in [0, 1], found {probability.min():g} to {probability.max():g}: "
            "turn logits into probabilities first."
        )
    return positive, probability
