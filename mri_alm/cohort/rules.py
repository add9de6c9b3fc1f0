"""What `prepare_cohort.py --rules` may say about a cohort: layout, roles of series and files, label columns, grid."""

import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mri_alm.cohort.names import tidy
from mri_alm.errors import InputError, StudyError, did_you_mean
from mri_alm.imaging.registration import COHORT_SIZE, COHORT_SPACING_MM
from mri_alm.imaging.series import BY_HAND, Series, check_rules, load_rules
from mri_alm.runtime.files import read_json
from mri_alm.runtime.tables import column_name

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
# What the value of each condition of a series rule is.
CONDITION_VALUES = {
    "description": "pattern", "image_type": "words", "sequence": "words", "sequence_without": "words",
    "nameless": "flag", "not_mr": "flag", "inverted": "flag", "without_position": "flag", "b_above": "number",
    "slices_below": "number", "orientations_above": "number", "number": "whole numbers",
    "echo_time_within": "range", "echo_time_outside": "range",
}  # fmt: skip
_LABELS = {
    "study": [
        "study", "study_uid", "studyinstanceuid", "study_instance_uid", "study_id", "folder", "path", "case", "exam",
    ],
    "patient": ["patient", "patientid", "patient_id", "proxid", "pid"],
    "label": ["label", "dce_needed", "case_cspca", "target"],
    "side": ["side", "split"],
    "gland": ["gland"],
    "crop_center_mm": ["crop_center_mm"],
}  # fmt: skip


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
        trust_positions: Compare positions across frames of reference, where de-identification gave each series its own.
        labels: See :class:`LabelRules`.
        spacing: Of the common grid, mm along T2's rows, columns and slices.
        size: Voxels along the same.
    """

    layout: str = ""
    series: Sequence[dict[str, Any]] = field(default_factory=load_rules)
    files: Mapping[str, str] = field(default_factory=lambda: FILE_ROLES)
    studies: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    trust_positions: bool = False
    labels: LabelRules = field(default_factory=LabelRules)
    spacing: tuple[float, float, float] = COHORT_SPACING_MM
    size: tuple[int, int, int] = COHORT_SIZE


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
        given = read_json(path, (dict, list))
    except FileNotFoundError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Give a JSON file, see docs/cohort.md.") from None
    try:
        return _rules(given)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _rules(given: Any) -> CohortRules:
    if isinstance(given, list):
        _check_series(given)
        return CohortRules(series=given)
    _known("field", given, ["about", *CohortRules.__dataclass_fields__])
    fields: dict[str, Any] = {"layout": _text("layout", given.get("layout", ""))}
    _known("layout", [fields["layout"]], ["", *LAYOUTS])
    series = _list("series", given.get("series", []))
    _check_series(series)
    fields["series"] = [*series, *load_rules()]
    files = _object("files", given.get("files", {}))
    _known("file role", files, FILE_ROLES)
    fields["files"] = {**FILE_ROLES, **{role: _pattern(f"files, {role}", text) for role, text in files.items()}}
    studies = _object("studies", given.get("studies", {}))
    fields["studies"] = {tidy(name): _by_hand(roles) for name, roles in studies.items()}
    if not isinstance(fields.setdefault("trust_positions", given.get("trust_positions", False)), bool):
        raise _other_kind("trust_positions", "true or false", fields["trust_positions"])
    fields["labels"] = _label_rules(_object("labels", given.get("labels", {})))
    for name in ("spacing", "size"):
        if name in given:
            whole = name == "size"
            numbers = [_number(name, value, whole=whole) for value in _list(name, given[name])]
            if len(numbers) != 3 or min(numbers) <= 0:
                raise InputError(f"{name} must be three numbers above 0, got {given[name]}.")
            fields[name] = tuple(numbers)
    return CohortRules(**fields)


def _by_hand(roles: Any) -> dict[str, list[int]]:
    """Role -> numbers of series, of one study; messages do not name it."""
    where = "an entry of studies"
    _known("role", _object(where, roles), ROLES)
    return {
        role: [_number(f"{where}, {role}", number, whole=True) for number in _list(f"{where}, {role}", numbers)]
        for role, numbers in roles.items()
    }


def _check_series(rules: list[Any]) -> None:
    """Refuse series rules with a value of another kind than its condition takes."""
    check_rules(rules)
    for number, rule in enumerate(rules, 1):
        _text(f"series rule {number}, role", rule["role"])
        _text(f"series rule {number}, reason", rule["reason"])
        for part in ("all", "any"):
            for name, value in _object(f"series rule {number}, {part}", rule.get(part, {})).items():
                _condition(f"series rule {number}, {name}", name, value)


def _condition(where: str, name: str, value: Any) -> None:
    kind = CONDITION_VALUES[name]
    if kind == "pattern":
        _pattern(where, value)
    elif kind == "words":
        _texts(where, value)
    elif kind == "flag":
        if not isinstance(value, bool):
            raise _other_kind(where, "true or false", value)
    elif kind == "number":
        _number(where, value)
    else:
        numbers = [_number(where, one, whole=kind == "whole numbers") for one in _list(where, value)]
        if kind == "range" and (len(numbers) != 2 or numbers[0] > numbers[1]):
            raise _other_kind(where, "two numbers, the lower one first", value)


def _label_rules(given: Mapping[str, Any]) -> LabelRules:
    labels = _renamed(given, {"splits": "sides"})
    columns = _renamed(_object("labels, columns", labels.pop("columns", {})), {"split": "side"})
    _known("label field", labels, LabelRules.__dataclass_fields__)
    _known("label column", columns, _LABELS)
    _known("choice of several", [_text("labels, several", labels.get("several", "refuse"))], ["refuse", "any"])
    for name in {"positive", "negative"} & labels.keys():
        labels[name] = _texts(f"labels, {name}", labels[name])
    if "sides" in labels:
        sides = _object("labels, sides", labels["sides"])
        _known("side of a split", [_text("labels, sides", side) for side in sides.values()], ["train", "test"])
        labels["sides"] = {word.lower(): side for word, side in sides.items()}
    wanted = {role: list(map(column_name, _texts(f"labels, column {role}", n))) for role, n in columns.items()}
    return LabelRules(columns={**_LABELS, **wanted}, **labels)


def _other_kind(where: str, wanted: str, value: Any) -> InputError:
    """What a field holds instead; of a text only that it is one, as it could be a name."""
    kinds = ((str, "a text"), (list, "a list"), (dict, "an object"), ((int, float), f"{value}"))
    found = next((name for kind, name in kinds if isinstance(value, kind)), "nothing")
    return InputError(f"{where} must be {wanted}, got {found}. See docs/cohort.md.")


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _other_kind(where, "a text", value)
    return value


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _other_kind(where, "a list", value)
    return value


def _texts(where: str, value: Any) -> list[str]:
    return [_text(f"every entry of {where}", one) for one in _list(where, value)]


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _other_kind(where, "an object", value)
    return value


def _number(where: str, value: Any, *, whole: bool = False) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _other_kind(where, "a number without quotation marks", value)
    if whole and value != int(value):
        raise _other_kind(where, "a whole number", value)
    return int(value) if whole else float(value)


def _pattern(where: str, value: Any) -> str:
    try:
        re.compile(_text(where, value))
    except re.error as error:
        raise InputError(f"{where} is no regular expression ({error}). Correct it.") from None
    return str(value)


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
            one.role, one.reason = mine, BY_HAND
        elif one.number in others:
            one.role, one.reason = "other", "another was set by hand"
