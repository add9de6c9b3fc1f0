"""Files of scores and labels as spreadsheets leave them: matched as names are compared, or refused with the cause."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluation_inputs import Rows, labels, scores, write_rows

from mri_alm.errors import InputError
from mri_alm.evaluation.data import HardExam, read_calibration, read_hardest, read_labelled_scores
from mri_alm.evaluation.performance import group_columns


def as_european_excel(path: Path, encoding: str = "utf-16") -> Path:
    """The same table with semicolons, another encoding and a first line for Excel."""
    text = path.read_text("utf-8").replace(",", ";")
    path.write_bytes(f"sep=;\r\n{text}".encode(encoding))
    return path


def both(folder: Path, rename: Callable[[str], str] = str) -> tuple[Path, Path]:
    """Labels of 60 studies whose names are changed, and their scores under the old names."""
    rows = labels()
    found = scores(rows, 1)
    for row in rows:
        row["study"] = rename(row["study"])
    return write_rows(folder / "labels.csv", rows), write_rows(folder / "scores.csv", found)


def test_tables_saved_by_a_european_spreadsheet_give_the_same(tmp_path: Path) -> None:
    truth, given = both(tmp_path)
    expected = read_labelled_scores({"a": given}, truth)
    found = read_labelled_scores({"a": as_european_excel(given)}, as_european_excel(truth, "cp1252"))
    assert found.studies == expected.studies
    assert found.label.tolist() == expected.label.tolist()
    assert found.models[0].score.tolist() == expected.models[0].score.tolist()
    assert found.columns == expected.columns


@pytest.mark.parametrize("rename", [str.lower, lambda name: f"\u200b{name}\u00a0", lambda name: f"\uff33{name[1:]}"])
def test_forms_of_one_name_match_and_keep_the_spelling_of_the_scores(
    tmp_path: Path, rename: Callable[[str], str]
) -> None:
    truth, given = both(tmp_path, rename)
    found = read_labelled_scores({"a": given}, truth, exclude=["s003"])
    assert found.studies == tuple(f"S{number:03d}" for number in range(60))  # pictures are called so
    assert found.left_out == {}


def numbered(folder: Path, name: Callable[[int], Any]) -> tuple[Path, Path]:
    rows: Rows = [row | {"study": f"{number:04d}"} for number, row in enumerate(labels())]
    given = write_rows(folder / "scores.csv", scores(rows, 1))
    changed = [row | {"study": name(number)} for number, row in enumerate(rows)]
    return write_rows(folder / "labels.csv", changed), given


def test_leading_zeros_that_were_lost_are_named_and_nothing_is_matched(tmp_path: Path) -> None:
    truth, given = numbered(tmp_path, str)
    with pytest.raises(InputError, match="60 names differ from an exam's by leading zeros only"):
        read_labelled_scores({"a": given}, truth)


def test_a_number_never_takes_the_label_of_the_one_with_zeros(tmp_path: Path) -> None:
    truth, given = numbered(tmp_path, lambda number: f"{number:04d}" if number else "0")
    with pytest.raises(InputError, match=r"(?s)no row in .* for 1 study \(0000\).*by leading zeros only"):
        read_labelled_scores({"a": given}, truth)


def test_one_study_by_two_spellings_is_refused(tmp_path: Path) -> None:
    truth, given = both(tmp_path, lambda name: {"S001": "s000"}.get(name, name))
    with pytest.raises(InputError, match=r"labels\.csv: several rows, or no name, for 1 study \(S000\)"):
        read_labelled_scores({"a": given}, truth)


def test_decimal_commas_are_named(tmp_path: Path) -> None:
    truth, given = both(tmp_path)
    text = given.read_text("utf-8").replace(",", ";").replace(".", ",")
    given.write_text(text, "utf-8")
    with pytest.raises(InputError, match=r'has score "0,.*", which is no finite number: write decimals with a point'):
        read_labelled_scores({"a": given}, truth)


@pytest.mark.parametrize(("patient", "trained"), [("p000", "P000 "), ("12", "0012")])
def test_a_patient_that_was_trained_on_is_known_by_every_spelling(tmp_path: Path, patient: str, trained: str) -> None:
    rows = labels()
    rows[0]["patient"] = patient
    truth = write_rows(tmp_path / "labels.csv", rows)
    given = write_rows(tmp_path / "scores.csv", scores(rows, 1))
    with pytest.raises(InputError, match=r"^1 calibration patients or studies were trained on"):
        read_calibration(given, truth, apart_from=[trained])
    with pytest.raises(InputError, match="Among the scores are training studies"):
        read_calibration(given, truth, trained_on=["s001"])


def test_columns_for_subgroups_in_any_case(tmp_path: Path) -> None:
    truth, given = both(tmp_path)
    truth.write_text(truth.read_text("utf-8").replace("vendor", "Vendor", 1), "utf-8")
    assert group_columns(read_labelled_scores({"a": given}, truth), ["VENDOR"]) == ["vendor"]


def test_the_hardest_exams_come_by_rank(tmp_path: Path) -> None:
    assert read_hardest(tmp_path / "hardest.csv") == ()
    rows = [("B", 0.4, 2, 3), ("C", 0.25, 10, 1), ("A", 1, 1, 4)]
    names = ("study", "lambda", "rank", "members")
    path = write_rows(tmp_path / "hardest.csv", [dict(zip(names, row, strict=True)) for row in rows])
    assert read_hardest(path) == (HardExam("A", 1.0, 4), HardExam("B", 0.4, 3), HardExam("C", 0.25, 1))
    assert read_hardest(path, most=1) == (HardExam("A", 1.0, 4),)


@pytest.mark.parametrize(
    "wrong", [{"lambda": "high"}, {"lambda": "1.5"}, {"lambda": "nan"}, {"rank": "x"}, {"members": ""}]
)
def test_a_table_of_hardest_exams_that_was_changed_is_refused(tmp_path: Path, wrong: dict[str, str]) -> None:
    row = {"study": "A", "lambda": "1", "rank": "1", "members": "2"} | wrong
    with pytest.raises(InputError, match=r"hardest\.csv: study A has lambda .* a share and two whole numbers"):
        read_hardest(write_rows(tmp_path / "hardest.csv", [row]))
