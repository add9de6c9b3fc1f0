"""Is a prepared cohort safe to train on? Leakage, copies, missing labels, balance and outliers, as a readable table."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mri_alm.prepared_cohort import read_rows

OUTLIER = 6.0  # robust standard deviations; about 1.5 of 1,000 normal values lie beyond 3.2
# Column, what it is called, and the smallest difference from the median that is worth a line.
_FIGURES = (
    ("t2_spacing_mm", "T2 voxel size", 0.1),
    ("t2_size", "T2 size in voxels", 8.0),
    ("adc_spacing_mm", "ADC voxel size", 0.2),
    ("shift_mm", "registration shift, mm", 3.0),
    ("coverage", "share of the grid with diffusion data", 0.1),
)


def check_cohort(folder: Path) -> tuple[str, bool]:
    """Check a prepared cohort.

    Args:
        folder: Written by :func:`mri_alm.prepared_cohort.prepare_cohort`.

    Returns:
        A text for a person, and whether the cohort is safe to train on: no patient on both sides, no exam twice, no
        study without a label, both classes on every side. Outliers and failed studies are notes only.

    Raises:
        InputError: If the folder holds no prepared cohort.
    """
    rows = read_rows(folder / "manifest.csv")
    usable = [row for row in rows if row["status"] != "failed"]
    problems = [*_leaks(usable), *_copies(folder, usable), *_labels(usable)]
    failed = Counter(row["error_code"] for row in rows if row["status"] == "failed")
    notes = [f"{count} studies failed: {code}" for code, count in failed.most_common()]
    notes += [*_confounded(usable), *_outliers(usable)]
    lines = [f"{len(rows)} studies of {len({row['patient'] for row in rows})} patients, {len(usable)} usable", ""]
    lines += _table(usable)
    lines += ["", "Problems:" if problems else "No problem found.", *(f"  {text}" for text in problems)]
    lines += ["", "Notes:", *(f"  {text}" for text in notes)] if notes else []
    return "\n".join(lines), not problems


def _leaks(rows: Iterable[dict[str, str]]) -> list[str]:
    sides: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["split"]:
            sides[row["patient"]][row["split"]].append(row["study"])
    return [
        f"leak: patient {patient} is in " + " and in ".join(f"{side} ({', '.join(s)})" for side, s in found.items())
        for patient, found in sides.items()
        if len(found) > 1
    ]


def _copies(folder: Path, rows: Iterable[dict[str, str]]) -> list[str]:
    """Studies that share voxels: the same exam exported twice, or one patient's image in another's folder."""
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        record = json.loads((folder / row["study"] / "study.json").read_text("utf-8"))
        for name, digest in record["content"].items():
            owners[name, digest].append(row["study"])
    shared: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (name, _), studies in owners.items():
        if len(studies) > 1:
            shared[tuple(studies)].append(name)
    return [f"copy: {', '.join(studies)} have the same {', '.join(names)}" for studies, names in shared.items()]


def _labels(rows: list[dict[str, str]]) -> list[str]:
    missing = [row["study"] for row in rows if row["label"] == ""]
    found = [f"no label: {len(missing)} studies ({', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''})"]
    problems = found if missing else []
    for side in sorted({row["split"] for row in rows if row["label"] != ""}):
        classes = {row["label"] for row in rows if row["split"] == side and row["label"] != ""}
        if len(classes) == 1:
            problems.append(f"one class: every study of {side or 'no side'} has label {classes.pop()}")
    return problems


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
    """Studies whose geometry lies far from the median, in robust standard deviations."""
    notes = []
    for column, name, least in _FIGURES:
        known = [(row["study"], [float(v) for v in row[column].split()]) for row in rows if row[column]]
        if len(known) < 5:
            continue
        values = np.array([found for _, found in known])
        middle = np.median(values, axis=0)
        away = np.abs(values - middle)
        limit = np.maximum(OUTLIER * 1.4826 * np.median(away, axis=0), least)
        for (study, found), over in zip(known, (away > limit).any(axis=1), strict=True):
            if over:
                mine, others = (" x ".join(f"{v:g}" for v in vector) for vector in (found, middle.tolist()))
                notes.append(f"outlier: {study} has {name} {mine}, the median is {others}")
    return notes


def _scanner(row: dict[str, str]) -> str:
    strength = f"{row['field_strength']} T" if row["field_strength"] else ""
    return " ".join(filter(None, (row["vendor"], row["model"], strength))) or "unknown"


def _table(rows: list[dict[str, str]]) -> list[str]:
    """Labels per side and per scanner."""
    groups = [
        (f"split {side or '-'}", [r for r in rows if r["split"] == side]) for side in sorted({r["split"] for r in rows})
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
