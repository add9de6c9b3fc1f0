"""`prepare_cohort.py --check`: what makes a cohort unsafe, what is only worth a look, and the table."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import load_program

import mri_alm
from mri_alm.cohort.manifest import Cohort
from mri_alm.cohort.overview import check_cohort
from mri_alm.cohort.prepare_cohort import MANIFEST_COLUMNS
from mri_alm.errors import InputError
from mri_alm.runtime.files import write_bytes, write_json
from mri_alm.runtime.tables import write_csv


def cohort(folder: Path, *changes: dict[str, Any], count: int = 18) -> Path:
    """A sound cohort of ``count`` studies, its images empty; the changes apply to the first ones."""
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
        for name in ("t2", "adc", "hbv") if row["status"] == "ok" else ():
            row[name] = f"{row['study']}/{name}.nii.gz"
            write_bytes(folder / row[name], b"")
        write_json(folder / row["study"] / "study.json", {"content": {"t2": content, "adc": f"adc{number}"}})
        rows.append(row)
    write_csv(folder / "manifest.csv", MANIFEST_COLUMNS, rows)
    return folder


def test_a_sound_cohort(tmp_path: Path) -> None:
    text, safe = check_cohort(cohort(tmp_path))
    assert safe
    assert text.splitlines()[0] == "18 studies of 18 patients, 18 usable"
    assert "No problem found." in text
    table = [line.split() for line in text.splitlines() if line.startswith(("side", "scanner"))]
    assert table == [
        ["side", "test", "6", "3", "3", "0", "0"],
        ["side", "train", "12", "6", "6", "0", "0"],
        ["scanner", "ge", "Skyra", "3.0", "T", "5", "0", "5", "0", "0"],
        ["scanner", "siemens", "Skyra", "3.0", "T", "13", "9", "4", "0", "0"],
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
        ([{"label": 0}] * 16, "no training: all 6 test studies have one label. Add the other class, or have none."),
        (
            [{"label": 1}] * 10,
            "no training: The training cohort has 9 positive and 3 negative patients; splits that hold out 0.2 of each "
            "class need at least 5 of either. Add studies, or bring --validation nearer to 0.5.",
        ),
        (
            [{"side": "train"}, {"side": "training"}],
            'no training: row 3 (study s01) has side "training". Write train or test.',
        ),
    ],
)
def test_what_makes_a_cohort_unsafe(tmp_path: Path, changes: list[dict[str, Any]], problem: str) -> None:
    """Where it is the training that would refuse, in its words."""
    text, safe = check_cohort(cohort(tmp_path, *changes))
    assert not safe
    problems = text.split("Problems:")[1].split("Notes:")[0].strip().splitlines()
    assert [line.strip().replace(f"{tmp_path / 'manifest.csv'}: ", "") for line in problems] == [problem]


@pytest.mark.parametrize("cell", ["0,7", "Jan 07", ""])
def test_numbers_that_a_spreadsheet_changed_are_named(tmp_path: Path, cell: str) -> None:
    with pytest.raises(InputError, match=r"column coverage does not hold as many numbers in every row.*spreadsheet"):
        check_cohort(cohort(tmp_path, {"coverage": cell}))


def test_an_image_that_is_gone_is_a_problem(tmp_path: Path) -> None:
    (cohort(tmp_path) / "s04" / "hbv.nii.gz").unlink()
    text, safe = check_cohort(tmp_path)
    assert not safe
    assert "row 6 (study s04) names" in text


def test_the_counts_are_those_of_the_default_settings() -> None:
    defaults = yaml.safe_load((Path(mri_alm.__file__).parent / "bundle/settings.yaml").read_text("utf-8"))
    settings = {name: entry for group in defaults["prostate_alm"].values() for name, entry in group.items()}
    wanted = inspect.signature(Cohort).parameters
    assert {name: wanted[name].default for name in ("splits", "validation")} == {
        name: settings[name]["default"] for name in ("splits", "validation")
    }


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
    assert "18 studies of 17 patients, 17 usable" in text
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
    changes = [{"label": "", "side": ""}] * 18
    text, safe = check_cohort(cohort(tmp_path, *changes))
    assert not safe
    assert "no label: 18 studies (s00, s01, s02, s03, s04 ...)" in text
    json.dumps(text)
