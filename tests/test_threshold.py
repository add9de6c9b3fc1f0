import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mapie.risk_control import BinaryClassificationController
from scipy.stats import binom, binomtest

from mri_alm.errors import InputError
from mri_alm.metrics import fpr_at_fn
from mri_alm.threshold import (
    certification,
    clopper_pearson_upper,
    conformal_rank,
    fixed_fn_threshold,
    future_false_negatives_cdf,
    mean_miss_rate_threshold,
    minimum_positives,
    neyman_pearson_rank,
    neyman_pearson_threshold,
    one_per_patient,
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


def test_clopper_pearson_covers():
    for rate in (0.02, 0.1, 0.5, 0.9):
        bounds = np.array([clopper_pearson_upper(k, 13, 0.05) for k in range(14)])
        assert binom.pmf(np.arange(14), 13, rate)[bounds < rate].sum() <= 0.05


def test_future_misses_of_the_method():
    assert future_false_negatives_cdf(0, 13, 1, 13) == pytest.approx(0.5)
    assert future_false_negatives_cdf(0, 13, 1, 1) == pytest.approx(13 / 14)
    assert future_false_negatives_cdf(-1, 13, 1, 13) == 0.0


@given(st.integers(1, 30), st.data(), st.integers(1, 30))
def test_future_misses_by_counting_orders(n, data, m):
    """All orders of the n + m positives are equally likely. At most x new ones lie below s_(rank) iff at least ``rank``
    of the lowest rank + x are old ones: a hypergeometric tail."""
    rank, x = data.draw(st.integers(1, n)), data.draw(st.integers(0, m))
    ways = sum(math.comb(n, old) * math.comb(m, rank + x - old) for old in range(rank, min(n, rank + x) + 1))
    assert future_false_negatives_cdf(x, n, rank, m) == pytest.approx(ways / math.comb(n + m, rank + x), abs=1e-9)


def test_simulated_future_misses():
    rng = np.random.default_rng(1)
    misses = rng.binomial(13, miss_rates(13, 2))
    for x in range(4):
        assert np.mean(misses <= x) == pytest.approx(future_false_negatives_cdf(x, 13, 2, 13), abs=0.015)


def test_examining_everyone_never_misses():
    assert future_false_negatives_cdf(0, 5, 0, 100) == 1.0
    assert future_false_negatives_cdf(-1, 5, 0, 100) == 0.0


def cohort(n_positive=13, n_negative=87, seed=0):
    rng = np.random.default_rng(seed)
    label = np.repeat([1, 0], [n_positive, n_negative])
    return label, rng.normal(size=label.size) + label


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_fixed_fn_threshold_by_hand(k):
    label, score = cohort()
    point = fixed_fn_threshold(label, score, k)
    assert point.threshold == sorted(score[:13])[k]
    assert (point.rank, point.n_positive, point.n_negative, point.false_negatives) == (k + 1, 13, 87, k)
    assert point.expected_miss_rate == pytest.approx((k + 1) / 14)
    assert point.miss_rate_upper_95 == pytest.approx(clopper_pearson_upper(k, 13, 0.05))
    assert point.false_positive_rate == fpr_at_fn(label, score, k)
    assert point.rule == f"at most {k} of 13 held-out positives missed"


def test_ties_only_lower_the_number_missed():
    point = fixed_fn_threshold([1, 1, 1, 1, 0, 0], [1, 2, 2, 3, 2, 1], 2)
    assert (point.threshold, point.false_negatives, point.false_positive_rate) == (2.0, 1, 0.5)
    assert point.expected_miss_rate == 3 / 5


@pytest.mark.parametrize("max_fn", [13, -1])
def test_too_many_misses_are_refused_in_a_sentence(max_fn):
    sentence = (
        rf"^Cannot allow {max_fn} false negatives: the cohort has 13 positive studies, "
        r"so --max-fn must be between 0 and 12\.$"
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
    assert point.threshold == sorted(score[:100])[5]
    sentence = "100 positives certify 10 % at 90 % confidence when at most 5 of them are missed"
    assert point.rule == f"P(miss rate > 0.1) <= 0.1: {sentence}"
    assert point.miss_rate_upper_95 == pytest.approx(clopper_pearson_upper(5, 100, 0.05))


def test_too_few_positives_mean_examine_everyone():
    point = neyman_pearson_threshold(*cohort(), 0.1, 0.1)
    assert (point.threshold, point.rank, point.false_negatives) == (-math.inf, 0, 0)
    assert (point.false_positive_rate, point.expected_miss_rate, point.miss_rate_upper_95) == (1.0, 0.0, 0.0)
    assert point.rule == "P(miss rate > 0.1) <= 0.1: 13 positives cannot certify 10 % at 90 %; 22 can"
    assert mean_miss_rate_threshold(*cohort(), 0.05).threshold == -math.inf


def test_mean_miss_rate_threshold_says_what_it_bounds():
    label, score = cohort(200, 300)
    point = mean_miss_rate_threshold(label, score, 0.05)
    assert point.threshold == sorted(score[:200])[9]
    assert point.expected_miss_rate <= 0.05
    assert point.rule == "mean miss rate <= 0.05, no bound for one cohort"


@pytest.mark.parametrize(
    ("source", "word"), [("calibration", "exact"), ("split", "approximate"), ("pooled", "approximate")]
)
def test_the_basis_says_exact_or_approximate(source, word):
    assert fixed_fn_threshold(*cohort(), 0, source=source).basis.startswith(word + ": ")


def test_the_default_basis_claims_nothing():
    assert fixed_fn_threshold(*cohort(), 0).basis.startswith("approximate")


def test_an_unknown_source_is_refused():
    with pytest.raises(InputError, match="Unknown source of scores 'test': use one of calibration, split, pooled"):
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
        (lambda: future_false_negatives_cdf(0, 3, 4, 1), "rank must lie between 0 and n = 3, found 4"),
        (lambda: future_false_negatives_cdf(0, 3, 1, -1), "m must be at least 0, found -1"),
    ],
)
def test_impossible_arguments_are_refused(call, match):
    with pytest.raises(InputError, match=match):
        call()


