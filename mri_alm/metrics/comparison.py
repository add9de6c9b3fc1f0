"""How sure a table's differences are: tests over test images, intervals over trainings, and the null beside them.

Two ensembles of the same method differ too, since their trainings do. DeLong's test and a bootstrap of the test images
take the trained models as given and so call that difference a gain; the hierarchical bootstrap draws splits and
seeds again as well. Scores are logits of the critical class; a gain in AUC is positive, a gain in FPR negative.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import auc, fpr_at_tpr
from mri_alm.metrics.uncertainty import DelongTest, bootstrap_interval, delong_test, holm

Metric = Callable[[NDArray[np.generic], NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Trained:
    """The trainings of one method.

    Attributes:
        score: ``(S, R, N)`` logits: splits, seeds, test images.
    """

    score: NDArray[np.float64]

    @property
    def members(self) -> NDArray[np.float64]:
        """``(S, N)``, the trainings with the first seed."""
        return np.asarray(self.score[:, 0])

    @property
    def ensemble(self) -> NDArray[np.float64]:
        """``(N,)``, mean logit over the splits, first seed."""
        return self.ensembles[0]

    @property
    def ensembles(self) -> NDArray[np.float64]:
        """``(R, N)``, mean logit over the splits, one ensemble of each seed."""
        return np.asarray(self.score.mean(0))


@dataclass(frozen=True)
class FigureEstimates:
    """A figure (or several) with its 95 % interval, each ``(M,)``."""

    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    def of(self, which: int) -> tuple[float, float, float]:
        """One of them: value and ends."""
        return float(self.value[which]), float(self.low[which]), float(self.high[which])


@dataclass(frozen=True)
class Summary:
    """One method's figures.

    Attributes:
        members: Number of models in the ensemble.
        average: Mean of the models' AUCs.
        deviation: Their standard deviation; 0 for one model.
        ensemble: AUC and FPRs of the ensemble, intervals by a stratified bootstrap of the test images.
    """

    members: int
    average: float
    deviation: float
    ensemble: FigureEstimates


@dataclass(frozen=True)
class TrainingComparison:
    """One method against another, with equally many models each.

    Attributes:
        delong: Test of the AUCs of the first seeds' ensembles, over test images only.
        difference: Of AUC and FPRs of the ensembles, each the mean over the seeds; intervals by the hierarchical
            bootstrap.
        against: ``(M,)``, what the differences are from: the other method's AUC and FPRs.
        gain: Mean over splits of the difference of two single models' AUCs, first seeds.
        gain_deviation: Standard deviation of those differences; NaN for one split.
    """

    delong: DelongTest
    difference: FigureEstimates
    against: NDArray[np.float64]
    gain: float
    gain_deviation: float

    @property
    def splits_to_settle(self) -> float:
        """Splits at which a paired test of single models' AUCs (5 % two-sided) finds a gain of this size in 80 %."""
        if not self.gain or np.isnan(self.gain_deviation):
            return math.inf
        effect = abs(self.gain) / self.gain_deviation if self.gain_deviation else math.inf
        splits = max(2, math.floor((2.8 / effect) ** 2))  # enough, were the deviation known
        while splits < 1000 and _power(splits, effect) < 0.8:
            splits += 1
        return splits


def _power(splits: int, effect: float) -> float:
    """Of a paired t test, 5 % two-sided, of differences whose mean is ``effect`` times their standard deviation."""
    if math.isinf(effect):
        return 1.0
    critical = stats.t.ppf(0.975, splits - 1)
    return float(stats.nct.sf(critical, splits - 1, effect * math.sqrt(splits)))


