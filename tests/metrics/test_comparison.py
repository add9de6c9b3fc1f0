from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from mri_alm.errors import InputError
from mri_alm.metrics.comparison import (
    Trained,
    adjusted,
    auc_and_fprs,
    compare_trainings,
    deviation_over_trainings,
    summarise,
)
from mri_alm.metrics.ranking import auc, fpr_at_tpr
from mri_alm.metrics.uncertainty import bootstrap_interval, delong_test, newcombe_interval

LABEL = np.repeat([0, 1], 60)
TPR = (0.95, 0.9)


def trainings(strength: float, splits: int, seeds: int, seed: int, spread: float = 1.0) -> Trained:
    """Scores of a common signal, and noise that each training draws for itself."""
    rng = np.random.default_rng(seed)
    signal = np.random.default_rng(99).normal(size=LABEL.size) + strength * LABEL
    return Trained(signal + spread * rng.normal(size=(splits, seeds, LABEL.size)))


def test_a_summary_is_what_the_metrics_say() -> None:
    trained = trainings(1.0, 4, 2, 0)
    found = summarise(LABEL, trained, TPR, draws=200)
    members = [auc(LABEL, trained.score[k, 0]) for k in range(4)]
    mean = trained.score[:, 0].mean(0)
    assert found.members == 4
    assert found.average == pytest.approx(np.mean(members))
    assert found.deviation == pytest.approx(np.std(members, ddof=1))
    expected = [auc(LABEL, mean), fpr_at_tpr(LABEL, mean, 0.95), fpr_at_tpr(LABEL, mean, 0.9)]
    np.testing.assert_allclose(found.ensemble.value, expected)
    interval = bootstrap_interval(auc_and_fprs(TPR), LABEL, mean, draws=200)
    np.testing.assert_array_equal([found.ensemble.low[1:], found.ensemble.high[1:]], interval[:, 1:])
    assert (found.ensemble.low[0], found.ensemble.high[0]) == newcombe_interval(expected[0], 60, 60)


def test_one_model_has_no_deviation() -> None:
    assert summarise(LABEL, trainings(1.0, 1, 1, 0), TPR, draws=20).deviation == 0.0


def test_a_comparison_is_of_the_means_over_the_seeds_that_both_have() -> None:
    method, baseline = trainings(1.5, 3, 2, 0), trainings(1.0, 3, 3, 1)
    found = compare_trainings(LABEL, method, baseline, TPR, draws=50)
    metric = auc_and_fprs(TPR)
    ours, theirs = (
        np.mean([metric(LABEL, trained.score[:, seed].mean(0)) for seed in (0, 1)], 0) for trained in (method, baseline)
    )
    np.testing.assert_allclose(found.difference.value, ours - theirs)
    np.testing.assert_allclose(found.against, theirs)
    assert found.seeds == 2
    assert not np.allclose(theirs, metric(LABEL, baseline.score[:, 2].mean(0)))
    gains = [auc(LABEL, method.score[k, 0]) - auc(LABEL, baseline.score[k, 0]) for k in range(3)]
    assert found.gain == pytest.approx(np.mean(gains))
    assert found.gain_deviation == pytest.approx(np.std(gains, ddof=1))


def test_the_deviation_is_the_jackknife_s_and_the_images() -> None:
    """By hand: differences without each split in turn; the images' part is the paired bootstrap with models fixed."""
    method, baseline = trainings(1.5, 4, 1, 0), trainings(1.0, 4, 1, 1)
    metric = auc_and_fprs(TPR)
    deviation, freedom = deviation_over_trainings(metric, LABEL, method, baseline, draws=300)
    left = []
    for k in range(4):
        others = [i for i in range(4) if i != k]
        left.append(metric(LABEL, method.score[others, 0].mean(0)) - metric(LABEL, baseline.score[others, 0].mean(0)))
    of_splits = 3 / 4 * ((np.array(left) - np.mean(left, 0)) ** 2).sum(0)
    one = [Trained(trained.ensemble[None, None]) for trained in (method, baseline)]
    of_images, endless = deviation_over_trainings(metric, LABEL, *one, draws=300)
    np.testing.assert_allclose(deviation**2, of_splits + of_images**2)
    np.testing.assert_allclose(freedom, 3 * deviation**4 / of_splits**2)
    assert np.isinf(endless).all()
    found = compare_trainings(LABEL, method, baseline, TPR, draws=300)
    half = student.ppf(0.975, freedom) * deviation
    np.testing.assert_allclose(found.difference.high - found.difference.value, half)
    np.testing.assert_allclose(found.difference.value - found.difference.low, half)
    assert found.p_value == pytest.approx(2 * student.sf(abs(found.difference.value[0]) / deviation[0], freedom[0]))


