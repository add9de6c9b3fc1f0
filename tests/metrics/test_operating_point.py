import json
import math

import numpy as np
import pytest

from mri_alm.errors import InputError
from mri_alm.metrics.threshold import OperatingPoint, fixed_fn_threshold, majority_vote, neyman_pearson_threshold

LABEL, SCORE = [1, 1, 1, 0, 0, 0], [0.1 + 0.2, 0.7, 0.9, 0.2, 0.5, 0.8]


def test_a_tied_score_is_positive():
    point = fixed_fn_threshold(LABEL, SCORE, 1)
    assert point.decide([0.69, 0.7, 0.71]).tolist() == [False, True, True]


def test_a_missing_score_never_passes_for_a_negative():
    point = fixed_fn_threshold(LABEL, SCORE, 1)
    with pytest.raises(InputError, match="1 of 3 scores are NaN"):
        point.decide([0.1, float("nan"), 0.9])


@pytest.mark.parametrize(
    "point",
    [fixed_fn_threshold(LABEL, SCORE, 0), neyman_pearson_threshold(LABEL, SCORE, 0.05, 0.05)],
    ids=["a threshold", "examine everyone"],
)
def test_strict_json_keeps_every_bit(point):
    text = json.dumps(point.to_json(), allow_nan=False)
    assert OperatingPoint.from_json(json.loads(text)) == point


def test_examine_everyone_is_a_null_threshold():
    point = neyman_pearson_threshold(LABEL, SCORE, 0.05, 0.05)
    assert point.threshold == -math.inf
    assert point.to_json()["threshold"] is None
    assert point.decide([-1e300, -math.inf]).all()


@pytest.mark.parametrize("change", [{"tau": 0.5}, {"threshold": ...}])
def test_another_file_is_refused(change):
    fields = fixed_fn_threshold(LABEL, SCORE, 0).to_json() | change
    fields = {name: value for name, value in fields.items() if value is not ...}
    with pytest.raises(InputError, match="An operating point has the fields threshold, rank"):
        OperatingPoint.from_json(fields)


def test_majority_vote_by_hand():
    low, high = fixed_fn_threshold(LABEL, SCORE, 0), fixed_fn_threshold(LABEL, SCORE, 2)
    score = np.array([[0.2, 0.2, 0.2], [0.5, 0.5, 0.5], [0.2, 0.95, 0.95], [0.2, 0.2, 0.95]])
    assert majority_vote([low, high, high], score).tolist() == [False, False, True, False]
    assert majority_vote([low, low, high], score).tolist() == [False, True, True, False]


def test_a_drawn_vote_is_positive():
    point = fixed_fn_threshold(LABEL, SCORE, 1)
    assert majority_vote([point, point], [[0.1, 0.9], [0.1, 0.1]]).tolist() == [True, False]


def test_a_vote_needs_one_column_per_model():
    with pytest.raises(InputError, match=r"one column per operating point \(2\), found shape \(1, 3\)"):
        majority_vote([fixed_fn_threshold(LABEL, SCORE, 0)] * 2, [[1, 2, 3]])
