from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import auc, fpr_at_fn
from mri_alm.metrics.uncertainty import (
    bootstrap_interval,
    delong_auc,
    delong_test,
    holm,
    newcombe_interval,
    partial_auc,
)

OVARIAN = Path(__file__).parents[3] / "shared" / "docs" / "delong_ovarian.csv"


@pytest.fixture
def ovarian():
    """Label, albumin, K-G score and total protein of DeLong et al., 1988."""
    if not OVARIAN.exists():
        pytest.skip(f"{OVARIAN.name} is not beside this checkout")
    table = np.genfromtxt(OVARIAN, delimiter=",", names=True)
    return table["outcome"], table["albumin"], 10 - table["totscore"], table["total_protein"]


def placement_covariance(label, scores):
    """AUCs and DeLong's covariance from the definition: the mean kernel of every pair, one row and column at a time."""
    kernel = np.array([
        [[float(p > n) + 0.5 * float(p == n) for n in s[label == 0]] for p in s[label == 1]] for s in scores
    ])  # fmt: skip
    by_positive, by_negative = kernel.mean(axis=2), kernel.mean(axis=1)
    covariance = np.cov(by_positive) / by_positive.shape[1] + np.cov(by_negative) / by_negative.shape[1]
    return kernel.mean(axis=(1, 2)), covariance


@st.composite
def tied_samples(draw, models=3):
    label = [0, 0, 1, 1, *draw(st.lists(st.integers(0, 1), max_size=16))]
    row = st.lists(st.integers(0, 5), min_size=len(label), max_size=len(label))
    return np.array(label), np.array([draw(row) for _ in range(models)], dtype=float)


def two_models(n=200, seed=0, shift=(1.0, 1.0)):
    """Labels and two correlated scores whose positives lie ``shift`` higher."""
    rng = np.random.default_rng(seed)
    label = np.arange(n) % 4 == 0
    shared = rng.normal(size=n)
    return label, *(shared + rng.normal(size=n) + s * label for s in shift)


@pytest.mark.parametrize(
    ("which", "value", "error"),
    [(1, 0.7366, 0.0927), (2, 0.7258, 0.1028), (3, 0.6478, 0.1000)],
    ids=["albumin", "K-G", "protein"],
)
def test_ovarian_aucs(ovarian, which, value, error):
    estimate = delong_auc(ovarian[0], ovarian[which])
    assert estimate.auc == pytest.approx(value, abs=5e-5)
    assert estimate.variance**0.5 == pytest.approx(error, abs=5e-5)


@pytest.mark.parametrize(
    ("which", "difference", "error", "p"), [(1, 0.0108, 0.0953, 0.9102), (3, -0.0780, 0.1046, 0.4561)]
)
def test_ovarian_differences_from_the_kg_score(ovarian, which, difference, error, p):
    result = delong_test(ovarian[0], ovarian[which], ovarian[2])
    assert result.difference == pytest.approx(difference, abs=5e-5)
    assert result.difference / result.z == pytest.approx(error, abs=5e-5)
    assert result.p_value == pytest.approx(p, abs=5e-5)
    low, high = result.interval
    assert (low + high) / 2 == pytest.approx(result.difference)
    assert (high - low) / 2 == pytest.approx(1.959964 * error, abs=1e-4)


def test_delong_by_hand():
    """P: 3, 1, 2; N: 0, 2. Placements of a: 1, 1/2, 3/4 and 1, 1/2; AUC 3/4; variance (1/16)/3 + (1/8)/2.
    b is constant: placements 1/2 each, AUC 1/2 without variance, so that the difference keeps a's variance."""
    label, a, b = [1, 1, 1, 0, 0], [3, 1, 2, 0, 2], [7, 7, 7, 7, 7]
    result = delong_test(label, a, b)
    assert (result.auc_a, result.auc_b, result.difference) == (0.75, 0.5, 0.25)
    assert result.z == pytest.approx(0.25 / (1 / 48 + 1 / 16) ** 0.5)
    assert result.z == pytest.approx(0.75**0.5)
    assert result.p_value == pytest.approx(2 * stats.norm.cdf(-(0.75**0.5)))
    assert delong_auc(label, a).variance == pytest.approx(1 / 12)


