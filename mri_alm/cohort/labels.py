"""A label table as a hospital gives it -> label, side of the split and patient of every study.

Names are compared in memory only. Messages speak of rows, never of names, but for what :class:`StrangeLabelsError`
keeps for the user's own screen.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from mri_alm.cohort.layouts import StudySource
from mri_alm.cohort.manifest import ManifestRow, stratified_splits
from mri_alm.cohort.names import by_number, kept_as_text, likely_cause, number_of, tidy, written_by_spreadsheet
from mri_alm.cohort.rules import LabelRules
from mri_alm.errors import InputError, refuse_all, shortened
from mri_alm.runtime.files import IMAGE
from mri_alm.runtime.tables import path_in_cell, read_table

TEST_SHARE = 0.25  # of the patients; the paper's 100 of 400
_SHOWN = 3  # names of either side on the screen when none fits: enough to see how they differ


class StrangeLabelsError(InputError):
    """No row of the labels fits an exam.

    Args:
        message: Without names.
        names: Some names of both sides, for the screen of whoever gave them and nothing else.
    """

    def __init__(self, message: str, names: str) -> None:
        super().__init__(message)
        self.names = names


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
        entry.gland = path_in_cell(path.parent, cell("gland")) if cell("gland") else None
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
    if any(entry.side for entry in merged.values()):
        problems += [
            f"row {entry.rows[0]} has no side, as other rows do. Write train or test in each, or take the column out."
            for entry in merged.values()
            if not entry.side and entry.label is not None
        ]
    refuse_all([f"{path}: {text}" for text in problems])
    return list(merged.values())


def _folder(name: str) -> str:
    """A study's name as it is; of the path of one of its images, the folder."""
    return str(PurePosixPath(name.replace("\\", "/")).parent) if IMAGE.search(name) else name


def _meaning(text: str, rules: LabelRules, number: int, problems: list[str]) -> int | None:
    word = text.lower()
    values = [
        value
        for value, words in ((1, rules.positive), (0, rules.negative))
        if any(fnmatchcase(word, pattern.lower()) for pattern in words)
    ]
    if len(values) == 1:
        return values[0]
    if values:
        problems.append(f"row {number} has a label that the rules file lists as positive and as negative. Correct it.")
    elif word:
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


class _Exams:
    """The studies by what a table may call them, and what is known of the table as a whole."""

    def __init__(self, sources: Sequence[StudySource], labels: Sequence[Label]) -> None:
        self.studies: dict[str, list[StudySource]] = defaultdict(list)
        self.folders: dict[str, list[StudySource]] = defaultdict(list)  # whole paths below the input
        # A number in the header says more than a folder's name.
        self.patients: list[dict[str, list[StudySource]]] = [defaultdict(list), defaultdict(list)]
        for source in sources:
            for name in dict.fromkeys(source.names):
                self.studies[name].append(source)
            paths = {name for name in source.names if "/" in name}
            for name in paths | ({path.split("/")[0] for path in paths} or set(source.names)):
                self.folders[name].append(source)
            for rank, name in enumerate(dict.fromkeys(source.patients)):
                self.patients[min(rank, 1)][name].append(source)
        self.numbers = {id(table): by_number(table) for table in (self.studies, *self.patients)}
        self.as_text = [kept_as_text({entry.study for entry in labels}), kept_as_text({one.patient for one in labels})]
        strange = [entry.study for entry in labels if "/" in entry.study and entry.study not in self.studies]
        common = os.path.commonpath([PurePosixPath(path).parent for path in strange]) if strange else ""
        ways = [
            skipped
            for skipped in range(1, len(PurePosixPath(common).parts) + 1)
            if any("/".join(path.split("/")[skipped:]) in self.folders for path in strange)
        ]
        self.skipped = ways[0] if len(ways) == 1 else 0

    def of(self, entry: Label) -> list[StudySource]:
        """The studies that an entry names."""
        if not entry.study:
            return self.patients[0].get(entry.patient) or self.patients[1].get(entry.patient) or []
        found = self.studies.get(entry.study) or self.studies.get(f"{entry.patient}_{entry.study}", [])
        if not found and self.skipped:
            found = self.folders.get("/".join(entry.study.split("/")[self.skipped :]), [])
        return found

    def of_another(self, entry: Label, found: Sequence[StudySource]) -> bool:
        """Whether a spreadsheet may have made an entry's number of that of an exam which is not among those found."""
        name = entry.study or entry.patient
        table = self.studies if entry.study else self.patients[name not in self.patients[0]]
        number = number_of(name)
        if number is None or self.as_text[not entry.study] or not written_by_spreadsheet(name):
            return False
        mine = {source.uid for source in found}
        others = [table[other] for other in self.numbers[id(table)].get(number, ()) if other != name]
        if table is not self.patients[0]:  # folders of one name in many studies number something else
            others = [sources for sources in others if len(sources) == 1]
        return any(mine.isdisjoint(source.uid for source in sources) for sources in others)

    def causes(self, entries: Iterable[Label]) -> list[str]:
        """Sentences on why entries may fit no exam."""
        rows: dict[str, list[int]] = defaultdict(list)
        for entry in entries:
            table = self.studies if entry.study else self.patients[0]
            rows[likely_cause(entry.study or entry.patient, self.numbers[id(table)])] += entry.rows
        rows.pop("", None)
        return [
            f"Rows {shortened(numbers)}: their names {cause}. The table was probably opened in Excel: make the "
            "column a text there and enter these names again, or export the table anew."
            for cause, numbers in rows.items()
        ]


