"""From DICOM to report: nothing that identifies a patient is in any file or line that training, scoring, reports write.

tests/cohort/test_prepare_identity.py does the same for the preparation of a cohort.
"""

import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pydicom
import pytest
from exams import dicom_exam, prepare, write_text
from identity import DATE, MARK, NUMBER, UID, leaks, plant
from programs import load_program
from small_cohort import train

TRACKING = "mlflow" if find_spec("mlflow") else None
EXAMS = 9  # of patients P0 to P8; every third is positive, the last three are the test cohort


def planted(patient: str, ds: pydicom.Dataset, index: int) -> None:
    plant(ds, index)
    ds.PatientID = patient


def main(name: str) -> Callable[..., int]:
    found: Callable[..., int] = load_program(name).main
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::mlflow", "ignore:::alembic", "ignore:::sqlalchemy")
def test_no_identity_in_models_logs_events_scores_reports_or_explanations(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, new = tmp_path / "in" / f"{MARK}_{DATE}", tmp_path / "new" / f"{MARK}_HANS"
    with pydicom.config.disable_value_validation():
        for number in range(EXAMS):
            dicom_exam(source / f"{MARK}_{number}", number, edit=partial(planted, f"{NUMBER}{number}"))
        dicom_exam(new / MARK, 20, edit=plant)
        dicom_exam(new / f"{MARK}_fails", 21, without=(4,), edit=plant)
    rows = [f"{NUMBER}{n};{int(n % 3 == 0)};{'train' if n < 6 else 'test'};{MARK}" for n in range(EXAMS)]
    labels = write_text(tmp_path / "labels.csv", "\n".join(["patient;label;split;name", *rows]))
    prepare(tmp_path / "in", tmp_path / "cohort", labels=labels)
    manifest = tmp_path / "cohort" / "manifest.csv"
    run = train(
        *(manifest, tmp_path / "run"),
        cache_dir=str(tmp_path / "cache"),
        spacing=[3.0, 3.0, 4.5],
        size=[8, 8, 4],
        validation=0.5,
        splits=1,
        max_epochs=1,
        tracking=TRACKING,
    )
    words = ["--model", run, "--input", tmp_path / "new", "--output", tmp_path / "out", "--sr", "--explain", 1]
    monkeypatch.setattr(sys, "argv", ["score.py", *map(str, words)])
    assert main("score")() == 2
    evaluation = ["--scores", run / "scores.csv", "--labels", manifest, "--run", run, "--output", tmp_path / "report"]
    assert main("evaluate")(list(map(str, [*evaluation, "--draws", 100]))) == 0
    shutil.rmtree(tmp_path / "cohort")  # test_prepare_identity.py looks at it
    written = {path.name for folder in ("run", "out", "report") for path in (tmp_path / folder).rglob("*")}
    assert {"report.html", "scores.csv", "model.pt", "last.pt", "metrics.json"} <= written
    assert ("mlflow.db" in written) == bool(TRACKING)
    for kind in ("events.out.tfevents", "_sr.dcm", "_explanation.png"):
        assert any(kind in name for name in written), kind
    for folder in ("run", "out", "report", "cache"):
        assert leaks(tmp_path / folder) == [], folder
    shown: Any = capfd.readouterr()
    text = (shown.out + shown.err).replace(str(tmp_path), "")
    assert "exams scored" in text
    assert not [word for word in (MARK, DATE, NUMBER, UID) if word.lower() in text.lower()]
    assert leaks(tmp_path / "new") != []  # the test would see it