# --- The interval of an AUC -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "positives", "negatives"), [(0.8, 8, 64), (0.97, 16, 128), (0.5, 40, 320), (1.0, 8, 64), (0.9, 1, 1)]
)
def test_the_ends_of_newcombes_interval_solve_its_equation(value, positives, negatives):
    """The distance to the AUC seen is 1.96 Hanley-McNeil errors of the end itself, both sizes set to their mean."""
    low, high = newcombe_interval(value, positives, negatives)
    assert 0 < low < value <= high <= 1
    size = (positives + negatives) / 2
    for end in {low, high} - {1.0}:
        q1, q2 = end / (2 - end), 2 * end**2 / (1 + end)
        variance = end * (1 - end) + (size - 1) * (q1 - end**2 + q2 - end**2)
        assert abs(value - end) == pytest.approx(stats.norm.ppf(0.975) * (variance / (positives * negatives)) ** 0.5)


def test_newcombes_interval_is_symmetric_and_never_a_point():
    low, high = newcombe_interval(0.2, 5, 9)
    assert newcombe_interval(0.8, 5, 9) == pytest.approx((1 - high, 1 - low))
    assert newcombe_interval(0.0, 8, 64) == (0.0, pytest.approx(1 - newcombe_interval(1.0, 8, 64)[0]))
    assert newcombe_interval(1.0, 8, 64)[0] < 0.95
    assert newcombe_interval(1.0, 800, 6400)[0] > 0.99


@pytest.mark.parametrize("arguments", [(1.1, 3, 3), (float("nan"), 3, 3), (0.5, 0, 3), (0.5, 3, float("nan"))])
def test_newcombe_refuses_what_is_no_auc(arguments):
    with pytest.raises(InputError, match="An AUC from 0 to 1 and positives and negatives are needed, found"):
        newcombe_interval(*arguments)


def test_it_holds_the_auc_at_eight_positives_where_walds_does_not():
    """Binormal, AUC 0.97; benchmarks/coverage.py has nine cases and 2,000 draws each."""
    rng, held, wald = np.random.default_rng(0), 0, 0
    label, shift = np.repeat([1, 0], [8, 64]), stats.norm.ppf(0.97) * 2**0.5
    for _ in range(400):
        found = delong_auc(label, rng.normal(size=72) + shift * label)
        held += found.interval[0] <= 0.97 <= found.interval[1]
        wald += abs(found.auc - 0.97) <= 1.959964 * found.variance**0.5
    assert held / 400 >= 0.94
    assert wald / 400 < 0.82


# --- Several exams of a patient ---------------------------------------------------------------------------------------


def clustered(rng, patients=60, positive=15, correlation=0.8):
    """Labels, scores and patients: one to four exams, each a patient's level and noise; some negatives' exams turn."""
    exams = rng.integers(1, 5, patients)
    patient = np.repeat(np.arange(patients), exams)
    label = (patient < positive) & (rng.random(patient.size) < 0.9)
    label[0] = True
    level = rng.normal(size=patients)[patient] * correlation**0.5
    score = level + rng.normal(size=patient.size) * (1 - correlation) ** 0.5 + 1.2 * (patient < positive)
    return label.astype(int), score, [f"p{i}" for i in patient]


def obuchowski(label, scores, patient):
    """AUC and variance of a score, or of the difference of two, from the definition: sums over patients."""
    kernel = sum(
        sign * np.array([[float(p > n) + 0.5 * float(p == n) for n in s[label == 0]] for p in s[label == 1]])
        for sign, s in zip((1, -1), scores, strict=False)
    )
    theta = kernel.mean()
    of = {1: np.array(patient)[label == 1], 0: np.array(patient)[label == 0]}
    by = {1: kernel.mean(1), 0: kernel.mean(0)}
    sums = {k: {p: (by[k][of[k] == p] - theta).sum() for p in set(patient)} for k in (0, 1)}
    some = {k: len(set(of[k])) for k in (0, 1)}
    variance = sum(some[k] / (some[k] - 1) * sum(v**2 for v in sums[k].values()) / len(of[k]) ** 2 for k in (0, 1))
    every = len(set(patient))
    cross = every / (every - 1) * sum(sums[0][p] * sums[1][p] for p in set(patient))
    return theta, variance + 2 * cross / (len(of[0]) * len(of[1]))


