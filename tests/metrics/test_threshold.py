import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mapie.risk_control import BinaryClassificationController
from scipy.stats import binom, binomtest

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import fpr_at_fn, midway_below
from mri_alm.metrics.threshold import (
    OperatingPoint,
    certificate_in_words,
    clopper_pearson_upper,
    conformal_rank,
    fixed_fn_threshold,
    mean_miss_rate_threshold,
    minimum_positives,
    miss_bound_in_words,
    neyman_pearson_rank,
    neyman_pearson_threshold,
    one_score_per_patient,
)

DRAWS = 20_000
rates = st.floats(0.01, 0.5)


def binomial_cdf(k, n, p):
    """P(at most k of n), from exact integer binomial coefficients."""
    return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def miss_rates(n, rank, *, levels=None):
    """True miss rate of tau = s_(rank) in many draws of n positives, uniform or rounded down to a few levels."""
    score = np.random.default_rng(0).random((DRAWS, n))
    if levels:
        score = np.floor(score * levels) / levels  # P(score < tau) is tau itself in both cases
    return np.partition(score, rank - 1, axis=1)[:, rank - 1]


@pytest.mark.parametrize(
    ("alpha", "eps", "allowed", "n"),
    [
        (0.05, 0.05, 0, 59), (0.1, 0.05, 0, 29), (0.1, 0.1, 0, 22), (0.02, 0.05, 0, 149), (0.01, 0.05, 0, 299),
        (0.05, 0.05, 1, 93), (0.05, 0.05, 2, 124), (0.05, 0.05, 5, 208),
        (0.1, 0.1, 1, 38), (0.1, 0.1, 2, 52), (0.1, 0.1, 5, 91),
        (0.1, 0.05, 1, 46), (0.1, 0.05, 2, 61), (0.1, 0.05, 5, 103),
    ],
)  # fmt: skip
def test_minimum_positives_of_the_method(alpha, eps, allowed, n):
    assert minimum_positives(alpha, eps, allowed) == n
    assert neyman_pearson_rank(n, alpha, eps) == allowed + 1
    assert neyman_pearson_rank(n - 1, alpha, eps) == allowed


def test_thirteen_positives_cannot_certify_ten_percent():
    assert neyman_pearson_rank(13, 0.1, 0.1) == 0
    assert neyman_pearson_rank(22, 0.1, 0.1) == 1
    assert clopper_pearson_upper(0, 13, 0.05) == pytest.approx(0.206, abs=5e-4)


@given(st.integers(1, 120), rates, rates)
def test_neyman_pearson_rank_is_the_largest_that_holds(n, alpha, eps):
    rank = neyman_pearson_rank(n, alpha, eps)
    assert rank == 0 or binomial_cdf(rank - 1, n, alpha) <= eps + 1e-12
    assert rank == n or binomial_cdf(rank, n, alpha) > eps - 1e-12


@given(rates, rates, st.integers(0, 6))
def test_minimum_positives_is_the_least_that_holds(alpha, eps, allowed):
    n = minimum_positives(alpha, eps, allowed)
    assert binomial_cdf(allowed, n, alpha) <= eps + 1e-12
    assert n == allowed + 1 or binomial_cdf(allowed, n - 1, alpha) > eps - 1e-12


def test_simulated_violations_stay_under_eps_and_close_to_it():
    rank = neyman_pearson_rank(100, 0.1, 0.1)
    violations = np.mean(miss_rates(100, rank) > 0.1)
    assert violations == pytest.approx(binomial_cdf(rank - 1, 100, 0.1), abs=0.01)
    assert violations <= 0.1
    assert np.mean(miss_rates(100, rank + 1) > 0.1) > 0.1


@pytest.mark.parametrize("levels", [7, 20, 1000])
def test_simulated_violations_stay_under_eps_with_ties(levels):
    rank = neyman_pearson_rank(100, 0.1, 0.1)
    assert np.mean(miss_rates(100, rank, levels=levels) > 0.1) <= 0.1


@pytest.mark.parametrize("levels", [None, 20])
def test_conformal_bounds_the_mean_and_only_the_mean(levels):
    simulated = miss_rates(200, conformal_rank(200, 0.05), levels=levels)
    assert simulated.mean() <= 0.05 + 3 * simulated.std() / math.sqrt(DRAWS)
    if levels is None:
        assert simulated.mean() == pytest.approx(10 / 201, abs=5e-4)
        assert np.mean(simulated > 0.05) == pytest.approx(0.455, abs=0.01)


