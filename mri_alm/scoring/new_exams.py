"""New exams in, decisions out: what `configs/inference.json` and `pipelines/score.py` do."""

import contextlib
import io
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from ignite.engine import Events
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator
from monai.transforms import Compose
from numpy.typing import NDArray
from pydicom.dataset import Dataset as Header

from mri_alm.bundle.config import PACKAGES
from mri_alm.bundle.trained_run import SCORE_COLUMNS, TrainedRun, collect, score_rows
from mri_alm.bundle.transforms import for_each_study
from mri_alm.cohort.layouts import Input, StudySource, detect_layout, find_sources
from mri_alm.cohort.manifest import read_manifest
from mri_alm.cohort.protocol import BELOW_GATE, UNLIKE, quality_counts, quality_of, training_note
from mri_alm.cohort.rules import CohortRules
from mri_alm.errors import InputError, StudyError
from mri_alm.evaluation.data import read_calibration, refuse_another_model
from mri_alm.imaging.dicom_files import StudyFiles, with_headers
from mri_alm.imaging.pictures import SliceSheet, slice_sheet, study_picture
from mri_alm.imaging.registration import Images
from mri_alm.metrics.threshold import OperatingPoint, certificate_in_words, neyman_pearson_threshold
from mri_alm.runtime.atomic import explain_os_errors, private_files
from mri_alm.runtime.bug_reports import BUG_REPORT, UnexpectedError, ends_the_run, study_failure, unexpected
from mri_alm.runtime.files import no_files, sha256, write_bytes, write_json
from mri_alm.runtime.progress import progress_bar
from mri_alm.runtime.pseudonyms import key_secret, study_key
from mri_alm.runtime.tables import read_table, write_csv
from mri_alm.scoring.explain import nearest_threshold, write_explanations
from mri_alm.scoring.page import PAGE, write_scores_page
from mri_alm.scoring.shift import Watch
from mri_alm.scoring.structured_report import check_highdicom, structured_report

logger = logging.getLogger("mri_alm")


class NewStudies:
    """Exams to score: found in a folder or table, or listed in a manifest, then prepared as the model was trained.

    Args:
        source: A folder of any layout, or a table of image files, see :func:`mri_alm.cohort.layouts.find_sources`: the
            exams get their keys for names. Or a manifest (:func:`is_manifest`), which names them itself; label, patient
            and side may be missing (see :func:`mri_alm.cohort.read_manifest`).
        preprocessing: From the training run.
        salt: Secret that study keys are made with.
        threads: Exams prepared at once.
        allow_outside_paths: Whether a manifest or table may name files outside its folder, and links in a folder may
            lead out of it.
        outside: The same, as bundles of version 0.1 spell it.

    Attributes:
        names: All exams, in the order of their keys, or of a manifest's rows; not of their folders or of threads.
        prepared: Items of those that could be prepared: image, study, index.
        reports: What was found of each of them: facts and warnings.
        errors: Why the others could not.
        sources: Where the exams lie that have keys for names.
        sheets: Slices of every exam that could be registered, to look at; or why there are none.

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
        self.sources: dict[str, StudySource] = {}
        if is_manifest(source):
            items = [row.item() for row in read_manifest(source, labelled=False, allow_outside_paths=allowed)]
        else:
            found = _find(source, allow_outside_paths=allowed)
            self.sources = dict(sorted((study_key(one.uid, salt), one) for one in found.sources))
            items = [one.item | {"study": key, "label": 0.0} for key, one in self.sources.items() if not one.error]
            items = [item | {"index": index} for index, item in enumerate(items)]
        lost = {key: one.error for key, one in self.sources.items() if one.error}
        preparation = _Prepared(preprocessing)
        self.prepared, errors = for_each_study(preparation, items, threads=threads)
        self.sheets = preparation.sheets
        self.reports: dict[str, Any] = {item["study"]: item.pop("report") for item in self.prepared}
        self.errors = lost | errors
        self.names = list(self.sources) or [item["study"] for item in items]


@dataclass(frozen=True)
class _Prepared:
    preprocessing: Compose
    sheets: dict[str, SliceSheet | Exception] = field(default_factory=dict)

    def __call__(self, item: dict[str, Any]) -> Any:
        """An exam prepared, or whatever hinders it as its own failure: nothing is written here that others need."""
        try:
            dicom = item.get("dicom")
            headers = {"dicom": with_headers(dicom)} if isinstance(dicom, StudyFiles) else {}
            return self.preprocessing(item | headers | {"show": partial(self._draw, item["study"])})
        except Exception as error:
            raise study_failure(error) from error

    def _draw(self, study: str, images: Images) -> None:
        """Keep an exam's slices to look at; what goes wrong with them is said of its row, and costs no score."""
        try:
            self.sheets[study] = slice_sheet(images)
        except Exception as error:
            self.sheets[study] = error


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


