from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mri_alm.errors import InputError
from mri_alm.metrics.calibration import brier_score, calibration_curve, decision_curve, expected_calibration_error


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


def test_net_benefit_by_hand():
    curve = decision_curve([1, 1, 0, 0], [0.9, 0.2, 0.2, 0.1], [0.0, 0.2, 0.5])
    assert curve.threshold.tolist() == [0.0, 0.2, 0.5]
    assert curve.model == pytest.approx([0.5, 0.5 - 0.25 / 4, 0.25])
    assert curve.everyone == pytest.approx([0.5, 0.5 - 0.5 / 4, 0.0])


@pytest.mark.parametrize("call", [calibration_curve, expected_calibration_error, brier_score])
@pytest.mark.parametrize(("probability", "text"), [([0.5, 1.5], "0.5 to 1.5"), ([-3, 0.5], "-3 to 0.5")])
def test_logits_are_refused(call, probability, text):
    with pytest.raises(InputError, match=rf"Probabilities must lie in \[0, 1\], found {text}: turn logits"):
        call([0, 1], probability)


@pytest.mark.parametrize("threshold", [1.0, -0.1])
def test_thresholds_without_odds_are_refused(threshold):
    with pytest.raises(InputError, match="Threshold probabilities must lie in"):
        decision_curve([0, 1], [0.1, 0.9], threshold)
