"""Cohorts: a manifest (CSV) read, checked and numbered; stratified splits that keep patients together."""

import hashlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mri_alm.cohort.names import number_of, one_spelling, tidy
from mri_alm.cohort.protocol import told_facts
from mri_alm.errors import InputError, did_you_mean, refuse_all
from mri_alm.runtime.files import bvals_of, links_out_of
from mri_alm.runtime.tables import path_in_cell, read_table, windows_hint

logger = logging.getLogger("mri_alm")

# columns that hold a file or a folder
IMAGE_COLUMNS = ("t2", "adc", "hbv", "dwi", "dicom", "valid", "t2_valid", "gland")
_COMPLETE = ({"dicom"}, {"t2", "dwi"}, {"t2", "adc"})  # each row must fill one of these sets
SHOWN_LINKS = 5
RENAMED_COLUMNS = {"split": "side"}  # manifests of before


@dataclass(frozen=True)
class ManifestRow:
    """One exam of a cohort.

    Attributes:
        index: Permanent number of the exam in its manifest (row order), the key of its multiplier.
        study: Its name in all outputs; must not identify the patient.
        patient: Whose exam it is, spelt as in its first row; exams of one patient never stand on two sides of a split.
        label: 1 when DCE is needed, 0 when not, None when unknown (scoring only).
        side: ``"train"`` or ``"test"``; empty when the manifest has no such column (scoring only).
        images: Column name (one of :data:`IMAGE_COLUMNS`) to absolute path.
        crop_center_mm: Point to crop about, three numbers in LPS millimetres as text; empty for T2's centre.
        facts: What the manifest tells of scanner and protocol, see :data:`mri_alm.cohort.protocol.FACT_COLUMNS`.
    """

    index: int
    study: str
    patient: str
    label: int | None
    side: str
    images: dict[str, Path]
    crop_center_mm: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def item(self) -> dict[str, Any]:
        """The exam as a MONAI data dictionary; ``digest`` makes a cache notice that a file changed."""
        paths = {column: str(path) for column, path in self.images.items()}
        centre: dict[str, Any] = {"crop_center_mm": self.crop_center_mm} if self.crop_center_mm else {}
        centre |= {"facts": self.facts} if self.facts else {}
        known = {"study": self.study, "label": float(self.label or 0), "index": self.index, "digest": digest(self)}
        return paths | centre | known


def read_manifest(
    path: Path | str, *, exclude: Iterable[str] | str = (), labelled: bool = True, allow_outside_paths: bool = False
) -> list[ManifestRow]:
    """Read and check a manifest; every problem of every row is reported at once.

    Args:
        path: CSV with columns study, patient, label (0 or 1), side (train or test), and per row either ``dicom`` (a
            study folder), or ``t2`` with ``dwi``, or ``t2`` with ``adc`` and, if there is one, ``hbv``: files (NIfTI,
            MHA, NRRD) or folders of one DICOM series; ``gland`` (a mask) or ``crop_center_mm`` where the crop should
            lie; ``valid`` where the images are registered already, and ``t2_valid`` where T2 is padded with zeros.
            Relative paths start at the manifest's folder. Rows whose ``status`` (see
            :mod:`mri_alm.cohort.prepare_study`) is failed, or that it left without a label, are skipped.
        exclude: Names of studies to leave out. The others keep their index.
        labelled: False for exams to be scored: label, patient and side may be missing.
        allow_outside_paths: Whether images may lie outside the manifest's folder. Otherwise ``..``, absolute paths
            and links that lead out of it are refused: whoever sends a cohort does not choose which files of this
            machine are read.

    Returns:
        The studies in row order.

    Raises:
        InputError: If the file or any row cannot be used; the message names rows (1 is the
            header), values and remedies.
    """
    path = Path(path)
    needed = ("study", "patient", "label", "side") if labelled else ("study",)
    table = read_table(path, needed, renamed=RENAMED_COLUMNS, as_numbered=True)
    rows = {number: row for number, row in enumerate(table, 2) if any(row.values())}
    left_out = _excluded(path, exclude, rows.values())
    left_out |= _skipped(path, list(rows.values()), labelled=labelled) if "status" in table[0] else set()
    problems: list[str] = []
    studies = []
    for index, (number, row) in enumerate(rows.items()):
        if row["study"] not in left_out:
            study = _study(index, row, path.parent, labelled=labelled, allow_outside_paths=allow_outside_paths)
            problems += [f"{path}: row {number} (study {row['study'] or 'without name'}) {text}" for text in study[1]]
            studies.append(study[0])
    patients = one_spelling(study.patient for study in studies)
    studies = [replace(study, patient=patient) for study, patient in zip(studies, patients, strict=True)]
    problems += [f"{path}: {text}" for text in _across_rows(studies)]
    refuse_all(problems)
    return studies