def test_the_variance_over_patients_is_obuchowskis():
    rng = np.random.default_rng(0)
    label, a, patient = clustered(rng)
    b = a + rng.normal(size=a.size)
    value, variance = obuchowski(label, [a], patient)
    found = delong_auc(label, a, patient)
    assert (found.auc, found.variance) == (pytest.approx(value), pytest.approx(variance))
    difference, variance = obuchowski(label, [a, b], patient)
    test = delong_test(label, a, b, patient)
    assert (test.difference, test.z) == (pytest.approx(difference), pytest.approx(difference / variance**0.5))


def test_with_one_exam_each_patients_change_nothing():
    label, a, b = two_models(60)
    patient = [f"p{i}" for i in range(60)]
    assert delong_auc(label, a, patient).variance == pytest.approx(delong_auc(label, a).variance, rel=1e-12)
    assert delong_auc(label, a, patient).interval == pytest.approx(delong_auc(label, a).interval)
    assert delong_test(label, a, b, patient).z == pytest.approx(delong_test(label, a, b).z)


def test_an_interval_that_counts_patients_holds_the_auc_and_one_that_counts_exams_does_not():
    rng = np.random.default_rng(1)
    label, score, _ = clustered(rng, 20_000, 5_000)
    truth, held, by_exam = auc(label, score), 0, 0
    for _ in range(300):
        label, score, patient = clustered(rng)
        low, high = delong_auc(label, score, patient).interval
        held += low <= truth <= high
        low, high = delong_auc(label, score).interval
        by_exam += low <= truth <= high
    assert held / 300 >= 0.93
    assert by_exam / 300 < 0.88


def test_a_perfect_auc_of_a_few_patients_counts_their_exams_as_fewer():
    label = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
    patient = ["a", "a", "a", "b", "c", "d", "e", "f", "g", "h"]
    found = delong_auc(label, label.astype(float), patient)
    assert found.interval == newcombe_interval(1.0, 16 / 10, 6)


def test_patients_are_drawn_with_all_their_exams():
    label = np.array([1, 0, 1, 0, 0, 1, 1])
    patient = ["a", "a", "b", "c", "d", "e", "e"]
    drawn = []

    def record(y, s):
        drawn.append(s.astype(int).tolist())
        return 0.0

    bootstrap_interval(record, label, np.arange(7.0), patient=patient, draws=100)
    whole = [[0, 1], [2], [3], [4], [5, 6]]
    for rows in drawn:
        counts = np.bincount(rows, minlength=7)
        assert all(len({counts[row] for row in rows_of}) == 1 for rows_of in whole)
        assert counts[0] == 1  # the one patient with both classes
        assert counts[2] + counts[5] == 2  # as many patients as there are with positives alone
        assert counts[3] + counts[4] == 2
    with pytest.raises(InputError, match="Each of the 7 scores needs its patient, found 2 patients"):
        bootstrap_interval(record, label, np.arange(7.0), patient=["a", "b"])
    with pytest.raises(InputError, match="Each of the 7 scores needs its patient, found 2 patients"):
        delong_auc(label, np.arange(7.0), ["a", "b"])


@given(tied_samples())
def test_delong_is_the_definition_with_ties(samples):
    label, scores = samples
    aucs, covariance = placement_covariance(label, scores)
    estimate = delong_auc(label, scores[0])
    assert estimate.auc == pytest.approx(roc_auc_score(label, scores[0]), abs=1e-12)
    assert estimate.variance == pytest.approx(covariance[0, 0], abs=1e-12)
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    if variance > 1e-12:
        result = delong_test(label, scores[0], scores[1])
        assert result.z == pytest.approx((aucs[0] - aucs[1]) / variance**0.5, abs=1e-6)


@pytest.mark.parametrize("score", [[1, 2, 3, 4, 5], [5, 4, 3, 1, 2], [1, 1, 1, 1, 1], [9, 8, 7, 1, 1]])
def test_identical_scores_give_p_one(score):
    label = [1, 0, 1, 0, 0]
    result = delong_test(label, score, np.exp(score))
    assert (result.difference, result.z, result.p_value, result.interval) == (0.0, 0.0, 1.0, (0.0, 0.0))


