from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import ttest_1samp

from mri_alm.errors import InputError
from mri_alm.metrics.comparison import (
    Trained,
    adjusted,
    auc_and_fprs,
    compare_trainings,
    hierarchical_interval,
    summarise,
)
from mri_alm.metrics.ranking import auc, fpr_at_tpr
from mri_alm.metrics.uncertainty import bootstrap_interval, delong_test

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
    np.testing.assert_array_equal([found.ensemble.low, found.ensemble.high], interval)


def test_one_model_has_no_deviation() -> None:
    assert summarise(LABEL, trainings(1.0, 1, 1, 0), TPR, draws=20).deviation == 0.0


def test_a_comparison_is_of_the_means_over_seeds_and_delongs_of_the_first() -> None:
    method, baseline = trainings(1.5, 3, 1, 0), trainings(1.0, 3, 2, 1)
    found = compare_trainings(LABEL, method, baseline, TPR, draws=50)
    ours, first, second = method.score[:, 0].mean(0), baseline.score[:, 0].mean(0), baseline.score[:, 1].mean(0)
    metric = auc_and_fprs(TPR)
    mean = (metric(LABEL, first) + metric(LABEL, second)) / 2
    np.testing.assert_allclose(found.difference.value, metric(LABEL, ours) - mean)
    np.testing.assert_allclose(found.against, mean)
    assert not np.allclose(metric(LABEL, first), mean)
    assert found.delong == delong_test(LABEL, ours, first)
    gains = [auc(LABEL, method.score[k, 0]) - auc(LABEL, baseline.score[k, 0]) for k in range(3)]
    assert found.gain == pytest.approx(np.mean(gains))
    assert found.gain_deviation == pytest.approx(np.std(gains, ddof=1))


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


def test_a_method_against_itself_is_no_difference() -> None:
    trained = trainings(1.0, 3, 1, 0)
    found = compare_trainings(LABEL, trained, trained, TPR, draws=50)
    for side in (found.difference.value, found.difference.low, found.difference.high):
        np.testing.assert_array_equal(side, 0)
    assert found.delong.p_value == 1
    assert found.splits_to_settle == float("inf")


def test_with_one_training_each_it_is_the_bootstrap_of_images() -> None:
    method, baseline = trainings(1.5, 1, 1, 0), trainings(1.0, 1, 1, 1)
    metric = auc_and_fprs(())
    interval = hierarchical_interval(metric, LABEL, method, baseline, draws=4000)

    def difference(label: NDArray[np.generic], score: NDArray[np.float64]) -> NDArray[np.float64]:
        return metric(label, score[:, 0]) - metric(label, score[:, 1])

    scores = np.stack([method.ensemble, baseline.ensemble], 1)
    np.testing.assert_allclose(interval, bootstrap_interval(difference, LABEL, scores, draws=4000, seed=1), atol=0.01)


def test_it_is_wider_than_the_bootstrap_of_images_when_trainings_vary() -> None:
    """Null: two sets of trainings of one method. Over repeats, intervals that count trainings hold zero about 95 %."""
    metric, held, widths = auc_and_fprs(()), 0, []
    for repeat in range(40):
        method, baseline = trainings(1.0, 8, 1, 2 * repeat, 1.5), trainings(1.0, 8, 1, 2 * repeat + 1, 1.5)
        low, high = hierarchical_interval(metric, LABEL, method, baseline, draws=200)
        held += bool(low[0] <= 0 <= high[0])
        widths.append(float(high[0] - low[0]))
    assert held >= 34
    images_only = [trainings(1.0, 8, 1, k, 1.5) for k in (0, 1)]
    fixed = [Trained(t.ensemble[None, None]) for t in images_only]
    low, high = hierarchical_interval(metric, LABEL, *fixed, draws=400)
    assert np.mean(widths) > float(high[0] - low[0])


def test_seeds_within_a_split_are_drawn_too() -> None:
    """A method whose second seed is far better: with it the interval must reach far above the first seed's gain."""
    baseline = trainings(0.5, 2, 1, 0)
    method = Trained(np.concatenate([baseline.score, baseline.score + 5 * LABEL], axis=1))
    low, high = hierarchical_interval(auc_and_fprs(()), LABEL, method, baseline, draws=400)
    assert low[0] <= 0
    assert high[0] > 0.2


def test_the_draws_are_repeatable() -> None:
    pair = trainings(1.0, 3, 2, 0), trainings(1.0, 3, 1, 1)
    first, again, other = (hierarchical_interval(auc_and_fprs(TPR), LABEL, *pair, draws=20, seed=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_unequal_splits_are_refused() -> None:
    with pytest.raises(InputError, match=r"^Compared methods need the same splits, found 3 and 2\.$"):
        compare_trainings(LABEL, trainings(1.0, 3, 1, 0), trainings(1.0, 2, 1, 1), TPR)


def test_p_values_are_adjusted_over_the_family() -> None:
    baseline = trainings(1.0, 2, 1, 0)
    family = {str(k): compare_trainings(LABEL, trainings(2.0, 2, 1, k), baseline, (), draws=5) for k in (1, 2, 3)}
    raw = {key: comparison.delong.p_value for key, comparison in family.items()}
    smallest = min(raw, key=lambda key: raw[key])
    assert adjusted(family)[smallest] == pytest.approx(3 * raw[smallest])
