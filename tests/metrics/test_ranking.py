import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import (
    auc,
    check_binary,
    class_accuracies,
    error_at_tpr,
    fpr_at_fn,
    fpr_at_tpr,
    predict_at_tpr,
)


@st.composite
def ranked_samples(draw):
    """Labels with both classes and small integer scores, so that ties are common."""
    label = [0, 1, *draw(st.lists(st.integers(0, 1), max_size=30))]
    score = draw(st.lists(st.integers(0, 8), min_size=len(label), max_size=len(label)))
    return np.array(label), np.array(score, dtype=float)


def brute_force_fpr(label, score, most_missed):
    """Lowest share of negatives flagged over every possible threshold that misses at most so many positives."""
    thresholds = [*score, score.max() + 1]
    rates = [np.mean(score[label == 0] >= t) for t in thresholds if np.sum(score[label == 1] < t) <= most_missed]
    return min(rates)


def in_rank_order(pattern):
    """Labels and distinct scores of a string such as 'PPN', highest score first."""
    return np.array([letter == "P" for letter in pattern]), -np.arange(len(pattern), dtype=float)


@given(ranked_samples())
def test_auc_is_scikit_learns_and_the_share_of_ordered_pairs(samples):
    label, score = samples
    gaps = score[label == 1][:, None] - score[label == 0][None, :]
    assert auc(label, score) == pytest.approx(np.mean((gaps > 0) + 0.5 * (gaps == 0)), abs=1e-12)
    assert auc(label, score) == pytest.approx(roc_auc_score(label, score), abs=1e-12)


@given(ranked_samples())
def test_only_the_order_of_the_scores_matters(samples):
    label, score = samples
    assert auc(label, np.exp(score) - 5) == auc(label, score)
    assert fpr_at_fn(label, np.exp(score) - 5, 0) == fpr_at_fn(label, score, 0)


@given(ranked_samples())
@settings(max_examples=50)
def test_fpr_at_fn_is_the_best_of_all_thresholds(samples):
    label, score = samples
    for k in range(int(label.sum())):
        assert fpr_at_fn(label, score, k) == brute_force_fpr(label, score, k)


@given(ranked_samples(), st.sampled_from([0.01, 0.5, 0.8, 0.9, 0.92, 0.95, 0.98, 1.0]))
def test_lowest_fpr_at_tpr_is_the_first_point_of_the_full_roc_that_reaches_it(samples, tpr):
    label, score = samples
    false_rate, true_rate, _ = roc_curve(label, score, drop_intermediate=False)
    assert fpr_at_tpr(label, score, tpr) == false_rate[true_rate >= tpr - 1e-12].min()


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
@example((7, 100))  # 0.07 * 100 = 7.000000000000001
def test_a_rate_that_is_a_whole_number_of_positives_asks_for_just_that_many(found_of_n):
    found, n = found_of_n
    label, score = in_rank_order("NP" * n)
    assert fpr_at_tpr(label, score, found / n) == fpr_at_fn(label, score, n - found) == found / n


def test_tied_negatives_are_false_positives():
    label, score = [1, 1, 0, 0, 0, 0], [2.0, 1.0, 1.0, 1.0, 0.0, 3.0]
    assert fpr_at_fn(label, score, 0) == 0.75
    assert fpr_at_fn(label, score, 1) == 0.25


def test_interpolation_walks_the_diagonal_of_a_tie():
    # ROC corners: (0, 0), (0, 1/2), then the tie of one positive with half of the negatives up to (1/2, 1).
    label, score = [1, 1, 0, 0], [3.0, 2.0, 2.0, 1.0]
    assert fpr_at_tpr(label, score, 0.75, rule="interpolate") == pytest.approx(0.25)
    assert fpr_at_tpr(label, score, 0.5, rule="interpolate") == 0.0
    assert fpr_at_tpr(label, score, 0.75) == 0.5


@given(st.permutations("P" * 9 + "N" * 7), st.floats(0.05, 1))
def test_interpolation_changes_nothing_without_ties(pattern, tpr):
    label, score = in_rank_order(pattern)
    assert fpr_at_tpr(label, score, tpr, rule="interpolate") == pytest.approx(fpr_at_tpr(label, score, tpr), abs=1e-9)