# --- What is told before training -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "rates_asked", "sentence"),
    [
        (13, (), "13 positives cannot certify 10 % at 90 %; 22 can"),
        (21, (), "21 positives cannot certify 10 % at 90 %; 22 can"),
        (22, (), "22 positives certify 10 % at 90 % confidence when at most 0 of them are missed"),
        (38, (), "38 positives certify 10 % at 90 % confidence when at most 1 of them are missed"),
        (58, (0.05, 0.05), "58 positives cannot certify 5 % at 95 %; 59 can"),
        (298, (0.01, 0.05), "298 positives cannot certify 1 % at 95 %; 299 can"),
    ],
)
def test_what_positives_can_certify(n, rates_asked, sentence):
    assert certification(n, *rates_asked) == sentence


# --- MAPIE as a second opinion --------------------------------------------------------------------------------------


def mapie_rank(label, score, alpha, eps):
    """Number of candidate thresholds, the positives' scores in order, that MAPIE's learn-then-test accepts in a row."""
    candidates = np.sort(score[label == 1])
    controller = BinaryClassificationController(
        lambda x: np.column_stack([1 - x[:, 0], x[:, 0]]),
        "recall",
        1 - alpha,
        confidence_level=1 - eps,
        list_predict_params=candidates,
        fwer_method="fixed_sequence",
    )
    controller.calibrate(score[:, None], label)
    return np.ravel(controller.valid_predict_params).size


@pytest.mark.parametrize("n", [32, 64, 128])  # powers of two: MAPIE multiplies a rounded rate by n and rounds up
@pytest.mark.parametrize(("alpha", "eps"), [(0.125, 0.1), (0.125, 0.05), (0.25, 0.2)])
def test_mapie_accepts_the_same_thresholds(n, alpha, eps):
    label, score = cohort(n, 200, seed=n)
    score = 1 / (1 + np.exp(-score))
    rank = neyman_pearson_rank(n, alpha, eps)
    assert rank > 0
    assert mapie_rank(label, score, alpha, eps) == rank