def test_swapping_models_changes_the_sign_only():
    label, a, b = two_models()
    forward, back = delong_test(label, a, b), delong_test(label, b, a)
    assert forward.z == pytest.approx(-back.z)
    assert forward.p_value == pytest.approx(back.p_value)


def test_delong_agrees_with_permuting_the_models():
    label, a, b = two_models(400, shift=(1.0, 0.75))
    ranks = np.column_stack([stats.rankdata(a), stats.rankdata(b)])
    swap = np.random.default_rng(0).random((2000, len(label))) < 0.5
    observed = abs(auc(label, ranks[:, 0]) - auc(label, ranks[:, 1]))
    permuted = [auc(label, np.where(s, *ranks.T)) - auc(label, np.where(s, *ranks.T[::-1])) for s in swap]
    p_value = np.mean(np.abs(permuted) >= observed - 1e-12)
    assert 0.01 < p_value < 0.5
    assert delong_test(label, a, b).p_value == pytest.approx(p_value, abs=0.04)


def test_the_variance_is_that_of_repeated_cohorts():
    simulated = [auc(label, a) - auc(label, b) for label, a, b in (two_models(100, seed) for seed in range(2000))]
    estimates = [delong_test(*two_models(100, seed)) for seed in range(200)]
    variances = [(e.interval[1] - e.interval[0]) ** 2 / (2 * 1.959964) ** 2 for e in estimates]
    assert np.mean(variances) == pytest.approx(np.var(simulated), rel=0.15)


def test_the_test_keeps_its_level():
    rejected = [delong_test(*two_models(200, seed)).p_value < 0.05 for seed in range(500)]
    assert 0.03 < np.mean(rejected) < 0.075


def test_a_hundred_thousand_samples_take_no_square_of_them():
    label, a, b = two_models(100_000)
    assert delong_test(label, a, b).auc_a == pytest.approx(roc_auc_score(label, a), abs=1e-12)


@pytest.mark.parametrize("label", [[1, 0, 0], [1, 1, 0]])
def test_fewer_than_two_per_class_are_refused(label):
    with pytest.raises(InputError, match="At least 2 positive and 2 negative labels are needed"):
        delong_test(label, [1, 2, 3], [3, 2, 1])
    with pytest.raises(InputError, match="At least 2 positive and 2 negative labels are needed"):
        delong_auc(label, [1, 2, 3])


def test_a_difference_without_variance_is_refused():
    label, perfect, constant = [1, 1, 0, 0], [4, 3, 2, 1], [1, 1, 1, 1]
    with pytest.raises(InputError, match="estimated variance is zero"):
        delong_test(label, perfect, constant)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]).tolist() == [1.0, 1.0]
    assert holm([]).size == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0.001, 0.5))
def test_holm_rejects_as_the_step_down_procedure_does(p_values, alpha):
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    rejected = set()
    for step, i in enumerate(order):
        if p_values[i] * (len(p_values) - step) > alpha:
            break
        rejected.add(i)
    assert set(np.flatnonzero(holm(p_values) <= alpha).tolist()) == rejected


@pytest.mark.parametrize("p_values", [[0.1, 1.1], [-0.1], [float("nan")], [[0.1]]])
def test_holm_refuses_what_is_no_p_value(p_values):
    with pytest.raises(InputError, match="p-values must be"):
        holm(p_values)


def test_bootstrap_of_the_auc_agrees_with_delong_and_with_scipy():
    label, a, _ = two_models(300)
    low, high = bootstrap_interval(auc, label, a, draws=1000)
    found = delong_auc(label, a)
    half = 1.959964 * found.variance**0.5
    assert (low, high) == pytest.approx((found.auc - half, found.auc + half), abs=0.01)
    oracle = stats.bootstrap(
        (a[label], a[~label]),
        lambda p, n: auc(np.repeat([1, 0], [p.size, n.size]), np.concatenate([p, n])),
        n_resamples=1000,
        method="percentile",
        vectorized=False,
    ).confidence_interval
    assert (low, high) == pytest.approx((oracle.low, oracle.high), abs=0.015)