def _excluded(path: Path, exclude: Iterable[str] | str, rows: Iterable[dict[str, str]]) -> set[str]:
    """Studies of the table that are to be left out, as the table writes them; a name for none is refused."""
    studies: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        studies[tidy(row["study"])].add(row["study"])
    wanted = {tidy(str(name)): str(name) for name in ([exclude] if isinstance(exclude, (str, int)) else exclude)}
    if unknown := sorted(name for key, name in wanted.items() if key not in studies):
        others = [name for key, names in studies.items() if key not in wanted for name in names]
        near = did_you_mean(unknown[0], others)
        quoted = f"Names like numbers need two pairs of quotation marks: --exclude \"'{unknown[0]}'\"."
        hint = near + quoted * any(number_of(tidy(name)) is not None for name in unknown)
        raise InputError(f"exclude names {', '.join(unknown)}, but {path} has no such study. {hint}".rstrip())
    return set[str]().union(*(studies[key] for key in wanted))


def _skipped(path: Path, rows: list[dict[str, str]], *, labelled: bool) -> set[str]:
    """Studies of a prepared cohort that cannot be used: failed, or without a label where one is needed."""
    failed = {row["study"] for row in rows if row["status"] == "failed"}
    unlabelled = {row["study"] for row in rows if labelled and not row["label"]} - failed
    if failed or unlabelled:
        logger.warning("%s: skipped %d failed and %d unlabelled studies.", path, len(failed), len(unlabelled))
    if len(failed | unlabelled) == len(rows):
        raise InputError(f"{path}: none of its {len(rows)} studies can be used; see columns status and label.")
    return failed | unlabelled


def _study(
    index: int, row: dict[str, str], folder: Path, *, labelled: bool, allow_outside_paths: bool
) -> tuple[ManifestRow, list[str]]:
    """One row as a study, and what is wrong with it."""
    problems = []
    label, side = row.get("label", ""), row.get("side", "")
    if labelled and label not in ("0", "1"):
        problems.append(f'has label "{label}". Write 1 (DCE needed) or 0 (not needed).')
    if labelled and side not in ("train", "test"):
        problems.append(f'has side "{side}". Write train or test.')
    if not _is_file_name(row["study"]):
        problems.append(
            "has no usable name in column study: give one of at most 100 characters without slashes, not identifying "
            "the patient."
        )
    if labelled and not row["patient"]:
        problems.append("has an empty column patient. Repeat the study's name where a patient has one exam.")
    images = {column: path_in_cell(folder, row[column]) for column in IMAGE_COLUMNS if row.get(column)}
    if not any(columns <= set(images) for columns in _COMPLETE):
        lacking = "T2 image" if "t2" not in images else "diffusion series"
        column = "t2" if "t2" not in images else "dwi, or adc and (if there is one) hbv"
        problems.append(f"has no {lacking}. Add its path in column {column}, or list the study under exclude.")
    wrong = {
        column: _wrong_path(column, path, folder, allow_outside_paths=allow_outside_paths)
        for column, path in images.items()
    }
    problems += filter(None, wrong.values())
    centre = row.get("crop_center_mm", "")
    if centre and not _is_point(centre):
        problems.append("has a crop_center_mm that is not three numbers. Write x y z in LPS millimetres, or nothing.")
    facts, wrong_facts = told_facts(row)
    problems += wrong_facts
    patient = row.get("patient") or row["study"]
    known = int(label) if label in ("0", "1") else None
    found = {column: path for column, path in images.items() if not wrong[column]}
    return ManifestRow(index, row["study"], patient, known, side, found, centre, facts), problems