@pytest.mark.parametrize("n_positive", [8, 13])
def test_the_official_rule_calls_a_small_cohort_perfect(n_positive):
    label, score = in_rank_order("N" * 10 + "P" * n_positive)
    for tpr in (0.98, 0.95, 0.9):
        assert fpr_at_tpr(label, score, tpr, rule="official") == 0.0
        assert fpr_at_tpr(label, score, tpr) == 1.0


@pytest.mark.parametrize(
    ("pattern", "tpr", "expected", "why"),
    [
        ("P" * 19 + "NN" + "P" + "NN", 0.95, 0.0, "exactly 19 of 20, first of its points"),
        ("N" + "P" * 19 + "NN" + "P" + "N", 0.95, 0.25, "exactly 19 of 20 behind one negative"),
        ("N" + "P" * 12 + "N" + "P" + "NN", 0.92, 0.25, "12 of 13 is 0.923, which rounds to it"),
        # Of 60 positives 57 are 0.95 and 58 round to 0.97; nothing rounds to 0.96.
        ("P" * 57 + "N" + "P" + "N" + "PP" + "NN", 0.96, 0.125, "mean of the rates at 0.95 and 0.97"),
        ("P" * 8 + "N" + "PP" + "N", 0.9, 0.0, "9 of 10 lies inside a straight segment, which the curve leaves out"),
    ],
)
def test_official_rule_by_hand(pattern, tpr, expected, why):
    label, score = in_rank_order(pattern)
    assert fpr_at_tpr(label, score, tpr, rule="official") == expected, why


def test_the_official_rule_can_be_lower_than_the_truth():
    label, score = in_rank_order("P" * 8 + "N" + "PP" + "N")
    assert fpr_at_tpr(label, score, 0.9) == 0.5


@pytest.mark.parametrize(
    ("label", "score", "match"),
    [
        ([1, 1], [0.1, 0.2], "found 2 positive and 0 negative"),
        ([0, 0], [0.1, 0.2], "found 0 positive and 2 negative"),
        ([0, 2], [0.1, 0.2], "found 2 at position 1"),
        ([0, float("nan")], [0.1, 0.2], "found nan at position 1"),
        ([0, 1], [0.1, float("nan")], "Scores must be finite, found nan at position 1"),
        ([0, 1], [float("inf"), 0.1], "Scores must be finite, found inf at position 0"),
        ([0, 1], [0.1], r"shapes \(2,\) and \(1,\)"),
        ([[0, 1]], [[0.1, 0.2]], "one-dimensional"),
    ],
)
def test_unusable_samples_are_refused(label, score, match):
    with pytest.raises(InputError, match=match):
        auc(label, score)


def test_check_binary_counts_each_class():
    with pytest.raises(InputError, match=r"At least 2 positive .* found 1 positive and 2 negative"):
        check_binary([0, 0, 1], [1, 2, 3], per_class=2)


@pytest.mark.parametrize("k", [-1, 2])
def test_more_misses_than_positives_are_refused(k):
    with pytest.raises(InputError, match=f"Cannot allow {k} false negatives among 2 positives: k must be .* 0 and 1"):
        fpr_at_fn([0, 1, 1], [1, 2, 3], k)


@pytest.mark.parametrize("rule", ["lowest", "interpolate", "official"])
@pytest.mark.parametrize("tpr", [0, 1.01, float("nan")])
def test_impossible_rates_are_refused(rule, tpr):
    with pytest.raises(InputError, match="true-positive rate must lie in"):
        fpr_at_tpr([0, 1], [1, 2], tpr, rule=rule)


def test_unknown_rule_is_refused():
    with pytest.raises(InputError, match="Unknown rule 'nearest'"):
        fpr_at_tpr([0, 1], [1, 2], 0.9, rule="nearest")


# Ten samples, classes 0 and 1 ordinary, 2 critical.
LABEL = np.array([2, 2, 2, 2, 0, 0, 0, 1, 1, 1])
SCORE = np.array(
    [
        [0, 0, 9], [0, 0, 7], [0, 0, 5], [0, 0, 1],
        [3, 1, 6], [3, 1, 5], [1, 3, 0], [0, 2, 4], [2, 2, 0], [0, 1, 2],
    ],
    dtype=float,
)  # fmt: skip


