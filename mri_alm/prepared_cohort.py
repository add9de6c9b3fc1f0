"""A cohort on disk: every study prepared as a task, then the manifest, the record of the whole and the QC page."""

import csv
import json
import logging
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mri_alm.atomic import private_files
from mri_alm.cohort_rules import CohortRules, load_cohort_rules
from mri_alm.dicom import study_key
from mri_alm.errors import InputError
from mri_alm.files import secret_of, write_csv, write_json
from mri_alm.labels import Label, Labelled, match_labels, patient_of, read_labels, read_table
from mri_alm.layouts import find_sources
from mri_alm.locks import only_user
from mri_alm.preparation import IMAGES, Job, Preparation
from mri_alm.qc_page import write_page
from mri_alm.sources import Input, Source
from mri_alm.tasks import Pool
from mri_alm.workers import prepare_all

logger = logging.getLogger("mri_alm")

COLUMNS = (
    "study", "patient", "status", "error_code", "error_text", "warnings", "label", "split", "t2", "adc", "hbv", "valid",
    "crop_center_mm", "t2_series", "dwi_series", "adc_series", "hbv_series", "b_values", "hbv_b", "adc_source",
    "adc_units", "registration", "shift_mm", "rotation_deg", "mi_before", "mi_after", "coverage",
    "vendor", "model", "field_strength", "t2_spacing_mm", "t2_size", "adc_spacing_mm",
    "files_seen", "files_used", "files_ignored", "files_failed",
)  # fmt: skip
_COPIED = (
    "study", "status", "error_code", "error_text", "b_values", "hbv_b", "adc_source", "adc_units", "coverage",
    "crop_center_mm", "t2_series", "dwi_series", "adc_series", "hbv_series",
    "vendor", "model", "field_strength", "t2_spacing_mm", "t2_size", "adc_spacing_mm",
    "files_seen", "files_used", "files_ignored", "files_failed",
)  # fmt: skip


