"""A cohort for a person to read: what a dry run shows, the closing lines, and whether it is safe to train on."""

import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mri_alm.cohort.labels import Labelled
from mri_alm.cohort.manifest import RENAMED_COLUMNS, Cohort
from mri_alm.cohort.prepare_cohort import (
    MANIFEST_COLUMNS,
    Order,
    PreparedCohort,
    make_plan,
)
from mri_alm.cohort.prepare_study import StudyTask
from mri_alm.cohort.protocol import BELOW_GATE, quality_counts
from mri_alm.errors import InputError, StudyError, shortened
from mri_alm.imaging.choose_series import axial_t2, diffusion_sets
from mri_alm.imaging.series import Series
from mri_alm.runtime.bug_reports import study_failure
from mri_alm.runtime.files import read_json
from mri_alm.runtime.tables import read_table

_SINCE_QUALITY = {"adc_size", "quality"}  # columns that cohorts prepared by version 0.2 lack
OUTLIER = 6.0  # robust standard deviations
SHOWN = 5  # outliers listed of each kind
# What is compared, and from which factor on it is worth a line: hospitals mix protocols; 1.5 is another kind of exam.
_RATIOS = (("T2 voxel size", 1.5), ("ADC voxel size", 1.5), ("T2 field of view", 1.5))
# Column, its name, and from which difference on.
_DIFFERENCES = (("shift_mm", "registration shift", 5.0), ("coverage", "share of the grid with diffusion data", 0.15))


def check_cohort(folder: Path) -> tuple[str, bool]:
    """Check a prepared cohort.

    Args:
        folder: Written by :func:`mri_alm.cohort.prepare_cohort`.

    Returns:
        A text for a person, and whether the cohort is safe to train on: no patient on both sides, no exam twice, no
        study without a label, and what :class:`mri_alm.cohort.manifest.Cohort` wants of images, classes and counts for
        a training with the default settings. Outliers and failed studies are notes only.

    Raises:
        InputError: If the folder holds no prepared cohort.
    """
    rows = _read_rows(folder / "manifest.csv")
    usable = [row for row in rows if row["status"] != "failed"]
    leaks = _leaks(usable)
    problems = [*leaks, *_copies(folder, usable), *_unlabelled(usable), *([] if leaks else _untrainable(folder))]
    failed = Counter(row["error_code"] for row in rows if row["status"] == "failed")
    notes = [f"{count} studies failed: {code}" for code, count in failed.most_common()]
    notes += [*_confounded(usable), *_outliers(usable), *_quality(usable)]
    lines = [f"{len(rows)} studies of {len({row['patient'] for row in rows})} patients, {len(usable)} usable", ""]
    lines += _counts(usable)
    lines += ["", "Problems:" if problems else "No problem found.", *(f"  {text}" for text in problems)]
    lines += ["", "Notes:", *(f"  {text}" for text in notes)] if notes else []
    return "\n".join(lines), not problems


def _read_rows(manifest: Path) -> list[dict[str, str]]:
    """Rows of a prepared cohort's manifest."""
    if not manifest.is_file():
        raise InputError(f"{manifest.parent} has no manifest.csv. Prepare the cohort first.")
    rows = read_table(manifest, renamed=RENAMED_COLUMNS)
    if missing := sorted(set(MANIFEST_COLUMNS) - _SINCE_QUALITY - rows[0].keys()):
        raise InputError(f"{manifest}: no column {missing[0]}; it is not the manifest of a prepared cohort.")
    return rows


def _leaks(rows: Iterable[dict[str, str]]) -> list[str]:
    sides: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["side"]:
            sides[row["patient"]][row["side"]].append(row["study"])
    return [
        f"leak: patient {patient} is in " + " and in ".join(f"{side} ({', '.join(s)})" for side, s in found.items())
        for patient, found in sides.items()
        if len(found) > 1
    ]


def _copies(folder: Path, rows: Iterable[dict[str, str]]) -> list[str]:
    """Studies that share voxels: the same exam exported twice, or one patient's image in another's folder."""
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        record = read_json(folder / row["study"] / "study.json")
        for name, digest in record["content"].items():
            owners[name, digest].append(row["study"])
    shared: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (name, _), studies in owners.items():
        if len(studies) > 1:
            shared[tuple(studies)].append(name)
    return [f"copy: {', '.join(studies)} have the same {', '.join(names)}" for studies, names in shared.items()]


def _unlabelled(rows: list[dict[str, str]]) -> list[str]:
    missing = [row["study"] for row in rows if row["label"] == ""]
    return [f"no label: {len(missing)} studies ({shortened(missing, SHOWN)})"] if missing else []


def _untrainable(folder: Path) -> list[str]:
    """What the training itself refuses, in its words: the splits of its default settings are drawn."""
    try:
        Cohort(folder / "manifest.csv")
    except InputError as error:
        return [f"no training: {line}" for line in str(error).splitlines()]
    return []


