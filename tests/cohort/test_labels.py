"""Label tables as people have them: columns, words, separators, matching, contradictions, splits."""

import re
from pathlib import Path

import pytest
from exams import write_text
from hypothesis import given
from hypothesis import strategies as st

from mri_alm.cohort.labels import Label, match_labels, patient_of, read_labels
from mri_alm.cohort.layouts import StudySource
from mri_alm.cohort.rules import CohortRules, LabelRules, load_cohort_rules, tidy
from mri_alm.errors import InputError
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
    found = match_labels([source(1)], [Label([2], "pat1", "", 1, "train"), Label([3], "exam", "", 0, "train")])
    assert found.of["1.2.1"].label == 1
    assert found.notes == ["Rows 2 and 3 fit one study: took the first."]


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
        ({"files": {"t2": "("}}, "another kind of value"),
        ({"studies": {"a": {"t3": [1]}}}, 'unknown role "t3"'),
        ({"studies": {"a": 7}}, "another kind of value"),
        ({"labels": {"positiv": ["1"]}}, 'unknown label field "positiv"'),
        ({"labels": {"columns": {"outcome": ["x"]}}}, 'unknown label column "outcome"'),
        ({"labels": {"several": "all"}}, 'unknown choice of several "all"'),
        ({"labels": {"splits": {"a": "b"}}}, 'unknown side of a split "b"'),
        ({"size": [0, 1, 1]}, "size must be three numbers above 0"),
        ({"spacing": ["x", 1, 1]}, "another kind of value"),
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
