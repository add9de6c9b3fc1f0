"""Studies in a folder of any layout, found by names and headers only; every file is accounted for.

Names of studies and patients stay in memory, to match labels: only keyed hashes of them are ever written.
"""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from mri_alm.cohort.names import tidy
from mri_alm.cohort.protocol import told_facts
from mri_alm.cohort.rules import LAYOUTS, CohortRules
from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.dicom_files import StudyFiles, find_studies, read_dicom
from mri_alm.imaging.diffusion import b_table
from mri_alm.imaging.image_file import image_header, voxels_of
from mri_alm.runtime.bug_reports import study_failure
from mri_alm.runtime.files import (
    bvals_of,
    is_image,
    links_out_of,
    no_files,
    open_file,
    read_json,
    stem,
    unusable,
    walk,
)
from mri_alm.runtime.tables import path_exists, path_in_cell, read_table, windows_hint

logger = logging.getLogger("mri_alm")

KEPT_HEADERS = 4000  # images; 80 MB
SHOWN_LINKS = 5
_PICAI = re.compile(r"([^_]+)_([^_]+)_(t2w|adc|hbv|sag|cor)")
_PICAI_COLUMNS = {"t2w": "t2", "adc": "adc", "hbv": "hbv"}
_NNUNET = re.compile(r"(.+)_(\d{4})")
_SCALED_AS_CT = "ct"  # picai_prep calls ADC so, since nnU-Net then scales it by the whole cohort and not by the image
_CASE = re.compile(r"(.+?)[_.-](t2w?|adc|hbv|dwi|gland)", re.IGNORECASE)
_TABLE = ("t2", "adc", "hbv", "dwi", "gland", "dicom")


