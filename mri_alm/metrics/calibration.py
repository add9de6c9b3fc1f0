"""Whether probabilities mean what they say, and whether acting on them helps: calibration and decision curves.

Everything here takes **probabilities** of the critical class, not logits.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.calibration import calibration_curve as binned_rates

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import Floats, check_binary


@dataclass(frozen=True)
class CalibrationCurve:
    """One entry per non-empty bin of equal width: mean probability, share of positives, number of samples."""

    mean_probability: Floats
    positive_rate: Floats
    count: NDArray[np.int64]


@dataclass(frozen=True)
class DecisionCurve:
    """Net benefit per sample, in true positives, at each threshold probability; treating nobody is 0.

    Attributes:
        threshold: ``(T,)``, the probability at which one is indifferent to the examination.
        model: ``(T,)``, examining those with probability >= threshold.
        everyone: ``(T,)``, examining everyone.
    """

    threshold: Floats
    model: Floats
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


def decision_curve(label: ArrayLike, probability: ArrayLike, threshold: ArrayLike) -> DecisionCurve:
    """Net benefit TP / B - FP / B * t / (1 - t) of the model and of examining everyone.

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
    return DecisionCurve(threshold, true_positives - false_positives * odds, prevalence - (1 - prevalence) * odds)


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
