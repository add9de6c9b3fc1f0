"""A cohort on disk: every study prepared as a task, then the manifest, the record of the whole and the QC page.

Studies that may have cost a process its life are prepared alone, in a process of their own.
"""

import base64
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment

from mri_alm.cohort.labels import Label, Labelled, match_labels, patient_of, read_labels
from mri_alm.cohort.layouts import Input, StudySource, find_sources
from mri_alm.cohort.prepare_study import Preparation, StudyTask
from mri_alm.cohort.protocol import quality_of
from mri_alm.cohort.rules import CohortRules, load_cohort_rules
from mri_alm.errors import InputError, StudyError, shortened
from mri_alm.imaging.pictures import HIGH_B_TOP, T2_TOP, reduced
from mri_alm.runtime.atomic import private_files, sweep
from mri_alm.runtime.files import read_json, write_bytes, write_json
from mri_alm.runtime.locks import exclusive_lock
from mri_alm.runtime.progress import progress_bar
from mri_alm.runtime.pseudonyms import key_secret, study_key
from mri_alm.runtime.tables import read_table, write_csv
from mri_alm.runtime.tasks import LostTaskError, Pool, TaskResult, run_tasks

logger = logging.getLogger("mri_alm")

MANIFEST_COLUMNS = (
    "study", "patient", "status", "error_code", "error_text", "warnings", "label", "side", "t2", "adc", "hbv", "valid",
    "crop_center_mm", "t2_series", "dwi_series", "adc_series", "hbv_series", "b_values", "hbv_b", "adc_source",
    "adc_units", "registration", "shift_mm", "rotation_deg", "mi_before", "mi_after", "coverage",
    "vendor", "model", "field_strength", "t2_spacing_mm", "t2_size", "adc_spacing_mm",
    "files_seen", "files_used", "files_ignored", "files_failed", "adc_size", "quality",
    "t2_valid", "crop_about", "gland_ml", "gland_confidence",
)  # fmt: skip

KEY_CHECK, OWN_SECRET = "key_check.json", "salt"  # in a cohort's folder; the second one of earlier versions
_CHECKED = "which secret are the keys of this cohort made with?"
_SHOWN = 640  # pixels of a picture in the page; the whole one lies in the study's folder
TEMPLATE = Path(__file__).with_name("qc.html.j2")
KILLED = StudyError(
    "killed",
    "The process that prepared this study alone was killed, most likely for want of memory. Free memory, or make its "
    "images smaller; --resume tries it again.",
)


@dataclass
class Order:
    """What to prepare; the arguments of `pipelines/prepare_cohort.py`.

    Args:
        source: Folder of studies, or a table of image files.
        output: The cohort's folder.
        labels: Label table; a table of image files with a label column is its own.
        rules: See :func:`mri_alm.cohort.rules.load_cohort_rules`.
        workers: Studies prepared at once; 0: one per core.
        resume: Go on in a folder that holds a cohort.
        strict: All or nothing: refuse labels that do not fit, stop at the first failed study, no manifest then.
        key_file: Where to write what the keys stand for; it identifies patients.
        salt_file: File with the secret of the keys, in place of the user's own.
        allow_outside_paths: See :func:`mri_alm.cohort.layouts.find_sources`.
        localise: Lay the crop about the gland, as a network finds it, where nothing else says where it lies.
        seed: Of the split, where the labels give none.
        backend: Where studies are prepared, see :class:`mri_alm.runtime.Pool`.
        address: Of a Ray cluster.
    """

    source: Path
    output: Path
    labels: Path | None = None
    rules: Path | None = None
    workers: int = 0
    resume: bool = False
    strict: bool = False
    key_file: Path | None = None
    seed: int = 0
    backend: str = "threading"
    address: str | None = None
    salt_file: Path | None = None
    allow_outside_paths: bool = False
    localise: bool = False


@dataclass
class Plan:
    """Studies found, with keys and labels, before any image is read."""

    found: Input
    labelled: Labelled
    preparation: Preparation
    jobs: list[StudyTask]
    has_labels: bool

    def entry(self, job: StudyTask) -> Label | None:
        """What the label table says of a study."""
        return self.labelled.of.get(job.source.uid)