def match_labels(sources: Sequence[StudySource], labels: Sequence[Label], *, seed: int = 0) -> Labelled:
    """Give every study its entry: by UID, folder or name of the study, else by its patient.

    Folders of another machine are matched by what follows the folder that all of them lie in. A table without sides
    gets a random split by patients, stratified by label, a quarter of the patients for the test.

    Raises:
        StrangeLabelsError: If no row fits a study.
        InputError: If rows contradict each other about one study, or a number could mean two.
    """
    result = Labelled()
    exams = _Exams(sources, labels)
    problems: list[str] = []
    strangers: list[Label] = []
    for entry in labels:
        found = _find(entry, exams, result.notes)
        if not found:
            result.unused += entry.rows
            strangers += [entry] * (not exams.of(entry))
        elif exams.of_another(entry, found):
            problems.append(
                f"Row {entry.rows[0]} of the labels: its number fits one exam as it stands, and another as a "
                "spreadsheet writes numbers (without leading zeros). Make the column a text and enter all numbers as "
                "they are in the exams; name both exams, without a label where there is none."
            )
        for source in found:
            first = result.of.setdefault(source.uid, entry)
            if first is not entry:
                _compare(first, entry, result.notes, problems)
    refuse_all(problems)
    if exams.skipped:
        result.notes.append("The labels name folders of another machine: matched by their last parts.")
    result.notes += [*exams.causes(strangers), *_divided(sources, result.of)]
    if labels and not result.of:
        raise _strange(sources, labels, result.notes)
    _split(sources, result, seed)
    return result


def _find(entry: Label, exams: _Exams, notes: list[str]) -> list[StudySource]:
    """The studies that an entry means: one by its own name, or all of a patient."""
    found, row = exams.of(entry), entry.rows[0]
    if not entry.study:
        if len(found) > 1:
            notes.append(f"Row {row}: one label for a patient with {len(found)} studies.")
        return found
    owned = exams.patients[0].get(entry.patient, []) if entry.patient else []
    mine = [source for source in found if source in owned] if owned else found
    if found and not mine:
        notes.append(f"Row {row}: its study is another patient's than the row says. Left out.")
    elif len(mine) > 1:
        notes.append(f"Row {row}: its study fits {len(mine)} studies; name each. Left out.")
    return mine if len(mine) == 1 else []


def _compare(first: Label, second: Label, notes: list[str], problems: list[str]) -> None:
    rows = f"ows {first.rows[0]} and {second.rows[0]}"
    if (first.label, first.side, first.patient) == (second.label, second.side, second.patient):
        notes.append(f"R{rows} fit one study and agree.")
    else:
        problems.append(f"R{rows} of the labels fit one study and contradict each other. Keep one of them.")


def _divided(sources: Sequence[StudySource], of: Mapping[str, Label]) -> list[str]:
    """Whether the table makes several patients of one; of the input's patients one alone says nothing."""
    theirs: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        if (entry := of.get(source.uid)) and entry.study and entry.patient:
            theirs[tidy(source.patient)].add(entry.patient)
    count = sum(len(names) > 1 for names in theirs.values())
    text = (
        f"{count} patients, by number or folder of the exams, are several in the labels: one patient could stand on "
        "both sides of the split. Look at column patient."
    )
    return [text] if count and len(theirs) > 1 else []


def _strange(sources: Sequence[StudySource], labels: Sequence[Label], notes: Sequence[str]) -> StrangeLabelsError:
    """What is said when nothing fits; the names stay apart from the message."""
    by_study = any(entry.study for entry in labels)
    theirs = [f'"{entry.study or entry.patient}"' for entry in labels]
    ours = [
        " or ".join(f'"{name}"' for name in dict.fromkeys(one.names[:2] if by_study else one.patients[:1]))
        for one in sources
    ]
    sides = [list(dict.fromkeys(names)) for names in (theirs, ours)]
    shown = [shortened(names, _SHOWN) for names in sides]
    message = (
        f"None of the {sum(len(entry.rows) for entry in labels)} rows of the labels fits one of the {len(sources)} "
        "exams. Nothing was prepared. Rows are matched by StudyInstanceUID or folder of the study in a column "
        "study, or by the patient's number or folder in a column patient."
    )
    return StrangeLabelsError(
        " ".join([message, *notes]),
        f"The labels name: {shown[0]}.\nThe {'exams' if by_study else 'patients'} are called: {shown[1]}.",
    )


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
