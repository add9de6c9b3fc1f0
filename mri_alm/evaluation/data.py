"""Scores and truth side by side: every study once in every file, or a sentence on what does not fit."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mri_alm.bundle.run_folder import model_digest
from mri_alm.cohort.manifest import RENAMED_COLUMNS
from mri_alm.cohort.names import by_number, likely_cause, loosely, one_spelling, tidy
from mri_alm.cohort.protocol import BELOW_GATE
from mri_alm.errors import InputError, shortened
from mri_alm.metrics.ranking import Floats
from mri_alm.metrics.threshold import one_score_per_patient
from mri_alm.runtime.files import Fields, read_json, sha256
from mri_alm.runtime.tables import read_table

logger = logging.getLogger("mri_alm")

_Row = dict[str, str]
_TRAINING = "training study"
_SHOWN = 10  # studies named in one message


@dataclass(frozen=True)
class ModelScores:
    """What one model says of the evaluated studies.

    Attributes:
        name: As shown in every table.
        score: ``(N,)``, finite, of any kind that grows with suspicion.
        threshold: The one its file decided with; -inf is "examine everyone", None: the file decides nothing, as it has
            no such column, or no threshold and no decision in any row.
        spread: ``(N,)`` standard deviation of the members' logits; NaN where unknown.
        warnings: ``(N,)`` quality warnings, empty where there are none.
        sha256: Of the file.
        below_gate: ``(N,)``, whether DCE is asked for whatever the score, for the exam's quality.
    """

    name: str
    score: Floats
    threshold: float | None
    spread: Floats
    warnings: tuple[str, ...]
    sha256: str
    below_gate: NDArray[np.bool_]

    @property
    def needed(self) -> NDArray[np.bool_] | None:
        """``(N,)``, whether its file asks for DCE; None: it decides nothing."""
        return None if self.threshold is None else (self.score >= self.threshold) | self.below_gate


@dataclass(frozen=True)
class LabelledScores:
    """An evaluation's cohort.

    Attributes:
        studies: ``(N,)`` names, in the order of the label table.
        label: ``(N,)`` in {0, 1}, both present.
        models: One per file of scores.
        columns: The label table's columns, ``(N,)`` each; what subgroups are made of.
        left_out: Studies of the label table that are not evaluated, with the reason.
        sha256: Of the label table.
    """

    studies: tuple[str, ...]
    label: NDArray[np.int64]
    models: tuple[ModelScores, ...]
    columns: dict[str, tuple[str, ...]]
    left_out: dict[str, str]
    sha256: str

    @property
    def positives(self) -> int:
        """How many need DCE."""
        return int(self.label.sum())

    @property
    def negatives(self) -> int:
        """How many do not."""
        return len(self.studies) - self.positives

    @property
    def patients(self) -> list[str]:
        """Whose study each is; where nothing says it, the study stands for its patient."""
        named = self.columns.get("patient", self.studies)
        return one_spelling(patient or study for patient, study in zip(named, self.studies, strict=True))

    @property
    def lost(self) -> list[str]:
        """Studies left out that are not the training's."""
        return [study for study, reason in self.left_out.items() if reason != _TRAINING]

    def in_words(self) -> str:
        """How many exams, and of which kind."""
        return f"{len(self.studies)} exams: {self.positives} need DCE, {self.negatives} do not"


def read_labelled_scores(
    scores: Mapping[str, Path], labels: Path, *, exclude: Collection[str] = (), trained_on: Collection[str] = ()
) -> LabelledScores:
    """Read and match files of scores (as `scores.csv`) and a table of labels; nothing is dropped in silence.

    Left out, with the reason, are rows of the label table that were excluded, failed in preparation, have no label, or
    belong to a training cohort (``side`` is ``train`` and no such study has a score), and studies that a file of
    scores lists without a score.

    Args:
        scores: Model name to a CSV with columns study and score; optional threshold, dce_needed, spread, warnings.
        labels: CSV with columns study and label; a cohort's manifest will do.
        exclude: Studies the training run left out.
        trained_on: Studies the model was trained on; a score of one is refused.

    Raises:
        InputError: If a file cannot be read, a study stands in one file and not in another, a value is no finite
            number, a label is missing, or only one class is left. Every problem of this kind is named at once.
    """
    truth = rows_by_study(labels, ("study", "label"))
    spelling = {tidy(study): study for study in truth}
    tables = {name: rows_by_study(path, ("study", "score"), spelling) for name, path in scores.items()}
    scored = {study for table in tables.values() for study in table}
    trained = {loosely(tidy(study)) for study in trained_on}
    if known := sorted(study for study in scored if loosely(tidy(study)) in trained):
        raise InputError(
            f"Among the scores are training studies of this run: {_named(known)}. They say nothing about new patients. "
            "Leave them out; or, if they only share a name with training studies, rename them or omit --run."
        )
    left_out = _left_out(truth, scored, {spelling.get(tidy(study), study) for study in exclude})
    expected = [study for study in truth if study not in left_out]
    problems = _mismatches(tables, scores, set(expected), labels)
    problems += [
        f'{labels}: study {study} has label "{truth[study]["label"]}". Write 1 (DCE needed) or 0 (not needed).'
        for study in expected
        if truth[study]["label"] not in ("0", "1")
    ]
    for name, table in tables.items():
        problems += [f"{scores[name]}: {text}" for text in _bad_scores(table)]
    if problems:
        raise InputError("\n".join(problems))
    for table in tables.values():
        lost = {study: row for study, row in table.items() if row["score"] == ""}
        left_out |= {study: row.get("warnings") or "not scored" for study, row in lost.items()}
    keys = tuple(study for study in expected if study not in left_out)
    label = np.array([int(truth[study]["label"]) for study in keys], dtype=np.int64)
    if len(set(label.tolist())) < 2:
        raise InputError(
            f"{labels}: the {label.size} studies with a score all have one label or there are none; an evaluation "
            "needs both classes."
        )
    return LabelledScores(
        studies=tuple(next(iter(tables.values()))[study]["study"] for study in keys),  # as their pictures are called
        label=label,
        models=tuple(
            _model_scores(name, scores[name], [table[study] for study in keys]) for name, table in tables.items()
        ),
        columns={column: tuple(truth[study][column] for study in keys) for column in truth[keys[0]]},
        left_out=left_out,
        sha256=sha256(labels),
    )


