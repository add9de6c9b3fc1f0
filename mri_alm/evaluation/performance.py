"""Figures of scored studies with known labels: each with its interval, between models, per subgroup.

These describe how scores did on these very labels. A threshold chosen on them is no operating point to ship; that is
:mod:`mri_alm.metrics.threshold`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest

from mri_alm.errors import InputError
from mri_alm.evaluation.data import LabelledScores
from mri_alm.metrics.calibration import brier_score, expected_calibration_error, recalibration
from mri_alm.metrics.ranking import (
    FALSE_NEGATIVES,
    TRUE_POSITIVE_RATES,
    Floats,
    FprRule,
    allowed_misses,
    auc,
    check_binary,
    fpr_at_each_fn,
    fpr_at_tpr,
)
from mri_alm.metrics.threshold import clopper_pearson_upper
from mri_alm.metrics.uncertainty import (
    DelongTest,
    bootstrap_interval,
    delong_auc,
    delong_test,
    holm,
    newcombe_interval,
    partial_auc,
)
from mri_alm.runtime.tables import column_name

PARTIAL_FROM = 0.9  # true-positive rate from which the partial AUC counts
_SCANNER_COLUMNS = ("site", "center", "scanner", "vendor", "model", "field_strength")
_GROUPS = 20  # values a column may have and still make subgroups
_FEW_POSITIVES = 5
_CURVE_POINTS = 101


@dataclass(frozen=True)
class RankingFigures:
    """How well a score ranks, without intervals: AUC, FPR by true-positive rate in percent, FPR by false negatives."""

    auc: float
    fpr_at_tpr: dict[int, float]
    fpr_at_fn: dict[int, float]

    @property
    def fprs(self) -> dict[str, float]:
        """The FPRs by name: ``fpr_at_tpr_T``, ``fpr_at_fn_K``."""
        of_rate = {f"fpr_at_tpr_{rate}": fpr for rate, fpr in self.fpr_at_tpr.items()}
        return of_rate | {f"fpr_at_fn_{k}": fpr for k, fpr in self.fpr_at_fn.items()}


@dataclass(frozen=True)
class DecisionCounts:
    """What decisions did to exams with known labels."""

    false_negatives: int
    false_positives: int
    spared: int


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Roc:
    """The ROC by false negatives allowed, ``(K,)`` each: k, and the false-positive rate with its bootstrap interval."""

    allowed: NDArray[np.int64]
    fpr: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Performance:
    """One model on one group of studies.

    Attributes:
        positives: Studies that need DCE.
        negatives: Studies that do not.
        figures: By name. ``auc`` has Newcombe's interval (:func:`mri_alm.metrics.newcombe_interval`); ``partial_auc``
            (TPR >= 90 %, standardised: 50 % is chance), ``fpr_at_tpr_T`` (percent), ``fpr_at_fn_K``, ``brier`` and
            ``ece`` (scores in [0, 1] only) have stratified bootstrap intervals, which draw patients where those have
            several studies; ``sensitivity``, ``specificity``, ``npv`` and ``spared`` (share below
            the threshold the file decided with) Clopper and Pearson's; ``calibration_slope``,
            ``calibration_intercept`` and ``observed_expected`` (scores in [0, 1] only) those of
            :func:`mri_alm.metrics.recalibration`.
        miss_rate_upper: K to the 95 % bound on the miss rate of new positives, K misses of ``positives`` being allowed.
        roc: The curve at every k up to 100 and at 101 points of the whole.
    """

    positives: int
    negatives: int
    figures: dict[str, Estimate]
    miss_rate_upper: dict[int, float]
    roc: Roc


@dataclass(frozen=True)
class ScoreComparison:
    """Two models on the same studies; every difference is a - b.

    Attributes:
        model_a: Name.
        model_b: Name.
        delong: DeLong's test of the AUCs; None where it does not apply.
        p_holm: Its p, corrected by Holm over all pairs.
        note: Why there is no test.
        differences: FPRs by name, with paired bootstrap intervals.
    """

    model_a: str
    model_b: str
    delong: DelongTest | None
    p_holm: float | None
    note: str
    differences: dict[str, Estimate]


@dataclass(frozen=True)
class Subgroup:
    """One model on the studies that share a value of a column; no performance where a class is missing."""

    column: str
    value: str
    model: str
    positives: int
    negatives: int
    performance: Performance | None
    note: str


def ranking_figures(label: ArrayLike, score: ArrayLike, *, tpr_rule: FprRule = "lowest") -> RankingFigures:
    """AUC, and the FPR at the rates and the numbers of false negatives of the paper's tables.

    Args:
        label: ``(B,)`` in {0, 1}, both present.
        score: ``(B,)``, any kind that grows with suspicion.
        tpr_rule: How the FPR at a TPR is read off the curve, see :func:`mri_alm.metrics.fpr_at_tpr`.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`; or the rule is unknown.
    """
    positive, score = check_binary(label, score)
    return _ranking(positive, score, _misses_told(int(positive.sum())), tpr_rule)


def _misses_told(n: int) -> list[int]:
    """The numbers of false negatives at which FPRs of ``n`` positives are told."""
    return [k for k in FALSE_NEGATIVES if k < n]


def _ranking(positive: ArrayLike, score: Floats, ks: Sequence[int], tpr_rule: FprRule) -> RankingFigures:
    """The figures with FPRs at these numbers of false negatives, whatever the number of positives."""
    misses = [allowed_misses(int(np.count_nonzero(positive)), rate / 100) for rate in TRUE_POSITIVE_RATES]
    fpr = _fprs(positive, score, [*ks, *misses]).tolist()
    at_tpr = dict(zip(TRUE_POSITIVE_RATES, fpr[len(ks) :], strict=True))
    if tpr_rule != "lowest":
        at_tpr = {rate: fpr_at_tpr(positive, score, rate / 100, rule=tpr_rule) for rate in TRUE_POSITIVE_RATES}
    return RankingFigures(auc(positive, score), at_tpr, dict(zip(ks, fpr[: len(ks)], strict=True)))


def _fprs(positive: ArrayLike, score: Floats, ks: ArrayLike) -> Floats:
    """The FPR at each number of misses; where that is no fewer than the positives, at all of them but one.

    A bootstrap that draws patients can draw fewer positive studies than there are.
    """
    return fpr_at_each_fn(positive, score, np.minimum(ks, np.count_nonzero(positive) - 1))


def decision_counts(label: ArrayLike, needed: ArrayLike) -> DecisionCounts:
    """What decisions did, both ``(B,)`` in {0, 1}: positives called negative, the reverse, and all called negative."""
    positive, spared = np.asarray(label) == 1, np.asarray(needed) == 0
    return DecisionCounts(int((positive & spared).sum()), int((~positive & ~spared).sum()), int(spared.sum()))


def performance_of(
    label: ArrayLike,
    score: ArrayLike,
    needed: ArrayLike | None = None,
    *,
    patient: Sequence[str] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> Performance:
    """Every figure of one score.

    Args:
        label: ``(B,)`` in {0, 1}, both present.
        score: ``(B,)``, any kind that grows with suspicion.
        needed: ``(B,)``, decided beforehand: whether DCE is asked for. None: no figures of decisions.
        patient: ``(B,)``, whose study; None: of a different patient each.
        draws: Bootstrap resamples.
        seed: Of the draws.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`.
    """
    positive, score = check_binary(label, score)
    n = int(positive.sum())
    # Every k where few are missed, and points enough for the rest of the curve.
    curve = np.union1d(np.arange(min(n, _CURVE_POINTS)), np.linspace(0, n - 1, _CURVE_POINTS).round().astype(np.int64))
    probability = bool(score.min() >= 0 and score.max() <= 1)

    def named(y: ArrayLike, s: Floats) -> dict[str, float]:
        ranking = _ranking(y, s, _misses_told(n), "lowest")
        calibration = {"brier": brier_score(y, s), "ece": expected_calibration_error(y, s)} if probability else {}
        return {"auc": ranking.auc, "partial_auc": partial_auc(y, s, min_tpr=PARTIAL_FROM)} | calibration | ranking.fprs

    values = named(positive, score)
    several = _if_several(patient)
    low, high = bootstrap_interval(
        lambda y, s: [*named(y, s).values(), *_fprs(y, s, curve)],
        positive,
        score,
        patient=several,
        draws=draws,
        seed=seed,
    )
    figures = {name: Estimate(value, float(low[i]), float(high[i])) for i, (name, value) in enumerate(values.items())}
    figures["auc"] = Estimate(values["auc"], *_auc_interval(positive, score, several))
    if probability:
        figures |= {name: Estimate(*ends) for name, ends in recalibration(positive, score).items()}
    if needed is not None:
        figures |= _shares(positive, np.asarray(needed) == 1)
    return Performance(
        positives=n,
        negatives=positive.size - n,
        figures=figures,
        miss_rate_upper={k: clopper_pearson_upper(k, n, 0.05) for k in FALSE_NEGATIVES if k < n},
        roc=Roc(curve, fpr_at_each_fn(positive, score, curve), low[len(values) :], high[len(values) :]),
    )


def _if_several(patient: Sequence[str] | None) -> Sequence[str] | None:
    """Patients, where one has several studies; where none has, rows are what is drawn."""
    return patient if patient is not None and len(set(patient)) < len(patient) else None


def _auc_interval(positive: NDArray[np.bool_], score: Floats, patient: Sequence[str] | None) -> tuple[float, float]:
    owners = np.arange(score.size) if patient is None else np.unique(np.asarray(patient), return_inverse=True)[1]
    patients = [len(set(owners[rows].tolist())) for rows in (positive, ~positive)]
    if min(patients) < 2:  # no variance to compare
        return newcombe_interval(auc(positive, score), *patients)
    return delong_auc(positive, score, patient).interval


def _shares(positive: NDArray[np.bool_], needed: NDArray[np.bool_]) -> dict[str, Estimate]:
    """Figures of decisions."""
    counts, n = decision_counts(positive, needed), int(positive.sum())
    found = {
        "sensitivity": proportion(n - counts.false_negatives, n),
        "specificity": proportion(positive.size - n - counts.false_positives, positive.size - n),
        "spared": proportion(counts.spared, positive.size),
    }
    if counts.spared:
        found["npv"] = proportion(counts.spared - counts.false_negatives, counts.spared)
    return found


def proportion(count: int, of: int) -> Estimate:
    """A share with Clopper and Pearson's interval, of no width nowhere: 8 of 8 is 63 to 100 %."""
    interval = binomtest(count, of).proportion_ci(0.95, "exact")
    return Estimate(count / of, float(interval.low), float(interval.high))


