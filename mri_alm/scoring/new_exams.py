"""New exams in, decisions out: what `configs/inference.json` and `pipelines/score.py` do."""

import io
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from ignite.engine import Events
from monai.engines import SupervisedEvaluator
from monai.transforms import Compose
from numpy.typing import NDArray
from pydicom.dataset import Dataset

from mri_alm.bundle.config import PACKAGES
from mri_alm.bundle.trained_run import SCORE_COLUMNS, TrainedRun, collect, score_rows
from mri_alm.bundle.transforms import for_each_study
from mri_alm.cohort.manifest import read_manifest
from mri_alm.errors import InputError, StudyError
from mri_alm.evaluation.data import read_calibration, refuse_another_model
from mri_alm.imaging.dicom_files import StudyFiles, find_studies
from mri_alm.imaging.pictures import study_picture
from mri_alm.metrics.threshold import OperatingPoint, certificate_in_words, neyman_pearson_threshold
from mri_alm.runtime.atomic import explain_os_errors, private_files
from mri_alm.runtime.files import sha256, write_bytes, write_json
from mri_alm.runtime.progress import progress_bar
from mri_alm.runtime.pseudonyms import secret_of, study_key
from mri_alm.runtime.tables import write_csv
from mri_alm.scoring.explain import nearest_threshold, write_explanations
from mri_alm.scoring.structured_report import check_highdicom, structured_report

logger = logging.getLogger("mri_alm")


class NewStudies:
    """Exams to score: found in DICOM folders or listed in a manifest, then prepared as the model was trained.

    Args:
        source: A folder with DICOM studies at any depth, or a manifest without label, patient and split
            (see :func:`mri_alm.cohort.read_manifest`).
        preprocessing: From the training run.
        salt: Secret that study keys of DICOM exams are derived with.
        threads: Exams prepared at once.
        allow_outside_paths: Whether a manifest may name files outside its folder.
        outside: The same, as bundles of version 0.1 spell it.

    Attributes:
        names: All exams, in the order of their keys (DICOM) or rows (manifest); not of their folders or of threads.
        prepared: Items of those that could be prepared: image, study, index.
        reports: What was found of each of them: facts and warnings.
        errors: Why the others could not.
        dicom: Files of the exams that were found in DICOM folders.

    Raises:
        InputError: If there is nothing to score.
    """

    def __init__(
        self,
        source: Path | str,
        preprocessing: Compose,
        *,
        salt: str,
        threads: int,
        allow_outside_paths: bool = False,
        outside: bool = False,
    ) -> None:
        source, allowed = Path(source), allow_outside_paths or outside
        if source.is_dir():
            items, lost = _dicom_items(source, salt)
        elif source.suffix.lower() == ".csv":
            studies = read_manifest(source, labelled=False, allow_outside_paths=allowed)
            items, lost = [study.item() for study in studies], {}
        else:
            raise InputError(
                f"{source} is neither a folder nor a .csv manifest. Give a folder of DICOM studies, or a manifest."
            )
        self.prepared, errors = for_each_study(preprocessing, items, threads=threads, title="prepare")
        self.reports: dict[str, Any] = {item["study"]: item.pop("report") for item in self.prepared}
        self.errors = lost | errors
        names = [item["study"] for item in items] + list(lost)
        self.names = sorted(names) if source.is_dir() else names
        self.dicom: dict[str, StudyFiles] = {item["study"]: item["dicom"] for item in items if source.is_dir()}