@dataclass
class Order:
    """What to prepare; the arguments of `pipelines/prepare_cohort.py`.

    Args:
        source: Folder of studies, or a table of image files.
        output: The cohort's folder.
        labels: Label table; a table of image files with a label column is its own.
        rules: See :func:`mri_alm.cohort_rules.load_cohort_rules`.
        workers: Studies prepared at once; 0: one per core.
        resume: Go on in a folder that holds a cohort.
        strict: All or nothing: refuse labels that do not fit, stop at the first failed study, no manifest then.
        key_file: Where to write what the keys stand for; it identifies patients.
        seed: Of the split, where the labels give none.
        backend: Where studies are prepared, see :class:`mri_alm.tasks.Pool`.
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


@dataclass
class Outcome:
    """Rows of the manifest, and what a person should know beside them."""

    rows: list[dict[str, Any]]
    found: Input
    labelled: Labelled
    has_labels: bool
    kept: int
    unlabelled: int = 0

    @property
    def failed(self) -> int:
        """Studies that cannot be used."""
        return sum(row["status"] == "failed" for row in self.rows)


@dataclass
class Plan:
    """Studies found, with keys and labels, before any image is read."""

    found: Input
    labelled: Labelled
    preparation: Preparation
    jobs: list[Job]
    has_labels: bool

    def entry(self, job: Job) -> Label | None:
        """What the label table says of a study."""
        return self.labelled.of.get(job.source.uid)


@dataclass
class Inputs:
    """What the user gave, read and checked: rules, labels and the studies found."""

    rules: CohortRules
    labels: list[Label]
    has_labels: bool
    found: Input


def read_inputs(order: Order) -> Inputs:
    """Find the studies and read their labels; reads headers only, writes nothing.

    Raises:
        InputError: If input, labels or rules cannot be used.
    """
    rules = load_cohort_rules(order.rules)
    place, root = order.output.resolve(), order.source.resolve()
    if root == place or root in place.parents:
        raise InputError(f"{order.output} lies inside the input, so it would become part of it. Choose another folder.")
    if order.key_file and place in order.key_file.resolve().parents:
        raise InputError(f"{order.key_file} identifies patients: put it outside {order.output}, which may be shared.")
    labels = order.labels
    if labels is None and root.suffix.lower() == ".csv" and root.is_file():
        columns = read_table(root)[0].keys()
        labels = root if columns & set(rules.labels.columns["label"]) else None
    return Inputs(
        rules,
        read_labels(labels, rules.labels) if labels else [],
        labels is not None,
        find_sources(order.source, rules),
    )


def make_plan(order: Order, inputs: Inputs, salt: str) -> Plan:
    """Give studies their keys and labels."""
    found = inputs.found
    keys = {source.uid: study_key(source.uid, salt) for source in found.sources}
    for source in found.sources:
        source.names.append(keys[source.uid])
    labelled = match_labels(found.sources, inputs.labels, seed=order.seed)
    jobs = [
        Job(source, keys[source.uid], _crop(source, labelled.of.get(source.uid)))
        for source in sorted(found.sources, key=lambda one: keys[one.uid])
    ]
    patients = {patient_of(source, labelled.of.get(source.uid)) for source in found.sources}
    if len(patients) == 1 and len(jobs) > 2:
        labelled.notes.append(
            f"All {len(jobs)} studies carry one patient number. If they are of several patients, add a column patient "
            "(and study) to the labels: a patient must stay on one side of a split."
        )
    preparation = Preparation(order.output, order.source, inputs.rules, salt)
    return Plan(found, labelled, preparation, jobs, inputs.has_labels)


@private_files()
def prepare_cohort(order: Order) -> Outcome:
    """Do it all; finished studies of an earlier, equal run are kept.

    Raises:
        InputError: If input, labels, rules or output cannot be used, another process works in the output, or with
            ``strict`` when anything is not perfect.
    """
    if order.workers < 0:
        raise InputError(f"--workers must be 1 or more, or 0 for one per core, got {order.workers}.")
    pool = Pool(order.backend, order.workers or os.cpu_count() or 1, order.address)
    if (order.output / "salt").exists() and not order.resume:
        raise InputError(f"{order.output} holds a cohort. Add --resume to go on with it, or choose another folder.")
    logger.info("Reading names and headers ...")
    inputs = read_inputs(order)  # bad input is refused before anything is written
    with only_user(order.output / ".lock"):
        plan = make_plan(order, inputs, secret_of(order.output))
        if order.strict and plan.has_labels:
            _refuse_labels(plan)
        done = prepare_all(plan.preparation, plan.jobs, pool=pool, strict=order.strict)
        outcome = Outcome([], plan.found, plan.labelled, plan.has_labels, len(plan.jobs) - done)
        outcome.rows = [_row(plan, job, outcome) for job in plan.jobs]
        _write(order, plan, outcome)
    return outcome


def _crop(source: Source, entry: Label | None) -> dict[str, Any]:
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
            f"have no study (rows {', '.join(map(str, plan.labelled.unused[:10])) or 'none'}). Correct the table."
        )


def _row(plan: Plan, job: Job, outcome: Outcome) -> dict[str, Any]:
    """One row of the manifest."""
    record = json.loads((plan.preparation.folder / job.key / "study.json").read_text("utf-8"))
    entry = plan.entry(job)
    row = dict.fromkeys(COLUMNS, "") | {name: _cell(record.get(name)) for name in _COPIED}
    row["patient"] = study_key(f"patient:{patient_of(job.source, entry)}", plan.preparation.salt)
    warnings = list(record["warnings"])
    if entry and entry.label is not None:
        row |= {"label": entry.label, "split": entry.split or job.source.split}
    elif plan.has_labels:
        outcome.unlabelled += 1
        warnings.append("No label in the label table.")
    if row["status"] != "failed":
        row |= {name: f"{job.key}/{name}.nii.gz" for name in IMAGES} | {"status": "warn" if warnings else "ok"}
        found = record.get("registration") or {}
        row["registration"] = "accepted" if found.get("accepted") else f"refused: {found.get('reason', 'not tried')}"
        row |= {name: _cell(found.get(name)) for name in ("shift_mm", "rotation_deg", "mi_before", "mi_after")}
    return row | {"warnings": " | ".join(warnings)}


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return " ".join(f"{one:g}" for one in value)
    return "" if value is None else value


def _write(order: Order, plan: Plan, outcome: Outcome) -> None:
    states = Counter(row["status"] for row in outcome.rows)
    summary = {
        "layout": plan.found.layout,
        "studies": {state: states[state] for state in ("ok", "warn", "failed")},
        "labels": {
            "unlabelled_studies": outcome.unlabelled,
            "rows_without_study": plan.labelled.unused,
            "notes": plan.labelled.notes,
        },
        "split": {"made_here": plan.labelled.split_made, "seed": order.seed},
        "files": {
            "seen": sum(int(row["files_seen"]) for row in outcome.rows) + len(plan.found.outside),
            "outside_studies": Counter(plan.found.outside.values()),
        },
        "grid": {"spacing_mm": plan.preparation.rules.spacing, "size": plan.preparation.rules.size},
        "versions": plan.preparation.versions,
    }
    write_csv(order.output / "manifest.csv", COLUMNS, outcome.rows)
    write_json(order.output / "cohort.json", summary)
    write_page(order.output, outcome.rows, summary)
    if order.key_file:
        write_csv(order.key_file, ("kind", "key", "path"), _keys(plan))


def _keys(plan: Plan) -> list[dict[str, str]]:
    """What the keys of studies and files stand for."""
    rows = []
    for job in plan.jobs:
        files = job.source.files
        place = os.path.commonpath([file.parent for file in files]) if files else ""
        rows.append({"kind": "study", "key": job.key, "path": str(place)})
        rows += [{"kind": "file", "key": plan.preparation.file_key(f), "path": str(f)} for f in files]
    return rows


def read_rows(manifest: Path) -> list[dict[str, str]]:
    """Rows of a prepared cohort's manifest.

    Raises:
        InputError: If it is absent or no manifest of a prepared cohort.
    """
    if not manifest.is_file():
        raise InputError(f"{manifest.parent} has no manifest.csv. Prepare the cohort first.")
    with manifest.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if missing := sorted(set(COLUMNS) - set(reader.fieldnames or ())):
        raise InputError(f"{manifest}: no column {missing[0]}; it is not the manifest of a prepared cohort.")
    return rows