def _confounded(rows: list[dict[str, str]]) -> list[str]:
    """Scanners that tell the label: a network can learn the scanner instead."""
    counts = Counter((_scanner(row), row["label"]) for row in rows if row["label"] != "")
    total = Counter(label for _, label in counts.elements())
    if len(total) < 2:
        return []
    rate = total["1"] / total.total()
    notes = []
    for scanner in sorted({scanner for scanner, _ in counts}):
        positive, n = counts[scanner, "1"], counts[scanner, "1"] + counts[scanner, "0"]
        spread = np.sqrt(n * rate * (1 - rate))
        if n < total.total() and abs(positive - n * rate) > 3 * spread:
            notes.append(f"scanner {scanner}: {positive} of {n} positive, {rate:.0%} in the cohort; it tells the label")
    return notes


def _outliers(rows: list[dict[str, str]]) -> list[str]:
    """Studies whose geometry lies far from the median."""
    if len(rows) < 5:
        return []
    names = [row["study"] for row in rows]
    spacing, adc, size = (_numbers(rows, column) for column in ("t2_spacing_mm", "adc_spacing_mm", "t2_size"))
    notes = []
    for (name, factor), values in zip(_RATIOS, (spacing, adc, spacing * size), strict=True):
        middle = np.median(values, axis=0)
        far = [row.any() for row in np.exp(np.abs(np.log(values / middle))) > factor]
        notes += _listed(name + " in mm", names, values, middle=middle, far=far)
    for column, name, least in _DIFFERENCES:
        values = _numbers(rows, column)
        middle = np.median(values, axis=0)
        away = np.abs(values - middle)
        far = [row.any() for row in away > np.maximum(OUTLIER * 1.4826 * np.median(away, axis=0), least)]
        notes += _listed(name, names, values, middle=middle, far=far)
    return notes


def _quality(rows: list[dict[str, str]]) -> list[str]:
    """How many studies meet the technical criteria, and which are below the gate."""
    texts = [row.get("quality", "") for row in rows]
    below = [
        f"quality: {row['study']} is {text}"
        for row, text in zip(rows, texts, strict=True)
        if text.startswith(BELOW_GATE)
    ]
    more = [f"... and {len(below) - SHOWN} more below the gate"] if len(below) > SHOWN else []
    return [f"quality: {quality_counts(texts)}", *below[:SHOWN], *more] if any(texts) else []


def _numbers(rows: list[dict[str, str]], column: str) -> NDArray[np.float64]:
    try:
        return np.array([[float(word) for word in row[column].split()] for row in rows])
    except ValueError:
        raise InputError(
            f"manifest.csv: column {column} does not hold as many numbers in every row, written with a decimal point. "
            "A spreadsheet may have changed it: prepare the cohort again with --resume, which writes it anew."
        ) from None


def _listed(
    name: str, studies: list[str], values: NDArray[np.float64], *, middle: NDArray[np.float64], far: Iterable[bool]
) -> list[str]:
    def words(vector: NDArray[np.float64]) -> str:
        return " x ".join(f"{value:g}" for value in vector)

    found = [
        f"outlier: {study} has {name} {words(mine)}, the median is {words(middle)}"
        for study, mine, over in zip(studies, values, far, strict=True)
        if over
    ]
    return found[:SHOWN] + ([f"... and {len(found) - SHOWN} more with {name} off"] if len(found) > SHOWN else [])


def _scanner(row: dict[str, str]) -> str:
    strength = f"{row['field_strength']} T" if row["field_strength"] else ""
    return " ".join(filter(None, (row["vendor"], row["model"], strength))) or "unknown"


def _counts(rows: list[dict[str, str]]) -> list[str]:
    """Labels per side and per scanner."""
    groups = [
        (f"side {side or '-'}", [r for r in rows if r["side"] == side]) for side in sorted({r["side"] for r in rows})
    ]
    scanners = sorted({_scanner(row) for row in rows})
    groups += [(f"scanner {scanner}", [r for r in rows if _scanner(r) == scanner]) for scanner in scanners]
    width = max([len(name) for name, _ in groups], default=0)
    lines = [f"{'':<{width}}  studies  positive  negative  no label  warnings"]
    for name, members in groups:
        labels = Counter(row["label"] for row in members)
        warned = sum(row["status"] == "warn" for row in members)
        lines.append(
            f"{name:<{width}}  {len(members):>7}  {labels['1']:>8}  {labels['0']:>8}  {labels['']:>8}  {warned:>8}"
        )
    return lines


