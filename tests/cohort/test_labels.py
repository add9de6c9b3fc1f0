"""Label tables as people have them: columns, words, separators, matching, contradictions, splits."""

import re
from pathlib import Path

import pytest
from exams import write_text
from hypothesis import given
from hypothesis import strategies as st

from mri_alm.cohort.labels import Label, StrangeLabelsError, match_labels, patient_of, read_labels
from mri_alm.cohort.layouts import StudySource
from mri_alm.cohort.names import tidy
from mri_alm.cohort.prepare_cohort import warn_of_entries
from mri_alm.cohort.rules import CONDITION_VALUES, CohortRules, LabelRules, load_cohort_rules
from mri_alm.errors import InputError
from mri_alm.imaging.series import CONDITIONS, load_rules
from mri_alm.runtime.tables import read_table


def source(number: int, patient: str = "", folder: str = "") -> StudySource:
    place = folder or f"pat{number}/exam"
    parts = [tidy(str(part)) for part in (Path(place), *Path(place).parents) if part.parts]
    names = [f"1.2.{number}", *parts, *(Path(part).name for part in parts)]
    owner = patient or f"ID{number}"
    return StudySource(f"1.2.{number}", owner, names, [tidy(owner), *names[1:]])


def read(folder: Path, text: str, rules: LabelRules | None = None) -> list[Label]:
    return read_labels(write_text(folder / "labels.csv", text), rules or LabelRules())


@pytest.mark.parametrize(
    "text",
    [
        "study,label\npat1/exam,1\npat2/exam,0\n",
        "StudyInstanceUID;Label\n1.2.1;yes\n1.2.2;no\n",
        "folder\tLABEL\nPAT1\\Exam\\\tTrue\npat2/exam/\tFalse\n",
        "\ufeffPatientID,label,note\n id1 ,1,x\nid2,0,\n",
        "path,label\npat1/exam/t2.nii.gz,1\npat2/exam/adc.mha,0\n",
        "patient,study,dce_needed\nwho,pat1,pos\nwho else,pat2,neg\n",
    ],
)
def test_every_way_to_name_a_study(tmp_path: Path, text: str) -> None:
    sources = [source(1), source(2), source(3)]
    found = match_labels(sources, read(tmp_path, text))
    assert {uid: entry.label for uid, entry in found.of.items()} == {"1.2.1": 1, "1.2.2": 0}
    assert found.unused == []


def test_rows_keep_their_numbers_and_columns_without_a_name_are_ignored(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"row 4 has a label that means neither"):
        read(tmp_path, "study;label;;\n;;;\nx;1;;\ny;perhaps;;\n;;;\n")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("study,label,label\nx,1,0\n", 'column "label" stands twice'),
        ("patient_id;label;case_csPCa\nP1;1;YES\nP2;;YES\n", "columns label and case_cspca could each be the label"),
        ("study,patient,label\nx,A,1\ny,,0\n", "row 3 names no patient, as other rows do"),
    ],
)
def test_tables_that_could_be_read_two_ways_are_refused(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        read(tmp_path, text)


def test_a_table_saved_by_an_old_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes("study;label;größe\r\nMüller;1;5\r\n\r\n".encode("cp1252"))
    assert read_table(path, as_numbered=True) == [{"study": "Müller", "label": "1", "größe": "5"}]


def test_a_patient_s_number_in_the_header_wins_over_a_folder_of_that_name() -> None:
    sources = [source(1, patient="7"), source(2, patient="8", folder="7/exam")]
    found = match_labels(sources, [Label([2], "", "7", 1, "train")])
    assert list(found.of) == ["1.2.1"]


def test_a_name_that_fits_several_studies_labels_none() -> None:
    sources = [source(1, folder="a/first"), source(2, folder="a/second")]
    found = match_labels(sources, [Label([2], "a", "", 1, "train"), Label([3], "first", "", 0, "train")])
    assert {uid: entry.label for uid, entry in found.of.items()} == {"1.2.1": 0}
    assert found.unused == [2]
    assert found.notes == ["Row 2: its study fits 2 studies; name each. Left out."]


def test_two_rows_for_one_study_by_different_names() -> None:
    found = match_labels([source(1)], [Label([2], "pat1", "", 1, "train"), Label([3], "exam", "", 1, "train")])
    assert found.of["1.2.1"].label == 1
    assert found.notes == ["Rows 2 and 3 fit one study and agree."]


@pytest.mark.parametrize("second", [Label([3], "exam", "", 0, "train"), Label([3], "exam", "", 1, "test")])
def test_rows_that_contradict_each_other_by_two_names_of_one_study_are_refused(second: Label) -> None:
    with pytest.raises(InputError, match=r"^Rows 2 and 3 of the labels fit one study and contradict each other\."):
        match_labels([source(1)], [Label([2], "pat1", "", 1, "train"), second])


@pytest.mark.parametrize("study", ["pat1/exam", "PAT1\\EXAM", "./pat1//exam/", "pat1/e\u200bxam", "pat1/\uff45xam"])
def test_forms_of_one_name(study: str) -> None:
    assert list(match_labels([source(1)], [Label([2], tidy(study), "", 1, "train")]).of) == ["1.2.1"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("M\u00fcnster", "Mu\u0308nster"),  # composed, decomposed
        ("Stra\u00dfe", "STRASSE"),
        ("a b", "a\u00a0 b"),
        ("a-1", "a\u20131"),
        ("a-1", "a\u20111"),
        ("\ufb01le", "file"),  # a ligature
        ("a\ufeff", "\u200ea"),
    ],
)
def test_unicode_forms_of_one_name(one: str, other: str) -> None:
    assert tidy(one) == tidy(other)