@pytest.mark.parametrize(
    ("tpr", "predicted"),
    [
        (0.5, [2, 2, 0, 0, 0, 0, 1, 1, 0, 1]),  # threshold 7
        (0.75, [2, 2, 2, 0, 2, 2, 1, 1, 0, 1]),  # threshold 5, tied with a negative
        (1.0, [2, 2, 2, 2, 2, 2, 1, 2, 0, 2]),  # threshold 1
    ],
)
def test_one_critical_class_by_hand(tpr, predicted):
    assert predict_at_tpr(LABEL, SCORE, tpr, critical=[2]).tolist() == predicted
    wrong = [p != y for p, y in zip(predicted, LABEL.tolist(), strict=True) if y != 2]
    assert error_at_tpr(LABEL, SCORE, tpr, critical=[2]) == pytest.approx(np.mean(wrong))


def test_two_classes_give_the_binary_rate():
    rng = np.random.default_rng(0)
    label, critical_score = rng.integers(0, 2, 200), rng.integers(0, 20, 200)
    score = np.column_stack([np.zeros(200), critical_score])
    for tpr in (0.5, 0.8, 0.9, 1.0):
        assert error_at_tpr(label, score, tpr, critical=[1]) == pytest.approx(fpr_at_tpr(label, critical_score, tpr))


@given(st.integers(0, 2**32 - 1), st.sampled_from([[0], [3], [1, 3]]), st.sampled_from([0.5, 0.8, 0.9, 1.0]))
@settings(max_examples=50)
def test_error_at_tpr_is_the_best_over_all_thresholds_that_reach_it(seed, critical, tpr):
    rng = np.random.default_rng(seed)
    label = np.concatenate([np.arange(4), rng.integers(0, 4, 20)])
    score = rng.integers(0, 6, (24, 4)).astype(float)
    errors = []
    for threshold in range(6):
        flagged = [max(row[c] for c in critical) >= threshold for row in score]
        others = [c for c in range(4) if c not in critical]
        best = [max(others, key=lambda c, row=row: (row[c], -c)) for row in score]
        if np.mean([f for f, y in zip(flagged, label, strict=True) if y in critical]) >= tpr - 1e-12:
            rows = [(f or b != y) for f, b, y in zip(flagged, best, label, strict=True) if y not in critical]
            errors.append(np.mean(rows))
    assert error_at_tpr(label, score, tpr, critical=critical) == pytest.approx(min(errors))


def test_several_critical_classes_share_one_threshold_and_keep_their_own_accuracy():
    label = [2, 2, 3, 3, 0, 1]
    score = [[0, 0, 5, 1], [0, 0, 3, 4], [0, 0, 0, 6], [9, 0, 1, 1], [2, 1, 0, 3], [1, 2, 0, 0]]
    predicted = predict_at_tpr(label, score, 0.75, critical=[3, 2])
    assert predicted.tolist() == [2, 3, 3, 0, 0, 1]
    accuracies = class_accuracies(label, predicted, critical=[3, 2])
    assert accuracies.critical == {3: 0.5, 2: 0.5}
    assert (accuracies.other, accuracies.overall) == (1.0, pytest.approx(4 / 6))


@pytest.mark.parametrize(
    ("label", "shape", "critical", "match"),
    [
        ([0, 1, 1], (3, 3), [2], "Class 2 is critical but no sample"),
        ([1, 1, 1], (3, 2), [1], "3 critical of 3 samples"),
        ([0, 1, 1], (3, 2), [], "0 critical of 3 samples"),
        ([0, 1, 5], (3, 2), [1], "Labels must lie in 0 to 1, found 0 to 5"),
        ([0, 1, -1], (3, 2), [1], "found -1 to 1"),
        ([0, 1, 1], (2, 2), [1], r"score must be of shape \(3, classes\), found \(2, 2\)"),
        ([0, 1, 1], (3,), [1], r"found \(3,\)"),
    ],
)
def test_unusable_classes_are_refused(label, shape, critical, match):
    with pytest.raises(InputError, match=match):
        predict_at_tpr(label, np.zeros(shape), 0.9, critical=critical)


def test_nan_in_any_column_is_refused():
    score = SCORE.copy()
    score[0, 0] = np.nan
    with pytest.raises(InputError, match="Scores must be finite"):
        predict_at_tpr(LABEL, score, 0.9, critical=[2])


def test_accuracies_need_one_prediction_per_label():
    with pytest.raises(InputError, match=r"shapes \(3,\) and \(2,\)"):
        class_accuracies([0, 1, 1], [0, 1], critical=[1])