def check_request(source: Path | str, *, sr: bool, salt_file: Path | str | None = None) -> None:
    """Refuse what cannot be done before hours of preparation.

    Raises:
        InputError: If structured reports are asked for and cannot be written, or a file for the keys holds no secret.
    """
    if salt_file is not None:
        key_secret(salt_file)
    if sr:
        check_highdicom()
        if not Path(source).is_dir() or detect_layout(Path(source)) != "dicom":
            raise InputError(f"--sr refers to DICOM images, and {source} is no folder of DICOM studies. Give one.")


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
    watch: Watch | None = None,
) -> None:
    """Score the prepared exams and write ``scores.csv``, ``report.json``, one picture per exam and ``index.html``.

    Args:
        studies: The exams.
        evaluator: Runs the ensemble over them; None when there is none.
        run: The trained run, for the record.
        output: Folder to write to.
        point: The threshold, see :func:`operating_point`.
        salt: See :class:`NewStudies`.
        sr: Also write a DICOM Structured Report per exam (DICOM folders only).
        explain: Also explain this many exams, those nearest the threshold.
        watch: Logs the decisions, and compares the exams with those known; None: without a log.

    Raises:
        InputError: If the output cannot be written.
    """
    output = Path(output)
    scored, logits = _decide(studies, evaluator, run, point)
    shift = (watch or Watch(run)).take(scored, logits, point)  # in the log before anybody can read them elsewhere
    rows = {row["study"]: row for row in scored} | _lost_rows(studies, run, output)
    table = [rows[name] for name in studies.names]
    with explain_os_errors(output):  # digests of an earlier model must not stand beside these scores, whatever happens
        for name in ("report.json", PAGE):
            (output / name).unlink(missing_ok=True)
    write_csv(output / "scores.csv", SCORE_COLUMNS, table)
    with progress_bar("write", len(studies.prepared), "study") as bar:
        for item in studies.prepared:
            row = rows[item["study"]]
            with _going_on(output, row, "slices on the page"):
                if isinstance(problem := studies.sheets.get(item["study"]), Exception):
                    raise problem
            with _going_on(output, row, "picture"):
                picture = study_picture(item["image"].numpy(), run.settings["spacing"], _title(row))
                write_bytes(output / f"{item['study']}.png", picture)
            if sr:
                with _going_on(output, row, "structured report"):
                    dicom = with_headers(studies.sources[item["study"]].item["dicom"])
                    facts, digests = studies.reports[item["study"]], run.checkpoints
                    report = structured_report(dicom, row, facts, point=point, checkpoints=digests, salt=salt)
                    write_bytes(output / f"{item['study']}_sr.dcm", _as_bytes(report))
            bar.update()
    write_csv(output / "scores.csv", SCORE_COLUMNS, table)  # with what failed since
    reports = {name: report | {"quality": str(quality_of(report))} for name, report in studies.reports.items()}
    record = _record(run, point) | {
        "shift": shift,
        "studies": {name: reports.get(name) or {"error": studies.errors[name].code} for name in studies.names},
    }
    if explain and evaluator:
        chosen = nearest_threshold(scored, explain)
        record |= _explanations(studies, evaluator, run, output, chosen=chosen)
    write_json(output / "report.json", record)
    lost = [shift["in_words"]] if shift["promise"] == "lost" else []
    _write_page(studies, table, output, point=point, notices=[*_model_notices(run.trained_on), *lost])
    _say(scored, studies, run, point)
    logger.log(logging.WARNING if lost else logging.INFO, "%s", shift["in_words"])
    logger.info("Written: %s", output)
    if (output / PAGE).exists():
        logger.info("Open in a browser: %s", output / PAGE)


def _write_page(
    studies: NewStudies,
    table: Sequence[Mapping[str, Any]],
    output: Path,
    *,
    point: OperatingPoint,
    notices: Sequence[str],
) -> None:
    """The page of all exams; without it the scores stand all the same."""
    sheets = {name: sheet for name, sheet in studies.sheets.items() if isinstance(sheet, SliceSheet)}
    told = {"study": "page", "warnings": ""}
    with _going_on(output, told, PAGE):
        words, keyed = point.in_words(), bool(studies.sources)
        write_scores_page(output, table, sheets, threshold=words, notices=notices, keyed=keyed)
    if told["warnings"]:
        logger.warning("%s", told["warnings"])