def test_conformal_exceeds_alpha_almost_every_second_time_exactly():
    assert conformal_rank(200, 0.05) == 10
    assert binomial_cdf(9, 200, 0.05) == pytest.approx(0.4547, abs=5e-5)


@given(st.integers(1, 99), st.integers(1, 500))
@example(29, 99)  # 0.29 * 100 = 28.999999999999996
def test_conformal_rank_in_whole_percents_is_exact(percent, n):
    assert conformal_rank(n, percent / 100) == percent * (n + 1) // 100


@given(st.integers(1, 60), st.data(), rates)
def test_clopper_pearson_is_scipys_one_sided_exact_interval(n, data, eps):
    k = data.draw(st.integers(0, n))
    interval = binomtest(k, n, alternative="less").proportion_ci(1 - eps, method="exact")
    assert clopper_pearson_upper(k, n, eps) == pytest.approx(interval.high, abs=1e-8)


def test_one_bound_is_said_in_one_way():
    """1 - 0.05 ** (1 / 6) = 0.3930; the upper end of the two-sided interval would be 1 - 0.025 ** (1 / 6) = 0.4593."""
    assert miss_bound_in_words(0, 6) == "at most 39.3 % of new positives are missed (one-sided 95 % bound from 0 of 6)"
    words = fixed_fn_threshold([1] * 6 + [0], [0.5] * 6 + [0.1], 0).in_words()
    assert words.endswith(f"\n  Expected share of missed patients 14.3 %; {miss_bound_in_words(0, 6)}.")


def test_clopper_pearson_covers():
    for rate in (0.02, 0.1, 0.5, 0.9):
        bounds = np.array([clopper_pearson_upper(k, 13, 0.05) for k in range(14)])
        assert binom.pmf(np.arange(14), 13, rate)[bounds < rate].sum() <= 0.05


def cohort(n_positive=13, n_negative=87, seed=0):
    rng = np.random.default_rng(seed)
    label = np.repeat([1, 0], [n_positive, n_negative])
    return label, rng.normal(size=label.size) + label


def below(score, at):
    """Halfway to the next lower score, as a test's threshold."""
    return pytest.approx((at + max(s for s in score if s < at)) / 2, rel=1e-12)


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_fixed_fn_threshold_by_hand(k):
    label, score = cohort()
    point = fixed_fn_threshold(label, score, k)
    assert point.threshold == below(score, sorted(score[:13])[k])
    assert (point.rank, point.n_positive, point.n_negative, point.false_negatives) == (k + 1, 13, 87, k)
    assert point.expected_miss_rate == pytest.approx((k + 1) / 14)
    assert point.miss_rate_upper_95 == pytest.approx(clopper_pearson_upper(k, 13, 0.05))
    assert point.false_positive_rate == fpr_at_fn(label, score, k)
    assert point.rule == f"at most {k} of 13 held-out positives missed"


def test_ties_only_lower_the_number_missed():
    point = fixed_fn_threshold([1, 1, 1, 1, 0, 0], [1, 2, 2, 3, 2, 1], 2)
    assert (point.threshold, point.false_negatives, point.false_positive_rate) == (1.5, 1, 0.5)
    assert point.expected_miss_rate == 3 / 5


def test_the_exam_that_defines_the_threshold_does_not_flip_in_another_batch():
    """Its logit moves by 1e-6, and so do those of all others: every decision stays."""
    label = np.repeat([1, 0], [13, 87])
    logit = 3 * cohort()[1]
    score, moved = (1 / (1 + np.exp(-(logit + shift))) for shift in (0, -1e-6))
    for k in range(13):
        point = fixed_fn_threshold(label, score, k)
        assert point.decide(score).tolist() == (score >= sorted(score[:13])[k]).tolist()
        assert point.decide(moved).tolist() == point.decide(score).tolist()


def test_halfway_below_by_hand():
    score = np.array([0.5, 0.1, 0.3, 0.3, -2.0, np.nextafter(0.5, 1)])
    at = np.array([0.1, 0.3, 0.5, -2.0, np.nextafter(0.5, 1)])
    # nothing lower than -2: a ten-thousandth of it; nothing between neighbours of floating point: itself
    np.testing.assert_allclose(midway_below(score, at), [-0.95, 0.2, 0.4, -2.0002, 0.5], rtol=1e-12)
    assert midway_below(score, at)[-1] == np.nextafter(0.5, 1)


