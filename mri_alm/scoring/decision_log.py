"""Every decision in one table that only grows: the shadow log, and the calibration cohort that it becomes.

A row is one line, written in one go and on the disk before the next one; it ends in a checksum, so that a line torn by
a kill is told from a whole one and from one that somebody edited. Rows name studies as ``scores.csv`` does.
"""

import csv
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from scipy.special import expit

from mri_alm.bundle.run_folder import RunFolder, model_digest
from mri_alm.cohort.names import tidy
from mri_alm.cohort.protocol import BELOW_GATE
from mri_alm.errors import InputError
from mri_alm.evaluation.data import rows_by_study
from mri_alm.metrics.threshold import OperatingPoint
from mri_alm.runtime.atomic import append_lines, explain_os_errors
from mri_alm.runtime.files import DamagedFileError, read_file, sha256, write_bytes, write_json
from mri_alm.runtime.locks import exclusive_lock
from mri_alm.runtime.tables import LARGEST_TABLE, csv_line, unescape_formula, write_csv

logger = logging.getLogger("mri_alm")

LOG_COLUMNS = ("time", "study", "score", "members", "threshold", "rule", "dce_needed", "model", "check")
_HEADER = ",".join(LOG_COLUMNS)
_CHECK = 8  # characters of the checksum
_BASIS = ("score", "threshold", "dce_needed")  # of a log's row; scores.csv has them too


def check_log(path: Path | str | None) -> None:
    """Refuse a file that is no log of decisions before hours of work; none, or none yet, is right.

    Raises:
        InputError: If it is another file, or cannot be read.
    """
    if path is not None and Path(path).exists():
        _content(Path(path))


def append_decisions(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    logits: NDArray[Any],
    *,
    point: OperatingPoint,
    checkpoints: Mapping[str, str],
) -> None:
    """Add the decisions of one scoring.

    Args:
        path: The log; it is made the first time. Several processes may add to it.
        rows: As ``scores.csv`` has them, with a score each.
        logits: ``(N, M)``, the members' logits of the same exams; their scores (sigmoid) are kept.
        point: What was decided by.
        checkpoints: Digests of the members.

    Raises:
        InputError: If it is another file, or cannot be written.
    """
    now, model = datetime.now(timezone.utc).isoformat(timespec="seconds"), model_digest(checkpoints)
    lines = []
    for row, members in zip(rows, expit(logits).tolist(), strict=True):
        cells = [now, row["study"], row["score"], " ".join(map(repr, members))]
        lines.append(_line([*cells, row["threshold"], point.rule, row["dce_needed"], model]))
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(path.with_name(f".{path.name}.lock"), wait=True):
        check_log(path)
        if not path.exists():
            write_bytes(path, f"{_HEADER}\n".encode())
        append_lines(path, lines)


def read_log(path: Path) -> list[dict[str, str]]:
    """Rows of a log in the order they were written; a line that a crash cut short is left out, and named.

    Raises:
        InputError: If it is no log, or a line is not as it was written.
    """
    rows = []
    for number, line in enumerate(_content(path)[1:], 2):
        body, _, check = line.rpartition(",")
        cells = next(csv.reader([line]), [])
        if line and check == _checksum(body) and len(cells) == len(LOG_COLUMNS):
            rows.append(dict(zip(LOG_COLUMNS, map(unescape_formula, cells), strict=True)))
        elif line and (len(cells) < len(LOG_COLUMNS) or len(check) < _CHECK):
            logger.warning(
                "%s: line %d is cut short, as a crash or a full disk leaves it; it is not counted. Score that exam "
                "again to have it there.", path, number,
            )  # fmt: skip
        elif line:
            raise DamagedFileError(
                f"{path}: line {number} is not as it was written; its checksum differs. Somebody edited the log, or "
                "the disk failed. Restore it from a copy."
            )
    return rows


def decisions_of(path: Path, model: str) -> list[dict[str, str]]:
    """The rows of one model (:func:`mri_alm.bundle.run_folder.model_digest`), the last one of each study."""
    return list({row["study"]: row for row in read_log(path) if row["model"] == model}.values())


