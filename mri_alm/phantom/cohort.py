"""Phantom cohorts on disk: studies as NIfTI or DICOM, and their manifest.

Writing is resumable: a study appears whole or not at all, and its truth file, written last, lists what belongs to it.
"""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813

from mri_alm.errors import InputError, one_of
from mri_alm.imaging.exam import PHANTOM_NOTE
from mri_alm.imaging.image_file import write_nifti
from mri_alm.phantom.anatomy import LESION_SIZES
from mri_alm.phantom.dicom import write_dicom_study
from mri_alm.phantom.study import PhantomStudy, make_study
from mri_alm.runtime.atomic import private_files, sweep, write_atomically
from mri_alm.runtime.files import read_json, write_json
from mri_alm.runtime.locks import exclusive_lock
from mri_alm.runtime.tables import write_csv
from mri_alm.runtime.tasks import Pool, run_tasks

VERSION = 1
"""Raised when the same parameters would give other images."""
WRITTEN_IMAGES = ("t2", "adc", "hbv", "gland", "zones")


@dataclass(frozen=True)
class PhantomRow:
    """One study of a cohort: its number, label and side."""

    index: int
    label: int
    side: str

    @property
    def name(self) -> str:
        """The study's key in the manifest and its folder's name."""
        return f"phantom_{self.index:04d}"