def _is_file_name(text: str) -> bool:
    """Whether a study's name can begin a file's name: printable, no way to another folder, no hidden file."""
    short = 0 < len(text) <= 100 and len(text.encode(errors="replace")) <= 200  # a file's name has 255 bytes at most
    return short and text.isprintable() and not set(text) & set("/\\") and not text.startswith(".")


def _wrong_path(column: str, path: Path, folder: Path, *, allow_outside_paths: bool) -> str:
    """What is wrong with the path in a column, joined to the manifest's folder, in words; empty if nothing is."""
    try:
        if not (allow_outside_paths or path.resolve().is_relative_to(folder.resolve())):
            return (
                f"names {path} in column {column}, outside the manifest's folder. Move it there, or allow it with "
                "--allow_outside_paths True if the manifest is your own."
            )
        if path.is_file() or path.is_dir():
            return "" if allow_outside_paths else _wrong_links(column, path, folder)
        if path.exists():
            return f"names {path} in column {column}, a pipe, socket or device. Give a file or a folder there."
    except (OSError, RuntimeError, ValueError):  # a name too long, a circle of links, a zero byte
        pass
    remedy = f"{windows_hint(path)} Correct the path, or list the study under exclude."
    return f"names {path} in column {column}, which does not exist.{remedy}"


def _wrong_links(column: str, path: Path, folder: Path) -> str:
    """What is wrong with links in a folder, or of the table of b-values beside a file; empty if nothing is."""
    if path.is_dir():
        links = links_out_of(folder, path)
    else:
        links = [table for table in bvals_of(path) if not table.resolve().is_relative_to(folder.resolve())]
    if not links:
        return ""
    shown = ", ".join(str(link.relative_to(path.parent)) for link in links[:SHOWN_LINKS])
    more = f" and {len(links) - SHOWN_LINKS} more" if len(links) > SHOWN_LINKS else ""
    return (
        f"names {path} in column {column}, where {len(links)} links lead out of the manifest's folder ({shown}{more}). "
        "Put the files themselves there, or allow it with --allow_outside_paths True if the manifest is your own."
    )


def _is_point(text: str) -> bool:
    try:
        numbers = [float(word) for word in text.split()]
    except ValueError:
        return False
    return len(numbers) == 3 and all(map(math.isfinite, numbers))


def _across_rows(studies: Sequence[ManifestRow]) -> list[str]:
    """Duplicated studies, and patients on both sides."""
    problems = [
        f"study {name} stands in {n} rows. Keep one." for name, n in Counter(s.study for s in studies).items() if n > 1
    ]
    owners: dict[Path, set[str]] = defaultdict(set)
    sides: dict[str, set[str]] = defaultdict(set)
    for study in studies:
        for path in study.images.values():
            owners[path.resolve()].add(study.study)
        if study.side:
            sides[study.patient].add(study.side)
    problems += [
        f"{', '.join(sorted(names))} share the file {p}. Keep one." for p, names in owners.items() if len(names) > 1
    ]
    problems += [
        f"patient {patient} has studies in train and in test. Put all studies of a patient on one side."
        for patient, splits in sides.items()
        if len(splits) > 1
    ]
    return problems


