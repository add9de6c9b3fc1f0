"""Figures of scored studies with known labels: each with its interval, per subgroup, between models, per threshold.

These describe how scores did on these very labels. A threshold chosen on them is no operating point to ship; that is
:mod:`mri_alm.metrics.threshold`.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest

from mri_alm.errors import InputError
from mri_alm.evaluation.data import LabelledScores
from mri_alm.metrics.calibration import brier_score, expected_calibration_error
from mri_alm.metrics.ranking import (
    FALSE_NEGATIVES,
    TRUE_POSITIVE_RATES,
    allowed_misses,
    auc,
    check_binary,
    fpr_at_each_fn,
)
from mri_alm.metrics.threshold import clopper_pearson_upper, fixed_fn_threshold, future_false_negatives_cdf
from mri_alm.metrics.uncertainty import DelongTest, bootstrap_interval, delong_auc, delong_test, holm, partial_auc

FEW_POSITIVES = 5
PARTIAL_FROM = 0.9  # true-positive rate from which the partial AUC counts
SCANNER_COLUMNS = ("site", "center", "scanner", "vendor", "model", "field_strength")
_GROUPS = 20  # values a column may have and still make subgroups
_CURVE_POINTS = 101


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Roc:
    """The ROC by false negatives allowed, ``(K,)`` each: k, and the false-positive rate with its bootstrap interval."""

    allowed: NDArray[np.int64]
    fpr: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True)
class Performance:
    """One model on one group of studies.

    Attributes:
        positives: Studies that need DCE.
        negatives: Studies that do not.
        figures: By name. ``auc``, ``partial_auc`` (TPR >= 90 %, standardised: 50 % is chance), ``fpr_at_tpr_T``
            (percent), ``fpr_at_fn_K``, ``brier`` and ``ece`` (scores in [0, 1] only) have stratified bootstrap
            intervals; ``auc_delong`` DeLong's; ``sensitivity``, ``specificity``, ``npv`` and ``spared`` (share below
            the threshold the file decided with) Clopper and Pearson's.
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


def performance_of(
    label: ArrayLike, score: ArrayLike, threshold: float | None = None, *, draws: int = 2000, seed: int = 0
) -> Performance:
    """Every figure of one score.

    Args:
        label: ``(B,)`` in {0, 1}, both present.
        score: ``(B,)``, any kind that grows with suspicion.
        threshold: Fixed beforehand: positive iff score >= threshold. None: no figures of decisions.
        draws: Bootstrap resamples.
        seed: Of the draws.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`.
    """
    positive, score = check_binary(label, score)
    n = int(positive.sum())
    named = _allowed(n)
    # Every k where few are missed, and points enough for the rest of the curve.
    curve = np.union1d(np.arange(min(n, _CURVE_POINTS)), np.linspace(0, n - 1, _CURVE_POINTS).round().astype(np.int64))
    probability = bool(score.min() >= 0 and score.max() <= 1)

    def values(y: NDArray[np.generic], s: NDArray[np.float64]) -> NDArray[np.float64]:
        calibration = [brier_score(y, s), expected_calibration_error(y, s)] if probability else []
        areas = [auc(y, s), partial_auc(y, s, min_tpr=PARTIAL_FROM)]
        return np.array([*areas, *calibration, *fpr_at_each_fn(y, s, [*named.values(), *curve])])

    names = ["auc", "partial_auc", *(["brier", "ece"] if probability else []), *named]
    found, (low, high) = values(positive, score), bootstrap_interval(values, positive, score, draws=draws, seed=seed)
    figures = {
        name: Estimate(*map(float, v)) for name, v in zip(names, zip(found, low, high, strict=True), strict=False)
    }
    if n > 1 and positive.size - n > 1:
        delong = delong_auc(positive, score)
        figures["auc_delong"] = Estimate(delong.auc, *delong.interval)
    if threshold is not None:
        figures |= _decisions(positive, score >= threshold)
    return Performance(
        positives=n,
        negatives=positive.size - n,
        figures=figures,
        miss_rate_upper={k: clopper_pearson_upper(k, n, 0.05) for k in FALSE_NEGATIVES if k < n},
        roc=Roc(curve, *(part[len(names) :] for part in (found, low, high))),
    )


