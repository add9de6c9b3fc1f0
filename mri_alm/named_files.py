"""NIfTI, MHA or NRRD files whose names (or dcm2niix's .json beside them) say what they are; a folder holds a study."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813

from mri_alm.cohort_rules import CohortRules, tidy
from mri_alm.files import ONE_IMAGE_FILE
from mri_alm.sources import IMAGE, Source, bvals_of, stem, unusable, walk

_CASE = re.compile(r"(.+?)[_.-](t2w?|adc|hbv|dwi|gland)", re.IGNORECASE)


def named_sources(root: Path, rules: CohortRules) -> tuple[list[Source], dict[Path, str]]:
    """Studies of a tree of image files, and the files that belong to none.

    A folder that holds images is a study. A folder where all images are called ``<case>_t2``, ``<case>_adc`` and so on,
    or those of several cases with a T2 are, is one study per case, with the other images whose names begin with its
    name. Files that are no image count with the study of their folder.
    """
    sources: list[Source] = []
    outside: dict[Path, str] = {}
    folders: dict[Path, list[Path]] = defaultdict(list)
    for file in walk(root):
        folders[file.parent].append(file)
    for folder, files in folders.items():
        images = [file for file in files if IMAGE.search(file.name)]
        if not images:
            outside |= {file: unusable(file) or "no image" for file in files}
            continue
        cases, strays = _cases(folder.relative_to(root), images)
        for name, members in cases.items():
            sources.append(_study(name, members, rules))
        outside |= dict.fromkeys(strays, "its name begins like no case of its folder")
        rest = [file for file in files if file not in images and all(file not in one.used for one in sources)]
        for file in rest:
            reason = unusable(file)
            (sources[-1].failed if reason else sources[-1].ignored)[file] = reason or "no image"
    return sources, outside


def role_of(text: str, patterns: Mapping[str, str]) -> str:
    """The first role whose pattern is found in a name; ``"ignored"`` when none is."""
    return next(
        (role for role, pattern in patterns.items() if re.search(pattern, text.lower().replace("_", " "))), "ignored"
    )


def _cases(folder: Path, images: list[Path]) -> tuple[dict[str, list[Path]], list[Path]]:
    """Study name -> its images, and the images of no study."""
    cases: dict[str, list[Path]] = defaultdict(list)
    others: list[Path] = []
    with_t2: set[str] = set()
    for file in images:
        if match := _CASE.fullmatch(stem(file)):
            cases[match[1]].append(file)
            with_t2 |= {match[1]} if match[2].lower().startswith("t2") else set()
        else:
            others.append(file)
    if len(cases) < 2 or (others and len(with_t2) < 2):
        return {folder.as_posix(): images}, []
    strays: list[Path] = []
    for file in others:
        owners = [case for case in cases if re.match(re.escape(case) + "[_.-]", stem(file))]
        (cases[max(owners, key=len)] if owners else strays).append(file)
    return {(folder / case).as_posix(): files for case, files in cases.items()}, strays


def _study(name: str, images: list[Path], rules: CohortRules) -> Source:
    place = Path(name)
    names = [tidy(str(part)) for part in (place, *place.parents) if part.parts]
    names += [tidy(Path(part).name) for part in names]
    owner = place.parts[0] if place.parts else name
    source = Source(name, owner, names, [tidy(owner), *names])
    candidates: dict[str, list[tuple[Any, Path]]] = defaultdict(list)
    for file in images:
        role, rank, reason = _role(file, rules.files)
        if reason:
            (source.failed if role == "failed" else source.ignored)[file] = reason
        else:
            candidates[role].append((rank, file))
    for role, found in candidates.items():
        for _, file in sorted(found, reverse=True):
            source.take(role, file)
    if "dwi" in source.item:
        source.used |= dict.fromkeys(bvals_of(Path(source.item["dwi"])), "dwi")
    return source


def _role(file: Path, patterns: Mapping[str, str]) -> tuple[str, tuple[float, str], str]:
    """Column of an image, its rank among others of that column, and why it is not used (empty when it may be)."""
    if reason := unusable(file):
        return "failed", (0.0, ""), reason
    role = role_of(_words(file), patterns)
    if role == "ignored":
        return role, (0.0, ""), "its name says no T2, diffusion or ADC"
    reader = sitk.ImageFileReader()
    reader.SetFileName(str(file))
    try:
        with ONE_IMAGE_FILE:
            reader.ReadImageInformation()
    except RuntimeError:  # its text holds the path, which may name the patient
        return "failed", (0.0, ""), "no image that can be read"
    size, table = reader.GetSize(), bvals_of(file)
    if role in ("dwi", "hbv"):
        role = "dwi" if table and len(size) == 4 else "hbv"
    if role == "t2" and int(np.argmax(np.abs(np.array(reader.GetDirection()).reshape(len(size), -1)[:3, 2]))) != 2:
        return role, (0.0, ""), "T2, but not axial"
    # Of several T2 the fullest, of several high-b images the highest b, then the last by name.
    return role, (_highest_b(table) if role == "hbv" else float(size[2]), file.name), ""


def _highest_b(table: list[Path]) -> float:
    words = table[0].read_text("utf-8", errors="replace").split() if table else []
    return max((float(word) for word in words if re.fullmatch(r"\d+(\.\d*)?", word)), default=0.0)


def _words(file: Path) -> str:
    """A file's name and what dcm2niix noted about its series."""
    words = [stem(file)]
    beside = file.with_name(stem(file) + ".json")
    if beside.is_file():
        try:
            note = json.loads(beside.read_text("utf-8"))
            words += [str(note.get("SeriesDescription", "")), " ".join(map(str, note.get("ImageType", [])))]
        except (OSError, ValueError, AttributeError, TypeError):
            pass  # a damaged note decides nothing; the name does
    return " ".join(words)