@dataclass
class PreparedCohort(Plan):
    """The same with the manifest's rows, and how many studies were kept from an earlier run."""

    rows: list[dict[str, Any]]
    kept: int

    @property
    def failed(self) -> int:
        """Studies that cannot be used."""
        return sum(row["status"] == "failed" for row in self.rows)

    @property
    def unlabelled(self) -> int:
        """Studies that the labels should name and do not."""
        return sum(row["label"] == "" for row in self.rows) if self.has_labels else 0


def make_plan(order: Order) -> Plan:
    """Find the studies, give them keys and labels; reads headers only, writes no cohort.

    Raises:
        InputError: If input, labels or rules cannot be used, or there is no secret for the keys.
    """
    rules = load_cohort_rules(order.rules)
    _refuse_places(order)
    labels = read_labels(order.labels, rules.labels) if order.labels else None
    found = find_sources(order.source, rules, allow_outside_paths=order.allow_outside_paths)
    if labels is None and found.layout == "table":
        table = order.source.resolve()
        columns = read_table(table, as_numbered=True)[0].keys()
        labels = read_labels(table, rules.labels) if columns & set(rules.labels.columns["label"]) else None
    salt = secret_of_cohort(order, mark=False)  # bad input is refused before one is made
    keys = {source.uid: study_key(source.uid, salt) for source in found.sources}
    for source in found.sources:
        source.names.append(keys[source.uid])
    warn_of_entries(rules, found.sources)
    labelled = match_labels(found.sources, labels or [], seed=order.seed)
    jobs = [
        StudyTask(source, keys[source.uid], _crop(source, labelled.of.get(source.uid)))
        for source in sorted(found.sources, key=lambda one: keys[one.uid])
    ]
    patients = {patient_of(source, labelled.of.get(source.uid)) for source in found.sources}
    if len(patients) == 1 and len(jobs) > 2:
        labelled.notes.append(
            f"All {len(jobs)} studies carry one patient number. If they are of several patients, add a column patient "
            "(and study) to the labels: a patient must stay on one side of a split."
        )
    preparation = Preparation(order.output, order.source, rules, salt, localise=order.localise)
    return Plan(found, labelled, preparation, jobs, labels is not None)


def _refuse_places(order: Order) -> None:
    """Refuse an output within the input, and a key file within the output."""
    place, root = order.output.resolve(), order.source.resolve()
    if root == place or root in place.parents:
        raise InputError(f"{order.output} lies inside the input, so it would become part of it. Choose another folder.")
    if order.key_file and place in order.key_file.resolve().parents:
        raise InputError(f"{order.key_file} identifies patients: put it outside {order.output}, which may be shared.")


def warn_of_entries(rules: CohortRules, sources: Sequence[StudySource]) -> None:
    """Say which entries of the rules' ``studies`` mean no study, or more than one."""
    for number, name in enumerate(rules.studies, 1):
        fits = sum(name in source.names for source in sources)
        if fits != 1:
            what = f"{fits} studies" if fits else "no study and changes nothing"
            logger.warning("Entry %d under studies in the rules file fits %s.", number, what)


@private_files()
def prepare_cohort(order: Order) -> PreparedCohort:
    """Do it all; finished studies of an earlier, equal run are kept.

    Raises:
        InputError: If input, labels, rules or output cannot be used, another process works in the output, or with
            ``strict`` when anything is not perfect.
    """
    if order.workers < 0:
        raise InputError(f"--workers must be 1 or more, or 0 for one per core, got {order.workers}.")
    pool = Pool(order.backend, order.workers or os.cpu_count() or 1, order.address)
    if any((order.output / name).exists() for name in (KEY_CHECK, OWN_SECRET)) and not order.resume:
        raise InputError(f"{order.output} holds a cohort. Add --resume to go on with it, or choose another folder.")
    logger.info("Reading names and headers ...")
    plan = make_plan(order)
    if order.strict and plan.has_labels:
        _refuse_labels(plan)
    if plan.labelled.unused:
        logger.warning("Rows %s of the labels fit no study and label none.", shortened(plan.labelled.unused))
    with exclusive_lock(order.output / ".lock"):
        secret_of_cohort(order)
        done = prepare_all(plan.preparation, plan.jobs, pool=pool, strict=order.strict)
        rows = [_row(plan, job) for job in plan.jobs]
        outcome = PreparedCohort(**vars(plan), rows=rows, kept=len(plan.jobs) - done)
        _write(order, outcome)
    return outcome