def compare_scores(data: LabelledScores, *, draws: int = 2000, seed: int = 0) -> list[ScoreComparison]:
    """Every pair of models, the family of DeLong tests corrected by Holm."""
    ks = _misses_told(data.positives)

    def difference(y: ArrayLike, s: Floats) -> dict[str, float]:
        a, b = (_ranking(y, column, ks, "lowest").fprs for column in s.T)
        return {name: a[name] - b[name] for name in a}

    found, patient = [], _if_several(data.patients)
    for a, b in itertools.combinations(data.models, 2):
        both = np.column_stack([a.score, b.score])
        ends = bootstrap_interval(
            lambda y, s: [*difference(y, s).values()], data.label == 1, both, patient=patient, draws=draws, seed=seed
        ).tolist()
        differences = {
            name: Estimate(value, low, high)
            for (name, value), low, high in zip(difference(data.label == 1, both).items(), *ends, strict=True)
        }
        try:
            test, note = delong_test(data.label, a.score, b.score, patient), ""
        except InputError as error:  # fewer than two of a class, or AUCs without variance
            test, note = None, str(error)
        found.append(ScoreComparison(a.name, b.name, test, None, note, differences))
    corrected = iter(holm([pair.delong.p_value for pair in found if pair.delong]).tolist())
    return [replace(pair, p_holm=next(corrected)) if pair.delong else pair for pair in found]


