"""New exams in, decisions out: what `configs/inference.json` and `pipelines/score.py` do."""

import io
import json
import logging
import secrets
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from ignite.engine import Events
from monai.engines import SupervisedEvaluator
from monai.transforms import Compose
from numpy.typing import NDArray
from pydicom.dataset import Dataset

from mri_alm.bundle import PACKAGES
from mri_alm.cohort import read_manifest
from mri_alm.dicom import StudyFiles, find_studies, study_key
from mri_alm.ensemble import SCORE_COLUMNS, TrainedRun, collect, for_each_study, progress_bar, score_rows
from mri_alm.errors import InputError, StudyError
from mri_alm.explain import nearest_threshold, write_explanations
from mri_alm.files import sha256, write_bytes, write_csv, write_json
from mri_alm.operating_point import OperatingPoint
from mri_alm.report import study_picture
from mri_alm.structured_report import check_highdicom, structured_report

logger = logging.getLogger("mri_alm")


class NewStudies:
    """Exams to score: found in DICOM folders or listed in a manifest, then prepared as the model was trained.

    Args:
        source: A folder with DICOM studies at any depth, or a manifest without label, patient and split
            (see :func:`mri_alm.cohort.read_manifest`).
        preprocessing: From the training run.
        salt: Secret that study keys of DICOM exams are derived with.
        threads: Exams prepared at once.

    Attributes:
        names: All exams, in the order of their keys (DICOM) or rows (manifest); not of their folders or of threads.
        prepared: Items of those that could be prepared: image, study, index, report.
        errors: Why the others could not.
        dicom: Files of the exams that were found in DICOM folders.

    Raises:
        InputError: If there is nothing to score.
    """

    def __init__(self, source: Path | str, preprocessing: Compose, *, salt: str, threads: int) -> None:
        source = Path(source)
        if source.is_dir():
            items, lost = _dicom_items(source, salt)
        elif source.suffix.lower() == ".csv":
            items, lost = [study.item() for study in read_manifest(source, labelled=False)], {}
        else:
            raise InputError(
                f"{source} is neither a folder nor a .csv manifest. Give a folder of DICOM studies, or a manifest."
            )
        self.prepared, errors = for_each_study(preprocessing, items, threads=threads, title="prepare")
        self.errors = lost | errors
        self.names = [item["study"] for item in items] if not lost else sorted([i["study"] for i in items] + [*lost])
        self.dicom: dict[str, StudyFiles] = {item["study"]: item["dicom"] for item in items if source.is_dir()}


def check_request(source: Path | str, *, sr: bool) -> None:
    """Refuse what cannot be done before hours of preparation.

    Raises:
        InputError: If structured reports are asked for and cannot be written.
    """
    if sr:
        check_highdicom()
        if not Path(source).is_dir():
            raise InputError(
                f"--sr refers to DICOM images, and {source} is a manifest. Give a folder of DICOM studies."
            )