@dataclass(frozen=True)
class HardExam:
    """A training exam whose constraint was hard to satisfy.

    Attributes:
        study: Its name; it needs DCE, as only those have a constraint.
        multiplier: Mean of its multiplier over the members that trained on it, each as a share of that member's
            largest, in [0, 1].
        members: How many trained on it.
    """

    study: str
    multiplier: float
    members: int


def read_hardest(path: Path, *, most: int = 10) -> tuple[HardExam, ...]:
    """Read the first of a run's training exams by their multipliers, the hardest first; empty where nothing is told.

    Raises:
        InputError: If it cannot be read, or holds something else than it was written with.
    """
    if not path.is_file():
        return ()
    rows = read_table(path, ("study", "lambda", "rank", "members"))
    for row in rows:
        whole = row["rank"].isdecimal() and row["members"].isdecimal()
        if not whole or not _finite(row["lambda"]) or not 0 <= float(row["lambda"]) <= 1:
            raise InputError(
                f"{path}: study {row['study']} has lambda {row['lambda']}, rank {row['rank']} and members "
                f"{row['members']}; a share and two whole numbers were written. Start the training again: it writes it."
            )
    rows.sort(key=lambda row: int(row["rank"]))
    return tuple(HardExam(row["study"], float(row["lambda"]), int(row["members"])) for row in rows[:most])


def read_calibration(
    scores: Path, labels: Path, *, trained_on: Collection[str] = (), apart_from: Collection[str] = ()
) -> tuple[NDArray[np.int64], Floats]:
    """Labels and scores ``(P,)`` of a calibration cohort, one row per patient and label.

    Args:
        scores: CSV with columns study and score, of a cohort that the model never saw.
        labels: CSV with columns study and label; with a column patient, a patient counts once.
        trained_on: Studies the model was trained on.
        apart_from: Patients and studies that must not be in it: those trained on, those the threshold is tried on.

    Raises:
        InputError: See :func:`read_labelled_scores`; or a patient is among those that must not be.
    """
    found = read_labelled_scores({"calibration": scores}, labels, trained_on=trained_on)
    theirs = {loosely(tidy(name)) for name in apart_from}
    if known := {name for name in (*found.patients, *found.studies) if loosely(tidy(name)) in theirs}:
        raise InputError(
            f"{len(known)} calibration patients or studies were trained on, or are evaluated too (such as "
            f"{min(known)}): a guarantee needs others. If they only share a name, or a number but for leading zeros, "
            "rename them."
        )
    return one_score_per_patient(found.patients, found.label, found.models[0].score)


def refuse_another_model(path: Path, run: Path, checkpoints: Mapping[str, str]) -> None:
    """Compare the digests that stand beside scores; where there are none nobody can tell, and that is said.

    Raises:
        InputError: If they are those of other checkpoints than the run's, or cannot be read.
    """
    report, threshold = path.with_name("report.json"), path.with_name("threshold.json")
    if report.is_file():
        model = Fields(str(report), read_json(report)).object("model")
        one = "sha256" in model.content  # as a log of decisions names its model
        found = model.text("sha256") if one else model_digest(model.object("checkpoints_sha256").content)
    elif threshold.is_file():
        found = model_digest(Fields(str(threshold), read_json(threshold)).object("checkpoints").content)
    else:
        logger.warning("Calibration: nothing beside %s tells which model gave its scores; it must be %s.", path, run)
        return
    if found != model_digest(checkpoints):
        raise InputError(f"{path} holds scores of another model. Score the calibration cohort with {run}.")