def test_bootstrap_draws_within_each_class_and_whole_rows():
    label = np.repeat([0, 1, 2], [3, 5, 7])
    score = np.column_stack([label, np.arange(15), np.arange(15) ** 2])
    seen = []

    def record(drawn_label, drawn_score):
        seen.append(drawn_score[:, 1].tolist())
        assert np.bincount(drawn_label).tolist() == [3, 5, 7]
        assert (drawn_score[:, 0] == drawn_label).all()
        assert (drawn_score[:, 1] ** 2 == drawn_score[:, 2]).all()
        return 0.0

    bootstrap_interval(record, label, score, draws=50)
    assert len({tuple(rows) for rows in seen}) == 50
    assert {row for rows in seen for row in rows} == set(range(15))


def test_bootstrap_is_seeded():
    label, a, _ = two_models(60)
    first, again, other = (bootstrap_interval(auc, label, a, draws=50, seed=seed) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_bootstrap_of_a_paired_difference_agrees_with_delong():
    label, a, b = two_models(300)
    interval = bootstrap_interval(
        lambda y, s: auc(y, s[:, 0]) - auc(y, s[:, 1]), label, np.column_stack([a, b]), draws=1000
    )
    assert tuple(interval) == pytest.approx(delong_test(label, a, b).interval, abs=0.012)


def test_bootstrap_of_a_curve_has_the_curves_shape():
    label, a, _ = two_models(100)
    grid = np.linspace(0, 1, 5)

    def roc(y, s):
        false_rate, true_rate, _ = roc_curve(y, s, drop_intermediate=False)
        return np.interp(grid, false_rate, true_rate)

    low, high = bootstrap_interval(roc, label, a, draws=50)
    assert low.shape == high.shape == (5,)
    assert (low <= roc(label, a) + 0.1).all()
    assert (low <= high).all()


def test_bootstrap_of_an_extreme_score_never_goes_beyond_the_sample():
    label, a, _ = two_models(100)
    low, high = bootstrap_interval(lambda y, s: s[y].min(), label, a, draws=200)
    assert low == a[label].min() < high


def test_bootstrap_of_a_constant_metric_has_no_width():
    label = np.repeat([1, 0], 10)
    assert bootstrap_interval(lambda y, s: fpr_at_fn(y, s, 1), label, label, draws=20).tolist() == [0.0, 0.0]


def test_bootstrap_needs_one_row_per_label():
    with pytest.raises(InputError, match="equally long, found 3 and 2"):
        bootstrap_interval(auc, [0, 1, 1], [1, 2])


def brute_force_partial_auc(label, score, min_tpr):
    """Area between the ROC and TPR = min_tpr, by a fine grid, standardised by chance and by a perfect score."""
    false_rate, true_rate, _ = roc_curve(label, score, drop_intermediate=False)
    grid = (np.arange(200_000) + 0.5) / 200_000
    area = np.maximum(np.interp(grid, false_rate, true_rate) - min_tpr, 0).mean()
    chance, best = (1 - min_tpr) ** 2 / 2, 1 - min_tpr
    return 0.5 * (1 + (area - chance) / (best - chance))


@given(tied_samples(models=1), st.sampled_from([0.5, 0.8, 0.9]))
@settings(max_examples=25)
def test_partial_auc_is_the_area_above_min_tpr(samples, min_tpr):
    label, (score,) = samples
    assert partial_auc(label, score, min_tpr=min_tpr) == pytest.approx(
        brute_force_partial_auc(label, score, min_tpr), abs=1e-3
    )


def test_partial_auc_at_its_ends():
    label, a, _ = two_models()
    assert partial_auc(label, a, min_tpr=0) == pytest.approx(auc(label, a))
    assert partial_auc(label, label, min_tpr=0.9) == pytest.approx(1.0)
    assert partial_auc(label, np.zeros(len(label)), min_tpr=0.9) == pytest.approx(0.5)


@pytest.mark.parametrize("min_tpr", [1, -0.1])
def test_partial_auc_needs_a_region(min_tpr):
    with pytest.raises(InputError, match="min_tpr must lie in"):
        partial_auc([0, 1], [0, 1], min_tpr=min_tpr)
