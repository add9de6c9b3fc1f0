"""Whatever goes wrong with one exam, it gets a row and the others go on."""

import csv
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exams import GRID, dicom_exam, image_exam, prepare, write_text
from programs import load_program

from mri_alm.cohort.overview import dry_run
from mri_alm.cohort.prepare_cohort import Order
from mri_alm.errors import InputError

NAMES = {column: f"{column}.nii.gz" for column in ("t2", "adc", "hbv")}
PATIENT = "Mueller/1977"


@pytest.fixture
def second_call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the second call of a function of `prepare_study` raise, or give something else."""

    def change(name: str, outcome: Any) -> None:
        original: Any = getattr(__import__("mri_alm.cohort.prepare_study", fromlist=[name]), name)
        calls = itertools.count(1)

        def wrapper(*words: Any, **more: Any) -> Any:
            if next(calls) != 2:
                return original(*words, **more)
            if isinstance(outcome, BaseException):
                raise outcome
            return original(*words, **more) | outcome

        monkeypatch.setattr(f"mri_alm.cohort.prepare_study.{name}", wrapper)

    return change


def export(root: Path) -> Path:
    for name in "abc":
        image_exam(root / name, ord(name), NAMES)
    return root


@pytest.mark.parametrize(
    ("name", "outcome", "kind"),
    [
        ("load_images", KeyError(PATIENT), "KeyError"),
        ("onto_grid", AssertionError(PATIENT), "AssertionError"),
        ("study_strip", IndexError(PATIENT), "IndexError"),
        ("_facts", {"coverage": float("nan")}, "ValueError"),  # no JSON
    ],
)
def test_any_exception_costs_its_own_study_alone(
    tmp_path: Path, second_call: Callable[..., None], name: str, outcome: Any, kind: str
) -> None:
    second_call(name, outcome)
    rules = write_text(tmp_path / "rules.json", GRID)
    words = ["--input", export(tmp_path / "in"), "--output", tmp_path / "c", "--rules", rules, "--workers", 1]
    program = load_program("prepare_cohort")
    assert program.main([str(word) for word in words]) == 2
    with (tmp_path / "c" / "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    (bad,) = [row for row in rows if row["error_code"]]
    assert (bad["status"], bad["error_code"], bad["t2"]) == ("failed", "unexpected", "")
    assert f"({kind})" in bad["error_text"]
    folder = tmp_path / "c" / bad["study"]
    assert {path.name for path in folder.iterdir()} == {"study.json", "bug_report.txt"}
    report = (folder / "bug_report.txt").read_text()
    assert f"builtins.{kind}\n" in report
    assert "mri_alm/cohort/prepare_study.py, line " in report
    assert not [
        path for path in (tmp_path / "c").rglob("*") if path.is_file() and PATIENT.encode() in path.read_bytes()
    ]
    assert program.main([*map(str, words), "--resume"]) == 0  # it is tried again
    assert not (folder / "bug_report.txt").exists()


def test_stopping_is_no_study_s_failure(tmp_path: Path, second_call: Callable[..., None]) -> None:
    second_call("load_images", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        prepare(export(tmp_path / "in"), tmp_path / "c")


def test_a_full_disk_is_no_study_s_failure(tmp_path: Path, second_call: Callable[..., None]) -> None:
    second_call("write_nifti", InputError("Cannot write t2.nii.gz: No space left on device."))
    with pytest.raises(InputError, match="No space left on device"):
        prepare(export(tmp_path / "in"), tmp_path / "c")


def test_a_header_that_cannot_be_judged_costs_its_own_study_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Any = __import__("mri_alm.cohort.layouts", fromlist=["_role"])._role

    def role(file: Path, *words: Any) -> Any:
        if file.parent.name == "b":
            raise IndexError(PATIENT)
        return original(file, *words)

    monkeypatch.setattr("mri_alm.cohort.layouts._role", role)
    outcome = prepare(export(tmp_path / "in"), tmp_path / "c")
    codes = {source.uid: row["error_code"] for source in outcome.found.sources for row in outcome.rows
             if row["study"] in source.names}  # fmt: skip
    assert codes == {"a": "", "b": "unexpected", "c": ""}


def test_cells_that_name_no_exam_cost_their_own_row_alone(tmp_path: Path) -> None:
    export(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no folder")
    rows = [
        "study,t2,adc,hbv,dwi,dicom",
        "good,a/t2.nii.gz,a/adc.nii.gz,a/hbv.nii.gz,,",
        "empty,a/t2.nii.gz,,,empty,",
        "file,,,,,file",
        "nothing,,,,,empty",
        f"long,{'x' * 300}/t2.nii.gz,b/adc.nii.gz,b/hbv.nii.gz,,",
    ]
    outcome = prepare(write_text(tmp_path / "table.csv", "\n".join(rows)), tmp_path / "c")
    codes = {source.uid: row["error_code"] for source in outcome.found.sources for row in outcome.rows
             if row["study"] in source.names}  # fmt: skip
    assert codes == {"good": "", "empty": "unreadable", "file": "no_images", "nothing": "no_images",
                     "long": "missing_file"}  # fmt: skip
    assert "empty" not in json.dumps([row["study"] + row["patient"] for row in outcome.rows])


def test_a_dry_run_goes_on_after_a_study_that_fails(tmp_path: Path) -> None:
    for number in range(2):
        dicom_exam(tmp_path / "in" / f"p{number}", number)
    rules = write_text(tmp_path / "rules.json", GRID | {"studies": {"p0": {"t2": [77]}}})
    text = dry_run(Order(tmp_path / "in", tmp_path / "c", rules=rules))
    assert text.count("  fails, rules: The rules file gives series 77 the role t2") == 1
    assert text.count("  takes T2 4;") == 1
