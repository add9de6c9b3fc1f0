"""One evaluation, whole: every figure of every model, and what each threshold would do; ready for tables and report."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mri_alm.bundle.run_folder import RunFolder, RunRecord, read_run
from mri_alm.cohort.protocol import training_note
from mri_alm.errors import InputError, shortened
from mri_alm.evaluation.data import (
    HardExam,
    LabelledScores,
    read_calibration,
    read_hardest,
    read_labelled_scores,
    refuse_another_model,
)
from mri_alm.evaluation.performance import (
    Estimate,
    Performance,
    ScoreComparison,
    Subgroup,
    compare_scores,
    decision_counts,
    group_columns,
    performance_of,
    proportion,
    subgroups,
)
from mri_alm.evaluation.reader import ReaderComparison, compare_with_reader, reader_warnings
from mri_alm.metrics.ranking import Floats, check_binary, midway_below
from mri_alm.metrics.threshold import clopper_pearson_upper, minimum_positives
from mri_alm.metrics.uncertainty import bootstrap_interval

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
        miss_rate_upper: Its one-sided 95 % bound (Clopper and Pearson).
        new_positives: Positives among 100 new patients, as many as here.
        expected_misses: Mean number of misses among them.
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


@dataclass(frozen=True)
class TradeOff:
    """The slider's steps for one way to set the threshold.

    Attributes:
        key: ``"calibration"`` (a cohort of its own), ``"held_out"`` (training patients by members that did not see
            them) or ``"evaluated"`` (these labels).
        positives: How many the threshold is set on.
        start: Position of the step to begin with: the shipped one, else no false negative.
        steps: From "examine everyone" on.
    """

    key: str
    positives: int
    start: int
    steps: tuple[ThresholdChoice, ...]


@dataclass(frozen=True)
class Evaluation:
    """Everything that is known; the first model is the one that slider and patient table are about.

    Attributes:
        data: Studies, labels, scores.
        performances: By model.
        comparisons: Of all pairs of models.
        groups: Subgroups.
        readers: The models beside a reader, if one was named.
        trade_offs: Of the first model; the one to be trusted most comes first.
        trained_on: Model to training exams and how many of them need contrast, where the scores lie in the folder of
            their run.
        run: The training run, if given.
        hardest: Its training exams whose constraint was hardest, at most ten; empty where nothing says it.
        draws: Bootstrap resamples.
        seed: Of the draws.
        pictures: Study to JPEG; no bytes where there is a picture that cannot be used.
        warnings: What a reader must know first.
    """

    data: LabelledScores
    performances: dict[str, Performance]
    comparisons: list[ScoreComparison]
    groups: list[Subgroup]
    readers: list[ReaderComparison]
    trade_offs: list[TradeOff]
    trained_on: dict[str, tuple[int, int]]
    run: RunRecord | None
    hardest: tuple[HardExam, ...]
    draws: int
    seed: int
    pictures: Mapping[str, bytes]
    warnings: tuple[str, ...]


def evaluate(
    scores: Mapping[str, Path],
    labels: Path,
    *,
    run: Path | None = None,
    calibration: tuple[Path, Path] | None = None,
    group_by: Sequence[str] | None = None,
    reader: str | None = None,
    draws: int = 2000,
    seed: int = 0,
    pictures: Callable[[Sequence[str]], Mapping[str, bytes]] = lambda _: {},
) -> Evaluation:
    """Read, check and measure.

    Args:
        scores: Model name to file, see :func:`mri_alm.evaluation.data.read_labelled_scores`.
        labels: Table of labels, such as a cohort's manifest.
        run: Folder of the training run that the first file of scores comes from.
        calibration: Scores that the first model gave a calibration cohort, and that cohort's labels; see
            :func:`mri_alm.evaluation.data.read_calibration`.
        group_by: Columns for subgroups; None: what describes the scanner.
        reader: Column of a reader to compare with, see :func:`mri_alm.evaluation.reader.compare_with_reader`.
        draws: Bootstrap resamples.
        seed: Of the draws.
        pictures: From studies to their pictures as JPEG, where there are any; no bytes for one that cannot be used.

    Raises:
        InputError: If anything given cannot be used.
    """
    record = read_run(run) if run else None
    data = read_labelled_scores(
        scores, labels, exclude=record.exclude if record else (), trained_on=record.trained if record else ()
    )
    columns = group_columns(data, group_by)
    rows = _calibration_rows(calibration, data, run, record) if calibration else None
    groups = subgroups(data, columns, draws=draws, seed=seed)
    readers = compare_with_reader(data, reader, draws=draws, seed=seed) if reader is not None else []
    hardest = read_hardest(RunFolder(run).hardest) if run else ()
    shown = pictures([*data.studies, *(exam.study for exam in hardest)])
    return Evaluation(
        data=data,
        performances={
            model.name: performance_of(
                data.label, model.score, model.needed, patient=data.patients, draws=draws, seed=seed
            )
            for model in data.models
        },
        comparisons=compare_scores(data, draws=draws, seed=seed),
        groups=groups,
        readers=readers,
        trade_offs=list(_trade_offs(data, record, rows, draws=draws, seed=seed)),
        trained_on=_trained_on(scores),
        run=record,
        hardest=hardest,
        draws=draws,
        seed=seed,
        pictures=shown,
        warnings=(*_warnings(data, groups, record), *reader_warnings(data, readers), *_unusable_pictures(shown)),
    )


def _trained_on(scores: Mapping[str, Path]) -> dict[str, tuple[int, int]]:
    """Of models whose scores lie beside a run's table of training exams; another table of that name says nothing."""
    found = {}
    for name, file in scores.items():
        with contextlib.suppress(InputError, ValueError):
            labels = [int(row["label"]) for row in RunFolder(file.parent).trained_exams()]
            found[name] = len(labels), sum(labels)
    return found