@pytest.mark.parametrize("n", [38, 59, 100, 124])
def test_mapie_never_accepts_more(n):
    label, score = cohort(n, 200, seed=n)
    rank = neyman_pearson_rank(n, 0.1, 0.1)
    assert rank - 1 <= mapie_rank(label, 1 / (1 + np.exp(-score)), 0.1, 0.1) <= rank


# --- One score per patient ------------------------------------------------------------------------------------------


def test_one_score_per_patient_by_hand():
    patient = ["a", "b", "a", "c", "c", "d", "d", "d"]
    label = [1, 0, 1, 0, 0, 0, 1, 1]
    score = [0.7, 0.2, 0.4, 0.1, 0.3, 0.05, 0.9, 0.8]
    labels, scores = one_per_patient(patient, label, score)
    assert labels.tolist() == [1, 0, 0, 1]
    assert scores.tolist() == [
        0.4,
        0.2,
        0.3,
        0.8,
    ]  # lowest positive; highest negative; a negative exam of d is left out


def test_one_exam_each_changes_nothing():
    label, score = cohort()
    labels, scores = one_per_patient([str(i) for i in range(label.size)], label, score)
    assert labels.tolist() == label.tolist()
    assert scores.tolist() == score.tolist()


@given(st.integers(0, 10_000))
def test_the_order_of_exams_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    patient = [f"p{i}" for i in rng.integers(0, 6, 20)]
    label, score = np.r_[1, 0, rng.integers(0, 2, 18)], rng.random(20)
    patient[0], patient[1] = "positive", "negative"
    order = rng.permutation(20)
    one = one_per_patient(patient, label, score)
    other = one_per_patient([patient[i] for i in order], label[order], score[order])
    assert sorted(zip(*one, strict=True)) == sorted(zip(*other, strict=True))


def test_unequal_lengths_are_refused():
    with pytest.raises(InputError, match=r"^There are 1 patients for 2 scores; every exam needs one of each\.$"):
        one_per_patient(["a"], [1, 0], [0.5, 0.1])


def test_counting_exams_breaks_the_promise_and_counting_patients_keeps_it():
    """Patients with four equal exams each, one exam of every new patient: a miss rate above 10 % in 10 % of draws
    was promised. Uniform scores, so the miss rate of tau is tau."""
    rng = np.random.default_rng(0)
    exams_rank, patients_rank = neyman_pearson_rank(160, 0.1, 0.1), neyman_pearson_rank(40, 0.1, 0.1)
    score = rng.random((DRAWS, 40))
    by_exam = np.sort(np.repeat(score, 4, axis=1), axis=1)[:, exams_rank - 1]
    by_patient = np.sort(score, axis=1)[:, patients_rank - 1]
    assert np.mean(by_exam > 0.1) > 0.15
    assert np.mean(by_patient > 0.1) <= 0.1


@pytest.mark.parametrize("levels", [None, 12])
def test_the_whole_threshold_keeps_its_promise(levels):
    """Through the functions a user calls: patients with one to three exams, each the patient's level plus noise."""
    rng = np.random.default_rng(1)

    def draw(patients):
        exams = rng.integers(1, 4, patients)
        patient = np.repeat(np.arange(patients), exams)
        score = 1 / (1 + np.exp(-(rng.normal(size=patients)[patient] + 0.5 * rng.normal(size=patient.size))))
        return patient, np.floor(score * levels) / levels if levels else score

    patient, score = draw(200_000)
    population = np.full(patient[-1] + 1, np.inf)
    np.minimum.at(population, patient, score)
    population.sort()
    broken = 0
    for _ in range(2000):
        patient, score = draw(40)
        names = [*map(str, patient), "negative"]
        label, score = np.r_[np.ones(patient.size, int), 0], np.r_[score, 0.5]
        point = neyman_pearson_threshold(*one_per_patient(names, label, score), 0.1, 0.1, source="calibration")
        broken += np.searchsorted(population, point.threshold) / population.size > 0.1
    assert broken / 2000 <= 0.1
    assert levels or broken / 2000 > 0.05  # BinomCDF(1; 40, .1) = 0.0805: not simply cautious