def calibration_cohort(log: Path, labels: Path, output: Path, *, run: Path | None = None) -> tuple[Path, Path]:
    """Make a cohort for ``--calibration`` of the logged exams whose outcome is known by now.

    Args:
        log: The log.
        labels: CSV with columns study and label (1, 0, or empty where it is not known yet); patient and others may be
            there and are kept.
        output: Folder for ``scores.csv``, ``labels.csv``, and ``report.json``, which says what model gave the scores.
        run: Run folder of the model to take, where the log holds several.

    Returns:
        The paths of scores and labels.

    Raises:
        InputError: If a file cannot be used or would be overwritten, a study has several outcomes, the log holds
            decisions of several models and no run says which, or no outcome is known.
    """
    model = _one_model(log, run)
    rows = decisions_of(log, model)
    scores, found = output / "scores.csv", output / "labels.csv"
    if own := [path for path in (log, labels) if path.resolve() in (scores.resolve(), found.resolve())]:
        raise InputError(f"{own[0]} would be overwritten by the cohort that is made of it: choose another --output.")
    table = rows_by_study(labels, ("study", "label"))
    outcomes = {tidy(study): row for study, row in table.items() if row["label"]}
    known = [row for row in rows if tidy(row["study"]) in outcomes]
    if not known:
        raise InputError(f"{labels} has no label for any of the {len(rows)} exams in {log}. Study names must agree.")
    if waiting := [row for row in rows if tidy(row["study"]) not in outcomes]:
        spared = sum(row["dce_needed"] == "0" for row in waiting)
        logger.warning(
            "%d of %d logged exams have no outcome yet; %d of them were spared. Where outcomes of spared exams are "
            "known less often, misses stay unseen and a threshold set on this cohort promises too much: take all exams "
            "up to a date.", len(waiting), len(rows), spared,
        )  # fmt: skip
    write_csv(scores, *_scores(known))
    of = [outcomes[tidy(row["study"])] | {"study": row["study"]} for row in known]
    write_csv(found, list(of[0]), of)
    write_json(output / "report.json", {"model": {"sha256": model}, "log_sha256": sha256(log)})
    return scores, found


def _scores(rows: Sequence[Mapping[str, str]]) -> tuple[Sequence[str], list[dict[str, str]]]:
    """Columns and rows as ``scores.csv`` has them; decisions are left out where several thresholds made them."""
    one = len({row["threshold"] for row in rows}) == 1
    if not one:
        logger.warning("The exams were decided at several thresholds: scores.csv holds scores without decisions.")
    kept = _BASIS if one else _BASIS[:1]
    table = [{"study": row["study"], **{name: row[name] for name in kept}} for row in rows]
    for row in table if one else ():
        gate = row["dce_needed"] == "1" and row["threshold"] != "" and float(row["score"]) < float(row["threshold"])
        row["quality"] = BELOW_GATE if gate else ""
    return list(table[0]), table


def _one_model(log: Path, run: Path | None) -> str:
    """The model whose decisions are taken."""
    rows = read_log(log)
    counts = Counter(row["model"] for row in rows)
    if run is not None:
        model = model_digest(RunFolder(run).operating_point()[1])
        if model not in counts:
            raise InputError(f"{log} holds no decision of {run}: its {len(rows)} rows are of other models.")
        return model
    if len(counts) != 1:
        each = ", ".join(f"{model[:8]}: {count}" for model, count in counts.items()) or "no row"
        raise InputError(
            f"{log} holds decisions of {len(counts)} models ({each}), and a calibration cohort is of one. Name the "
            "model's folder by --run, and keep a log a model from now on."
        )
    return next(iter(counts))


def _content(path: Path) -> list[str]:
    """The lines of a log, its header first."""
    try:
        lines = read_file(path, LARGEST_TABLE).decode(errors="replace").split("\n")  # a letter may be torn, too
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). --log takes the table of decisions.") from None
    if lines[0] != _HEADER:
        raise InputError(f"{path} is no log of decisions: its first line is another one. Give --log a file of its own.")
    return lines


def _line(cells: Iterable[Any]) -> str:
    text = csv_line(cells)
    return f"{text},{_checksum(text)}"


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):0{_CHECK}x}"
