"""A label table as a hospital gives it -> label, side of the split and patient of every study.

Names are compared in memory only. Messages speak of rows, never of names.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from mri_alm.cohort.layouts import StudySource
from mri_alm.cohort.manifest import ManifestRow, stratified_splits
from mri_alm.cohort.rules import LabelRules, tidy
from mri_alm.errors import InputError, refuse_all
from mri_alm.runtime.files import IMAGE
from mri_alm.runtime.tables import read_table

TEST_SHARE = 0.25  # of the patients; the paper's 100 of 400


@dataclass
class Label:
    """What a label table says of one study or patient.

    Args:
        rows: Numbers of its rows; the header is row 1.
        study: Its name, tidied; empty when the table goes by patients.
        patient: Whose it is, tidied; empty when the table does not say.
        label: 1, 0 or None.
        side: ``train``, ``test`` or empty.
        gland: Path of a gland mask, or None.
        crop_center_mm: Three numbers in LPS millimetres, or empty.
    """

    rows: list[int]
    study: str
    patient: str
    label: int | None
    side: str
    gland: Path | None = None
    crop_center_mm: str = ""


@dataclass
class Labelled:
    """The outcome of matching: study uid -> its entry, and what did not fit.

    Args:
        of: Entry of each labelled study, by :attr:`mri_alm.cohort.layouts.StudySource.uid`.
        unused: Rows whose study was not found.
        notes: Sentences for a person, without names.
        split_made: Whether the split was drawn here because the table has none.
    """

    of: dict[str, Label] = field(default_factory=dict)
    unused: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    split_made: bool = False


def read_labels(path: Path, rules: LabelRules) -> list[Label]:
    """Entries of a label table, rows of one study (or patient) merged.

    Raises:
        InputError: If the table has no usable columns, a cell has no known meaning, or rows contradict each other.
    """
    table = read_table(path, as_numbered=True)
    columns = {role: [name for name in names if name in table[0]] for role, names in rules.columns.items()}
    if not columns["label"] or not (columns["study"] or columns["patient"]):
        raise InputError(
            f"{path}: needs a column for the study ({', '.join(rules.columns['study'])}) or the patient "
            f"({', '.join(rules.columns['patient'])}), and one for the label ({', '.join(rules.columns['label'])}). "
            "Name others under labels in the rules file."
        )
    if len(columns["label"]) > 1:
        raise InputError(
            f"{path}: columns {' and '.join(columns['label'])} could each be the label. Keep one of them, or name it "
            "under labels in the rules file."
        )
    merged: dict[tuple[str, str], Label] = {}
    problems: list[str] = []
    for number, row in enumerate(table, 2):
        if not any(row.values()):
            continue

        def cell(role: str, row: dict[str, str] = row) -> str:
            return next((row[name] for name in columns[role] if row.get(name)), "")

        entry = Label([number], tidy(_folder(cell("study"))), tidy(cell("patient")), None, "")
        if not entry.study and not entry.patient:
            problems.append(f"row {number} names neither study nor patient.")
            continue
        entry.label = _meaning(cell("label"), rules, number, problems)
        entry.side = _side(cell("side"), rules, number, problems)
        entry.gland = path.parent / cell("gland") if cell("gland") else None
        entry.crop_center_mm = cell("crop_center_mm")
        known = merged.setdefault((entry.study, entry.patient), entry)
        if known is not entry:
            _merge(known, entry, rules, problems)
    if any(entry.patient for entry in merged.values()):  # else exams of one patient could stand on both sides
        problems += [
            f"row {entry.rows[0]} names no patient, as other rows do. Fill the column in, or take it out."
            for entry in merged.values()
            if not entry.patient
        ]
    refuse_all([f"{path}: {text}" for text in problems])
    return list(merged.values())


def _folder(name: str) -> str:
    """A study's name as it is; of the path of one of its images, the folder."""
    return str(PurePosixPath(name.replace("\\", "/")).parent) if IMAGE.search(name) else name