def test_names_that_differ_stay_different() -> None:
    names = ["0012", "12", "12.0", "1.2e1", "a_b", "a-b", "ab", "a b", "a/b"]
    assert len({tidy(name) for name in names}) == len(names)


def windows(*paths: str) -> list[Label]:
    return [Label([row], tidy(path), "", row % 2, "train") for row, path in enumerate(paths, 2)]


@pytest.mark.parametrize("root", ["D:\\Export 2023\\", "\\\\server\\share\\", "/Volumes/disk/x/", "export/"])
def test_folders_of_another_machine_are_matched_by_what_follows_their_common_one(root: str) -> None:
    found = match_labels([source(1), source(2)], windows(f"{root}pat1\\exam", f"{root}pat2\\"))
    assert {uid: entry.rows for uid, entry in found.of.items()} == {"1.2.1": [2], "1.2.2": [3]}
    assert found.notes == ["The labels name folders of another machine: matched by their last parts."]


def test_a_last_part_alone_matches_no_study_of_another_folder() -> None:
    """``exam`` of patient 3 is not the exam of patient 1."""
    found = match_labels([source(1), source(2)], windows("D:\\x\\pat3\\exam", "D:\\x\\pat2\\exam"))
    assert list(found.of) == ["1.2.2"]
    assert found.unused == [2]
    with pytest.raises(StrangeLabelsError, match="None of the 2 rows"):
        match_labels([source(1, folder="exam")], windows("D:\\x\\pat3\\exam", "D:\\x\\pat2\\exam"))


def test_the_patient_of_a_row_tells_studies_of_one_name_apart_and_is_not_contradicted() -> None:
    sources = [source(1, "A", "a/exam"), source(2, "B", "b/exam")]
    found = match_labels(sources, [Label([2], "exam", "a", 1, "train"), Label([3], "a/exam", "b", 0, "train")])
    assert {uid: entry.label for uid, entry in found.of.items()} == {"1.2.1": 1}
    assert found.unused == [3]
    assert "Row 3: its study is another patient's than the row says. Left out." in found.notes


def test_a_patient_that_the_table_makes_two_of_is_said() -> None:
    sources = [source(1, "A", "x/1"), source(2, "A", "x/2"), source(3, "B", "y/3")]
    labels = [Label([row], f"1.2.{row}", f"q{row}", 1, "train") for row in (1, 2, 3)]
    (note,) = match_labels(sources, labels).notes
    assert note.startswith("1 patients, by number or folder of the exams, are several in the labels")


def by_number(*numbers: str) -> list[StudySource]:
    return [source(number, patient, f"scan{number}") for number, patient in enumerate(numbers, 1)]


def of_patients(*numbers: str) -> list[Label]:
    return [Label([row], "", tidy(number), 1, "train") for row, number in enumerate(numbers, 2)]