class Cohort:
    """A checked manifest with its splits, as the items that MONAI datasets take.

    Args:
        manifest: See :func:`read_manifest`.
        exclude: Studies to leave out.
        splits: Number of splits.
        validation: Share of the training patients that each random split holds out; 0: nobody, with one split.
        seed: Seed of the splits.
        split_rule: ``"random"`` (:func:`stratified_splits`) or ``"partition"`` (:func:`partition_splits`).
        allow_outside_paths: See :func:`read_manifest`.

    Raises:
        InputError: See :func:`read_manifest`, :func:`stratified_splits` and :func:`partition_splits`; or the rule is
            unknown, or the test studies are all of one class.
    """

    def __init__(
        self,
        manifest: Path | str,
        exclude: Iterable[str] | str = (),
        *,
        splits: int | Literal["loo"] = 10,
        validation: float = 0.2,
        seed: int = 0,
        split_rule: str = "random",
        allow_outside_paths: bool = False,
    ) -> None:
        self.manifest = Path(manifest).resolve()
        self.studies = read_manifest(self.manifest, exclude=exclude, allow_outside_paths=allow_outside_paths)
        self.test = [study for study in self.studies if study.side == "test"]
        self.train = [study for study in self.studies if study.side == "train"]
        if len({study.label for study in self.test}) == 1:
            raise InputError(
                f"{manifest}: all {len(self.test)} test studies have one label. Add the other class, or have none."
            )
        self.splits = _splits(self.train, splits, split_rule, validation=validation, seed=seed)
        self.size = max(study.index for study in self.studies) + 1

    def items(self, part: str, split: int = 0) -> list[dict[str, Any]]:
        """Items of a part: ``"training"`` or ``"validation"`` of a split, ``"test"``, or ``"all"`` of the cohort."""
        whole = {"all": self.studies, "test": self.test}
        studies = whole[part] if part in whole else self.splits[split][part == "validation"]
        return [study.item() for study in studies]

    def labels(self, split: int) -> list[int]:
        """Labels of the training exams of a split, in the order of its items."""
        return [study.label or 0 for study in self.splits[split][0]]

    def counts(self, split: int) -> tuple[int, int]:
        """Negative and positive training exams of a split."""
        labels = self.labels(split)
        return labels.count(0), labels.count(1)

    def split_digest(self, split: int) -> str:
        """SHA-256 of the training studies of a split with their labels and indices; differs from any other split's."""
        text = "\n".join(f"{s.index}|{s.study}|{s.patient}|{s.label}" for s in self.splits[split][0])
        return hashlib.sha256(text.encode()).hexdigest()


def digest(study: ManifestRow) -> str:
    """SHA-256 over names, sizes and times of a study's files, and of a .bval beside one: changes when a file does."""
    state = hashlib.sha256()
    for column, path in sorted(study.images.items()):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path, *bvals_of(path)]:
            status = file.stat()
            state.update(f"{column}|{file.name}|{status.st_size}|{status.st_mtime_ns}\n".encode())
    return state.hexdigest()


def stratified_splits(
    studies: Sequence[ManifestRow], *, splits: int = 10, validation: float = 0.2, seed: int = 0
) -> list[tuple[list[ManifestRow], list[ManifestRow]]]:
    """Random stratified splits of the training patients into two parts (the splits overlap, as in the paper).

    A patient counts as positive when any of its studies is; the first k splits do not depend on how many are asked for.

    Args:
        studies: The training studies.
        splits: How many.
        validation: Share of patients held out in each, in (0, 1).
        seed: Seed of the draw.

    Returns:
        Per split the training and the validation studies, in manifest order.

    Raises:
        InputError: If there is only one class, or too few positive or negative patients for both sides of a split.
    """
    from sklearn.model_selection import StratifiedShuffleSplit

    if not 0 < validation < 1:
        raise InputError(f"validation must lie between 0 and 1, got {validation}: the share that a split holds out.")
    patients, classes = _patients(studies)
    counts = np.bincount(classes, minlength=2)
    needed = int(np.ceil(round(1 / min(validation, 1 - validation), 6)))
    if counts.min() < needed:
        raise InputError(
            f"The training cohort has {counts[1]} positive and {counts[0]} negative patients; splits that hold out "
            f"{validation:g} of each class need at least {needed} of either. "
            "Add studies, or bring --validation nearer to 0.5."
        )
    draw = StratifiedShuffleSplit(n_splits=splits, test_size=validation, random_state=seed)
    return [_held_out(studies, {patients[i] for i in held_out}) for _, held_out in draw.split(classes, classes)]