def _decide(
    studies: NewStudies, evaluator: SupervisedEvaluator | None, run: TrainedRun, point: OperatingPoint
) -> tuple[list[dict[str, Any]], NDArray[np.float64]]:
    """Rows and members' logits of the exams that got a score; the others are noted among the errors."""
    names, logits, errors = _logits(evaluator, studies.prepared)
    studies.errors |= errors
    for name, row in zip(names, logits, strict=True):
        if not np.isfinite(row).all():
            studies.errors[name] = StudyError("no_score", "a model's answer is no finite number; look at its images.")
    good = [number for number, name in enumerate(names) if name not in studies.errors]
    studies.prepared = [item for item in studies.prepared if item["study"] not in studies.errors]
    kept = [names[number] for number in good]
    largest, kinds = bool(run.point.folds), run.trained_on
    return score_rows(kept, logits[good], point, studies.reports, trained_on=kinds, largest=largest), logits[good]


def _lost_rows(studies: NewStudies, run: TrainedRun, output: Path) -> dict[str, dict[str, Any]]:
    """Rows of the exams without a score, and a bug report of each that met a fault of ours."""
    rows = {}
    for name, error in studies.errors.items():
        if isinstance(error, UnexpectedError):
            write_bytes(output / f"{name}_{BUG_REPORT}", error.report.encode())
        rows[name] = dict.fromkeys(SCORE_COLUMNS, "") | {
            "study": name,
            "warnings": f"NOT SCORED ({error.code}): {error}",
            "model_note": training_note(run.trained_on),
        }
    return rows


def _explanations(
    studies: NewStudies, evaluator: SupervisedEvaluator, run: TrainedRun, output: Path, *, chosen: Sequence[str]
) -> dict[str, Any]:
    """Write the pictures of some exams; gives the record, empty when they cannot be made."""
    images = {item["study"]: item["image"] for item in studies.prepared}
    network, told = evaluator.network, {"study": "explanations", "warnings": ""}
    with _going_on(output, told, "explanations"):
        wanted = {name: images[name] for name in chosen}
        channels, spacing = network.members[0].channels, run.settings["spacing"]
        return {"explanations": write_explanations(network, wanted, output, channels=channels, spacing=spacing)}
    logger.warning("%s", told["warnings"])
    return {}


def _say(scored: Sequence[Mapping[str, Any]], studies: NewStudies, run: TrainedRun, point: OperatingPoint) -> None:
    """The closing lines on the terminal: results, what the model is, and exams it should not be trusted with."""
    decided = f"DCE needed in {sum(row['dce_needed'] for row in scored)}" if point.n_positive else "no decision"
    logger.info("%d exams scored, %s, %d not scored.", len(scored), decided, len(studies.errors))
    logger.info("%s", point.in_words())
    for name, error in studies.errors.items():
        logger.warning("Not scored: study %s: %s", name, error)
    for notice in _model_notices(run.trained_on):
        logger.warning("%s", notice)
    logger.info("Quality by headers and geometry: %s.", quality_counts(row["quality"] for row in scored) or "no exam")
    if apart := sum(UNLIKE in row["warnings"] for row in scored):
        logger.warning(
            "%d of %d exams are unlike those that the model was trained on; see warnings.", apart, len(scored)
        )


def _title(row: Mapping[str, Any]) -> str:
    """What stands above an exam's picture: never its identity, always what the model is."""
    decision = {1: "DCE needed", 0: "DCE not needed", "": "no decision"}[row["dce_needed"]]
    lines = [f"{row['study']}   score {row['score']:.4g}   {decision}   research only"]
    lines += ["quality below gate: DCE needed whatever the score"] if row["quality"].startswith(BELOW_GATE) else []
    return "\n".join([*lines, *([f"model {row['model_note']}"] if row["model_note"] else [])])


def _model_notices(trained_on: Mapping[str, Any] | None) -> list[str]:
    """What must be known of a model before its scores are read."""
    note = training_note(trained_on)
    notices = [f"This model was {note}: its scores say nothing about patients."] if note else []
    if trained_on is None:
        notices.append(
            "What this model was trained on is not recorded (it was trained by an earlier version, or protocol.json is "
            "gone): nobody can tell whether these exams are like those. Train it again to have it recorded."
        )
    return notices


def _logits(
    evaluator: SupervisedEvaluator | None, prepared: Sequence[dict[str, Any]]
) -> tuple[list[str], NDArray[np.float64], dict[str, StudyError]]:
    """Names and members' logits, with a progress bar; and why the network cannot take the others."""
    if evaluator is None:
        return [], np.empty((0, 1)), {}
    with progress_bar("score", len(prepared), "study") as bar:

        def advance(engine: Any) -> None:
            bar.update(len(engine.state.batch["study"]))

        try:
            with evaluator.add_event_handler(Events.ITERATION_COMPLETED, advance):
                return *collect(evaluator), {}
        except Exception as error:
            if ends_the_run(error):
                raise
            logger.warning("A batch of exams failed (%s): now each is scored alone.", type(error).__name__)
    scored: list[tuple[list[str], NDArray[np.float64]]] = []
    errors: dict[str, StudyError] = {}
    for item in prepared:
        try:
            scored.append(collect(_alone(evaluator, item)))
        except Exception as error:
            errors[item["study"]] = study_failure(error)
    logits = np.concatenate([rows for _, rows in scored]) if scored else np.empty((0, 1))
    return [name for names, _ in scored for name in names], logits, errors


