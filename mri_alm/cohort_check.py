"""Is a prepared cohort safe to train on? Leakage, copies, missing labels, balance and outliers, as a readable table."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mri_alm.prepared_cohort import read_rows

OUTLIER = 6.0  # robust standard deviations
SHOWN = 5  # outliers listed of each kind
# What is compared, and from which factor on it is worth a line: hospitals mix protocols; 1.5 is another kind of exam.
_RATIOS = (("T2 voxel size", 1.5), ("ADC voxel size", 1.5), ("T2 field of view", 1.5))
# Column, its name, and from which difference on.
_DIFFERENCES = (("shift_mm", "registration shift", 5.0), ("coverage", "share of the grid with diffusion data", 0.15))


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


def _numbers(rows: list[dict[str, str]], column: str) -> NDArray[np.float64]:
    return np.array([[float(word) for word in row[column].split()] for row in rows])


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
