"""What `prepare_cohort.py --rules` may say about a cohort: layout, roles of series and files, label columns, grid."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError, StudyError, did_you_mean
from mri_alm.imaging.series import Series, check_rules, load_rules
from mri_alm.runtime.files import DamagedFileError, read_json

logger = logging.getLogger("mri_alm")

LAYOUTS = ("dicom", "table", "picai", "nnunet", "named")
ROLES = ("t2", "dwi", "calculated", "adc")
# Role of an image file by its name (and, beside dcm2niix output, its series' description); the first that fits.
FILE_ROLES = {
    "ignored": (
        r"local|scout|survey|mask|label|seg|anatomy|tumou?r|lesion|empty|exponential|\be[ -]?adc|"
        r"\b(loc|sag|cor|fa|t1|pd)\b"
    ),
    "gland": r"gland|whole.?prostate",
    "adc": r"adc|apparent.diffusion",
    "hbv": r"hbv|high.?b|calc|synth|comput",
    "dwi": r"dwi|diff|ep2d|trace",
    "t2": r"t2|tse|fse",
}
_LABELS = {
    "study": ["study", "study_uid", "studyinstanceuid", "study_id", "folder", "path", "case", "exam"],
    "patient": ["patient", "patientid", "patient_id", "proxid", "pid"],
    "label": ["label", "dce_needed", "case_cspca", "target"],
    "side": ["side", "split"],
    "gland": ["gland"],
    "crop_center_mm": ["crop_center_mm"],
}


@dataclass(frozen=True)
class LabelRules:
    """Where a label table keeps what, and what its words mean; words may have ``*`` and are compared in lower case.

    Args:
        columns: ``study``, ``patient``, ``label``, ``side``, ``gland``, ``crop_center_mm`` -> accepted column names.
        positive: Words of column label that mean 1.
        negative: Words that mean 0; an empty cell means no label unless ``""`` stands here.
        sides: Words of column side -> ``train`` or ``test``.
        several: ``"refuse"`` rows of one study that disagree, or ``"any"``: positive when one of them is.
    """

    columns: Mapping[str, Sequence[str]] = field(default_factory=lambda: _LABELS)
    positive: Sequence[str] = ("1", "1.0", "yes", "true", "positive", "pos")
    negative: Sequence[str] = ("0", "0.0", "no", "false", "negative", "neg")
    sides: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    several: str = "refuse"


@dataclass(frozen=True)
class CohortRules:
    """All that a rules file may say; see docs/cohort.md.

    Args:
        layout: One of :data:`LAYOUTS`; empty: detected.
        series: Rules for the roles of DICOM series, tried in order.
        files: Role -> pattern for names of image files, tried in order.
        studies: Key or folder of a study -> role -> numbers of its DICOM series, set by hand.
        labels: See :class:`LabelRules`.
        spacing: Of the common grid, mm along T2's rows, columns and slices.
        size: Voxels along the same.
    """

    layout: str = ""
    series: Sequence[dict[str, Any]] = field(default_factory=load_rules)
    files: Mapping[str, str] = field(default_factory=lambda: FILE_ROLES)
    studies: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    labels: LabelRules = field(default_factory=LabelRules)
    spacing: tuple[float, float, float] = (0.5, 0.5, 3.0)
    size: tuple[int, int, int] = (256, 256, 28)


def load_cohort_rules(path: Path | None) -> CohortRules:
    """Read a rules file: an object with any of the fields of :class:`CohortRules`, or a bare list of series rules.

    Entries under ``series`` are tried before the shipped ones, entries under ``files`` replace the shipped pattern of
    their role; a bare list replaces all series rules.

    Raises:
        InputError: If the file cannot be read, or a field, role, layout or pattern is unknown.
    """
    if path is None:
        return CohortRules()
    try:
        return _rules(read_json(path, (dict, list)))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Give a JSON file, see docs/cohort.md.") from None
    except DamagedFileError:
        raise
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise InputError(f"{path}: a field holds another kind of value than docs/cohort.md says ({error}).") from None


def _rules(given: Any) -> CohortRules:
    if isinstance(given, list):
        check_rules(given)
        return CohortRules(series=given)
    _known("field", given, ["about", *CohortRules.__dataclass_fields__])
    fields: dict[str, Any] = {"layout": given.get("layout", "")}
    _known("layout", [fields["layout"]], ["", *LAYOUTS])
    fields["series"] = [*given.get("series", []), *load_rules()]
    check_rules(fields["series"])
    _known("file role", given.get("files", {}), FILE_ROLES)
    fields["files"] = {**FILE_ROLES, **given.get("files", {})}
    for pattern in fields["files"].values():
        re.compile(pattern)
    fields["studies"] = {tidy(name): roles for name, roles in given.get("studies", {}).items()}
    for roles in fields["studies"].values():
        _known("role", roles, ROLES)
    fields["labels"] = _label_rules(given.get("labels", {}))
    for name, kind in (("spacing", float), ("size", int)):
        if name in given:
            fields[name] = tuple(kind(value) for value in given[name])
            if len(fields[name]) != 3 or min(fields[name]) <= 0:
                raise InputError(f"{name} must be three numbers above 0, got {given[name]}.")
    return CohortRules(**fields)


def _label_rules(given: Mapping[str, Any]) -> LabelRules:
    labels = _renamed(given, {"splits": "sides"})
    columns = _renamed(labels.pop("columns", {}), {"split": "side"})
    _known("label field", labels, LabelRules.__dataclass_fields__)
    _known("label column", columns, _LABELS)
    _known("choice of several", [labels.get("several", "refuse")], ["refuse", "any"])
    _known("side of a split", labels.get("sides", {}).values(), ["train", "test"])
    lower = {role: [name.lower() for name in names] for role, names in columns.items()}
    return LabelRules(columns={**_LABELS, **lower}, **labels)


def _renamed(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rules of before spell some names otherwise."""
    for old, new in names.items():
        if old in given:
            logger.info("Rules: %s is called %s now; it is understood.", old, new)
    return {names.get(name, name): value for name, value in given.items()}


def _known(what: str, names: Iterable[Any], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InputError(f'unknown {what} "{name}". {hint}Known: {", ".join(known)}.')


def tidy(name: str) -> str:
    """A name as names are compared: without outer blanks and slashes, slashes forward, lower case."""
    return name.strip().replace("\\", "/").strip("/").casefold()


def set_by_hand(wanted: Mapping[str, Sequence[int]], series: Sequence[Series]) -> None:
    """Give series of a study the roles of its entry in :attr:`CohortRules.studies`; no other then has such a role.

    Args:
        wanted: Role -> numbers of its series.
        series: Of the study, with their roles by the rules.

    Raises:
        StudyError: ``rules`` when the study has no series of a number that the entry names.
    """
    known = {one.number for one in series}
    for role, numbers in wanted.items():
        if absent := sorted(set(numbers) - known):
            raise StudyError(
                "rules",
                f"The rules file gives series {absent[0]} the role {role}, but the study has only series "
                f"{', '.join(map(str, sorted(known)))}. Correct its entry under studies.",
            )
    others = {one.number for one in series if one.role in wanted}
    for one in series:
        mine = next((role for role, numbers in wanted.items() if one.number in numbers), None)
        if mine:
            one.role, one.reason = mine, "set by hand"
        elif one.number in others:
            one.role, one.reason = "other", "another was set by hand"