def write_scores(
    studies: NewStudies,
    evaluator: SupervisedEvaluator | None,
    run: TrainedRun,
    output: Path | str,
    *,
    point: OperatingPoint,
    salt: str,
    sr: bool = False,
    explain: int = 0,
) -> None:
    """Score the prepared exams and write ``scores.csv``, ``report.json`` and one picture per exam.

    Args:
        studies: The exams.
        evaluator: Runs the ensemble over them; None when there is none.
        run: The trained run, for the record.
        output: Folder to write to.
        point: The threshold to decide at: the run's, or that of a calibration cohort.
        salt: See :class:`NewStudies`.
        sr: Also write a DICOM Structured Report per exam (DICOM folders only).
        explain: Also explain this many exams, those nearest the threshold.

    Raises:
        InputError: If the output cannot be written.
    """
    output = Path(output)
    reports = {item["study"]: json.loads(item["report"]) for item in studies.prepared}
    warnings = {name: " | ".join(report["warnings"]) for name, report in reports.items()}
    scored = score_rows(*_logits(evaluator, len(studies.prepared)), point, warnings)
    rows = {row["study"]: row for row in scored}
    for name, error in studies.errors.items():
        rows[name] = dict.fromkeys(SCORE_COLUMNS, "") | {
            "study": name,
            "warnings": f"NOT SCORED ({error.code}): {error}",
        }
    write_csv(output / "scores.csv", SCORE_COLUMNS, [rows[name] for name in studies.names])
    with progress_bar("write", len(studies.prepared), "study") as bar:
        for item in studies.prepared:
            row = rows[item["study"]]
            decision = "needed" if row["dce_needed"] else "not needed"
            title = f"{item['study']}   score {row['score']:.3f}   DCE {decision}   research only"
            write_bytes(output / f"{item['study']}.png", study_picture(item["image"], run.settings["spacing"], title))
            if sr:
                report = structured_report(
                    *(studies.dicom[item["study"]], row, reports[item["study"]]),
                    point=point,
                    checkpoints=run.checkpoints,
                    salt=salt,
                )
                write_bytes(output / f"{item['study']}_sr.dcm", _as_bytes(report))
            bar.update()
    record = _record(run, point) | {
        "studies": {name: reports.get(name) or {"error": studies.errors[name].code} for name in studies.names}
    }
    if explain and evaluator:
        images = {item["study"]: item["image"] for item in studies.prepared}
        chosen = {name: images[name] for name in nearest_threshold(scored, explain)}
        network = evaluator.network
        record["explanations"] = write_explanations(
            network, chosen, output, channels=network.members[0].channels, spacing=run.settings["spacing"]
        )
    write_json(output / "report.json", record)
    needed = sum(row["dce_needed"] for row in scored)
    logger.info("%d exams scored, DCE needed in %d, %d not scored.", len(scored), needed, len(studies.errors))
    logger.info("%s\nWritten: %s", point.in_words(), output)
    for name, error in studies.errors.items():
        logger.warning("Not scored: study %s: %s", name, error)


def _logits(evaluator: SupervisedEvaluator | None, count: int) -> tuple[list[str], NDArray[np.float64]]:
    """Names and members' logits, with a progress bar."""
    if evaluator is None:
        return [], np.empty((0, 1))
    with progress_bar("score", count, "study") as bar:

        def advance(engine: Any) -> None:
            bar.update(len(engine.state.batch["study"]))

        with evaluator.add_event_handler(Events.ITERATION_COMPLETED, advance):
            return collect(evaluator)


def _record(run: TrainedRun, point: OperatingPoint) -> dict[str, Any]:
    """What a score rests on: threshold, model, versions."""
    return {
        "threshold": point.to_json(),
        "model": {
            "settings": run.settings,
            "config_sha256": sha256(run.folder / "config.json"),
            "checkpoints_sha256": run.checkpoints,
        },
        "versions": {name: version(name) for name in PACKAGES},
    }


def _as_bytes(dataset: Dataset) -> bytes:
    buffer = io.BytesIO()
    dataset.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def salt_of(run: Path) -> str:
    """The run's secret for study keys: made once, readable by its owner only."""
    path = run / "salt"
    if not path.exists():
        write_bytes(path, secrets.token_hex(16).encode())
        path.chmod(0o600)
    return path.read_text()


def key_table(source: Path, salt: str) -> list[dict[str, str]]:
    """Which folder each study key stands for. It identifies patients: keep it apart from the results."""
    return [
        {"study": study_key(study.uid, salt), "folder": str(study.files[0].parent.resolve())}
        for study in find_studies(source)
        if study.files
    ]


def _dicom_items(source: Path, salt: str) -> tuple[list[dict[str, Any]], dict[str, StudyError]]:
    """One item per DICOM study below a folder; studies without a readable image are lost, with the reason."""
    found = find_studies(source)
    if not any(study.files or study.failed for study in found):
        raise InputError(f"{source} holds no DICOM images. Give the folder of a DICOM export, or a manifest (.csv).")
    items: list[dict[str, Any]] = []
    lost: dict[str, StudyError] = {}
    for study in found:
        name = study_key(study.uid, salt)
        if study.files:
            items.append({"study": name, "dicom": study, "label": 0.0, "index": len(items)})
        elif study.failed:
            lost[name] = StudyError(
                "no_images", f"none of its {len(study.failed)} files can be read: {next(iter(study.failed.values()))}."
            )
    return sorted(items, key=lambda item: str(item["study"])), lost
