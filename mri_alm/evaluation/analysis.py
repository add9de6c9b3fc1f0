"""One evaluation, whole: every figure of every model, ready for tables and report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mri_alm.bundle.run_folder import RunRecord, read_run
from mri_alm.evaluation.data import (
    LabelledScores,
    patients_of,
    read_calibration,
    read_labelled_scores,
    refuse_another_model,
)
from mri_alm.evaluation.performance import (
    Performance,
    ScoreComparison,
    Subgroup,
    ThresholdChoice,
    compare_scores,
    group_columns,
    performance_of,
    subgroups,
    trade_off,
)
from mri_alm.metrics.threshold import minimum_positives


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
        trade_offs: Of the first model; the one to be trusted most comes first.
        run: The training run, if given.
        draws: Bootstrap resamples.
        seed: Of the draws.
        pictures: Study to JPEG.
        warnings: What a reader must know first.
    """

    data: LabelledScores
    performances: dict[str, Performance]
    comparisons: list[ScoreComparison]
    groups: list[Subgroup]
    trade_offs: list[TradeOff]
    run: RunRecord | None
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
        draws: Bootstrap resamples.
        seed: Of the draws.
        pictures: From studies to their pictures as JPEG, where there are any.

    Raises:
        InputError: If anything given cannot be used.
    """
    record = read_run(run) if run else None
    data = read_labelled_scores(
        scores, labels, exclude=record.exclude if record else (), trained_on=record.trained if record else ()
    )
    columns = group_columns(data, group_by)
    first = data.models[0]
    trade_offs = [
        TradeOff(
            "evaluated", int(data.label.sum()), 1, tuple(trade_off(data.label, first.score, draws=draws, seed=seed))
        )
    ]
    if record:
        steps = tuple(trade_off(data.label, first.score, record.held_out))
        positives = int(record.held_out[0].sum())
        trade_offs.insert(0, TradeOff("held_out", positives, min(record.point.rank, len(steps) - 1), steps))
    if calibration:
        apart: set[str] = {*patients_of(data), *data.studies}
        trained: Sequence[str] = ()
        if run and record:
            refuse_another_model(calibration[0], run, record.checkpoints)
            apart, trained = apart | record.patients, list(record.trained)
        rows = read_calibration(*calibration, trained_on=trained, apart_from=apart)
        steps = tuple(trade_off(data.label, first.score, rows))
        shipped = next((i for i, step in enumerate(steps) if step.threshold == first.threshold), 1)
        trade_offs.insert(0, TradeOff("calibration", int(rows[0].sum()), shipped, steps))
    groups = subgroups(data, columns, draws=draws, seed=seed)
    return Evaluation(
        data=data,
        performances={
            model.name: performance_of(data.label, model.score, model.threshold, draws=draws, seed=seed)
            for model in data.models
        },
        comparisons=compare_scores(data, draws=draws, seed=seed),
        groups=groups,
        trade_offs=trade_offs,
        run=record,
        draws=draws,
        seed=seed,
        pictures=pictures(data.studies),
        warnings=(*data.notes, *_warnings(data, groups, record)),
    )


def _warnings(data: LabelledScores, groups: Sequence[Subgroup], run: RunRecord | None) -> list[str]:
    found = []
    positives = int(data.label.sum())
    if run and run.synthetic:
        found.append("The training cohort is synthetic: figures show that the software works, and nothing of patients.")
    if positives < (least := minimum_positives(0.1, 0.1)):
        found.append(
            f"Only {positives} positives: one exam moves every figure by much, and none missed among so few does not "
            f"show a miss rate below 10 % (that takes {least}, at 90 % confidence)."
        )
    if data.lost:
        found.append(f"Not evaluated, {len(data.lost)} of the label table; the section on the cohort says why.")
    if few := sorted({f"{g.column} {g.value}" for g in groups if g.note}):
        found.append(
            f"Groups with under 5 positives or without negatives: {', '.join(few)}. Conclude nothing from them."
        )
    if run and data.models[0].threshold is not None and data.models[0].threshold != run.point.threshold:
        found.append(
            f"The scores were decided at threshold {data.models[0].threshold:g}, the run's threshold.json says "
            f"{run.point.threshold:g}: figures at the threshold are of the former."
        )
    return found