@pytest.mark.parametrize(
    ("exam", "cell", "cause"),
    [
        ("0012", "12", "differ from an exam's by leading zeros only"),
        ("12", "12.0", "differ from an exam's only as a spreadsheet writes numbers"),
        ("1000", "1,00E+03", "differ from an exam's only as a spreadsheet writes numbers"),
        ("12345678901234567", "12345678901234500", "differ from an exam's only as a spreadsheet writes numbers"),
        ("1.10", "1.1", "differ from an exam's only as a spreadsheet writes numbers"),
        ("123456789012", "1.23E+11", "are in scientific notation"),
        ("1-2", "02. Jan", "look like dates"),
        ("1-2", "2024-01-02", "look like dates"),
        ("a", "#NAME?", "are a spreadsheet's signs"),
    ],
)
def test_what_a_spreadsheet_did_to_numbers_is_said_and_labels_nothing(exam: str, cell: str, cause: str) -> None:
    with pytest.raises(StrangeLabelsError, match=rf"Rows 2: their names {re.escape(cause)}") as caught:
        match_labels(by_number(exam), of_patients(cell))
    assert cell not in str(caught.value)
    found = match_labels(by_number(exam, "other"), of_patients(cell, "other"))
    assert list(found.of) == ["1.2.2"]
    assert any(cause in note for note in found.notes)


@pytest.mark.parametrize(
    ("exams", "cells"),
    [
        (("0012", "12"), ("12",)),
        (("0012", "12", "7"), ("12", "7")),
        (("1.10", "1.1"), ("1.1",)),
        (("12345678901234567", "12345678901234500"), ("12345678901234500",)),
    ],
)
def test_a_number_that_could_mean_two_exams_is_refused(exams: tuple[str, ...], cells: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"^Row 2 of the labels: its number fits one exam as it stands, and another"):
        match_labels(by_number(*exams), of_patients(*cells))


@pytest.mark.parametrize("cells", [("12", "0012"), ("12", "0345")])
def test_numbers_with_their_zeros_show_that_the_column_is_a_text(cells: tuple[str, ...]) -> None:
    found = match_labels(by_number("0012", "12", "0345"), of_patients(*cells))
    assert [entry.patient for entry in found.of.values()] == list(cells)


def test_the_number_of_a_study_that_could_be_another_s() -> None:
    sources = [source(1, folder="0012"), source(2, folder="12")]
    with pytest.raises(InputError, match="its number fits one exam as it stands"):
        match_labels(sources, [Label([2], "12", "", 1, "train")])
    sources = [source(1, folder="1/001"), source(2, folder="2/001")]  # the same session's number everywhere
    assert list(match_labels(sources, [Label([2], "1", "", 1, "train")]).of) == ["1.2.1"]


def test_labels_that_fit_no_exam_name_both_sides_apart_from_the_message() -> None:
    with pytest.raises(
        StrangeLabelsError, match=r"^None of the 5 rows of the labels fits one of the 2 exams\."
    ) as caught:
        match_labels([source(1), source(2)], [Label([i], f"Xa{i}", "", 1, "") for i in range(5)])
    assert not re.search("xa[0-9]|pat[0-9]|exam/", str(caught.value), re.IGNORECASE)
    assert caught.value.names == (
        'The labels name: "Xa0", "Xa1", "Xa2" ....\n'
        'The exams are called: "1.2.1" or "pat1/exam", "1.2.2" or "pat2/exam".'
    )


LESIONS = "ProxID,fid,ClinSig\nA,1,FALSE\nA,2,TRUE\nB,1,FALSE\n"


