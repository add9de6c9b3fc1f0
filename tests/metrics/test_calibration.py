from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit, logit
from scipy.stats import binomtest

from mri_alm.errors import InputError
from mri_alm.metrics.calibration import (
    brier_score,
    calibration_curve,
    decision_curve,
    expected_calibration_error,
    recalibration,
    smooth_calibration,
)


@st.composite
def probabilities(draw):
    """Labels with both classes, and probabilities of which many lie on the edges of bins."""
    label = [0, 1, *draw(st.lists(st.integers(0, 1), max_size=40))]
    one = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1.0]))
    return np.array(label), np.array([draw(one) for _ in label])


@given(probabilities(), st.integers(1, 12))
def test_curve_and_error_are_the_definition_bin_by_bin(samples, bins):
    label, probability = samples
    edges = np.linspace(0, 1, bins + 1)
    edges[0] = -1
    members = [(probability > low) & (probability <= high) for low, high in pairwise(edges)]
    members = [m for m in members if m.any()]
    curve = calibration_curve(label, probability, bins=bins)
    assert curve.count.tolist() == [m.sum() for m in members]
    assert curve.positive_rate == pytest.approx([label[m].mean() for m in members])
    assert curve.mean_probability == pytest.approx([probability[m].mean() for m in members])
    gap = sum(abs(probability[m].sum() - label[m].sum()) for m in members) / len(label)
    assert expected_calibration_error(label, probability, bins=bins) == pytest.approx(gap, abs=1e-12)


def test_curve_and_error_by_hand():
    label, probability = [0, 1, 1, 0, 1], [0.1, 0.3, 0.6, 0.4, 1.0]
    curve = calibration_curve(label, probability, bins=2)
    assert curve.mean_probability == pytest.approx([0.8 / 3, 0.8])
    assert curve.positive_rate == pytest.approx([1 / 3, 1])
    assert curve.count.tolist() == [3, 2]
    assert expected_calibration_error(label, probability, bins=2) == pytest.approx(0.2 / 5 + 0.4 / 5)
    assert brier_score(label, probability) == pytest.approx((0.01 + 0.49 + 0.16 + 0.16) / 5)


def test_true_probabilities_are_calibrated_and_sharper_ones_are_not():
    rng = np.random.default_rng(0)
    probability = rng.random(50_000)
    label = rng.random(50_000) < probability
    assert expected_calibration_error(label, probability) < 0.01
    assert expected_calibration_error(label, probability > 0.5) == pytest.approx(0.25, abs=0.01)


@given(probabilities(), st.lists(st.floats(0, 0.99), min_size=1, max_size=5))
def test_net_benefit_is_counted_one_threshold_at_a_time(samples, thresholds):
    label, probability = samples
    curve = decision_curve(label, probability, thresholds)
    for t, model, everyone in zip(thresholds, curve.model, curve.everyone, strict=True):
        hits = sum(y == 1 and p >= t for y, p in zip(label, probability, strict=True))
        alarms = sum(y == 0 and p >= t for y, p in zip(label, probability, strict=True))
        assert model == pytest.approx((hits - alarms * t / (1 - t)) / len(label), abs=1e-12)
        assert everyone == pytest.approx((sum(label == 1) - sum(label == 0) * t / (1 - t)) / len(label), abs=1e-9)


@given(probabilities(), st.floats(0, 0.95))
def test_the_interval_of_net_benefit_is_that_of_a_mean(samples, t):
    label, probability = samples
    curve = decision_curve(label, probability, t)
    each = np.where(label == 1, 1.0, -t / (1 - t)) * (probability >= t)
    half = 1.959964 * each.std(ddof=1) / len(label) ** 0.5
    assert (curve.low[0], curve.high[0]) == pytest.approx((each.mean() - half, each.mean() + half), abs=1e-5)


def test_net_benefit_by_hand():
    curve = decision_curve([1, 1, 0, 0], [0.9, 0.2, 0.2, 0.1], [0.0, 0.2, 0.5])
    assert curve.threshold.tolist() == [0.0, 0.2, 0.5]
    assert curve.model == pytest.approx([0.5, 0.5 - 0.25 / 4, 0.25])
    assert curve.everyone == pytest.approx([0.5, 0.5 - 0.5 / 4, 0.0])


# --- Slope, intercept, observed over expected ------------------------------------------------------------------------


def table(*groups):
    """Labels and probabilities of groups, each (probability, positives, negatives)."""
    label = np.concatenate([[1] * positives + [0] * negatives for _, positives, negatives in groups])
    return label, np.concatenate([[p] * (positives + negatives) for p, positives, negatives in groups])


def test_slope_of_two_groups_by_hand():
    """Two probabilities: the logistic regression goes through both shares, Woolf's variance is that of its slope."""
    found = recalibration(*table((0.2, 3, 9), (0.6, 10, 6)))
    step = logit(0.6) - logit(0.2)
    slope, error = (logit(10 / 16) - logit(3 / 12)) / step, (1 / 3 + 1 / 9 + 1 / 10 + 1 / 6) ** 0.5 / step
    wanted = slope, slope - 1.959964 * error, slope + 1.959964 * error
    assert found["calibration_slope"] == pytest.approx(wanted, abs=1e-5)


