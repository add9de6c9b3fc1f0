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
from mri_alm.cohort.rules import CohortRules, set_by_hand, tidy
from mri_alm.errors import StudyError, itk_failed, memory_ran_out
from mri_alm.imaging.choose_series import chosen
from mri_alm.imaging.dicom_files import StudyFiles, silence_readers, with_headers
from mri_alm.imaging.exam import crop_centre, load_images, read_study, study_images
from mri_alm.imaging.image_file import write_nifti
from mri_alm.imaging.pictures import study_strip
from mri_alm.imaging.registration import PREPARED_IMAGES, Facts, Images, onto_grid
from mri_alm.imaging.series import Series, group_series
from mri_alm.runtime.atomic import write_atomically
from mri_alm.runtime.files import DamagedFileError, read_json, write_bytes, write_json
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
    "registration",
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
    """

    def __init__(self, folder: Path, root: Path, rules: CohortRules, salt: str) -> None:
        self.folder, self.root, self.rules, self.salt = folder, root, rules, salt
        self.versions = {name: version(name) for name in PREPARATION_PACKAGES}
        settings = {"series": rules.series, "grid": [rules.spacing, rules.size]}
        self.settings = json.dumps(settings | self.versions, sort_keys=True, default=list)

    def finished(self, job: StudyTask) -> bool:
        """Whether a study is usable and up to date; a failed one is tried again: a decoder may be there since."""
        place = self.folder / job.key
        try:
            digest = read_json(place / "study.json").get("digest")
        except (OSError, DamagedFileError):
            return False
        whole = all((place / f"{name}.nii.gz").is_file() for name in PREPARED_IMAGES)
        return whole and digest == self.digest(job)

    def prepare(self, job: StudyTask, refused: StudyError | None = None) -> dict[str, Any]:
        """Read, register and write one study, or record why it cannot be; gives the record.

        Args:
            job: The study.
            refused: Do not try, record this reason.
        """
        silence_readers()  # in the process that reads, whichever that is
        with write_atomically(self.folder / job.key) as part:
            part.mkdir()
            record = self._attempt(job, part, refused)
            write_json(part / "study.json", record | {"versions": self.versions})
        return record

    def _attempt(self, job: StudyTask, part: Path, refused: StudyError | None) -> dict[str, Any]:
        dicom: StudyFiles | None = job.source.item.get("dicom")
        series: list[Series] = []
        used: frozenset[Path] = frozenset()
        record: dict[str, Any] = {"study": job.key, "status": "ok", "error_code": ""}
        record |= {"error_text": "", "warnings": []}
        try:
            if refused:
                raise refused
            if dicom:
                dicom = with_headers(dicom)
                series = group_series(dicom.files, dicom.headers, self.rules.series)
                set_by_hand(self._by_hand(job), series)
            images, report, used = _load(job.source, dicom, series)
            record |= _geometry(images) | {"content": _content(images)}
            spacing, size, centre = self.rules.spacing, self.rules.size, crop_centre(job.item)
            images, report = onto_grid(images, report, spacing=spacing, size=size, center_mm=centre)
            record |= _facts(report)
            self._write(images, part)
        except (StudyError, MemoryError, RuntimeError) as error:
            failure = error if isinstance(error, StudyError) else memory_ran_out(error) or itk_failed(error)
            if failure is None:
                raise
            shutil.rmtree(part)
            part.mkdir()
            record |= {"status": "failed", "error_code": failure.code, "error_text": failure.message}
        record["series"] = [chosen(one) for one in series]
        record |= self._accounts(job, record, dicom=dicom, series=series, used=used)
        return record | {"digest": self.digest(job), "grid": {"spacing": self.rules.spacing, "size": self.rules.size}}

    def roles(self, job: StudyTask) -> list[Series]:
        """The DICOM series of a study with their roles; none when it is no DICOM study.

        Raises:
            StudyError: If the rules name a series that the study does not have.
        """
        if "dicom" not in job.source.item:
            return []
        dicom = with_headers(job.source.item["dicom"])
        series = group_series(dicom.files, dicom.headers, self.rules.series)
        set_by_hand(self._by_hand(job), series)
        return series

    def file_key(self, file: Path) -> str:
        """Pseudonym of a file."""
        return study_key(f"file:{self._name(file)}", self.salt)

    def digest(self, job: StudyTask) -> str:
        """SHA-256 of what a study's result depends on: its files' names, sizes, times and roles, settings, versions."""
        state = hashlib.sha256(self.settings.encode())
        gland = [Path(job.item["gland"])] if "gland" in job.item else []
        for file in [*job.source.files, *filter(Path.is_file, gland)]:
            status = file.stat() if file.exists() else None
            state.update(os.fsencode(f"{self._name(file)}|{status and (status.st_size, status.st_mtime_ns)}\n"))
        columns = {name: self._name(Path(value)) for name, value in job.source.item.items() if name != "dicom"}
        state.update(os.fsencode(repr((sorted(columns.items()), job.item.get("crop_center_mm"), self._by_hand(job)))))
        return state.hexdigest()

    def _by_hand(self, job: StudyTask) -> dict[str, Sequence[int]]:
        names = [job.key, *job.source.names]
        return dict(next((self.rules.studies[name] for name in names if name in self.rules.studies), {}))

    def _write(self, images: Images, part: Path) -> None:
        """Images and picture of a prepared item."""
        for name, image in images.items():
            write_nifti(part / f"{name}.nii.gz", image if name == "valid" else _rounded(image))
        arrays = {name: sitk.GetArrayFromImage(image) for name, image in images.items()}
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
    arrays = {name: sitk.GetArrayFromImage(images[name]).astype(np.float32) for name in ("t2", "adc", "hbv")}
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}


def _geometry(images: Images) -> dict[str, Any]:
    """Voxel size and count of the images as they came."""
    sizes = {f"{name}_size": images[name].GetSize() for name in ("t2", "adc")}
    return sizes | {f"{name}_spacing_mm": [round(v, 3) for v in images[name].GetSpacing()] for name in ("t2", "adc")}


def _facts(report: Facts) -> dict[str, Any]:
    """What the record says about a prepared study."""
    facts = {name: report.get(name) for name in _FACTS}
    facts["vendor"] = report.get("vendor", "")
    facts["hbv_b"] = (report.get("hbv") or {}).get("b")
    for name in ("t2", "dwi", "adc", "hbv"):  # of DICOM; the reasons stand at the series of study.json
        found = report.get(name) or []
        facts[f"{name}_series"] = [one["series"] for one in (found if isinstance(found, list) else [found])]
    return facts | {"warnings": report["warnings"], "status": "warn" if report["warnings"] else "ok"}


def _rounded(image: sitk.Image) -> sitk.Image:
    """Float32 rounded to 12 significant bits (0.01 %, well below noise): the file shrinks by half, zero stays zero."""
    bits = sitk.GetArrayFromImage(image).view(np.uint32)
    rounded = sitk.GetImageFromArray(((bits + 0x400) & np.uint32(0xFFFFF800)).view(np.float32))
    rounded.CopyInformation(image)
    return rounded
