"""A study before its images are read: its files, what labels may call it, and what is known to be wrong with it.

Names of studies and patients stay in memory, to match labels: only keyed hashes of them are ever written.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError, StudyError
from mri_alm.files import in_utf8

IMAGE = re.compile(r"\.(nii|nii\.gz|mha|mhd|nrrd)$", re.IGNORECASE)


@dataclass
class Source:
    """One study before its images are read.

    Args:
        uid: What its key is made from; never written.
        patient: What its patient's key is made from; never written.
        names: What a label table or a rules file may call the study, tidied; never written.
        patients: What a label table may call the patient, tidied, the best first; never written.
        item: What :class:`mri_alm.transforms.LoadProstateStudyd` takes: ``dicom``, or image columns.
        used: Image files with their role; of a DICOM study they are known after reading.
        ignored: Files not needed, with the reason.
        failed: Files that should be readable and are not, with the reason.
        error: Why the study cannot be used, as far as names tell.
        split: The side that the layout itself gives.
    """

    uid: str
    patient: str
    names: list[str]
    patients: list[str]
    item: dict[str, Any] = field(default_factory=dict)
    used: dict[Path, str] = field(default_factory=dict)
    ignored: dict[Path, str] = field(default_factory=dict)
    failed: dict[Path, str] = field(default_factory=dict)
    error: StudyError | None = None
    split: str = ""

    @property
    def files(self) -> list[Path]:
        """Every file of the study, in order."""
        dicom = self.item.get("dicom")
        found = {*self.used, *self.ignored, *self.failed}
        return sorted(found | ({*dicom.files, *dicom.ignored, *dicom.failed} if dicom else set()))

    def take(self, column: str, file: Path) -> None:
        """Use a file for a column, unless an earlier file has it."""
        if column in self.item:
            self.ignored[file] = f"a second file for {column}"
        else:
            self.item[column] = str(file)
            self.used[file] = column


@dataclass
class Input:
    """What was found: the layout, its studies, and files that belong to none, with the reason."""

    root: Path
    layout: str
    sources: list[Source]
    outside: dict[Path, str]


def walk(root: Path) -> Iterator[Path]:
    """All files below a folder, sorted within each folder; links are followed, a folder met again is left out.

    Raises:
        InputError: If a folder cannot be listed: its studies would vanish in silence.
    """
    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_refuse):
        if (place := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders.sort()
        yield from (path for name in sorted(files) if (path := Path(folder) / name).is_file())


def _refuse(error: OSError) -> None:
    raise InputError(
        f"The folder {error.filename} cannot be listed ({error.strerror}). Get access to it, or leave it out."
    ) from error


def stem(file: Path) -> str:
    """A file's name without the ending of an image."""
    return IMAGE.sub("", file.name)


def bvals_of(image: Path) -> list[Path]:
    """The table of b-values beside an image, if there is one."""
    beside = image.with_name(stem(image) + ".bval")
    return [beside] if beside.is_file() else []


def unusable(file: Path) -> str:
    """Why a file cannot be what its name says, or nothing: an archive, or the pointer that Git LFS leaves."""
    if not in_utf8(file):  # ITK ends the process over such a name
        return "a name that is not in UTF-8; rename the file or its folder"
    try:
        with file.open("rb") as stream:
            start = stream.read(23)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if start.startswith(b"PK\x03\x04") or file.suffix.lower() == ".zip":
        return "zip archive; unpack it first"
    return "Git LFS pointer instead of data" if start == b"version https://git-lfs" else ""
