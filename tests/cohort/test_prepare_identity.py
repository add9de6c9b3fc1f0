"""Nothing that identifies a patient leaves the input: every header field says something unmistakable, then grep."""

from pathlib import Path

import pydicom
import pytest
from exams import GRID, dicom_exam, image_exam, scans, write_image, write_text
from identity import DATE, MARK, NUMBER, UID, leaks, plant
from programs import load_program
from shell import WarmPython

PREPARE = "pipelines/prepare_cohort.py"


@pytest.mark.slow
def test_no_identity_in_any_output_log_or_name(tmp_path: Path, python: WarmPython) -> None:
    hidden = tmp_path / "in" / f"{MARK}_HANS_{DATE}"
    with pydicom.config.disable_value_validation():
        dicom_exam(hidden / "exam", 1, patient=NUMBER, edit=plant)
        dicom_exam(tmp_path / "in" / f"{MARK}_FAILS", 2, patient=NUMBER, without=(4,), edit=plant)
    first = next((hidden / "exam" / "s9").iterdir())
    (hidden / f"{MARK}.dcm").write_bytes(first.read_bytes()[:900])
    (hidden / f"{MARK}.zip").write_bytes(b"PK\x03\x04")
    with pydicom.config.disable_value_validation():
        assert sum(1 for element in pydicom.dcmread(first) if MARK in str(element.value)) > 200
    lines = [f"PatientID;label;Name\n{MARK};1;{MARK}\n{NUMBER}8;0;{MARK}\n{NUMBER};0;{MARK}\n"]
    labels = write_text(tmp_path / "labels.csv", "".join(lines))
    rules = write_text(tmp_path / "rules.json", GRID | {"studies": {f"in/{MARK}": {"t2": [4]}}})
    output = tmp_path / "out"
    words = [PREPARE, "--input", tmp_path / "in", "--labels", labels, "--rules", rules, "--output", output]
    shown = [python.run(*words, "--dry-run"), python.run(*words)]
    assert [one.returncode for one in shown] == [0, 2], shown[1].stderr
    assert "2 studies (layout dicom)" in shown[1].stdout
    shown += [python.run(PREPARE, "--check", output), python.run(*words, "--strict", "--resume")]
    assert [one.returncode for one in shown[2:]] == [2, 2], shown[2].stdout
    text = "".join(one.stdout + one.stderr for one in shown[1:])  # a dry run names folders, for its screen alone
    assert not [word for word in (MARK, DATE, NUMBER, UID) if word.lower() in text.lower()]
    assert leaks(output) == []
    assert leaks(tmp_path / "in") != []  # the test would see it


@pytest.mark.slow
def test_no_identity_from_file_names_notes_or_damaged_images(tmp_path: Path, python: WarmPython) -> None:
    names = {"t2": f"{MARK}_t2.nii.gz", "adc": f"{MARK}_adc.nii.gz", "hbv": f"{MARK}_hbv.nii.gz"}
    folder = image_exam(tmp_path / "in" / f"{MARK}_1977", 1, names)
    write_text(folder / f"{MARK}_adc.json", {"PatientName": MARK, "SeriesDescription": MARK, "StudyDate": DATE})
    write_text(tmp_path / "in" / f"{MARK}_broken" / f"{MARK}_t2.nii.gz", "no image")
    write_image(tmp_path / "in" / f"{MARK}_half" / f"{MARK}_t2.nii.gz", scans(3)[0].pixels)
    output = tmp_path / "out"
    rules = write_text(tmp_path / "rules.json", GRID)
    found = python.run(PREPARE, "--input", tmp_path / "in", "--output", output, "--rules", rules)
    assert found.returncode == 2, found.stderr
    assert MARK not in found.stdout + found.stderr
    assert leaks(output) == []


def test_names_of_labels_that_fit_no_exam_reach_the_screen_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is written, and nothing asks for --resume afterwards."""
    image_exam(tmp_path / "in" / f"{MARK}_1", 1, {name: f"{name}.nii.gz" for name in ("t2", "adc", "hbv")})
    labels = write_text(tmp_path / "labels.csv", f"study;label\n{MARK}_2;1\n")
    order = ["--input", str(tmp_path / "in"), "--labels", str(labels), "--output", str(tmp_path / "out")]
    for more in ([], ["--dry-run"]):
        assert load_program("prepare_cohort").main([*order, *more]) == 2
        shown = capsys.readouterr()
        assert "error: None of the 1 rows of the labels fits one of the 1 exams. Nothing was prepared." in shown.err
        assert f'The labels name: "{MARK.lower()}_2".' in shown.err
        assert f'The exams are called: "{MARK.lower()}_1".' in shown.err
        assert MARK.lower() not in (shown.out + caplog.text).lower()
        assert not (tmp_path / "out").exists()