def _meaning(text: str, rules: LabelRules, number: int, problems: list[str]) -> int | None:
    word = text.lower()
    for value, words in ((1, rules.positive), (0, rules.negative)):
        if any(fnmatchcase(word, pattern) for pattern in words):
            return value
    if word:
        problems.append(
            f"row {number} has a label that means neither 1 ({', '.join(rules.positive)}) nor 0 "
            f"({', '.join(rules.negative)}). Correct it, or name its meaning under labels in the rules file."
        )
    return None


def _side(text: str, rules: LabelRules, number: int, problems: list[str]) -> str:
    if text and text.lower() not in rules.sides:
        problems.append(f"row {number} has a side that is none of {', '.join(rules.sides)}.")
    return rules.sides.get(text.lower(), "")


def _merge(known: Label, entry: Label, rules: LabelRules, problems: list[str]) -> None:
    """A further row of the same study: lesions or slices, or a contradiction."""
    labels = [one for one in (known.label, entry.label) if one is not None]
    if (len(set(labels)) > 1 and rules.several == "refuse") or {known.side, entry.side} >= {"train", "test"}:
        problems.append(f"rows {known.rows[0]} and {entry.rows[0]} contradict each other about one study.")
    known.label = max(labels, default=None)
    known.rows += entry.rows
    known.side = known.side or entry.side


def match_labels(sources: Sequence[StudySource], labels: Sequence[Label], *, seed: int = 0) -> Labelled:
    """Give every study its entry: by UID, folder or name of the study, else by its patient.

    A table without sides gets a random split by patients, stratified by label, a quarter of the patients for the test.
    """
    result = Labelled()
    by_study: dict[str, list[StudySource]] = defaultdict(list)
    by_patient: list[dict[str, list[StudySource]]] = [defaultdict(list), defaultdict(list)]
    for source in sources:
        for name in dict.fromkeys(source.names):
            by_study[name].append(source)
        # A number in the header says more than a folder's name.
        for rank, name in enumerate(dict.fromkeys(source.patients)):
            by_patient[min(rank, 1)][name].append(source)
    for entry in labels:
        found = _find(entry, by_study, by_patient, result.notes)
        if not found:
            result.unused += entry.rows
        for source in found:
            first = result.of.setdefault(source.uid, entry)
            if first is not entry:
                result.notes.append(f"Rows {first.rows[0]} and {entry.rows[0]} fit one study: took the first.")
    _split(sources, result, seed)
    return result


def _find(
    entry: Label,
    by_study: dict[str, list[StudySource]],
    by_patient: list[dict[str, list[StudySource]]],
    notes: list[str],
) -> list[StudySource]:
    """The studies that an entry means: one by its own name, or all of a patient."""
    if entry.study:
        found = by_study.get(entry.study) or by_study.get(f"{entry.patient}_{entry.study}", [])
        if len(found) > 1:
            notes.append(f"Row {entry.rows[0]}: its study fits {len(found)} studies; name each. Left out.")
        return found if len(found) == 1 else []
    found = by_patient[0].get(entry.patient) or by_patient[1].get(entry.patient) or []
    if len(found) > 1:
        notes.append(f"Row {entry.rows[0]}: one label for a patient with {len(found)} studies.")
    return found


def patient_of(source: StudySource, entry: Label | None) -> str:
    """Whose study it is: as the table says, else as the headers or folders do; never written."""
    return entry.patient if entry and entry.study and entry.patient else tidy(source.patient)


def _split(sources: Sequence[StudySource], result: Labelled, seed: int) -> None:
    """Fill in the sides where nothing gives them."""
    labelled = [source for source in sources if source.uid in result.of and result.of[source.uid].label is not None]
    if not labelled or any(result.of[source.uid].side or source.side for source in labelled):
        return
    result.split_made = True
    studies = [
        ManifestRow(i, source.uid, patient_of(source, result.of[source.uid]), result.of[source.uid].label, "", {})
        for i, source in enumerate(sorted(labelled, key=lambda one: one.uid))
    ]
    try:
        ((_, held_out),) = stratified_splits(studies, splits=1, validation=TEST_SHARE, seed=seed)
    except InputError:
        result.notes.append("Too few patients of one class for a test side: all studies are train.")
        held_out = []
    test = {study.study for study in held_out}
    for source in labelled:
        source.side = "test" if source.uid in test else "train"