def test_intercept_and_ratio_of_one_group_by_hand():
    found = recalibration(*table((0.2, 12, 8)))
    shift, error = logit(0.6) - logit(0.2), 1 / (20 * 0.6 * 0.4) ** 0.5
    assert found["calibration_intercept"] == pytest.approx(
        (shift, shift - 1.959964 * error, shift + 1.959964 * error), abs=1e-5
    )
    interval = binomtest(12, 20).proportion_ci(0.95, "exact")
    assert found["observed_expected"] == pytest.approx((3.0, interval.low / 0.2, interval.high / 0.2))
    assert "calibration_slope" not in found


def test_figures_of_recalibration_are_the_likelihood_s_maximum():
    rng = np.random.default_rng(3)
    probability = expit(rng.normal(-1, 2, 200))
    label = rng.random(200) < expit(0.5 + 0.7 * logit(probability))

    def cost(shift, slope):
        odds = shift + slope * logit(probability)
        return np.logaddexp(0, odds).sum() - odds[label].sum()

    found = recalibration(label, probability)
    both = minimize(lambda b: cost(*b), [0, 1], tol=1e-10)
    assert found["calibration_slope"][0] == pytest.approx(both.x[1], abs=1e-4)
    assert found["calibration_intercept"][0] == pytest.approx(minimize(lambda b: cost(b[0], 1), [0]).x[0], abs=1e-4)
    assert found["observed_expected"][0] == pytest.approx(label.sum() / probability.sum())


@pytest.mark.parametrize("score", [[0.1, 0.2, 0.3, 0.4], [0.4, 0.4, 0.1, 0.1], [0.1, 0.2, 0.2, 0.9]])
def test_no_slope_fits_a_separating_score(score):
    assert "calibration_slope" not in recalibration([0, 0, 1, 1], score)


@settings(max_examples=30)
@given(probabilities())
def test_every_score_has_figures_or_none(samples):
    for value, low, high in recalibration(*samples).values():
        assert np.isfinite([value, low, high]).all()
        assert low <= value <= high


# --- The smooth curve -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [0.4, 0.75, 1.0])
def test_smooth_curve_is_a_line_fitted_to_the_nearest(span):
    """By NumPy's weighted least squares."""
    rng = np.random.default_rng(5)
    x = rng.beta(1, 3, 60)
    label = rng.random(60) < x
    curve = smooth_calibration(label, x, span=span, points=7)
    assert curve.probability == pytest.approx(np.linspace(x.min(), x.max(), 7))
    for at, rate in zip(curve.probability, curve.positive_rate, strict=True):
        distance = abs(x - at)
        reach = np.sort(distance)[int(np.ceil(span * 60)) - 1]
        weight = np.clip(1 - (distance / reach) ** 3, 0, 1) ** 1.5  # polyfit squares them
        assert rate == pytest.approx(np.clip(np.polyval(np.polyfit(x - at, label, 1, w=weight), 0), 0, 1), abs=1e-4)


@settings(max_examples=30)
@given(probabilities())
def test_every_smooth_curve_is_a_share_inside_its_interval(samples):
    curve = smooth_calibration(*samples, points=9)
    for low, rate, high in zip(curve.low, curve.positive_rate, curve.high, strict=True):
        assert -1e-12 <= low <= rate + 1e-12
        assert rate - 1e-12 <= high <= 1 + 1e-12


def test_smooth_curve_of_one_probability_is_a_share_with_wilson_s_interval():
    curve = smooth_calibration(*table((0.3, 2, 18)), points=3)
    interval = binomtest(2, 20).proportion_ci(0.95, "wilson")
    assert curve.positive_rate == pytest.approx([0.1] * 3)
    assert curve.low == pytest.approx([interval.low] * 3)
    assert curve.high == pytest.approx([interval.high] * 3)


def test_smooth_curve_finds_the_truth():
    rng = np.random.default_rng(1)
    x = rng.uniform(0.1, 0.7, 20_000)
    curve = smooth_calibration(rng.random(x.size) < x**2, x, span=0.3)
    assert curve.positive_rate == pytest.approx(curve.probability**2, abs=0.04)
    held = (curve.low < curve.probability**2) & (curve.probability**2 < curve.high)
    assert held[10:40].mean() > 0.8


@pytest.mark.parametrize(
    "call", [calibration_curve, expected_calibration_error, brier_score, recalibration, smooth_calibration]
)
@pytest.mark.parametrize(("probability", "text"), [([0.5, 1.5], "0.5 to 1.5"), ([-3, 0.5], "-3 to 0.5")])
def test_logits_are_refused(call, probability, text):
    with pytest.raises(InputError, match=rf"Probabilities must lie in \[0, 1\], found {text}: turn logits"):
        call([0, 1], probability)


@pytest.mark.parametrize("threshold", [1.0, -0.1])
def test_thresholds_without_odds_are_refused(threshold):
    with pytest.raises(InputError, match="Threshold probabilities must lie in"):
        decision_curve([0, 1], [0.1, 0.9], threshold)
