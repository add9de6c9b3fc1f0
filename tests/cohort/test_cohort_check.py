"""`prepare_cohort.py --check`: what makes a cohort unsafe, what is only worth a look, and the table."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import load_program

from mri_alm.cohort.overview import check_cohort
from mri_alm.cohort.prepare_cohort import MANIFEST_COLUMNS
from mri_alm.errors import InputError
from mri_alm.runtime.files import write_json
from mri_alm.runtime.tables import write_csv


def cohort(folder: Path, *changes: dict[str, Any], count: int = 12) -> Path:
    """A sound cohort of ``count`` studies; the changes apply to the first ones."""
    rows = []
    for number in range(count):
        row = dict.fromkeys(MANIFEST_COLUMNS, "") | {
            "study": f"s{number:02d}", "patient": f"p{number}", "status": "ok", "label": number % 2,
            "side": "test" if number % 3 == 0 else "train", "vendor": "siemens" if number % 4 else "ge",
            "model": "Skyra", "field_strength": 3.0, "t2_spacing_mm": "0.5 0.5 3", "t2_size": "384 384 20",
            "adc_spacing_mm": "2 2 3", "shift_mm": 1.0 + 0.1 * (number % 5), "coverage": 0.7, "content": f"c{number}",
        }  # fmt: skip
        row |= changes[number] if number < len(changes) else {}
        content = row.pop("content")
        write_json(folder / row["study"] / "study.json", {"content": {"t2": content, "adc": f"adc{number}"}})
        rows.append(row)
    write_csv(folder / "manifest.csv", MANIFEST_COLUMNS, rows)
    return folder


def test_a_sound_cohort(tmp_path: Path) -> None:
    text, safe = check_cohort(cohort(tmp_path))
    assert safe
    assert text.splitlines()[0] == "12 studies of 12 patients, 12 usable"
    assert "No problem found." in text
    table = [line.split() for line in text.splitlines() if line.startswith(("side", "scanner"))]
    assert table == [
        ["side", "test", "4", "2", "2", "0", "0"],
        ["side", "train", "8", "4", "4", "0", "0"],
        ["scanner", "ge", "Skyra", "3.0", "T", "3", "0", "3", "0", "0"],
        ["scanner", "siemens", "Skyra", "3.0", "T", "9", "6", "3", "0", "0"],
    ]


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [([], 0, "No problem found."), ([{"shift_mm": 90.0}], 0, "Notes:"), ([{}, {"patient": "p0"}], 2, "Problems:")],
)
def test_the_exit_status_says_whether_it_is_safe(
    tmp_path: Path, changes: list[dict[str, Any]], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 safe, also with notes; 2 not."""
    assert load_program("prepare_cohort").main(["--check", str(cohort(tmp_path, *changes))]) == status
    assert says in capsys.readouterr().out


def test_the_exit_status_without_a_cohort(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_program("prepare_cohort").main(["--check", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ([{}, {"patient": "p0"}], "leak: patient p0 is in test (s00) and in train (s01)"),
        ([{}, {"content": "c0"}], "copy: s00, s01 have the same t2"),
        ([{"label": "", "side": ""}], "no label: 1 studies (s00)"),
        ([{}, {}, {}, {"label": 0}, {}, {}, {}, {}, {}, {"label": 0}], "one class: every study of test has label 0"),
    ],
)
def test_what_makes_a_cohort_unsafe(tmp_path: Path, changes: list[dict[str, Any]], problem: str) -> None:
    text, safe = check_cohort(cohort(tmp_path, *changes))
    assert not safe
    problems = text.split("Problems:")[1].split("Notes:")[0].strip().splitlines()
    assert [line.strip() for line in problems] == [problem]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (
            {"t2_spacing_mm": "0.9 0.9 3"},
            "outlier: s00 has T2 voxel size in mm 0.9 x 0.9 x 3, the median is 0.5 x 0.5 x 3",
        ),
        ({"t2_size": "384 384 60"}, "s00 has T2 field of view in mm 192 x 192 x 180, the median is 192 x 192 x 60"),
        ({"adc_spacing_mm": "2 2 6"}, "outlier: s00 has ADC voxel size in mm 2 x 2 x 6, the median is 2 x 2 x 3"),
        ({"shift_mm": 14.0}, "outlier: s00 has registration shift 14, the median is 1.2"),
        ({"coverage": 0.51}, "outlier: s00 has share of the grid with diffusion data 0.51, the median is 0.7"),
    ],
)
def test_outliers_are_notes(tmp_path: Path, change: dict[str, Any], note: str) -> None:
    text, safe = check_cohort(cohort(tmp_path, change))
    assert safe
    assert note in text.split("Notes:")[1]


def test_protocols_that_differ_a_little_are_no_outliers(tmp_path: Path) -> None:
    change = {"t2_spacing_mm": "0.7 0.7 3.6", "t2_size": "320 320 20", "shift_mm": 5.0, "coverage": 0.6}
    text, _ = check_cohort(cohort(tmp_path, change))
    assert "outlier" not in text


def test_many_outliers_are_counted(tmp_path: Path) -> None:
    text, _ = check_cohort(cohort(tmp_path, *[{"adc_spacing_mm": "4 4 3"}] * 8, count=20))
    assert text.count("outlier: ") == 5
    assert "... and 3 more with ADC voxel size in mm off" in text


def test_failed_studies_are_left_out_and_counted(tmp_path: Path) -> None:
    failed = {"status": "failed", "error_code": "no_t2", "patient": "p1", "label": "", "content": "c1"}
    text, safe = check_cohort(cohort(tmp_path, failed))
    assert safe
    assert "12 studies of 11 patients, 11 usable" in text
    assert "1 studies failed: no_t2" in text


def test_a_scanner_that_tells_the_label_is_a_note(tmp_path: Path) -> None:
    changes = [{"vendor": "philips" if number < 15 else "siemens", "label": int(number < 15)} for number in range(40)]
    text, _ = check_cohort(cohort(tmp_path, *changes, count=40))
    assert "scanner philips Skyra 3.0 T: 15 of 15 positive, 38% in the cohort; it tells the label" in text


def test_no_cohort(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no manifest\.csv\. Prepare the cohort first"):
        check_cohort(tmp_path)
    (tmp_path / "manifest.csv").write_text("study,label\na,1\n")
    with pytest.raises(InputError, match="it is not the manifest of a prepared cohort"):
        check_cohort(tmp_path)


def test_no_label_anywhere(tmp_path: Path) -> None:
    changes = [{"label": "", "side": ""}] * 12
    text, safe = check_cohort(cohort(tmp_path, *changes))
    assert not safe
    assert "no label: 12 studies (s00, s01, s02, s03, s04 ...)" in text
    json.dumps(text)