@pytest.mark.parametrize("max_fn", [13, -1])
def test_too_many_misses_are_refused_in_a_sentence(max_fn):
    sentence = (
        rf"^Cannot allow {max_fn} false negatives: the cohort has 13 positive patients, "
        r"so --max_fn must be between 0 and 12\.$"
    )
    with pytest.raises(InputError, match=sentence):
        fixed_fn_threshold(*cohort(), max_fn)


def test_expected_and_upper_rates_hold_over_cohorts():
    simulated = miss_rates(13, 2)
    point = fixed_fn_threshold(*cohort(), 1)
    assert simulated.mean() == pytest.approx(point.expected_miss_rate, abs=0.003)
    assert np.mean(simulated > point.miss_rate_upper_95) == pytest.approx(0.05, abs=0.006)


def test_neyman_pearson_threshold_is_the_order_statistic():
    label, score = cohort(100, 300)
    point = neyman_pearson_threshold(label, score, 0.1, 0.1, source="calibration")
    assert point.rank == neyman_pearson_rank(100, 0.1, 0.1) == 6
    assert point.threshold == below(score, sorted(score[:100])[5])
    assert point.rule == "P(miss rate > 0.1) <= 0.1"
    assert point.miss_rate_upper_95 == pytest.approx(clopper_pearson_upper(5, 100, 0.05))


def test_too_few_positives_mean_examine_everyone():
    point = neyman_pearson_threshold(*cohort(), 0.1, 0.1)
    assert (point.threshold, point.rank, point.false_negatives) == (-math.inf, 0, 0)
    assert (point.false_positive_rate, point.expected_miss_rate, point.miss_rate_upper_95) == (1.0, 0.0, 0.0)
    assert mean_miss_rate_threshold(*cohort(), 0.05).threshold == -math.inf


def test_mean_miss_rate_threshold_says_what_it_bounds():
    label, score = cohort(200, 300)
    point = mean_miss_rate_threshold(label, score, 0.05)
    assert point.threshold == below(score, sorted(score[:200])[9])
    assert point.expected_miss_rate <= 0.05
    assert point.rule == "mean miss rate <= 0.05, no bound for one cohort"


@pytest.mark.parametrize(("source", "word"), [("calibration", "exact"), ("pooled", "approximate")])
def test_the_basis_says_exact_or_approximate(source, word):
    assert fixed_fn_threshold(*cohort(), 0, source=source).basis.startswith(word + ": ")


def test_the_default_basis_claims_nothing():
    assert fixed_fn_threshold(*cohort(), 0).basis.startswith("approximate")


def test_an_unknown_source_is_refused():
    with pytest.raises(InputError, match="Unknown source of scores 'test': use one of calibration, pooled"):
        fixed_fn_threshold(*cohort(), 0, source="test")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: neyman_pearson_rank(0, 0.1, 0.1), "found n = 0"),
        (lambda: neyman_pearson_rank(10, 0, 0.1), "alpha must lie strictly between 0 and 1, found 0"),
        (lambda: neyman_pearson_rank(10, 0.1, 1), "eps must lie strictly between 0 and 1, found 1"),
        (lambda: minimum_positives(0.1, math.nan), "eps must lie strictly between 0 and 1, found nan"),
        (lambda: minimum_positives(0.1, 0.1, -1), "allowed must be at least 0, found -1"),
        (lambda: conformal_rank(10, 5), "alpha must lie strictly between 0 and 1, found 5"),
        (lambda: clopper_pearson_upper(4, 3, 0.1), "k must lie between 0 and n = 3, found 4"),
    ],
)
def test_impossible_arguments_are_refused(call, match):
    with pytest.raises(InputError, match=match):
        call()


# --- The record -------------------------------------------------------------------------------------------------------


LABEL, SCORE = [1, 1, 1, 0, 0, 0], [0.1 + 0.2, 0.7, 0.9, 0.2, 0.5, 0.8]


def test_a_tied_score_is_positive():
    point = fixed_fn_threshold(LABEL, SCORE, 1)
    at = point.threshold
    assert point.decide([np.nextafter(at, 0), at, 0.7]).tolist() == [False, True, True]


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