def group_columns(data: LabelledScores, wanted: Sequence[str] | None) -> list[str]:
    """Columns that make subgroups: those wanted, or what the table has on the scanner and differs.

    Raises:
        InputError: If a wanted column does not exist, or has too many values to be groups.
    """
    counts = {column: len(set(cells)) for column, cells in data.columns.items()}
    if wanted is None:
        return [column for column in _SCANNER_COLUMNS if 1 < counts.get(column, 0) <= _GROUPS]
    columns = list(map(column_name, wanted))
    for column in columns:
        if column not in counts:
            raise InputError(f'The label table has no column "{column}" to group by. It has: {", ".join(counts)}.')
        if counts[column] > _GROUPS:
            raise InputError(
                f'Column "{column}" has {counts[column]} different values, too many for subgroups (at most {_GROUPS}). '
                "Add a column with ranges and group by that."
            )
    return columns


def subgroups(data: LabelledScores, columns: Sequence[str], *, draws: int = 2000, seed: int = 0) -> list[Subgroup]:
    """Each model on each group of each column; groups with few positives carry a warning."""
    found = []
    for column in columns:
        cells = np.array(data.columns[column])
        for value, model in itertools.product(sorted(set(cells.tolist())), data.models):
            rows = cells == value
            label, score = data.label[rows], model.score[rows]
            positives = int(label.sum())
            negatives = label.size - positives
            note, performance = "" if negatives else "no negatives", None
            if positives < _FEW_POSITIVES:
                note = f"only {positives} positive{'s' * (positives != 1)}"
            if positives and negatives:
                needed = None if model.needed is None else model.needed[rows]
                patient = [name for name, inside in zip(data.patients, rows.tolist(), strict=True) if inside]
                performance = performance_of(label, score, needed, patient=patient, draws=draws, seed=seed)
            found.append(Subgroup(column, value or "(empty)", model.name, positives, negatives, performance, note))
    return found
