"""How sure a table's differences are: over trainings and test images, and the null beside them.

Two ensembles of the same method differ too, since their trainings do. DeLong's test and a bootstrap of the test images
take the trained models as given and so call that difference a gain; here the difference between splits counts as well.
Scores are logits of the critical class; a gain in AUC is positive, a gain in FPR negative.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import auc, fpr_at_tpr
from mri_alm.metrics.uncertainty import bootstrap_interval, holm, newcombe_interval

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
        ensemble: AUC and FPRs of the ensemble, over test images: the AUC's interval is Newcombe's, those of FPRs are
            by a stratified bootstrap.
    """

    members: int
    average: float
    deviation: float
    ensemble: FigureEstimates


@dataclass(frozen=True)
class TrainingComparison:
    """One method against another, with equally many models and equal seeds each.

    Attributes:
        difference: Of AUC and FPRs of the ensembles, each the mean over the seeds that both have; intervals by
            :func:`deviation_over_trainings`.
        p_value: That the AUCs of the methods are equal, by the same deviation; NaN for one split, which says nothing
            of how trainings differ.
        against: ``(M,)``, what the differences are from: the other method's AUC and FPRs.
        seeds: How many seeds both have.
        gain: Mean over splits of the difference of two single models' AUCs, first seeds.
        gain_deviation: Standard deviation of those differences; NaN for one split.
    """

    difference: FigureEstimates
    p_value: float
    against: NDArray[np.float64]
    seeds: int
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
    value = metric(label, trained.ensemble)
    low[0], high[0] = newcombe_interval(value[0], int(label.sum()), int((label == 0).sum()))
    return Summary(
        members=len(members),
        average=float(np.mean(members)),
        deviation=float(np.std(members, ddof=1)) if len(members) > 1 else 0.0,
        ensemble=FigureEstimates(value, low, high),
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
        draws: Of the test images.

    Raises:
        InputError: If the two have not equally many splits.
    """
    if len(method.score) != len(baseline.score):
        raise InputError(f"Compared methods need the same splits, found {len(method.score)} and {len(baseline.score)}.")
    seeds = min(trained.score.shape[1] for trained in (method, baseline))
    method, baseline = (Trained(trained.score[:, :seeds]) for trained in (method, baseline))
    metric = auc_and_fprs(tpr)
    means = [np.mean([metric(label, score) for score in trained.ensembles], 0) for trained in (method, baseline)]
    gain = means[0] - means[1]
    deviation, freedom = deviation_over_trainings(metric, label, method, baseline, draws=draws)
    half = stats.t.ppf(0.975, freedom) * deviation
    gains = [auc(label, a) - auc(label, b) for a, b in zip(method.members, baseline.members, strict=True)]
    return TrainingComparison(
        difference=FigureEstimates(gain, gain - half, gain + half),
        p_value=_p_value(gain[0], deviation[0], freedom[0]) if len(gains) > 1 else float("nan"),
        against=means[1],
        seeds=seeds,
        gain=float(np.mean(gains)),
        gain_deviation=float(np.std(gains, ddof=1)) if len(gains) > 1 else float("nan"),
    )


def _p_value(gain: float, deviation: float, freedom: float) -> float:
    if deviation == 0:
        return float(gain == 0)
    return float(2 * stats.t.sf(abs(gain) / deviation, freedom))


def deviation_over_trainings(
    metric: Metric, label: NDArray[np.int64], method: Trained, baseline: Trained, *, draws: int = 1000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Standard deviation of the difference of two methods' ensembles, over splits and test images.

    The two parts of its square are added. Splits: the delete-one jackknife, (S - 1) / S times the sum of squares of the
    differences that are left without one split (all seeds of it, of both methods) about their mean. Images: the
    variance over draws with replacement within each class, the trained models as they are. Drawing splits with
    replacement, as before version 0.5.0, makes ensembles of fewer different models, which are worse, and
    the one with more seeds less so.

    Args:
        metric: Of labels and scores.
        label: ``(N,)`` in {0, 1}.
        method: Its trainings.
        baseline: The other's, with as many splits and seeds.
        draws: Of the images.
        seed: Of the draws.

    Returns:
        ``(M,)`` deviations, and ``(M,)`` degrees of freedom by Welch and Satterthwaite: S - 1 of the splits' part, the
        images' part without end. Of one split the deviation is the images' part alone.

    References:
        Efron and Stein, "The jackknife estimate of variance", Annals of Statistics 9:586, 1981.
    """

    def difference(splits: NDArray[np.int64], images: NDArray[np.int64]) -> NDArray[np.float64]:
        figures = [
            np.mean([metric(label[images], one[images]) for one in trained.score[splits].mean(0)], 0)
            for trained in (method, baseline)
        ]
        return np.asarray(figures[0] - figures[1])

    every, count = np.arange(len(method.score)), len(method.score)
    rng = np.random.default_rng(seed)
    classes = [np.flatnonzero(label == value) for value in np.unique(label)]
    drawn = [difference(every, np.concatenate([rng.choice(rows, rows.size) for rows in classes])) for _ in range(draws)]
    of_images = np.var(drawn, axis=0, ddof=1)
    if count == 1:
        return np.sqrt(of_images), np.full_like(of_images, np.inf)
    left = [difference(np.delete(every, split), np.arange(label.size)) for split in every]
    of_splits = (count - 1) * np.var(left, axis=0)
    both = of_images + of_splits
    freedom = np.divide((count - 1) * both**2, of_splits**2, out=np.full_like(both, np.inf), where=of_splits > 0)
    return np.sqrt(both), freedom


def adjusted(comparisons: Mapping[str, TrainingComparison]) -> dict[str, float]:
    """Holm's adjusted p-values of a family of comparisons; NaN of those that have none, which do not count."""
    p_values = {key: comparison.p_value for key, comparison in comparisons.items()}
    known = [key for key, value in p_values.items() if not math.isnan(value)]
    return p_values | dict(zip(known, holm([p_values[key] for key in known]).tolist(), strict=True))