@dataclass
class StudySource:
    """One study before its images are read.

    Args:
        uid: What its key is made from; never written.
        patient: What its patient's key is made from; never written.
        names: What a label table or a rules file may call the study, tidied; never written.
        patients: What a label table may call the patient, tidied, the best first; never written.
        item: What :func:`mri_alm.imaging.exam.load_images` takes: ``dicom``, or image columns.
        used: Image files with their role; of a DICOM study they are known after reading.
        ignored: Files not needed, with the reason.
        failed: Files that should be readable and are not, with the reason.
        error: Why the study cannot be used, as far as names tell.
        side: The side that the layout itself gives.
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
    side: str = ""

    @property
    def files(self) -> list[Path]:
        """Every file of the study, in order."""
        dicom = self.item.get("dicom")
        found = {*self.used, *self.ignored, *self.failed}
        return sorted(found | ({*dicom.files, *dicom.ignored, *dicom.failed} if dicom else set()))

    @property
    def folder(self) -> Path:
        """The folder that holds all of its images; it may identify the patient."""
        dicom = self.item.get("dicom")
        files = (dicom.files if dicom else [*self.used]) or self.files
        return Path(os.path.commonpath([file.parent.absolute() for file in files])) if files else Path()

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

    layout: str
    sources: list[StudySource]
    outside: dict[Path, str]


def find_sources(root: Path, rules: CohortRules, *, allow_outside_paths: bool = False) -> Input:
    """Studies of a folder or table, in a stable order.

    Args:
        root: The folder, or a table, which may name files anywhere.
        rules: Layout and roles.
        allow_outside_paths: Whether links in the folder may lead out of it. Otherwise these are left out, and a warning
            names them: whoever sends an export does not choose which files of this machine are read.

    Raises:
        InputError: If there is nothing to prepare, or the input is an archive.
    """
    if root.suffix.lower() in (".zip", ".tar", ".tgz", ".7z"):
        raise InputError(f"{root} is an archive. Unpack it and give the folder.")
    if not root.exists():
        raise InputError(f"{root}: no such file or folder. Give a folder of studies, or a table (.csv) of image files.")
    if (root / "cohort.json").is_file() and (root / "manifest.csv").is_file():
        raise InputError(f"{root} is a prepared cohort. Give {root / 'manifest.csv'}, or the export it was made from.")
    within = None if allow_outside_paths or root.is_file() else root
    left_out = links_out_of(root, root) if within else []
    _warn_of_links(left_out, root)
    layout = rules.layout or detect_layout(root, within)
    if (layout == "table") != root.is_file():
        raise InputError(f"{root} cannot have the layout {layout} ({', '.join(LAYOUTS)}); a table is a .csv file.")
    readers = {"dicom": _dicom, "table": _table, "picai": _picai, "nnunet": _nnunet, "named": _named}
    sources, outside = readers[layout](root, rules, within)
    outside |= dict.fromkeys(left_out, "a link that leads out of the input folder")
    if not sources:
        raise InputError(f"{root}: no study found, read as layout {layout}. Force another one in the rules file.")
    if layout not in ("dicom", "table"):  # their files are counted with a study, or named by the table
        outside |= no_files(root, within=within)
    _take_voxels(sources, outside)
    for source in sources:
        if not source.error and "dicom" not in source.item:
            source.error = _incomplete(source)
    return Input(layout, sorted(sources, key=lambda one: one.files[:1] or [root]), outside)


def _warn_of_links(links: list[Path], root: Path) -> None:
    if links:
        shown = ", ".join(str(link.relative_to(root)) for link in links[:SHOWN_LINKS])
        logger.warning(
            "%d links lead out of the input folder and are left out: %s%s. Put the files themselves there, or allow it "
            "with --allow-outside-paths if the folder is your own.",
            len(links),
            shown,
            f" and {len(links) - SHOWN_LINKS} more" if len(links) > SHOWN_LINKS else "",
        )


def detect_layout(root: Path, within: Path | None = None) -> str:
    """The layout that names and first bytes speak for; DICOM when nothing speaks for another one.

    Args:
        root: Folder or table.
        within: See :func:`mri_alm.runtime.files.walk`.
    """
    if root.is_file():
        return "table"
    if (root / "dataset.json").is_file() and any((root / part).is_dir() for part in ("imagesTr", "imagesTs")):
        return "nnunet"
    images = False
    for file in walk(root, within=within):
        if unusable(file):
            continue
        if is_image(file):
            images = True
            if (match := _PICAI.fullmatch(stem(file))) and match[3] == "t2w":
                return "picai"
        elif _is_dicom(file):
            return "dicom"
    return "named" if images else "dicom"


def _take_voxels(sources: list[StudySource], outside: dict[Path, str]) -> None:
    """Count voxels apart from their header with the image they belong to, whatever their own names made of them."""
    owned = [{file: role for image, role in one.used.items() for file in voxels_of(image)} for one in sources]
    every = set().union(*owned)
    for place in (outside, *(place for one in sources for place in (one.ignored, one.failed))):
        for file in place.keys() & every:
            del place[file]
    for source, files in zip(sources, owned, strict=True):
        source.failed |= {file: reason for file in files if (reason := unusable(file))}
        source.used |= files


def _is_dicom(file: Path) -> bool:
    try:
        with open_file(file) as stream:
            return stream.read(132)[128:] == b"DICM"
    except OSError:  # whoever reads its study says so
        return False


def _incomplete(source: StudySource) -> StudyError | None:
    # without a high b it is for training and scoring to say, as a model may be made for it; not where a file is damaged
    maps = "adc" in source.item and ("hbv" in source.item or not source.failed)
    if "t2" in source.item and ("dwi" in source.item or maps):
        return None
    if reasons := sorted(set(source.failed.values())):
        code = "pointer" if any("pointer" in reason for reason in reasons) else "unreadable"
        return StudyError(code, f"{len(source.failed)} of its files cannot be used: {'; '.join(reasons)}.")
    if "t2" not in source.item:
        return StudyError("no_t2", "No file of this study is an axial T2 image. Name it in the rules or the table.")
    return StudyError("no_diffusion", "The study has no adc, and no 4D diffusion with b-values instead.")


def _dicom(root: Path, _: CohortRules, within: Path | None) -> tuple[list[StudySource], dict[Path, str]]:
    sources = []
    for study in find_studies(root, keep=KEPT_HEADERS, within=within):
        source = StudySource(study.uid, "", [], [], {"dicom": study})
        folder = PurePath(source.folder).relative_to(root.absolute())
        folders = [tidy(str(place)) for place in (folder, *folder.parents) if place.parts]
        source.names = [tidy(study.uid), *folders, *(tidy(PurePath(name).name) for name in folders)]
        patient = _patient_id(study)
        source.patient = patient or (folder.parts[0] if folder.parts else study.uid)
        source.patients = [name for name in (tidy(patient), *source.names[1:]) if name]
        sources.append(source)
    return sources, {}


def _patient_id(study: StudyFiles) -> str:
    """The patient's number, to match labels and to keep patients together; never written."""
    if not study.files:
        return ""
    try:
        header = read_dicom(study.files[0], stop_before_pixels=True, specific_tags=["PatientID"])
        return str(header.get("PatientID") or "").strip()
    except Exception:  # whatever it is, reading the study says so
        return ""


