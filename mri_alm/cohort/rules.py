"""What `prepare_cohort.py --rules` may say about a cohort: layout, roles of series and files, label columns, grid."""

import difflib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.series import Series, load_rules

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

    def of_study(self, wanted: Mapping[str, Sequence[int]], series: Sequence[Series]) -> Sequence[dict[str, Any]]:
        """Series rules of one study: what is set by hand first, and then no other series has that role.

        Args:
            wanted: Its entry in :attr:`studies`.
            series: Its series, by the rules alone.

        Raises:
            StudyError: ``rules`` when the study has no series of a number that the entry names.
        """
        if not wanted:
            return self.series
        known = {one.number for one in series}
        by_hand = []
        for role, numbers in wanted.items():
            if absent := sorted(set(numbers) - known):
                raise StudyError(
                    "rules",
                    f"The rules file gives series {absent[0]} the role {role}, but the study has only series "
                    f"{', '.join(map(str, sorted(known)))}. Correct its entry under studies.",
                )
            by_hand.append({"role": role, "reason": "set by hand", "all": {"number": list(numbers)}})
        others = {one.number for one in series if one.role in wanted} - {n for ns in wanted.values() for n in ns}
        if others:
            by_hand.append({"role": "other", "reason": "another was set by hand", "all": {"number": sorted(others)}})
        return [*by_hand, *self.series]


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
        given = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no readable JSON file ({error}). See docs/cohort.md for what it may hold.") from None
    if isinstance(given, list):
        return CohortRules(series=load_rules(path))
    _known(path, "field", given, ["about", *CohortRules.__dataclass_fields__])
    try:
        return _rules(path, given)
    except (TypeError, ValueError, AttributeError, re.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: a field holds another kind of value than docs/cohort.md says ({error}).") from None


def _rules(path: Path, given: dict[str, Any]) -> CohortRules:
    fields: dict[str, Any] = {"layout": given.get("layout", "")}
    _known(path, "layout", [fields["layout"]], ["", *LAYOUTS])
    fields["series"] = load_rules([*given.get("series", []), *load_rules()])
    _known(path, "file role", given.get("files", {}), FILE_ROLES)
    fields["files"] = {**FILE_ROLES, **given.get("files", {})}
    for pattern in fields["files"].values():
        re.compile(pattern)
    fields["studies"] = {tidy(name): roles for name, roles in given.get("studies", {}).items()}
    for roles in fields["studies"].values():
        _known(path, "role", roles, ROLES)
    labels = _renamed(path, given.get("labels", {}), {"splits": "sides"})
    labels |= {"columns": _renamed(path, labels.get("columns", {}), {"split": "side"})}
    _known(path, "label field", labels, LabelRules.__dataclass_fields__)
    _known(path, "label column", labels.get("columns", {}), _LABELS)
    columns = {role: [name.lower() for name in names] for role, names in labels.pop("columns", {}).items()}
    _known(path, "choice of several", [labels.get("several", "refuse")], ["refuse", "any"])
    _known(path, "side of a split", labels.get("sides", {}).values(), ["train", "test"])
    fields["labels"] = LabelRules(columns={**_LABELS, **columns}, **labels)
    for name, kind in (("spacing", float), ("size", int)):
        if name in given:
            fields[name] = tuple(kind(value) for value in given[name])
            if len(fields[name]) != 3 or min(fields[name]) <= 0:
                raise InputError(f"{path}: {name} must be three numbers above 0, got {given[name]}.")
    return CohortRules(**fields)


def _renamed(path: Path, given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rules of before spell some names otherwise."""
    for old, new in names.items():
        if old in given:
            logger.info("%s: %s is called %s now; it is understood.", path, old, new)
    return {names.get(name, name): value for name, value in given.items()}


def tidy(name: str) -> str:
    """A name as names are compared: without outer blanks and slashes, slashes forward, lower case."""
    return name.strip().replace("\\", "/").strip("/").casefold()


def _known(path: Path, what: str, names: Any, known: Any) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), list(known), 1, 0.5)
            hint = f'Did you mean "{near[0]}"? ' if near else ""
            raise InputError(f'{path}: unknown {what} "{name}". {hint}Known: {", ".join(map(str, known))}.')