def _alone(evaluator: SupervisedEvaluator, item: dict[str, Any]) -> SupervisedEvaluator:
    """An evaluator of the same network for one exam."""
    return SupervisedEvaluator(
        device=evaluator.state.device,
        val_data_loader=DataLoader(Dataset([item]), batch_size=1),
        network=evaluator.network,
        inferer=evaluator.inferer,
        prepare_batch=evaluator.prepare_batch,
        amp=evaluator.amp,
        decollate=False,
    )


@contextlib.contextmanager
def _going_on(output: Path, row: dict[str, Any], what: str) -> Iterator[None]:
    """Go on without a file of one exam that cannot be made; its row says so."""
    try:
        yield
    except Exception as error:
        if ends_the_run(error):
            raise
        failure = unexpected(error)
        report = f"{row['study']}_{BUG_REPORT}"
        write_bytes(output / report, failure.report.encode())
        text = f"No {what}: an error that nobody foresaw ({failure.kind}); please report it with {report}."
        row["warnings"] = " | ".join(filter(None, (row["warnings"], text)))


def _record(run: TrainedRun, point: OperatingPoint) -> dict[str, Any]:
    """What a score rests on: threshold, model, versions."""
    return {
        "threshold": point.to_json(),
        "model": {
            "settings": run.public_settings,
            "config_sha256": sha256(run.run.config),
            "checkpoints_sha256": run.checkpoints,
            "trained_on": run.trained_on,
        },
        "versions": {name: version(name) for name in PACKAGES},
    }


def _as_bytes(dataset: Header) -> bytes:
    buffer = io.BytesIO()
    dataset.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def salt_of(run: Path, file: Path | str | None = None) -> str:
    """The secret of the study keys: the user's own or a file's (:func:`mri_alm.runtime.pseudonyms.key_secret`).

    Args:
        run: The run folder. A secret in it, as earlier versions left one, is not taken: it may be a sender's.
        file: Setting ``salt_file``.

    Raises:
        InputError: If there is none.
    """
    if file is None and (Path(run) / "salt").exists():
        logger.warning(
            "Study keys are made with your own secret now, the same in all programs, and no longer with %s. Name that "
            "file as --salt-file (in a config --salt_file) to have the keys of before.",
            Path(run) / "salt",
        )
    return key_secret(file)


def key_table(studies: NewStudies) -> list[dict[str, str]]:
    """Which folder each study key stands for, and which name in it. It identifies patients: keep it apart."""
    return [{"study": key, "folder": str(one.folder), "name": one.uid} for key, one in studies.sources.items()]


def is_manifest(source: Path) -> bool:
    """Whether an input is a table that names its studies (column study): these names stand in all outputs.

    Raises:
        InputError: If it is a table that cannot be read.
    """
    table = not source.is_dir() and source.suffix.lower() in (".csv", ".tsv", ".txt")
    return table and "study" in read_table(source, as_numbered=True)[0]


def _find(source: Path, *, allow_outside_paths: bool) -> Input:
    """The exams of a folder or table, as `pipelines/prepare_cohort.py` finds them."""
    if not source.exists():
        raise InputError(f"{source} is neither a folder nor a .csv manifest. Give a folder of exams, or a manifest.")
    found = find_sources(source, CohortRules(), allow_outside_paths=allow_outside_paths)
    within = None if allow_outside_paths else source
    for what, count in Counter(no_files(source, within=within).values() if source.is_dir() else ()).items():
        logger.warning("%d entries of the input were left out: %s. Look for what should be there.", count, what)
    dicom = [one.item["dicom"] for one in found.sources if found.layout == "dicom"]
    if dicom and not any(one.files or one.failed for one in dicom):
        raise InputError(f"{source} holds no DICOM images. Give the folder of an export, or a manifest (.csv).")
    for one in found.sources if found.layout == "table" and not allow_outside_paths else ():
        if not all(file.resolve().is_relative_to(source.parent.resolve()) for file in one.files):
            one.error = StudyError(
                "outside_path",
                "The table names a file outside its own folder for this study. Move it there, or allow it with "
                "--allow-outside-paths if the table is your own.",
            )
    return found