def make_cohort(
    folder: Path,
    *,
    train: int,
    test: int,
    ratio: int = 8,
    seed: int = 0,
    form: str = "nifti",
    difficulty: str = "plain",
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a cohort of phantoms, or complete the one begun in ``folder``; a complete one is left as it is.

    Args:
        folder: Where ``manifest.csv``, ``studies/`` and ``truth/`` are written; made when missing.
        train: Number of training studies, >= 2.
        test: Number of test studies, >= 2.
        ratio: Negatives per positive on each side, >= 1; each side gets at least one positive.
        seed: Another seed, another cohort.
        form: ``"nifti"`` (columns t2, adc, hbv) or ``"dicom"`` (column dicom, one folder per study).
        difficulty: ``"plain"`` or ``"real"``, see :func:`mri_alm.phantom.study.make_study`.
        progress: Called with the number of studies done and their total.

    Returns:
        The manifest's path: one row per study, paths relative to the manifest.

    Raises:
        InputError: If a parameter is out of range, or ``folder`` holds a cohort made with other parameters.
    """
    if form not in {"nifti", "dicom"}:
        raise InputError(f"A phantom cohort's form must be 'nifti' or 'dicom', not {form!r}.")
    one_of("A phantom's difficulty", difficulty, tuple(LESION_SIZES))
    rows = plan_cohort(train, test, ratio, seed)
    parameters = {"version": VERSION, "train": train, "test": test, "ratio": ratio, "seed": seed, "form": form}
    parameters |= {} if difficulty == "plain" else {"difficulty": difficulty}  # cohorts of before name none

    def make(row: PhantomRow) -> PhantomStudy:
        return make_study(row.index, row.label, seed=seed, difficulty=difficulty)

    return write_cohort(folder, rows, make, parameters=parameters, progress=progress)


def plan_cohort(train: int, test: int, ratio: int, seed: int) -> list[PhantomRow]:
    """Number, label and side of every study, in a random order that depends on ``seed`` only.

    Raises:
        InputError: If a side has fewer than two studies, or the ratio is below 1.
    """
    for name, value, least in (("train", train, 2), ("test", test, 2), ("ratio", ratio, 1), ("seed", seed, 0)):
        if value < least:
            raise InputError(f"A phantom cohort needs {name} >= {least}, not {value}.")
    rows: list[PhantomRow] = []
    rng = np.random.default_rng([seed, 0x5EED])
    for split, count in (("train", train), ("test", test)):
        positives = max(1, round(count / (ratio + 1)))
        labels = rng.permutation(np.arange(count) < positives)
        rows += [PhantomRow(len(rows) + i, int(label), split) for i, label in enumerate(labels)]
    return rows


@private_files()
def write_cohort(
    folder: Path,
    rows: list[PhantomRow],
    make: Callable[[PhantomRow], PhantomStudy],
    *,
    parameters: dict[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the studies ``make`` gives for ``rows``, and their manifest; see :func:`make_cohort`.

    Args:
        folder: The cohort's folder.
        rows: From :func:`plan_cohort`.
        make: Makes one study; called from several threads, for missing studies only.
        parameters: What the cohort depends on, JSON types; ``form`` chooses between NIfTI and DICOM.
        progress: Called with the number of studies done and their total.

    Raises:
        InputError: If ``folder`` holds a cohort made with other parameters.
    """
    with exclusive_lock(folder / ".lock", wait=True):  # the splits of one run may all want it at once
        _claim(folder, parameters)
        for part in (folder, folder / "studies", folder / "truth"):
            sweep(part)
        missing = [row for row in rows if not _is_complete(folder, row)]

        def write(row: PhantomRow) -> None:
            _write_study(folder, row, make(row), dicom=parameters["form"] == "dicom")

        pool = Pool("threading", min(os.cpu_count() or 1, 8))
        with closing(run_tasks(write, missing, pool)) as outcomes:  # none is at work when the lock goes
            for done, outcome in enumerate(outcomes, len(rows) - len(missing) + 1):
                outcome.get()
                if progress:
                    progress(done, len(rows))
        return _write_manifest(folder, rows, dicom=parameters["form"] == "dicom")


def _claim(folder: Path, parameters: dict[str, Any]) -> None:
    """Record the parameters in the folder, or check that they are those recorded."""
    record = folder / "cohort.json"
    if record.exists():
        found = read_json(record)
        different = [f"{key} = {found.get(key)!r}, not {parameters.get(key)!r}" for key in sorted({*found, *parameters})
                     if found.get(key) != parameters.get(key)]  # fmt: skip
        if different:
            raise InputError(
                f"{folder} holds a phantom cohort made with {'; '.join(different)}. Choose another folder or delete it."
            )
        return
    write_json(record, parameters)


def _is_complete(folder: Path, row: PhantomRow) -> bool:
    truth = folder / "truth" / f"{row.name}.json"
    if not truth.exists():
        return False
    files = read_json(truth)["files"]
    return all((folder / "studies" / row.name / file).is_file() for file in files)


def _write_study(folder: Path, row: PhantomRow, study: PhantomStudy, *, dicom: bool) -> None:
    place, truth = folder / "studies" / row.name, folder / "truth" / f"{row.name}.json"
    truth.unlink(missing_ok=True)
    with write_atomically(place) as temporary:
        temporary.mkdir()
        if dicom:
            write_dicom_study(study, temporary)
        else:
            for name in WRITTEN_IMAGES:
                image: sitk.Image = getattr(study, name)
                image.SetMetaData("ITK_FileNotes", PHANTOM_NOTE)  # the header says it, whatever becomes of the manifest
                write_nifti(temporary / f"{name}.nii.gz", image)
        files = sorted(str(file.relative_to(temporary)) for file in temporary.rglob("*") if file.is_file())
    write_json(truth, {**study.info, "side": row.side, "files": files})


def _write_manifest(folder: Path, rows: list[PhantomRow], *, dicom: bool) -> Path:
    paths = {"dicom": ""} if dicom else {name: f"/{name}.nii.gz" for name in ("t2", "adc", "hbv")}
    cells = [
        {"study": row.name, "patient": row.name, "label": row.label, "side": row.side}
        | {column: f"studies/{row.name}{path}" for column, path in paths.items()}
        | {"vendor": "mri-alm"}
        for row in rows
    ]
    write_csv(folder / "manifest.csv", list(cells[0]), cells)
    return folder / "manifest.csv"