def secret_of_cohort(order: Order, *, mark: bool = True) -> str:
    """The secret of the cohort's keys: that of its own file, if it is of an earlier version, else the user's.

    Args:
        order: What to prepare.
        mark: Write down by which secret the cohort's keys are made, in a form that does not tell the secret.

    Raises:
        InputError: If there is none, or the cohort's keys were made with another one.
    """
    own, check = order.output / OWN_SECRET, order.output / KEY_CHECK
    salt = key_secret(own if own.exists() and not order.salt_file else order.salt_file)
    expected = study_key(_CHECKED, key_secret(own)) if own.exists() else None
    if check.exists():
        expected = read_json(check).get("check")
    if expected not in (None, study_key(_CHECKED, salt)):
        raise InputError(
            f"The study keys of {order.output} were made with another secret, and would all change. Go on with that "
            "one: name its file by --salt-file, or choose another folder."
        )
    if mark and not check.exists():
        write_json(check, {"check": study_key(_CHECKED, salt)})
    return salt


def _crop(source: StudySource, entry: Label | None) -> dict[str, Any]:
    """Where the study's crop should lie, by the label table or the input itself."""
    given = {"crop_center_mm": entry.crop_center_mm, "gland": entry.gland} if entry else {}
    for name in ("crop_center_mm", "gland"):
        if value := given.get(name) or source.item.get(name):
            return {name: str(value)}
    return {}


def _refuse_labels(plan: Plan) -> None:
    unlabelled = [job for job in plan.jobs if (entry := plan.entry(job)) is None or entry.label is None]
    if unlabelled or plan.labelled.unused:
        raise InputError(
            f"--strict: {len(unlabelled)} studies have no label, and {len(plan.labelled.unused)} rows of the labels "
            f"have no study (rows {shortened(plan.labelled.unused) or 'none'}). Correct the table."
        )


def _row(plan: Plan, job: StudyTask) -> dict[str, Any]:
    """One row of the manifest."""
    record = read_json(plan.preparation.folder / job.key / "study.json")
    entry, warnings, found = plan.entry(job), list(record["warnings"]), record.pop("registration", None) or {}
    row = {name: _cell(record.get(name)) for name in MANIFEST_COLUMNS if name != "warnings"}
    row["patient"] = study_key(f"patient:{patient_of(job.source, entry)}", plan.preparation.salt)
    if entry and entry.label is not None:
        row |= {"label": entry.label, "side": entry.side or job.source.side}
    elif plan.has_labels:
        warnings.append("No label in the label table.")
    if row["status"] != "failed":
        row |= {name: f"{job.key}/{name}.nii.gz" for name in record["images"]}
        row["status"] = "warn" if warnings else "ok"
        row["registration"] = "accepted" if found.get("accepted") else f"refused: {found.get('reason', 'not tried')}"
        row |= {name: _cell(found.get(name)) for name in ("shift_mm", "rotation_deg", "mi_before", "mi_after")}
        row["quality"] = str(quality_of(record))
    return row | {"warnings": " | ".join(warnings)}


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return " ".join(f"{one:g}" for one in value)
    return "" if value is None else value


def _write(order: Order, outcome: PreparedCohort) -> None:
    states = Counter(row["status"] for row in outcome.rows)
    summary = {
        "layout": outcome.found.layout,
        "studies": {state: states[state] for state in ("ok", "warn", "failed")},
        "labels": {
            "unlabelled_studies": outcome.unlabelled,
            "rows_without_study": outcome.labelled.unused,
            "notes": outcome.labelled.notes,
        },
        "split": {"made_here": outcome.labelled.split_made, "seed": order.seed},
        "files": {
            "seen": sum(int(row["files_seen"]) for row in outcome.rows) + len(outcome.found.outside),
            "outside_studies": Counter(outcome.found.outside.values()),
        },
        "grid": {"spacing_mm": outcome.preparation.rules.spacing, "size": outcome.preparation.rules.size},
        "localiser": outcome.preparation.localiser,
        "versions": outcome.preparation.versions,
    }
    write_csv(order.output / "manifest.csv", MANIFEST_COLUMNS, outcome.rows)
    write_json(order.output / "cohort.json", summary)
    write_page(order.output, outcome.rows, summary)
    if order.key_file:
        write_csv(order.key_file, ("kind", "key", "path"), _keys(outcome))


