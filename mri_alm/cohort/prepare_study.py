"""One study of any export -> NIfTI on the cohort's grid and a record of every decision, whatever happened to it.

A study's folder appears whole or not at all, so a run that was killed goes on where it was. Its record holds a digest
of everything the result depends on; a study whose files or settings changed is done again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813

from mri_alm.cohort.layouts import StudySource
from mri_alm.cohort.names import tidy
from mri_alm.cohort.rules import CohortRules, set_by_hand
from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.choose_series import chosen
from mri_alm.imaging.dicom_files import StudyFiles, silence_readers, with_headers
from mri_alm.imaging.exam import crop_centre, load_images, read_study, study_images
from mri_alm.imaging.image_file import write_nifti
from mri_alm.imaging.pictures import study_strip
from mri_alm.imaging.registration import (
    PREPARED_IMAGES,
    Facts,
    Images,
    as_manifest_says,
    as_stored,
    missing_high_b,
    onto_grid,
)
from mri_alm.imaging.series import Series, group_series, trust_positions
from mri_alm.localiser import find_gland, localiser_name
from mri_alm.runtime.atomic import write_atomically
from mri_alm.runtime.bug_reports import BUG_REPORT, UnexpectedError, ends_the_run, study_failure
from mri_alm.runtime.files import read_json, write_bytes, write_json
from mri_alm.runtime.pseudonyms import study_key

PREPARATION_PACKAGES = ("mri-alm", "SimpleITK", "pydicom", "numpy")
_FACTS = (
    "model",
    "field_strength",
    "b_values",
    "adc_source",
    "adc_units",
    "coverage",
    "crop_center_mm",
    "crop_about",
    "gland_ml",
    "gland_confidence",
    "registration",
    "hbv_b",
    *(f"{name}_{what}" for name in ("t2", "adc") for what in ("spacing_mm", "size", "thickness_mm", "acquired_mm")),
)


@dataclass(frozen=True)
class StudyTask:
    """One study to prepare.

    Args:
        source: Where it is.
        key: Its pseudonym, the name of its folder.
        item: ``gland`` or ``crop_center_mm`` from the label table.
    """

    source: StudySource
    key: str
    item: dict[str, Any]

    def __str__(self) -> str:
        """As messages may name it."""
        return self.key


class Preparation:
    """Prepares studies of one cohort.

    Args:
        folder: The cohort.
        root: Input that names of files are relative to.
        rules: Grid and roles.
        salt: Secret of the keys of studies and files.
        localise: Find the gland of a study that does not say where it is (:mod:`mri_alm.localiser`).
    """

    def __init__(self, folder: Path, root: Path, rules: CohortRules, salt: str, *, localise: bool = False) -> None:
        self.folder, self.root, self.rules, self.salt = folder, root, rules, salt
        self.versions = {name: version(name) for name in PREPARATION_PACKAGES}
        grid = [rules.spacing, rules.size]
        settings = {"series": rules.series, "trust_positions": rules.trust_positions, "grid": grid}
        self.localiser = localiser_name() if localise else ""
        settings |= {"localiser": self.localiser} if localise else {}
        self.settings = json.dumps(settings | self.versions, sort_keys=True, default=list)

    def finished(self, job: StudyTask) -> bool:
        """Whether a study is usable and up to date; a failed one is tried again: a decoder may be there since."""
        place = self.folder / job.key
        try:
            record = read_json(place / "study.json")
        except (OSError, InputError):
            return False
        images = record.get("images", PREPARED_IMAGES)  # before t2_valid there was no such list
        whole = bool(images) and all((place / f"{name}.nii.gz").is_file() for name in images)
        return whole and bool(record.get("digest") == self.digest(job))

    def prepare(self, job: StudyTask, refused: StudyError | None = None) -> dict[str, Any]:
        """Read, register and write one study, or record why it cannot be; gives the record.

        Args:
            job: The study.
            refused: Do not try, record this reason.
        """
        silence_readers()  # in the process that reads, whichever that is
        place = self.folder / job.key
        with write_atomically(place) as part:
            try:
                return self._written(job, part, refused)
            except Exception as error:
                if ends_the_run(error):  # the place cannot be written
                    raise
                return self._written(job, part, study_failure(error))

    def _written(self, job: StudyTask, part: Path, refused: StudyError | None) -> dict[str, Any]:
        """The record and all files of a study, in an empty folder."""
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        record, images = self._attempt(job, part, refused)
        if images:
            self._write(images, part)
        write_json(part / "study.json", record | {"versions": self.versions})
        return record

    def _attempt(self, job: StudyTask, part: Path, refused: StudyError | None) -> tuple[dict[str, Any], Images]:
        """The record, and the images on the grid; none of a study that cannot be used, whatever the reason."""
        dicom: StudyFiles | None = job.source.item.get("dicom")
        series: list[Series] = []
        images: Images = {}
        used: frozenset[Path] = frozenset()
        record: dict[str, Any] = {"study": job.key, "status": "ok", "error_code": ""}
        record |= {"error_text": "", "warnings": []}
        try:
            if refused:
                raise refused
            if dicom:
                dicom = with_headers(dicom)
                series = self._series(job, dicom)
            images, report, used = _load(job.source, dicom, series)
            record |= {"content": _content(images)}
            if why := missing_high_b(images, report):
                images.pop("hbv", None)
                report["warnings"].append(f"{why}. Only models trained with --drop_hbv above 0 take it.")
            centre = crop_centre(job.item) or (find_gland(images["t2"], report) if self.localiser else None)
            spacing, size, centre = self.rules.spacing, self.rules.size, as_manifest_says(centre)
            images, report = onto_grid(images, report, spacing=spacing, size=size, center_mm=centre)
            images = as_stored(images)
            record |= _facts(report)
        except Exception as error:
            failure, images = study_failure(error), {}
            if isinstance(failure, UnexpectedError):
                write_bytes(part / BUG_REPORT, failure.report.encode())
            record |= {"status": "failed", "error_code": failure.code, "error_text": failure.message}
        record["series"] = [chosen(one) for one in series]
        record |= self._accounts(job, record, dicom=dicom, series=series, used=used)
        record |= {"grid": {"spacing": self.rules.spacing, "size": self.rules.size}, "images": list(images)}
        return record | {"digest": self.digest(job)}, images

    def roles(self, job: StudyTask) -> list[Series]:
        """The DICOM series of a study with their roles; none when it is no DICOM study.

        Raises:
            StudyError: If the rules name a series that the study does not have.
        """
        if "dicom" not in job.source.item:
            return []
        return self._series(job, with_headers(job.source.item["dicom"]))

    def _series(self, job: StudyTask, dicom: StudyFiles) -> list[Series]:
        series = group_series(dicom.files, dicom.headers, self.rules.series)
        set_by_hand(self._by_hand(job), series)
        if self.rules.trust_positions:
            trust_positions(series)
        return series

    def file_key(self, file: Path) -> str:
        """Pseudonym of a file."""
        return study_key(f"file:{self._name(file)}", self.salt)

    def digest(self, job: StudyTask) -> str:
        """SHA-256 of what a study's result depends on: its files' names, sizes, times and roles, settings, versions."""
        state = hashlib.sha256(self.settings.encode())
        gland = [Path(job.item["gland"])] if "gland" in job.item else []
        for file in [*job.source.files, *filter(Path.is_file, gland)]:
            state.update(os.fsencode(f"{self._name(file)}|{_size_and_time(file)}\n"))
        item = job.source.item
        columns = {name: self._name(Path(item[name])) for name in item.keys() - {"dicom", "facts"}}
        columns |= {"facts": repr(sorted(item["facts"].items()))} if "facts" in item else {}
        state.update(os.fsencode(repr((sorted(columns.items()), job.item.get("crop_center_mm"), self._by_hand(job)))))
        return state.hexdigest()

    def _by_hand(self, job: StudyTask) -> dict[str, Sequence[int]]:
        names = [job.key, *job.source.names]
        return dict(next((self.rules.studies[name] for name in names if name in self.rules.studies), {}))

    def _write(self, images: Images, part: Path) -> None:
        """Images and picture of a prepared item."""
        for name, image in images.items():
            write_nifti(part / f"{name}.nii.gz", image)
        arrays = {name: sitk.GetArrayFromImage(image) for name, image in images.items()}
        arrays.setdefault("hbv", np.zeros_like(arrays["adc"]))
        write_bytes(part / "qc.jpg", study_strip(arrays, self.rules.spacing))

    def _accounts(
        self,
        job: StudyTask,
        record: dict[str, Any],
        *,
        dicom: StudyFiles | None,
        series: Sequence[Series],
        used: frozenset[Path],
    ) -> dict[str, Any]:
        """Every file of the study, by key: used, ignored or failed, with the reason."""
        series_of = {frame.file: one for one in series for frame in one.frames}
        failed = job.source.failed | (dicom.failed if dicom else {})
        ignored = job.source.ignored | (dicom.ignored if dicom else {})
        groups: dict[tuple[str, str, int], list[str]] = {}
        for file in job.source.files:
            one = series_of.get(file)
            role = job.source.used.get(file) or (one.role if one else "")
            if file in failed:
                state = ("failed", failed[file])
            elif file in ignored:
                state = ("ignored", ignored[file])
            elif record["error_code"] == "unreadable" and record["error_text"].startswith(f"Column {role}:"):
                state = ("failed", "cannot be read")
            elif record["status"] == "failed":
                state = ("ignored", "the study failed")
            elif file in used:
                state = ("used", role)
            else:
                state = ("ignored", f"{role}: {one.reason}" if one else "not needed")
            groups.setdefault((*state, one.number if one else -1), []).append(self.file_key(file))
        counts = {
            f"files_{state}": sum(len(keys) for key, keys in groups.items() if key[0] == state)
            for state in ("used", "ignored", "failed")
        }
        entries = [
            {"state": state, "reason": reason} | ({"series": number} if number >= 0 else {}) | {"files": keys}
            for (state, reason, number), keys in groups.items()
        ]
        return {"files_seen": len(job.source.files), **counts, "files": entries}

    def _name(self, file: Path) -> str:
        base = self.root if self.root.is_dir() else self.root.parent
        return tidy(str(file.relative_to(base) if file.is_relative_to(base) else file))


def _size_and_time(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except (OSError, ValueError):  # it is gone, or never was
        return None
    return status.st_size, status.st_mtime_ns


def _load(source: StudySource, dicom: StudyFiles | None, series: list[Series]) -> tuple[Images, Facts, frozenset[Path]]:
    """A study's volumes, each on its own grid, what is known of them, and the files they are from."""
    if source.error:
        raise source.error
    if dicom is None:
        return *load_images(source.item), frozenset(source.used)
    study = read_study(dicom, series)
    return *study_images(study), study.used


def _content(images: Images) -> dict[str, str]:
    """Digest of each image's voxels as they were read, by which copies are known whatever their crop."""
    read = [name for name in ("t2", "adc", "hbv") if name in images]
    arrays = {name: sitk.GetArrayFromImage(images[name]).astype(np.float32) for name in read}
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}


def _facts(report: Facts) -> dict[str, Any]:
    """What the record says about a prepared study."""
    facts = {name: report.get(name) for name in _FACTS}
    facts["vendor"] = report.get("vendor", "")
    for name in ("t2", "dwi", "adc", "hbv"):  # of DICOM; the reasons stand at the series of study.json
        found = report.get(name) or []
        facts[f"{name}_series"] = [one["series"] for one in (found if isinstance(found, list) else [found])]
    return facts | {"warnings": report["warnings"], "status": "warn" if report["warnings"] else "ok"}
