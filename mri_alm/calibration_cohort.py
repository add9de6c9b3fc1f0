"""A separate calibration cohort: scores and labels read from CSV files, and the exact threshold they give."""

import csv
import io
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mri_alm.ensemble import TrainedRun
from mri_alm.errors import InputError
from mri_alm.operating_point import OperatingPoint
from mri_alm.threshold import neyman_pearson_threshold, one_per_patient

logger = logging.getLogger("mri_alm")

_SHOWN = 5  # studies named in one message


def calibrate(files: Sequence[Path | str], run: TrainedRun, *, alpha: float, eps: float) -> OperatingPoint:
    """The Neyman-Pearson threshold of a calibration cohort, one score per patient; may be "examine everyone".

    Args:
        files: One or two CSV files, joined by ``study``: between them the columns study, score (as `scores.csv` has it,
            of this very run's ensemble), label (0 or 1) and, where patients have several exams, patient. Exams of the
            second file that the first does not score are left out, so a manifest may serve.
        run: The run that is to be calibrated.
        alpha: Largest acceptable miss rate, in (0, 1).
        eps: Acceptable chance that it is larger, in (0, 1).

    Raises:
        InputError: If a file or row cannot be used, the scores are another model's, a patient was trained on, or a rate
            is out of range.
    """
    paths = [Path(file) for file in files]
    if len(paths) not in (1, 2):
        raise InputError(f"--calibration takes one CSV file, or scores and labels in two; got {len(paths)}.")
    _refuse_another_model(paths[0], run)
    rows = _scored(paths[0])
    if len(paths) == 2:
        rows = _joined(rows, _rows(paths[1], {"study", "label"}), paths)
    scores = [_number(row["score"], row["study"], "score", paths[0]) for row in rows]
    labels = [_label(row, paths[-1]) for row in rows]
    if any(not row.get("patient") for row in rows):
        logger.warning("Calibration: no column patient, so every study is taken for another patient.")
    patients = [row.get("patient") or row["study"] for row in rows]
    _refuse_trained_on(patients, run)
    return neyman_pearson_threshold(
        *one_per_patient(patients, np.array(labels), np.array(scores)), alpha, eps, source="calibration"
    )


def _rows(path: Path, columns: set[str]) -> list[dict[str, str]]:
    """Rows of a CSV file that must have some columns, each study once."""
    if not path.is_file():
        raise InputError(f"There is no file {path}. --calibration takes a CSV with columns study, label and score.")
    try:
        reader = csv.DictReader(io.StringIO(path.read_text("utf-8-sig"), newline=""))
        rows = [{key: (value or "").strip() for key, value in row.items() if key} for row in reader]
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text ({error.reason}). Save it as CSV in UTF-8.") from None
    if missing := sorted(columns - set(reader.fieldnames or ())):
        raise InputError(f"{path}: no column {', '.join(missing)}. Its columns are: {_names(reader.fieldnames or ())}.")
    if twice := [study for study, count in Counter(row["study"] for row in rows).items() if count > 1]:
        raise InputError(f"{path}: {_names(twice)} stand in several rows. Keep one row per study.")
    return rows


def _scored(path: Path) -> list[dict[str, str]]:
    rows = _rows(path, {"study", "score"})
    scored = [row for row in rows if row["score"]]
    if len(scored) < len(rows):
        logger.warning("Calibration: %d exams without a score are left out.", len(rows) - len(scored))
    return scored


def _joined(scores: list[dict[str, str]], labels: list[dict[str, str]], paths: Sequence[Path]) -> list[dict[str, str]]:
    known = {row["study"]: row for row in labels}
    if missing := [row["study"] for row in scores if row["study"] not in known]:
        raise InputError(
            f"{paths[1]} has no row for {_names(missing)}, scored in {paths[0]}. Add their labels, or leave them "
            "out of both files."
        )
    wanted = ("label", "patient")
    return [row | {name: known[row["study"]].get(name, "") for name in wanted} for row in scores]


def _label(row: dict[str, str], path: Path) -> int:
    if row.get("label") not in ("0", "1"):
        raise InputError(
            f'{path}: study {row["study"]} has label "{row.get("label", "")}". Write 1 (DCE needed) or 0 (not needed); '
            "labels may stand in a second file."
        )
    return int(row["label"])


def _number(text: str, study: str, column: str, path: Path) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1:
        raise InputError(f'{path}: study {study} has {column} "{text}", which is no probability in [0, 1].')
    return value


def _refuse_another_model(path: Path, run: TrainedRun) -> None:
    """Compare the digests written beside the scores; without them nobody can tell, which is said."""
    beside: list[tuple[str, tuple[str, ...]]] = [
        ("report.json", ("model", "checkpoints_sha256")),
        ("threshold.json", ("checkpoints",)),
    ]
    for name, keys in beside:
        if (path.parent / name).is_file():
            found: Any = json.loads((path.parent / name).read_text())
            for key in keys:
                found = found.get(key, {})
            if found != run.checkpoints:
                raise InputError(
                    f"{path} holds scores of another model. Score the calibration cohort with {run.folder}."
                )
            return
    logger.warning("Calibration: nothing beside %s tells which model gave its scores. It must be %s.", path, run.folder)


def _refuse_trained_on(patients: Iterable[str], run: TrainedRun) -> None:
    trained = {row["patient"] for row in _rows(run.folder / "splits.csv", {"study", "patient"})}
    if known := sorted({*patients} & trained):
        raise InputError(
            f"{len(known)} calibration patients have names that the model was trained on: {_names(known)}. A guarantee "
            "needs others. If they are others, rename them."
        )


def _names(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