def dry_run(order: Order) -> str:
    """A table of the roles of all series and of what is known to be wrong, without reading an image or writing.

    It names the folder of each study, so it is for the user's own screen.
    """
    plan = make_plan(order)
    lines = [f"{len(plan.jobs)} studies, layout {plan.found.layout}"]
    jobs = {job.source.uid: job for job in plan.jobs}
    for job in (jobs[source.uid] for source in plan.found.sources):  # in the order of folders
        entry = plan.entry(job)
        label = "-" if entry is None or entry.label is None else str(entry.label)
        lines += ["", f"study {job.key}   label {label}   {len(job.source.files)} files   {_whereabouts(order, job)}"]
        try:
            series = plan.preparation.roles(job)
            lines += [_series_line(one) for one in series] + ([_decision(series)] if series else [])
        except Exception as error:  # of this study alone
            lines += [f"  fails, {(failure := study_failure(error)).code}: {failure.message}"]
        names = sorted({(role, file.suffix) for file, role in job.source.used.items()})
        lines += [f"  {role:<12} a {ending} file" for role, ending in names]
        lines += [f"  failed: {job.source.error}"] if job.source.error else []
    return "\n".join([*lines, "", *_label_lines(plan.labelled, plan.has_labels)])


def _whereabouts(order: Order, job: StudyTask) -> str:
    """Where a study lies in the input, and its name there where several may lie in one folder."""
    place = os.path.relpath(job.source.folder, order.source if order.source.is_dir() else order.source.parent)
    return f"in {place}" + ("" if "dicom" in job.source.item else f" ({job.source.uid})")


def _series_line(one: Series) -> str:
    plane = one.plane if np.isfinite(one.frames[0].orientation).all() else "-"
    files, b = len({frame.file for frame in one.frames}), " ".join(f"{b:g}" for b in one.b_values) or "-"
    return f"  series {one.number:>4}  {one.role:<12} {plane:<9} {files:>4} files  b {b:<20} {one.reason}"


def _decision(series: Sequence[Series]) -> str:
    """What would be taken, unless one of these turns out to be broken."""
    try:
        sets = diffusion_sets(series, [])
        t2 = axial_t2(series, sets)[0]
    except StudyError as error:
        return f"  fails, {error.code}: {error.message}"
    group = next(one for one in sets if one.first.frame_of_reference == t2.frame_of_reference)
    numbers = {
        "diffusion": group.dwi,
        "calculated b": group.calculated,
        "ADC": group.adc,
    }
    parts = [f"{name} {', '.join(str(one.number) for one in found)}" for name, found in numbers.items() if found]
    return "  takes " + "; ".join([f"T2 {t2.number}", *parts] + ([] if group.adc else ["ADC fitted"]))


def _label_lines(labelled: Labelled, given: bool) -> list[str]:
    """What did not fit between labels and studies, by row."""
    if not given:
        return ["No labels: the cohort can be scored, not trained on."]
    rows = f"{len(labelled.unused)} rows of the labels have no study (rows {shortened(labelled.unused)})."
    return ([rows] if labelled.unused else []) + labelled.notes


def summary_text(order: Order, outcome: PreparedCohort) -> str:
    """The closing lines: how many, why not, what is missing, where everything lies."""
    states = Counter(row["status"] for row in outcome.rows)
    lines = [
        f"{len(outcome.rows)} studies (layout {outcome.found.layout}): {states['ok']} ok, {states['warn']} with "
        f"warnings, {states['failed']} failed; {outcome.kept} kept from an earlier run."
    ]
    codes = Counter(row["error_code"] for row in outcome.rows if row["error_code"])
    lines += [f"  failed, {code}: {count}" for code, count in codes.most_common()]
    if outcome.has_labels:
        sides = Counter((row["side"], row["label"]) for row in outcome.rows if row["label"] != "")
        lines += [f"  {side or 'no side'}: {sides[side, 1]} positive, {sides[side, 0]} negative"
                  for side in dict.fromkeys(side for side, _ in sorted(sides))]  # fmt: skip
        lines += [f"  {outcome.unlabelled} studies have no label."] if outcome.unlabelled else []
        made = f"The labels give no split: drawn by patients, a quarter for the test, seed {order.seed}."
        lines += [made] if outcome.labelled.split_made else []
    if usable := [row["quality"] for row in outcome.rows if row["quality"]]:
        lines.append(f"  quality by headers and geometry: {quality_counts(usable)}.")
    lines += _label_lines(outcome.labelled, outcome.has_labels)
    outside = Counter(outcome.found.outside.values())
    lines += [f"  {count} files belong to no study: {reason}" for reason, count in outside.most_common(3)]
    lines.append(f"Look at {order.output / 'qc.html'}, then: mri-alm check {shlex.quote(str(order.output))}")
    if outcome.has_labels:
        manifest = shlex.quote(str(order.output / "manifest.csv"))
        lines.append(f"Train: mri-alm train --cohort {manifest}{' --localise True' * order.localise}")
    return "\n".join(lines)