def test_a_row_per_lesion(tmp_path: Path) -> None:
    columns = {"columns": {"label": ["ClinSig"]}}
    rules = load_cohort_rules(write_text(tmp_path / "r.json", {"labels": columns | {"several": "any"}})).labels
    assert [(one.patient, one.label, one.rows) for one in read(tmp_path, LESIONS, rules)] == [
        ("a", 1, [2, 3]),
        ("b", 0, [4]),
    ]
    refusing = load_cohort_rules(write_text(tmp_path / "r.json", {"labels": columns})).labels
    with pytest.raises(InputError, match=r"rows 2 and 3 contradict each other about one study\."):
        read(tmp_path, LESIONS, refusing)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,outcome\na,1\n", "needs a column for the study (study, study_uid,"),
        ("study,label\n", "has a header but no row below it"),
        ("study,study,label\na,b,1\n", 'column "study" stands twice'),
        ("study,label\na,perhaps\n", "row 2 has a label that means neither 1 (1, 1.0, yes"),
        ("study,label,split\na,1,holdout\n", "row 2 has a side that is none of train, test"),
        ("study,label\n,1\n", "row 2 names neither study nor patient"),
        ("study,label,split\na,1,train\na,1,test\n", "rows 2 and 3 contradict each other"),
        ("study,label,split\na,1,train\nb,0,\n", "row 3 has no side, as other rows do. Write train or test in each"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read(tmp_path, text)
    with pytest.raises(InputError, match="cannot be read"):
        read_labels(tmp_path / "absent.csv", LabelRules())


def test_many_problems_are_counted_and_no_name_is_quoted(tmp_path: Path) -> None:
    text = "study,label\n" + "".join(f"MUELLER{i},SECRET\n" for i in range(12))
    with pytest.raises(InputError, match=r"\.\.\. and 2 more\.$") as caught:
        read(tmp_path, text)
    assert not re.search("MUELLER|SECRET", str(caught.value))


def test_words_and_patterns_of_the_rules(tmp_path: Path) -> None:
    labels = {"positive": ["*tumor*"], "negative": [""], "splits": {"validation": "train", "holdout": "test"}}
    rules = load_cohort_rules(write_text(tmp_path / "r.json", {"labels": labels})).labels
    found = read(tmp_path, "study,label,split\na,x/TUMOR.nii,Validation\nb,,holdout\n", rules)
    assert [(one.label, one.side) for one in found] == [(1, "train"), (0, "test")]


def test_a_word_that_means_both_is_refused(tmp_path: Path) -> None:
    labels = {"positive": ["*Tumor*"], "negative": ["no tumor"]}
    rules = load_cohort_rules(write_text(tmp_path / "r.json", {"labels": labels})).labels
    with pytest.raises(InputError, match="row 3 has a label that the rules file lists as positive and as negative"):
        read(tmp_path, "study,label\na,a TUMOR\nb,No tumor\n", rules)


def test_an_empty_label_is_no_label(tmp_path: Path) -> None:
    (entry,) = read(tmp_path, "study,label\npat1,\n")
    assert entry.label is None
    assert match_labels([source(1)], [entry]).of["1.2.1"].label is None


def test_the_patient_is_what_the_table_says_when_it_names_the_study() -> None:
    assert patient_of(source(1), Label([2], "pat1", "someone", 1, "")) == "someone"
    assert patient_of(source(1), Label([2], "", "id1", 1, "")) == "id1"
    assert patient_of(source(1), None) == "id1"


@given(
    owners=st.lists(st.integers(0, 11), min_size=12, max_size=40),
    positive=st.sets(st.integers(0, 11), min_size=4, max_size=8),
    seed=st.integers(0, 5),
)
def test_a_drawn_split_is_by_patients_and_stratified(owners: list[int], positive: set[int], seed: int) -> None:
    owners = [*owners, *range(12)]
    sources = [source(i, patient=f"p{owner}") for i, owner in enumerate(owners)]
    labels = [Label([i], f"1.2.{i}", "", int(owner in positive), "") for i, owner in enumerate(owners)]
    found = match_labels(sources, labels, seed=seed)
    assert found.split_made
    sides = {owner: {s.side for s, o in zip(sources, owners, strict=True) if o == owner} for owner in set(owners)}
    assert all(side in ({"train"}, {"test"}) for side in sides.values())
    test = [owner for owner, side in sides.items() if side == {"test"}]
    assert len(test) == 3
    assert abs(len(positive & set(test)) - 3 * len(positive) / 12) <= 1


def test_a_split_that_is_given_is_kept() -> None:
    sources = [source(1), source(2)]
    sources[0].side = "test"
    found = match_labels(sources, [Label([2], "pat1", "", 1, ""), Label([3], "pat2", "", 0, "")])
    assert not found.split_made
    assert [one.side for one in sources] == ["test", ""]


def test_too_few_patients_for_a_test_side_is_said() -> None:
    found = match_labels([source(1)], [Label([2], "pat1", "", 1, "")])
    assert found.notes == ["Too few patients of one class for a test side: all studies are train."]


def series_rule(**conditions: object) -> dict[str, object]:
    return {"role": "t2", "reason": "x", "all": conditions}


def test_an_entry_of_studies_that_means_no_study_or_several_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By its number: its name may identify a patient."""
    entries = {name: {"t2": [4]} for name in ("other", "a/exam", "EXAM")}
    rules = load_cohort_rules(write_text(tmp_path / "r.json", {"studies": entries}))
    sources = [source(1, folder="a/exam"), source(2, folder="b/exam")]
    with caplog.at_level("WARNING"):
        warn_of_entries(rules, sources)
    assert caplog.messages == [
        "Entry 1 under studies in the rules file fits no study and changes nothing.",
        "Entry 3 under studies in the rules file fits 2 studies.",
    ]


def test_every_condition_has_its_kind_of_value(tmp_path: Path) -> None:
    assert CONDITION_VALUES.keys() == CONDITIONS.keys()
    assert load_cohort_rules(write_text(tmp_path / "r.json", load_rules())).series == load_rules()


# --- The rules file -------------------------------------------------------------------------------------------------


def test_rules_default_extend_and_replace(tmp_path: Path) -> None:
    assert load_cohort_rules(None) == CohortRules()
    house = {"role": "t2", "reason": "house name", "all": {"description": "^axial"}}
    added = load_cohort_rules(write_text(tmp_path / "a.json", {"about": "x", "series": [house], "size": [8, 8, 4]}))
    assert added.series[0] == house
    assert len(added.series) == len(CohortRules().series) + 1
    assert (added.size, added.spacing) == ((8, 8, 4), (0.5, 0.5, 3.0))
    assert load_cohort_rules(write_text(tmp_path / "b.json", [house])).series == [house]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged (Expecting property name"),
        ("7", "is damaged (it holds a int)"),
        ([{"role": "t2", "reason": "x", "any": {"colour": 1}}], "rules.json: unknown condition 'colour'"),
        ({"layuot": "dicom"}, 'unknown field "layuot". Did you mean "layout"?'),
        ({"layout": "bids"}, 'unknown layout "bids"'),
        ({"files": {"t2w": "x"}}, 'unknown file role "t2w"'),
        ({"files": {"t2": "("}}, "files, t2 is no regular expression (missing ), unterminated subpattern at"),
        ({"files": {"t2": ["a", "b"]}}, "files, t2 must be a text, got a list. See docs/cohort.md."),
        ({"layout": ["dicom"]}, "layout must be a text, got a list"),
        ({"studies": {"a": {"t3": [1]}}}, 'unknown role "t3"'),
        ({"studies": {"a": 7}}, "an entry of studies must be an object, got 7"),
        ({"studies": {"a": {"t2": 4}}}, "an entry of studies, t2 must be a list, got 4"),
        (
            {"studies": {"a": {"t2": ["4"]}}},
            "an entry of studies, t2 must be a number without quotation marks, got a text",
        ),
        ({"labels": {"columns": {"label": "ClinSig"}}}, "labels, column label must be a list, got a text"),
        ({"labels": {"positive": [1]}}, "every entry of labels, positive must be a text, got 1"),
        ({"labels": {"sides": {"a": 1}}}, "labels, sides must be a text, got 1"),
        ({"labels": []}, "labels must be an object, got a list"),
        ({"labels": {"positiv": ["1"]}}, 'unknown label field "positiv"'),
        ({"labels": {"columns": {"outcome": ["x"]}}}, 'unknown label column "outcome"'),
        ({"labels": {"several": "all"}}, 'unknown choice of several "all"'),
        ({"labels": {"splits": {"a": "b"}}}, 'unknown side of a split "b"'),
        ({"size": [0, 1, 1]}, "size must be three numbers above 0"),
        ({"spacing": ["1", 1, 1]}, "spacing must be a number without quotation marks, got a text"),
        ({"spacing": [float("nan"), 1, 1]}, "is damaged (NaN is no number of JSON"),
        ({"size": [12.5, 12, 6]}, "size must be a whole number, got 12.5"),
        ([series_rule(description=["a"])], "series rule 1, description must be a text, got a list"),
        ([series_rule(description="(")], "series rule 1, description is no regular expression"),
        ([series_rule(image_type="ADC")], "series rule 1, image_type must be a list, got a text"),
        ([series_rule(b_above="5")], "series rule 1, b_above must be a number without quotation marks, got a text"),
        ({"series": [series_rule(number=7)]}, "series rule 1, number must be a list, got 7"),
        ({"series": [series_rule(nameless="yes")]}, "series rule 1, nameless must be true or false, got a text"),
        ({"series": [series_rule(echo_time_within=[250, 60])]}, "must be two numbers, the lower one first, got a list"),
        ({"series": [series_rule(slices_below=None)]}, "series rule 1, slices_below must be a number without"),
        ({"series": {"role": "t2"}}, "series must be a list, got an object"),
        ({"series": [{"role": "t2"}]}, "every rule needs a role and a reason"),
        ({"series": [{"role": "t2", "reason": "x", "all": {"colour": 1}}]}, "unknown condition 'colour'"),
    ],
)
def test_rules_that_cannot_be_meant(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_cohort_rules(write_text(tmp_path / "rules.json", content))


def test_a_rules_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json: cannot be read \(No such file or directory\)\. Give a JSON"):
        load_cohort_rules(tmp_path / "absent.json")


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "cohorts").glob("*/rules.json")), ids=str)
def test_committed_rules_are_valid(path: Path) -> None:
    rules = load_cohort_rules(path)
    assert rules.labels.columns["label"]