def auc_and_fprs(tpr: Sequence[float]) -> Metric:
    """AUC, then the FPR at each TPR, of labels and scores ``(B,)``."""

    def of(label: NDArray[np.generic], score: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([auc(label, score), *(fpr_at_tpr(label, score, rate) for rate in tpr)])

    return of


def summarise(label: NDArray[np.int64], trained: Trained, tpr: Sequence[float], *, draws: int = 1000) -> Summary:
    """The figures of one method.

    Args:
        label: ``(N,)`` in {0, 1}.
        trained: Its trainings.
        tpr: See :func:`auc_and_fprs`.
        draws: Of the bootstrap.
    """
    members = [auc(label, score) for score in trained.members]
    metric = auc_and_fprs(tpr)
    low, high = bootstrap_interval(metric, label, trained.ensemble, draws=draws)
    return Summary(
        members=len(members),
        average=float(np.mean(members)),
        deviation=float(np.std(members, ddof=1)) if len(members) > 1 else 0.0,
        ensemble=FigureEstimates(metric(label, trained.ensemble), low, high),
    )


def compare_trainings(
    label: NDArray[np.int64],
    method: Trained,
    baseline: Trained,
    tpr: Sequence[float],
    *,
    draws: int = 1000,
) -> TrainingComparison:
    """One method against another, trained on the same splits.

    Args:
        label: ``(N,)`` in {0, 1}.
        method: Its trainings.
        baseline: The other's.
        tpr: See :func:`auc_and_fprs`.
        draws: Of the hierarchical bootstrap.

    Raises:
        InputError: If the two have not equally many splits.
    """
    if len(method.score) != len(baseline.score):
        raise InputError(f"Compared methods need the same splits, found {len(method.score)} and {len(baseline.score)}.")
    metric = auc_and_fprs(tpr)
    means = [np.mean([metric(label, score) for score in trained.ensembles], 0) for trained in (method, baseline)]
    low, high = hierarchical_interval(metric, label, method, baseline, draws=draws)
    gains = [auc(label, a) - auc(label, b) for a, b in zip(method.members, baseline.members, strict=True)]
    return TrainingComparison(
        delong=delong_test(label, method.ensemble, baseline.ensemble),
        difference=FigureEstimates(means[0] - means[1], low, high),
        against=means[1],
        gain=float(np.mean(gains)),
        gain_deviation=float(np.std(gains, ddof=1)) if len(gains) > 1 else float("nan"),
    )


def hierarchical_interval(
    metric: Metric, label: NDArray[np.int64], method: Trained, baseline: Trained, *, draws: int = 1000, seed: int = 0
) -> NDArray[np.float64]:
    """Percentile interval of the difference of two ensembles, over splits, seeds within a split, and test images.

    Each draw takes as many splits as there are, with replacement and the same for both methods; of every split and
    method one of its seeds; and test images with replacement within each class. With few splits it is too
    narrow: by a factor sqrt((S - 1) / S) for their part alone, and more since few draws differ.

    Args:
        metric: Of labels and scores.
        label: ``(N,)`` in {0, 1}.
        method: Its trainings.
        baseline: The other's.
        draws: Number of resamples.
        seed: Of the draws.

    Returns:
        ``(2, M)``, lower and upper ends.
    """
    rng = np.random.default_rng(seed)
    classes = [np.flatnonzero(label == value) for value in np.unique(label)]
    values = []
    for _ in range(draws):
        splits = rng.integers(len(method.score), size=len(method.score))
        images = np.concatenate([rng.choice(members, members.size) for members in classes])
        drawn = []
        for trained in (method, baseline):
            seeds = rng.integers(trained.score.shape[1], size=len(splits))
            drawn.append(metric(label[images], trained.score[splits, seeds].mean(0)[images]))
        values.append(drawn[0] - drawn[1])
    return np.asarray(np.quantile(values, [0.025, 0.975], axis=0))


def adjusted(comparisons: Mapping[str, TrainingComparison]) -> dict[str, float]:
    """Holm's adjusted p-values of a family of DeLong tests."""
    p_values = holm([comparison.delong.p_value for comparison in comparisons.values()])
    return dict(zip(comparisons, p_values.tolist(), strict=True))