def compare_scores(data: LabelledScores, *, draws: int = 2000, seed: int = 0) -> list[ScoreComparison]:
    """Every pair of models, the family of DeLong tests corrected by Holm."""
    named = _allowed(int(data.label.sum()))

    def difference(y: NDArray[np.generic], s: NDArray[np.float64]) -> NDArray[np.float64]:
        return fpr_at_each_fn(y, s[:, 0], [*named.values()]) - fpr_at_each_fn(y, s[:, 1], [*named.values()])

    found = []
    for a, b in itertools.combinations(data.models, 2):
        both = np.column_stack([a.score, b.score])
        ends = bootstrap_interval(difference, data.label, both, draws=draws, seed=seed)
        values = zip(difference(data.label, both), *ends, strict=True)
        try:
            test, note = delong_test(data.label, a.score, b.score), ""
        except InputError as error:  # fewer than two of a class, or AUCs without variance
            test, note = None, str(error)
        differences = {name: Estimate(*map(float, v)) for name, v in zip(named, values, strict=True)}
        found.append((a.name, b.name, test, note, differences))
    corrected = iter(holm([test.p_value for _, _, test, _, _ in found if test]))
    return [
        ScoreComparison(a, b, test, float(next(corrected)) if test else None, note, d) for a, b, test, note, d in found
    ]


def group_columns(data: LabelledScores, wanted: Sequence[str] | None) -> list[str]:
    """Columns that make subgroups: those wanted, or else what the table has of :data:`SCANNER_COLUMNS` and differs.

    Raises:
        InputError: If a wanted column does not exist, or has too many values to be groups.
    """
    if wanted is None:
        counts = {column: len(set(data.columns[column])) for column in SCANNER_COLUMNS if column in data.columns}
        return [column for column, n in counts.items() if 1 < n <= _GROUPS]
    for column in wanted:
        if column not in data.columns:
            raise InputError(
                f'The label table has no column "{column}" to group by. It has: {", ".join(data.columns)}.'
            )
        if (n := len(set(data.columns[column]))) > _GROUPS:
            raise InputError(
                f'Column "{column}" has {n} different values, too many for subgroups (at most {_GROUPS}). '
                "Add a column with ranges and group by that."
            )
    return list(wanted)


def subgroups(data: LabelledScores, columns: Sequence[str], *, draws: int = 2000, seed: int = 0) -> list[Subgroup]:
    """Each model on each group of each column; groups with few positives carry a warning."""
    found = []
    for column in columns:
        cells = np.array(data.columns[column])
        for value, model in itertools.product(sorted(set(cells.tolist())), data.models):
            rows = cells == value
            label = data.label[rows]
            positives, negatives = int(label.sum()), int((label == 0).sum())
            whole = positives > 0 and negatives > 0
            found.append(
                Subgroup(
                    column=column,
                    value=value or "(empty)",
                    model=model.name,
                    positives=positives,
                    negatives=negatives,
                    performance=performance_of(label, model.score[rows], model.threshold, draws=draws, seed=seed)
                    if whole
                    else None,
                    note=f"only {positives} positive{'s' * (positives != 1)}"
                    if positives < FEW_POSITIVES
                    else "no negatives"
                    if not negatives
                    else "",
                )
            )
    return found


def share(count: int, of: int) -> Estimate:
    """A proportion with Clopper and Pearson's interval, of no width nowhere: 8 of 8 is 63 to 100 %."""
    interval = binomtest(count, of).proportion_ci(0.95, "exact")
    return Estimate(count / of, float(interval.low), float(interval.high))


def _allowed(n_positive: int) -> dict[str, int]:
    """Names of the FPR figures, and how many false negatives each allows."""
    of_rate = {f"fpr_at_tpr_{t}": allowed_misses(n_positive, t / 100) for t in TRUE_POSITIVE_RATES}
    return of_rate | {f"fpr_at_fn_{k}": k for k in FALSE_NEGATIVES if k < n_positive}