def _table(path: Path, rules: CohortRules, _: Path | None) -> tuple[list[StudySource], dict[Path, str]]:
    sources = []
    names = rules.labels.columns
    seen: set[str] = set()
    for number, row in enumerate(read_table(path, as_numbered=True), 2):
        if not any(row.values()):
            continue
        study = next((row[name] for name in names["study"] if row.get(name)), f"row {number}")
        patient = next((row[name] for name in names["patient"] if row.get(name)), study)
        uid = f"{study}|{number}" if study in seen else study
        seen.add(study)
        source = StudySource(uid, patient, [tidy(study)], [tidy(patient)])
        if row.get("crop_center_mm"):
            source.item["crop_center_mm"] = row["crop_center_mm"]
        facts, problems = told_facts(row)
        source.item |= {"facts": facts} if facts else {}
        for column in _TABLE:
            if row.get(column):
                _add(source, column, path_in_cell(path.parent, row[column]))
        if problems:
            source.error = StudyError("table", f"The study's row in the table {' '.join(problems)}")
        sources.append(source)
    return sources, {}


def _add(source: StudySource, column: str, place: Path) -> None:
    """One cell of a table: a file, a folder of one DICOM series, or (column dicom) a folder of one study."""
    if not path_exists(place):
        source.failed[place] = f"column {column} names it, but it does not exist"
        source.error = StudyError(
            "missing_file", f"The path in column {column} does not exist.{windows_hint(place)} Correct the table."
        )
    elif column == "dicom":
        try:
            studies = find_studies(place, keep=0)
        except InputError:
            source.failed[place] = "no folder with files"
            source.error = StudyError("no_images", "Column dicom names no folder with files. Correct the table.")
            return
        source.item["dicom"] = studies[0]
        for other in studies[1:]:
            source.ignored |= dict.fromkeys(other.files, "of another study") | other.ignored
            source.failed |= other.failed
            source.error = StudyError("several_studies", "Column dicom names a folder with several studies.")
    else:
        source.item[column] = str(place)
        source.used |= dict.fromkeys(walk(place) if place.is_dir() else [place, *bvals_of(place)], column)


def _picai(root: Path, _: CohortRules, within: Path | None) -> tuple[list[StudySource], dict[Path, str]]:
    found: dict[str, StudySource] = {}
    outside: dict[Path, str] = {}
    for file in walk(root, within=within):
        match = _PICAI.fullmatch(stem(file)) if is_image(file) else None
        if match is None:
            outside[file] = "not of the form patient_study_t2w, _adc or _hbv"
            continue
        patient, study, kind = match.groups()
        name = f"{patient}_{study}"
        source = found.setdefault(name, StudySource(name, patient, [tidy(name), tidy(study)], [tidy(patient)]))
        if kind in _PICAI_COLUMNS:
            source.take(_PICAI_COLUMNS[kind], file)
        else:
            source.ignored[file] = "a plane that is not needed"
    return list(found.values()), outside


def _nnunet(root: Path, rules: CohortRules, within: Path | None) -> tuple[list[StudySource], dict[Path, str]]:
    channels = _channels(root / "dataset.json", rules)
    found: dict[str, StudySource] = {}
    outside: dict[Path, str] = {}
    for file in walk(root, within=within):
        part = file.relative_to(root).parts[0]
        match = _NNUNET.fullmatch(stem(file)) if is_image(file) else None
        if match is None or part not in ("imagesTr", "imagesTs"):
            outside[file] = "not an image of imagesTr or imagesTs"
            continue
        case = match[1]
        owner = case.split("_")[0] if re.fullmatch(r"[^_]+_[^_]+", case) else case
        names = [tidy(f"{part}/{case}"), tidy(case)]
        side = "train" if part == "imagesTr" else "test"
        source = found.setdefault(names[0], StudySource(names[0], owner, names, [tidy(owner)], side=side))
        if int(match[2]) in channels:
            source.take(channels[int(match[2])], file)
        else:
            source.ignored[file] = "a channel that is not needed"
    return list(found.values()), outside