def rows_by_study(
    path: Path, required: Collection[str], spelling: Mapping[str, str] = MappingProxyType({})
) -> dict[str, _Row]:
    """Rows of a CSV file by study, cells stripped.

    Args:
        path: The file.
        required: Columns it must have, study among them.
        spelling: A tidied name to the one that another table has for it, under which its row is given.

    Raises:
        InputError: See :func:`mri_alm.runtime.tables.read_table`; or a study has several rows, or a row no name.
    """
    found: dict[str, list[_Row]] = defaultdict(list)
    for row in read_table(path, required, renamed=RENAMED_COLUMNS):
        found[tidy(row["study"])].append(row)
    twice = [same[0]["study"] or "without name" for name, same in found.items() if len(same) > 1 or not name]
    if twice:
        raise InputError(f"{path}: several rows, or no name, for {_named(twice)}. Keep one row of each.")
    return {spelling.get(name, row["study"]): row for name, (row,) in found.items()}


def _left_out(truth: Mapping[str, _Row], scored: set[str], exclude: Collection[str]) -> dict[str, str]:
    """Studies without a score that need none, with the reason."""
    trains = {study for study, row in truth.items() if row.get("side") == "train"}
    found = {}
    for study, row in truth.items():
        if study in scored:
            continue
        if study in exclude:
            found[study] = "left out by the training run's setting exclude"
        elif row.get("status") == "failed":
            found[study] = f"failed in preparation ({row.get('error_code') or 'no code'})"
        elif study in trains and not trains & scored:
            found[study] = _TRAINING
        elif row["label"] == "":
            found[study] = "no label"
    return found


def _mismatches(
    tables: Mapping[str, Mapping[str, _Row]], paths: Mapping[str, Path], expected: set[str], labels: Path
) -> list[str]:
    problems = []
    for name, table in tables.items():
        extra, missing = sorted(table.keys() - expected), sorted(expected - table.keys())
        if extra:
            problems.append(f"{paths[name]}: no row in {labels} for {_named(extra)}. Add the labels.")
        if missing:
            problems.append(
                f"{paths[name]}: no row there for {_named(missing)} of {labels}. Score them, or take them out of the "
                "labels: an exam that is lost must not look like one that went well."
            )
        for strange, known, path in ((extra, expected, paths[name]), (missing, set(table), labels)):
            numbers = by_number(map(tidy, known))
            causes = Counter(filter(None, (likely_cause(tidy(study), numbers) for study in strange)))
            problems += [
                f"{path}: {count} names {cause}. A table was probably opened in Excel: restore it, or make the column "
                "study a text there."
                for cause, count in causes.items()
            ]
    return problems


def _bad_scores(table: Mapping[str, _Row]) -> list[str]:
    bad = [(study, row["score"]) for study, row in table.items() if row["score"] != "" and not _finite(row["score"])]
    more = [f"... and {len(bad) - _SHOWN} more scores that are no finite numbers."] if len(bad) > _SHOWN else []
    return [
        f'study {study} has score "{value}", which is no finite number'
        + (
            ": write decimals with a point."
            if "," in value
            else ". Score it again, or leave the cell empty to count it as not scored."
        )
        for study, value in bad[:_SHOWN]
    ] + more


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _model_scores(name: str, path: Path, rows: list[_Row]) -> ModelScores:
    score = np.array([float(row["score"]) for row in rows])
    spread = [row.get("spread", "") for row in rows]
    return ModelScores(
        name=name,
        score=score,
        threshold=_threshold(path, rows, score),
        below_gate=_below_gate(rows),
        spread=np.array([float(text) if _finite(text) else math.nan for text in spread]),
        warnings=tuple(row.get("warnings", "") for row in rows),
        sha256=sha256(path),
    )


def _threshold(path: Path, rows: list[_Row], score: Floats) -> float | None:
    """The one threshold of a file, checked against its decisions; an empty cell is "examine everyone"."""
    if "threshold" not in rows[0]:
        return None
    values = {row["threshold"] for row in rows}
    if len(values) > 1 or not all(value == "" or _finite(value) for value in values):
        raise InputError(
            f"{path}: column threshold must hold one number throughout, found {len(values)} values. "
            "Evaluate files of different operating points apart."
        )
    (text,) = values
    threshold = float(text) if text else -math.inf
    needed = [row.get("dce_needed") for row in rows]
    if not text and set(needed) == {""}:
        return None
    asked = (score >= threshold) | _below_gate(rows)
    wrong = [i for i, (a, n) in enumerate(zip(asked, needed, strict=True)) if n and n != str(int(a))]
    if wrong:
        i = wrong[0]
        raise InputError(
            f"{path}: study {rows[i]['study']} has dce_needed {needed[i]} at score {score[i]:g} and threshold "
            f"{text or 'none'}; that is not score >= threshold. Restore the file that score.py wrote."
        )
    return threshold


def _below_gate(rows: list[_Row]) -> NDArray[np.bool_]:
    return np.array([row.get("quality", "").startswith(BELOW_GATE) for row in rows])


def _named(studies: list[str]) -> str:
    return f"{len(studies)} {'study' if len(studies) == 1 else 'studies'} ({shortened(studies)})"