# --- Another library ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "alpha", "eps", "slack"),
    [
        (32, 0.1, 0.1, 0), (64, 0.1, 0.1, 0), (128, 0.05, 0.05, 0), (256, 0.05, 0.1, 0),
        (100, 0.1, 0.05, 1), (208, 0.05, 0.05, 1),
    ],
)  # fmt: skip
def test_mapie_finds_the_same_threshold(n: int, alpha: float, eps: float, slack: int) -> None:
    """Its binary risk control, tested in fixed sequence over the positives' scores, has the same p-values.

    It computes misses as ceil(n * rate): where n * rate is not exact in floats it can be one rank too careful.
    """
    rng = np.random.default_rng(n)
    score = np.concatenate([rng.random(n), 0.6 * rng.random(200)])
    label = np.concatenate([np.ones(n, dtype=int), np.zeros(200, dtype=int)])
    grid = np.sort(score[:n])
    controller = BinaryClassificationController(
        lambda x: np.column_stack([1 - x[:, 0], x[:, 0]]),
        "recall",
        1 - alpha,
        confidence_level=1 - eps,
        best_predict_param_choice="recall",
        list_predict_params=grid,
        fwer_method="fixed_sequence",
    ).calibrate(score[:, None], label)
    theirs = int(np.searchsorted(grid, np.max(controller.valid_predict_params))) + 1
    ours = neyman_pearson_rank(n, alpha, eps)
    assert ours - slack <= theirs <= ours
    assert neyman_pearson_threshold(label, score, alpha, eps).threshold == below(score, grid[ours - 1])


# --- Patients, and what is known before training --------------------------------------------------------------------


def test_a_patient_counts_once_and_on_the_cautious_side():
    patient = ["a", "b", "a", "c", "b", "a"]
    label = [1, 0, 1, 1, 0, 0]
    score = [0.8, 0.3, 0.6, 0.9, 0.5, 0.2]
    labels, scores = one_score_per_patient(patient, label, score)
    assert list(zip(labels.tolist(), scores.tolist(), strict=True)) == [(1, 0.6), (0, 0.5), (1, 0.9), (0, 0.2)]
    point = fixed_fn_threshold(labels, scores, 0)
    assert (point.threshold, point.n_positive, point.n_negative) == (0.55, 2, 2)
    with pytest.raises(InputError, match="Each of the 6 scores needs its patient, found 5 patients"):
        one_score_per_patient(patient[:5], label, score)


def test_copies_of_an_exam_do_not_make_a_certificate():
    """Twenty-two positives may certify 10 % at 90 %; eleven patients with two exams each may not."""
    score = np.random.default_rng(0).random(44)
    label = np.repeat([1, 0], 22)
    twice = [f"p{i // 2}" for i in range(44)]
    assert math.isfinite(neyman_pearson_threshold(label, score, 0.1, 0.1).threshold)
    rows = one_score_per_patient(twice, label, score)
    assert neyman_pearson_threshold(*rows, 0.1, 0.1).threshold == -math.inf


def test_what_the_positives_can_promise_is_said_before_training():
    text = certificate_in_words(13)
    assert text == "13 positives cannot certify a miss rate of 10 % at 90 % confidence; 22 can."
    assert certificate_in_words(59, 0.05, 0.05) == "59 positives can certify a miss rate of 5 % at 95 % confidence."


@pytest.mark.parametrize("levels", [None, 12])
def test_the_threshold_of_patients_keeps_its_promise(levels):
    """Through the functions a user calls: patients with one to three exams, each the patient's level plus noise; a
    patient is missed when any exam is."""
    rng = np.random.default_rng(1)

    def draw(patients):
        patient = np.repeat(np.arange(patients), rng.integers(1, 4, patients))
        score = 1 / (1 + np.exp(-(rng.normal(size=patients)[patient] + 0.5 * rng.normal(size=patient.size))))
        return patient, np.floor(score * levels) / levels if levels else score

    def lowest(patient, score):
        return np.minimum.reduceat(score, np.flatnonzero(np.diff(patient, prepend=-1)))

    population, draws = np.sort(lowest(*draw(200_000))), 1000
    broken = by_exam = 0
    for _ in range(draws):
        patient, score = draw(40)
        names = [*map(str, patient), *(f"negative {i}" for i in range(401))]
        label, score = np.r_[np.ones(patient.size, int), np.zeros(401, int)], np.r_[score, np.linspace(0, 1, 401)]
        for rows in (one_score_per_patient(names, label, score), (label, score)):
            point = neyman_pearson_threshold(*rows, 0.1, 0.1, source="calibration")
            too_many = np.searchsorted(population, point.threshold) / population.size > 0.1
            broken, by_exam = (broken + too_many, by_exam) if rows[0] is not label else (broken, by_exam + too_many)
    assert broken / draws <= 0.1
    assert by_exam / draws > 0.15  # counting exams breaks the promise
    assert levels or broken / draws > 0.05  # BinomCDF(1; 40, .1) = 0.0805: not simply cautious