def _decisions(positive: NDArray[np.bool_], needed: NDArray[np.bool_]) -> dict[str, Estimate]:
    found = {
        "sensitivity": share(int(needed[positive].sum()), int(positive.sum())),
        "specificity": share(int((~needed[~positive]).sum()), int((~positive).sum())),
        "spared": share(int((~needed).sum()), positive.size),
    }
    if not needed.all():
        found["npv"] = share(int((~positive[~needed]).sum()), int((~needed).sum()))
    return found


def finite(value: float) -> float | None:
    """For strict JSON: None instead of infinity."""
    return value if math.isfinite(value) else None


MOST_ALLOWED = 100  # nobody ships a threshold that misses more; keeps the page small


@dataclass(frozen=True)
class ThresholdChoice:
    """One setting of the slider.

    Attributes:
        allowed: False negatives allowed where the threshold is set; None is "examine everyone".
        threshold: Positive iff score >= threshold; -inf is "examine everyone".
        missed: ``(B,)`` evaluated positives below it.
        false_positives: Evaluated negatives at or above it.
        spared: Share of evaluated studies below it, with interval.
        expected_miss_rate: Mean miss rate of new positives.
        miss_rate_upper: Its 95 % bound (Clopper and Pearson).
        new_positives: Positives among 100 new patients, as many as here.
        expected_misses: Mean number of misses among them.
        misses_upper: With 95 % probability no more are missed among them (beta-binomial law).
    """

    allowed: int | None
    threshold: float
    missed: NDArray[np.bool_]
    false_positives: int
    spared: Estimate
    expected_miss_rate: float
    miss_rate_upper: float
    new_positives: int
    expected_misses: float
    misses_upper: int


def trade_off(
    label: ArrayLike,
    score: ArrayLike,
    set_on: tuple[ArrayLike, ArrayLike] | None = None,
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Iterator[ThresholdChoice]:
    """The steps from "examine everyone" over 0 to all but one (at most 100) false negatives.

    Args:
        label: ``(B,)`` in {0, 1}, the evaluated studies.
        score: ``(B,)``, theirs.
        set_on: Label and score of the studies the threshold is set on, of the same kind; None: on the evaluated ones,
            which describes them and promises nothing for the number one picks after looking.
        draws: Bootstrap resamples for the interval of what is spared, where the threshold is set on the evaluated
            studies; elsewhere the interval is Clopper and Pearson's.
        seed: Of the draws.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`.
    """
    positive, score = check_binary(label, score)
    on_label, on_score = check_binary(*set_on) if set_on else (positive, score)
    n = int(on_label.sum())
    new = max(1, round(100 * float(positive.mean())))
    redrawn = None if set_on else bootstrap_interval(_shares_spared, positive, score, draws=draws, seed=seed)
    for rank in range(min(n, MOST_ALLOWED + 1) + 1):
        threshold = fixed_fn_threshold(on_label, on_score, rank - 1).threshold if rank else -math.inf
        below = score < threshold
        spared = share(int(below.sum()), below.size)
        if redrawn is not None and rank:
            spared = Estimate(spared.value, *map(float, redrawn[:, rank - 1]))
        yield ThresholdChoice(
            allowed=rank - 1 if rank else None,
            threshold=threshold,
            missed=positive & below,
            false_positives=int((~positive & ~below).sum()),
            spared=spared,
            expected_miss_rate=rank / (n + 1),
            miss_rate_upper=clopper_pearson_upper(rank - 1, n, 0.05) if rank else 0.0,
            new_positives=new,
            expected_misses=new * rank / (n + 1),
            misses_upper=next(x for x in range(new + 1) if future_false_negatives_cdf(x, n, rank, new) >= 0.95),
        )


def _shares_spared(label: NDArray[np.generic], score: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of studies below the threshold of 0, 1, ... false negatives allowed among these very studies."""
    thresholds = np.sort(score[label == 1])[: MOST_ALLOWED + 1]
    return np.searchsorted(np.sort(score), thresholds) / score.size