def _channels(path: Path, rules: CohortRules) -> dict[int, str]:
    """Channel number -> column, by the channel names of ``dataset.json`` (``modality`` in its first version)."""
    try:
        dataset = read_json(path)
        given = dataset.get("channel_names") or dataset["modality"]
        named = {int(number): str(name) for number, name in given.items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: no channel_names that can be read ({type(error).__name__}).") from None
    roles = {number: role_of(name, rules.files) for number, name in named.items()}
    columns = {number: "hbv" if role == "dwi" else role for number, role in roles.items()}
    if "adc" not in columns.values() and {"t2", "hbv"} <= set(columns.values()):
        columns |= {number: "adc" for number, name in named.items() if name.strip().casefold() == _SCALED_AS_CT}
    if not {"t2", "adc", "hbv"} <= set(columns.values()):
        raise InputError(
            f"{path}: the channels {', '.join(named.values())} are not recognised as T2, ADC and high b. "
            "Give patterns for them under files in the rules file."
        )
    return {number: column for number, column in columns.items() if column in _TABLE}


def _named(root: Path, rules: CohortRules, within: Path | None) -> tuple[list[StudySource], dict[Path, str]]:
    """Studies of a tree of image files, and the files that belong to none.

    A folder that holds images is a study. A folder where all images are called ``<case>_t2``, ``<case>_adc`` and so on,
    or those of several cases with a T2 are, is one study per case, with the other images whose names begin with its
    name. Files that are no image count with the study of their folder.
    """
    sources: list[StudySource] = []
    outside: dict[Path, str] = {}
    folders: dict[Path, list[Path]] = defaultdict(list)
    for file in walk(root, within=within):
        folders[file.parent].append(file)
    for folder, files in folders.items():
        images = [file for file in files if is_image(file)]
        if not images:
            outside |= {file: unusable(file) or "no image" for file in files}
            continue
        cases, strays = _cases(folder.relative_to(root), images)
        if "." in cases and not (root / (here := root.resolve().name)).exists():
            cases = {here: cases["."]}  # all of the input: the same name as when it is one among others
        for name, members in cases.items():
            sources.append(_named_study(name, members, rules))
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


def _named_study(name: str, images: list[Path], rules: CohortRules) -> StudySource:
    place = Path(name)
    names = [tidy(str(part)) for part in (place, *place.parents) if part.parts]
    names += [tidy(Path(part).name) for part in names]
    owner = place.parts[0] if place.parts else name
    source = StudySource(name, owner, names, [tidy(owner), *names])
    candidates: dict[str, list[tuple[Any, Path]]] = defaultdict(list)
    for file in images:
        try:
            role, rank, reason = _role(file, rules.files)
        except Exception as error:
            source.error = study_failure(error)
            role, rank, reason = "failed", (0.0, ""), "cannot be read"
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
    try:
        header = image_header(file, role)
    except StudyError as error:
        return "failed", (0.0, ""), error.message.rstrip(".")
    if role in ("dwi", "hbv"):
        role = "dwi" if len(header.size) == 4 else "hbv"
    if role == "t2" and int(np.argmax(np.abs(header.direction[:, 2]))) != 2:
        return role, (0.0, ""), "T2, but not axial"
    # Of several T2 the fullest, of several high-b images the highest b, then the last by name.
    return role, (_highest_b(file) if role == "hbv" else float(header.size[2]), file.name), ""


def _highest_b(file: Path) -> float:
    try:
        return max(b_table(file))
    except StudyError:
        return 0.0


def _words(file: Path) -> str:
    """A file's name and what dcm2niix noted about its series."""
    words = [stem(file)]
    beside = file.with_name(stem(file) + ".json")
    if beside.is_file():
        try:
            note = read_json(beside)
            words += [str(note.get("SeriesDescription", "")), " ".join(map(str, note.get("ImageType", [])))]
        except (OSError, InputError, TypeError):
            pass  # a damaged note decides nothing; the name does
    return " ".join(words)