def operating_point(
    run: TrainedRun, calibration: Path | str | None, labels: Path | str | None, *, alpha: float, eps: float
) -> OperatingPoint:
    """The run's own threshold, or one with a guarantee from a separate calibration cohort.

    Args:
        run: The trained run.
        calibration: The ``scores.csv`` that this run gave a cohort it never saw; None for the run's threshold.
        labels: CSV with columns study and label of that cohort; with a column patient a patient counts once.
        alpha: Largest acceptable miss rate, in (0, 1).
        eps: Acceptable chance that it is larger, in (0, 1).

    Raises:
        InputError: If a file cannot be used, the scores are another model's, or the calibration cohort holds exams or
            patients the run was trained with.
    """
    if calibration is None:
        return run.point
    if labels is None:
        raise InputError("--calibration needs --labels: a CSV with columns study and label of the same exams.")
    refuse_another_model(Path(calibration), run.folder, run.checkpoints)
    trained = _training_exams(run)
    rows = read_calibration(
        Path(calibration), Path(labels),
        trained_on={row["study"] for row in trained}, apart_from={row["patient"] for row in trained},
    )  # fmt: skip
    logger.info("Calibration: %s", certificate_in_words(int(rows[0].sum()), alpha, eps))
    return neyman_pearson_threshold(*rows, alpha, eps, source="calibration")


def _training_exams(run: TrainedRun) -> list[dict[str, str]]:
    """Exams the run was trained with; an exported bundle does not name them, and that is said."""
    if run.run.splits.is_file():
        return run.run.trained_exams()
    logger.warning(
        "Calibration: %s does not name its training exams; that yours are others is yours to know.", run.folder
    )
    return []


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


@private_files()
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
        point: The threshold, see :func:`operating_point`.
        salt: See :class:`NewStudies`.
        sr: Also write a DICOM Structured Report per exam (DICOM folders only).
        explain: Also explain this many exams, those nearest the threshold.

    Raises:
        InputError: If the output cannot be written.
    """
    output = Path(output)
    warnings = {name: " | ".join(report["warnings"]) for name, report in studies.reports.items()}
    names, logits = _logits(evaluator, len(studies.prepared))
    for name, row in zip(names, logits, strict=True):
        if not np.isfinite(row).all():
            studies.errors[name] = StudyError("no_score", "a model's answer is no finite number; look at its images.")
    good = [number for number, name in enumerate(names) if name not in studies.errors]
    studies.prepared = [item for item in studies.prepared if item["study"] not in studies.errors]
    scored = score_rows([names[number] for number in good], logits[good], point, warnings)
    rows = {row["study"]: row for row in scored}
    for name, error in studies.errors.items():
        rows[name] = dict.fromkeys(SCORE_COLUMNS, "") | {
            "study": name,
            "warnings": f"NOT SCORED ({error.code}): {error}",
        }
    with explain_os_errors(output):  # digests of an earlier model must not stand beside these scores, whatever happens
        (output / "report.json").unlink(missing_ok=True)
    write_csv(output / "scores.csv", SCORE_COLUMNS, [rows[name] for name in studies.names])
    with progress_bar("write", len(studies.prepared), "study") as bar:
        for item in studies.prepared:
            row = rows[item["study"]]
            decision = "needed" if row["dce_needed"] else "not needed"
            title = f"{item['study']}   score {row['score']:.3f}   DCE {decision}   research only"
            picture = study_picture(item["image"].numpy(), run.settings["spacing"], title)
            write_bytes(output / f"{item['study']}.png", picture)
            if sr:
                report = structured_report(
                    *(studies.dicom[item["study"]], row, studies.reports[item["study"]]),
                    point=point,
                    checkpoints=run.checkpoints,
                    salt=salt,
                )
                write_bytes(output / f"{item['study']}_sr.dcm", _as_bytes(report))
            bar.update()
    record = _record(run, point) | {
        "studies": {name: studies.reports.get(name) or {"error": studies.errors[name].code} for name in studies.names}
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
            "settings": run.run.public_settings,
            "config_sha256": sha256(run.run.config),
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
    return secret_of(run)


def key_table(studies: NewStudies) -> list[dict[str, str]]:
    """Which folder each study key stands for. It identifies patients: keep it apart from the results."""
    return [{"study": name, "folder": str(study.files[0].parent.resolve())} for name, study in studies.dicom.items()]


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