def _calibration_rows(
    calibration: tuple[Path, Path], data: LabelledScores, run: Path | None, record: RunRecord | None
) -> tuple[NDArray[np.int64], Floats]:
    """Labels and scores of the calibration cohort, which shares no patient with training or evaluation."""
    apart = {*data.patients, *data.studies}
    if not run or not record:
        return read_calibration(*calibration, apart_from=apart)
    refuse_another_model(calibration[0], run, record.checkpoints)
    return read_calibration(*calibration, trained_on=record.trained, apart_from=apart | record.patients)


def _trade_offs(
    data: LabelledScores,
    record: RunRecord | None,
    calibration: tuple[NDArray[np.int64], Floats] | None,
    *,
    draws: int,
    seed: int,
) -> Iterator[TradeOff]:
    first = data.models[0]
    if calibration:
        steps = tuple(trade_off(data.label, first.score, calibration))
        exams = [-math.inf, *np.sort(calibration[1][calibration[0] == 1]).tolist()]  # thresholds of before 0.5.0
        shipped = next((i for i, step in enumerate(steps) if first.threshold in (step.threshold, exams[i])), 1)
        yield TradeOff("calibration", int(calibration[0].sum()), shipped, steps)
    if record and record.point.n_positive and not record.point.folds:  # no law of a largest score
        steps = tuple(trade_off(data.label, first.score, record.held_out))
        yield TradeOff("held_out", int(record.held_out[0].sum()), min(record.point.rank, len(steps) - 1), steps)
    steps = tuple(trade_off(data.label, first.score, draws=draws, seed=seed))
    yield TradeOff("evaluated", data.positives, 1, steps)


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
    for rank, threshold in enumerate([-math.inf, *_thresholds(on_label, on_score).tolist()]):
        below = score < threshold
        counts = decision_counts(positive, ~below)
        spared = proportion(counts.spared, below.size)
        if redrawn is not None and rank:
            spared = Estimate(spared.value, *map(float, redrawn[:, rank - 1]))
        yield ThresholdChoice(
            allowed=rank - 1 if rank else None,
            threshold=threshold,
            missed=positive & below,
            false_positives=counts.false_positives,
            spared=spared,
            expected_miss_rate=rank / (n + 1),
            miss_rate_upper=clopper_pearson_upper(rank - 1, n, 0.05) if rank else 0.0,
            new_positives=new,
            expected_misses=new * rank / (n + 1),
        )


def _thresholds(positive: NDArray[np.generic], score: Floats) -> Floats:
    """Those that allow 0, 1, ... false negatives among these very studies."""
    return midway_below(score, np.sort(score[positive == 1])[: MOST_ALLOWED + 1])


def _shares_spared(positive: NDArray[np.generic], score: Floats) -> Floats:
    """Share of studies below each of these thresholds."""
    return np.searchsorted(np.sort(score), _thresholds(positive, score)) / score.size


def _warnings(data: LabelledScores, groups: Sequence[Subgroup], run: RunRecord | None) -> Iterator[str]:
    studies, patients = len(data.studies), len(set(data.patients))
    if n := data.columns.get("side", ()).count("train"):
        yield (
            f"{n} of {studies} evaluated studies have side = train in the label table. If this model was trained "
            "on them, every figure here is worthless."
        )
    if patients < studies:
        yield (
            f"{studies} studies come from {patients} patients. Intervals of AUCs and FPRs count patients; those of "
            "shares (sensitivity, spared) and bounds assume independent studies and are too narrow: keep one study per "
            "patient."
        )
    if run and (note := training_note(run.trained_on)):
        yield f"The model was {note}: figures show that the software works, and nothing of patients."
    if n := int(data.models[0].below_gate.sum()):
        yield (
            f"{n} of {studies} studies are below the quality gate: DCE is asked for whatever their score. Figures of "
            "decisions count that; curves and the slider, which go by the score alone, do not."
        )
    if data.positives < (least := minimum_positives(0.1, 0.1)):
        yield (
            f"Only {data.positives} positive{'s' * (data.positives != 1)}: one exam moves every figure by much, and "
            f"none missed among so few does not show a miss rate below 10 % (that takes {least}, at 90 % confidence)."
        )
    if data.lost:
        yield f"Not evaluated, {len(data.lost)} of the label table; the section on the cohort says why."
    if few := sorted({f"{g.column} {g.value}" for g in groups if g.note}):
        yield f"Groups with under 5 positives or without negatives: {', '.join(few)}. Conclude nothing from them."
    decided_at = data.models[0].threshold
    if run and run.point.n_positive and decided_at is not None and decided_at != run.point.threshold:
        yield (
            f"The scores were decided at threshold {decided_at:g}, the run's threshold.json says "
            f"{run.point.threshold:g}: figures at the threshold are of the former."
        )


def _unusable_pictures(pictures: Mapping[str, bytes]) -> Iterator[str]:
    if lost := [study for study, picture in pictures.items() if not picture]:
        yield (
            f"No picture of {shortened(lost)}: the file is no PNG or JPEG, is damaged, or has more than 50 "
            "megapixels or 64 MiB. Score the exam again, or give its folder by --pictures."
        )
