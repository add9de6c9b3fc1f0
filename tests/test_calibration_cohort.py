import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_cohort import read_rows, write_manifest

from mri_alm.calibration_cohort import calibrate
from mri_alm.ensemble import TrainedRun
from mri_alm.errors import InputError
from mri_alm.operating_point import OperatingPoint

COLUMNS = ("study", "patient", "label", "score")


@pytest.fixture
def run(trained: Path) -> TrainedRun:
    return TrainedRun(trained)


def table(positives: int = 25, negatives: int = 5) -> list[list[str]]:
    rows = [[f"P{i}", f"p{i}", "1", str((i + 10) / 100)] for i in range(positives)]
    return rows + [[f"N{i}", f"n{i}", "0", str(i / 100)] for i in range(negatives)]


def at(*files: Path, run: TrainedRun, alpha: float = 0.1, eps: float = 0.1) -> OperatingPoint:
    return calibrate(files, run, alpha=alpha, eps=eps)


def test_one_file(run: TrainedRun, tmp_path: Path) -> None:
    point = at(write_manifest(tmp_path / "c.csv", table(), COLUMNS), run=run)
    assert (point.threshold, point.rank, point.n_positive, point.n_negative) == (0.1, 1, 25, 5)
    assert point.basis.startswith("exact: a separate calibration cohort")


def test_scores_and_labels_in_two_files_in_another_order(run: TrainedRun, tmp_path: Path) -> None:
    rows = table()
    scores = write_manifest(tmp_path / "scores.csv", [[r[0], r[3]] for r in rows], ("study", "score"))
    labels = [[r[0], r[1], r[2]] for r in reversed(rows)] + [["elsewhere", "x", "not read"]]
    second = write_manifest(tmp_path / "manifest.csv", labels, ("study", "patient", "label"))
    whole = write_manifest(tmp_path / "c.csv", rows, COLUMNS)
    assert at(scores, second, run=run) == at(whole, run=run)


def test_the_test_cohort_of_a_run_can_calibrate_it(run: TrainedRun, manifest: Path) -> None:
    point = at(run.folder / "scores.csv", manifest, run=run, alpha=0.5, eps=0.1)
    scores = {row["study"]: float(row["score"]) for row in read_rows(run.folder / "scores.csv")}
    positive = sorted(
        scores[row["study"]] for row in read_rows(manifest) if row["study"] in scores and row["label"] == "1"
    )
    assert len(positive) == 4
    assert point.threshold == positive[0]  # (1/2)^4 = 0.06, with two 0.31


def test_a_patient_counts_once(run: TrainedRun, tmp_path: Path) -> None:
    rows = [
        [f"{name}{k}", name, label, str(float(score) + k / 1000)] for _, name, label, score in table() for k in (0, 1)
    ]
    point = at(write_manifest(tmp_path / "c.csv", rows, COLUMNS), run=run)
    assert (point.n_positive, point.n_negative, point.threshold) == (25, 5, 0.1)


def test_without_patients_every_study_is_one_and_that_is_said(
    run: TrainedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [[r[0], r[2], r[3]] for r in table()]
    with caplog.at_level(logging.WARNING, "mri_alm"):
        point = at(write_manifest(tmp_path / "c.csv", rows, ("study", "label", "score")), run=run)
    assert point.n_positive == 25
    assert "every study is taken for another patient" in caplog.text


def test_exams_without_a_score_are_left_out_and_counted(
    run: TrainedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mri_alm"):
        point = at(write_manifest(tmp_path / "c.csv", [*table(), ["L", "l", "1", ""]], COLUMNS), run=run)
    assert point.n_positive == 25
    assert "1 exams without a score are left out" in caplog.text


def changed(row: int, column: int, value: str) -> list[list[str]]:
    rows = table()
    rows[row][column] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed(0, 3, "1.5"), r'study P0 has score "1\.5", which is no probability in \[0, 1\]'),
        (changed(0, 3, "nan"), r'study P0 has score "nan", which is no probability'),
        (changed(0, 3, "high"), r'study P0 has score "high", which is no probability'),
        (changed(0, 2, "yes"), r'study P0 has label "yes"\. Write 1 \(DCE needed\) or 0'),
        (changed(1, 0, "P0"), r"P0 stand in several rows\. Keep one row per study"),
        (changed(3, 1, "S07"), r"1 calibration patients have names that the model was trained on: S07\. A guarantee"),
        (table(0), r"found 0 positive and 5 negative"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(
    run: TrainedRun, tmp_path: Path, rows: list[list[str]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        at(write_manifest(tmp_path / "c.csv", rows, COLUMNS), run=run)


def test_a_scored_exam_without_a_label_is_refused(run: TrainedRun, tmp_path: Path) -> None:
    scores = write_manifest(tmp_path / "s.csv", [["A", "0.5"], ["B", "0.5"]], ("study", "score"))
    labels = write_manifest(tmp_path / "l.csv", [["A", "1"]], ("study", "label"))
    with pytest.raises(InputError, match=r"l\.csv has no row for B, scored in .*s\.csv\. Add their labels"):
        at(scores, labels, run=run)


def test_a_missing_column_is_named(run: TrainedRun, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"c\.csv: no column score\. Its columns are: study, label\.$"):
        at(write_manifest(tmp_path / "c.csv", [["A", "1"]], ("study", "label")), run=run)


def test_a_file_in_another_encoding(run: TrainedRun, tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes("study,label,score\nÄ,1,0.5\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"c\.csv is no UTF-8 text"):
        at(path, run=run)


@pytest.mark.parametrize("wrap", [lambda c: {"model": {"checkpoints_sha256": c}}, lambda c: {"checkpoints": c}])
def test_scores_of_another_model_are_refused(run: TrainedRun, tmp_path: Path, wrap: Any) -> None:
    name = "report.json" if "model" in wrap({}) else "threshold.json"
    file = write_manifest(tmp_path / "c.csv", table(), COLUMNS)
    (tmp_path / name).write_text(json.dumps(wrap(run.checkpoints)))
    assert at(file, run=run).rank == 1
    (tmp_path / name).write_text(json.dumps(wrap({"split_0": "other"})))
    with pytest.raises(InputError, match=r"c\.csv holds scores of another model\. Score the calibration cohort with"):
        at(file, run=run)


def test_scores_of_unknown_origin_are_said_to_be(
    run: TrainedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_manifest(tmp_path / "c.csv", table(), COLUMNS)
    with caplog.at_level(logging.WARNING, "mri_alm"):
        at(file, run=run)
        assert "nothing beside" in caplog.text
        caplog.clear()
        shutil.copy(run.folder / "threshold.json", tmp_path)
        at(file, run=run)
    assert caplog.text == ""