@pytest.mark.parametrize("effect", [0.1, 0.3, 0.5, 1.0, 1.4, 2.0])
def test_splits_to_settle_are_those_of_a_paired_t_test(effect: float) -> None:
    """Tried on 20,000 made-up studies of that many splits, and of one less."""
    same = compare_trainings(LABEL, trainings(1.0, 3, 1, 0), trainings(1.0, 3, 1, 0), TPR, draws=2)
    splits = int(replace(same, gain=-effect, gain_deviation=1.0).splits_to_settle)
    rng = np.random.default_rng(0)
    found, less = (
        np.mean(ttest_1samp(rng.normal(effect, 1.0, (20_000, n)), 0, axis=1).pvalue < 0.05)
        for n in (splits, splits - 1)
    )
    assert less < 0.81
    assert found > 0.79


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_method_against_itself_is_no_difference(seeds: tuple[int, int]) -> None:
    """With more seeds on one side, too: the baseline of a table has two."""
    both = trainings(1.0, 5, 2, 0, spread=2.0)
    method, baseline = (Trained(both.score[:, :count]) for count in seeds)
    found = compare_trainings(LABEL, method, baseline, TPR, draws=50)
    for side in (found.difference.value, found.difference.low, found.difference.high):
        np.testing.assert_array_equal(side, 0)
    assert found.p_value == 1
    assert found.splits_to_settle == float("inf")


def test_with_one_training_each_it_is_the_bootstrap_of_images_and_has_no_p() -> None:
    method, baseline = trainings(1.5, 1, 1, 0), trainings(1.0, 1, 1, 1)
    found = compare_trainings(LABEL, method, baseline, (), draws=1500)
    scores = np.stack([method.ensemble, baseline.ensemble], 1)
    drawn = bootstrap_interval(
        lambda label, score: auc(label, score[:, 0]) - auc(label, score[:, 1]), LABEL, scores, draws=1500, seed=1
    )
    np.testing.assert_allclose([found.difference.low[0], found.difference.high[0]], drawn, atol=0.012)
    assert np.isnan(found.p_value)
    assert delong_test(LABEL, method.ensemble, baseline.ensemble).p_value < 1  # which takes the models as given


def test_two_trainings_of_one_method_are_told_apart_as_rarely_as_promised() -> None:
    """The null, over 80 tables on new images, each training of another strength: intervals that count the splits hold
    0, those of the images alone, which is what DeLong's test counts, call it a difference far more often."""
    held = small = images_only = 0
    repeats = 80
    for repeat in range(repeats):
        rng = np.random.default_rng(repeat)
        signal = rng.normal(size=LABEL.size) + LABEL
        method, baseline = (Trained(signal + rng.normal(scale=0.5, size=(5, 1, 1)) * LABEL) for _ in range(2))
        found = compare_trainings(LABEL, method, baseline, (), draws=30)
        held += found.difference.low[0] <= 0 <= found.difference.high[0]
        small += found.p_value < 0.05
        fixed = (Trained(trained.ensemble[None, None]) for trained in (method, baseline))
        alone = compare_trainings(LABEL, *fixed, (), draws=30).difference
        images_only += alone.low[0] <= 0 <= alone.high[0]
    assert held / repeats >= 0.9  # 95 % less two standard errors of 80 repeats
    assert small / repeats <= 0.1
    assert images_only / repeats < 0.5


def test_unequal_splits_are_refused() -> None:
    with pytest.raises(InputError, match=r"^Compared methods need the same splits, found 3 and 2\.$"):
        compare_trainings(LABEL, trainings(1.0, 3, 1, 0), trainings(1.0, 2, 1, 1), TPR)


def test_p_values_are_adjusted_over_the_family_of_those_that_have_one() -> None:
    baseline = trainings(1.0, 3, 1, 0)
    family = {str(k): compare_trainings(LABEL, trainings(2.0, 3, 1, k), baseline, (), draws=20) for k in (1, 2, 3)}
    raw = {key: comparison.p_value for key, comparison in family.items()}
    family["one"] = compare_trainings(LABEL, trainings(2.0, 1, 1, 1), trainings(1.0, 1, 1, 0), (), draws=5)
    found = adjusted(family)
    smallest = min(raw, key=lambda key: raw[key])
    assert found[smallest] == pytest.approx(min(3 * raw[smallest], 1))
    assert np.isnan(found["one"])