def partition_splits(
    studies: Sequence[ManifestRow], *, folds: int | Literal["loo"] = "loo", seed: int = 0
) -> list[tuple[list[ManifestRow], list[ManifestRow]]]:
    """Folds of the training patients, dealt at random; every positive one is held out exactly once.

    A patient counts as positive when any of its studies is. Numbers of positives differ by one at most. All folds hold
    equally many negatives, so that no member can be told from another one by them (:func:`mri_alm.metrics.minmax_bound`
    rests on it); the fewer than ``folds`` that are left over are trained on by all members and never held out.

    Args:
        studies: The training studies.
        folds: How many, 2 or more; ``"loo"``: as many as positive patients.
        seed: Seed of the dealing.

    Returns:
        Per fold the training and the held-out studies, in manifest order.

    Raises:
        InputError: If there are fewer folds than two, or fewer positive or negative patients than folds.
    """
    patients, classes = _patients(studies)
    counts = np.bincount(classes, minlength=2)
    number = int(counts[1]) if folds == "loo" else folds
    if not 2 <= number <= counts.min():
        raise InputError(
            f"The training cohort has {counts[1]} positive and {counts[0]} negative patients; a partition into "
            f"{number} folds needs 2 folds or more, and at least one patient of each class in every fold. "
            f"Add studies, or give --splits a number from 2 to {max(counts.min(), 2)}."
        )
    rng = np.random.default_rng(seed)
    negative, positive = (rng.permutation(np.flatnonzero(classes == label)) for label in (0, 1))
    equal = negative[: len(negative) // number * number]
    dealt = zip(np.array_split(positive, number), np.array_split(equal, number), strict=True)
    return [_held_out(studies, {patients[i] for i in np.concatenate(fold)}) for fold in dealt]


def _splits(
    studies: Sequence[ManifestRow], splits: int | Literal["loo"], rule: str, *, validation: float, seed: int
) -> list[tuple[list[ManifestRow], list[ManifestRow]]]:
    """By the rule of that name."""
    if rule == "partition":
        if validation == 0:
            raise InputError("A partition holds every patient out, once: leave --validation 0 out with it.")
        return partition_splits(studies, folds=splits, seed=seed)
    if rule != "random":
        raise InputError(f'split_rule must be random or partition, got "{rule}".')
    if splits == "loo":
        raise InputError("splits loo leaves one positive patient out at a time: it needs --split_rule partition.")
    if validation == 0:
        return [_nobody_held_out(studies, splits)]
    return stratified_splits(studies, splits=splits, validation=validation, seed=seed)


def _nobody_held_out(studies: Sequence[ManifestRow], splits: int) -> tuple[list[ManifestRow], list[ManifestRow]]:
    """The one split of a model that is trained on all patients."""
    if splits != 1:
        raise InputError(
            f"validation 0 trains one model on all patients, and splits is {splits}: give --splits 1 with it, or hold "
            "some out (--validation 0.2)."
        )
    if len({study.label for study in studies}) < 2:
        raise InputError("The training cohort has patients of one class only. Add the other one.")
    return list(studies), []


def _patients(studies: Sequence[ManifestRow]) -> tuple[list[str], NDArray[np.int64]]:
    """Patients ``(P,)`` in the order in which they first occur, and 1 for those with a positive study, else 0."""
    positive: dict[str, int] = {}
    for study in studies:
        positive[study.patient] = max(positive.get(study.patient, 0), study.label or 0)
    return list(positive), np.array(list(positive.values()), dtype=np.int64)


def _held_out(studies: Sequence[ManifestRow], patients: set[str]) -> tuple[list[ManifestRow], list[ManifestRow]]:
    """The studies of other patients, and those of these."""
    return [s for s in studies if s.patient not in patients], [s for s in studies if s.patient in patients]
