import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mri_alm.alm.constraint import class_scores
from mri_alm.errors import InputError

LOGITS = torch.tensor([[1.0, -2.0, 0.5], [80.0, -80.0, 0.0]], dtype=torch.float64)


def test_probabilities_are_softmax_and_sigmoid() -> None:
    assert torch.equal(class_scores(LOGITS, "probability"), LOGITS.softmax(1))
    assert torch.equal(class_scores(LOGITS[:, 0], "probability", scale=2.0), (2 * LOGITS[:, 0]).sigmoid())


def test_logits_stay_as_they_are_whatever_the_scale() -> None:
    assert class_scores(LOGITS, "logit", scale=30.0) is LOGITS


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=5), st.floats(0.1, 3))
def test_log_odds_are_the_logit_of_the_probability(row: list[float], scale: float) -> None:
    logits = torch.tensor([row], dtype=torch.float64)
    odds = class_scores(logits, "log_odds", scale=scale)
    torch.testing.assert_close(odds.sigmoid(), class_scores(logits, "probability", scale=scale), rtol=1e-9, atol=1e-12)


def test_log_odds_of_two_columns_are_their_difference_and_finite_far_out() -> None:
    odds = class_scores(LOGITS[:, :2], "log_odds")
    torch.testing.assert_close(odds[:, 1], LOGITS[:, 1] - LOGITS[:, 0])
    assert class_scores(LOGITS, "log_odds").isfinite().all()
    one = torch.tensor([3.0, -4.0])
    assert torch.equal(class_scores(one, "log_odds", scale=2.0), 2 * one)


def test_a_column_and_the_difference_of_columns_order_samples_differently() -> None:
    """Why LDAM's ranking score is a choice: cosine of column 1 against z1 - z0."""
    cosines = torch.tensor([[0.9, 0.6], [-0.5, 0.5]])
    assert class_scores(cosines, "logit")[:, 1].argmax() != class_scores(cosines, "log_odds")[:, 1].argmax()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match='score must be one of probability, logit, log_odds, got "logits"'):
        class_scores(LOGITS, "logits")  # type: ignore[arg-type]