def _keys(plan: Plan) -> list[dict[str, str]]:
    """What the keys of studies and files stand for."""
    rows = []
    for job in plan.jobs:
        rows.append({"kind": "study", "key": job.key, "path": str(job.source.folder)})
        files = [(plan.preparation.file_key(file), file) for file in job.source.files]
        rows += [{"kind": "file", "key": key, "path": str(file)} for key, file in files]
    return rows


def prepare_all(preparation: Preparation, jobs: Sequence[StudyTask], *, pool: Pool, strict: bool) -> int:
    """Prepare the studies that are not finished; gives how many that were.

    A process that is killed, as the system does when memory runs out, takes all its studies in work with it. Threads
    are this very process: the next start finds the traces and prepares these studies last, one at a time, each in a
    process of its own. Of a pool of processes or a cluster they are begun again at once. A study whose process is
    killed each time becomes a failed one, ``killed``.

    Args:
        preparation: The cohort, which this process alone writes to.
        jobs: All studies.
        pool: Where studies are prepared.
        strict: Stop at the first failed study.

    Raises:
        InputError: If a study failed and ``strict`` is set, or the disk is full.
    """
    begun = {part.name for part in preparation.folder.glob(".part-*/*")}
    sweep(preparation.folder)
    todo = [job for job in jobs if not preparation.finished(job)]
    apart = [job for job in todo if job.key in begun]
    if apart:
        logger.warning(
            "%d studies were in work when an earlier run was killed, perhaps for want of memory: they come last, each "
            "alone in a process of its own.",
            len(apart),
        )
    at_once = [job for job in todo if job.key not in begun]
    with (
        closing(run_tasks(preparation.prepare, at_once, pool)) as together,
        progress_bar("prepare", len(todo), "study") as bar,
    ):
        first = (_record_of(preparation, outcome) for outcome in together)
        records = chain(first, (prepare_apart(preparation, job) for job in apart))
        for record in records:
            bar.update()
            if strict and record["status"] == "failed":
                raise InputError(
                    f"Study {record['study']} failed ({record['error_code']}): {record['error_text']} With "
                    "--strict the run stops here; finished studies are kept for --resume, no manifest is written."
                )
    sweep(preparation.folder)
    return len(todo)


def prepare_apart(preparation: Preparation, job: StudyTask) -> dict[str, Any]:
    """What :meth:`Preparation.prepare` does, where the system may kill it for memory without harm to the others."""
    (outcome,) = run_tasks(preparation.prepare, [job], Pool("loky", retries=0))
    return _record_of(preparation, outcome)


def _record_of(preparation: Preparation, outcome: TaskResult) -> dict[str, Any]:
    if not isinstance(outcome.error, LostTaskError):
        record: dict[str, Any] = outcome.get()
        return record
    return preparation.prepare(outcome.item, refused=KILLED)


def write_page(cohort: Path, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Write ``qc.html``: a row per study with its picture, figures, warnings or error; filters by status and text.

    A reader marks studies to leave out there, and the page composes the text of ``--exclude``.

    Args:
        cohort: Folder with ``<study>/study.json`` and ``<study>/qc.jpg``.
        rows: Of the manifest.
        summary: Of the whole cohort, as in ``cohort.json``.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    studies, tops = _studies(cohort, rows), (T2_TOP, HIGH_B_TOP)
    page = template.render(summary=summary, studies=studies, total=len(rows), tops=tops)
    write_bytes(cohort / "qc.html", page.encode())


def _studies(cohort: Path, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    order = {"failed": 0, "warn": 1, "ok": 2}
    for row in sorted(rows, key=lambda row: (order[row["status"]], row["study"])):
        folder = cohort / row["study"]
        picture = folder / "qc.jpg"
        record = read_json(folder / "study.json")
        image = base64.b64encode(reduced(picture.read_bytes(), _SHOWN)).decode() if picture.is_file() else ""
        warnings = [text for text in row["warnings"].split(" | ") if text]
        yield {"row": row, "record": record, "image": image, "warnings": warnings}
