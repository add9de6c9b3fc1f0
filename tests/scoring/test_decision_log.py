"""The shadow log: a table that only grows, whatever kills its writers, and the calibration cohort it becomes."""

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import load_program
from small_cohort import read_rows, write_manifest

from mri_alm.bundle.run_folder import model_digest
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.cohort.protocol import BELOW_GATE
from mri_alm.errors import InputError
from mri_alm.metrics import fixed_fn_threshold
from mri_alm.scoring.decision_log import append_decisions, calibration_cohort, check_log, decisions_of, read_log
from mri_alm.scoring.new_exams import operating_point
from mri_alm.scoring.shift import Watch

POINT = replace(fixed_fn_threshold([1, 1, 0], [0.4, 0.6, 0.38], 0), rule='at most 0 of 2, "held out"')
ONE, TWO = {"split_0": "1" * 64, "split_1": "2" * 64}, {"split_0": "3" * 64}


def decided(path: Path, scores: dict[str, float], checkpoints: dict[str, str] = ONE) -> None:
    """Log exams with two members each, one a little above, one a little below the score."""
    rows = [
        {"study": name, "score": score, "threshold": POINT.threshold, "dce_needed": int(score >= POINT.threshold)}
        for name, score in scores.items()
    ]
    logits = np.array([[np.log(s / (1 - s)) + d for d in (0.5, -0.5)] for s in scores.values()])
    append_decisions(path, rows, logits, point=POINT, checkpoints=checkpoints)


def test_every_decision_is_a_row_that_reads_back_equal(tmp_path: Path) -> None:
    log = tmp_path / "new" / "log.csv"
    check_log(log)
    decided(log, {"a,b": 0.3, "=1+1": 0.7})
    decided(log, {"Müller": 1 / 3}, TWO)
    rows = read_log(log)
    assert [row["study"] for row in rows] == ["a,b", "=1+1", "Müller"]
    assert [float(row["score"]) for row in rows] == [0.3, 0.7, 1 / 3]
    assert [row["dce_needed"] for row in rows] == ["0", "1", "0"]
    assert {(row["threshold"], row["rule"]) for row in rows} == {("0.39", POINT.rule)}
    assert [row["model"] for row in rows] == [*[model_digest(ONE)] * 2, model_digest(TWO)]
    low, high = (0.3 / 0.7 * np.exp(d) for d in (-0.5, 0.5))
    assert [float(one) for one in rows[0]["members"].split()] == pytest.approx([high / (1 + high), low / (1 + low)])
    assert all(row["time"].endswith("+00:00") for row in rows)
    assert log.read_text().count("\n") == 4
    assert not list(log.parent.glob(".*"))


def test_a_torn_last_line_is_named_wherever_it_ends_and_spoils_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, torn = tmp_path / "log.csv", tmp_path / "torn.csv"
    decided(log, {"whole": 0.3})
    start = log.stat().st_size
    decided(log, {"Mü": 0.7})
    content = log.read_bytes()
    for end in range(start + 1, len(content)):
        torn.write_bytes(content[:end])
        caplog.clear()
        whole = end == len(content) - 1  # all but the line end
        assert [row["study"] for row in read_log(torn)] == ["whole", *["Mü"] * whole]
        assert ("line 3 is cut short" in caplog.text) is not whole
        if end % 40 == 0 or whole:
            decided(torn, {"next": 0.5})
            assert [row["study"] for row in read_log(torn)] == ["whole", *["Mü"] * whole, "next"]


def test_an_edited_line_and_another_file_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    decided(log, {"a": 0.3, "b": 0.7})
    log.write_text(log.read_text().replace("b,0.7", "b,0.1"))
    with pytest.raises(InputError, match=r"log\.csv: line 3 is not as it was written; its checksum differs"):
        read_log(log)
    other = tmp_path / "other.csv"
    for text in ("", "study,score\na,0.3\n", "\xff\xfe"):
        other.write_text(text)
        with pytest.raises(InputError, match=r"other\.csv is no log of decisions"):
            check_log(other)
        with pytest.raises(InputError, match=r"other\.csv is no log of decisions"):
            decided(other, {"a": 0.3})
        assert other.read_text() == text
    with pytest.raises(InputError, match="it is a folder, no file"):
        check_log(tmp_path)


def write_for_ever(log: Path, name: str, done: Any) -> None:
    for number in range(10**6):
        decided(log, {f"{name}_{number}": 0.3, f"{name}_{number}b": 0.7})
        done.send_bytes(b"%d" % number)


def test_two_writers_killed_by_kill_9_lose_no_row_that_they_finished(tmp_path: Path) -> None:
    log, context = tmp_path / "log.csv", get_context("fork")
    finished: set[str] = set()
    for turn in range(4):
        writers = []
        for name in (f"A{turn}", f"B{turn}"):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=write_for_ever, args=(log, name, there))
            process.start()
            there.close()
            writers.append((name, process, here))
        for name, _, here in writers:  # both are at work
            finished |= {f"{name}_{here.recv_bytes().decode()}"}
        time.sleep(0.013 * turn)
        for name, process, here in writers:
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            while here.poll():
                try:
                    finished |= {f"{name}_{here.recv_bytes().decode()}"}
                except EOFError:
                    break
    found = [row["study"] for row in read_log(log)]
    assert len(found) == len({*found})
    assert {study for name in finished for study in (name, f"{name}b")} <= {*found}
    decided(log, {"last": 0.3})
    assert read_log(log)[-1]["study"] == "last"


# --- The cohort that it becomes ---------------------------------------------------------------------------------------


def outcomes(path: Path, label: dict[str, str]) -> Path:
    return write_manifest(path, [[n, v, f"P{n}"] for n, v in label.items()], ("study", "label", "patient"))


def test_the_last_decision_counts_and_unknown_outcomes_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log.csv"
    decided(log, {"a": 0.3, "b": 0.7, "c": 0.2, "d": 0.6})
    decided(log, {"A": 0.5})  # another name: small and capital letters are two studies of the log
    decided(log, {"b": 0.65})
    labels = outcomes(tmp_path / "labels.csv", {"a": "1", "b": "0", "c": "", "x": "1"})
    scores, found = calibration_cohort(log, labels, tmp_path / "out")
    assert {row["study"]: float(row["score"]) for row in read_rows(scores)}.items() >= {"a": 0.3, "b": 0.65}.items()
    assert [row["label"] for row in read_rows(found) if row["study"] in "ab"] == ["1", "0"]
    assert "2 of 5 logged exams have no outcome yet; 1 of them were spared" in caplog.text
    with pytest.raises(InputError, match=r"has no label for any of the 5 exams in"):
        calibration_cohort(log, outcomes(tmp_path / "none.csv", {"x": "1"}), tmp_path / "out")


def test_two_outcomes_of_a_study_are_refused(tmp_path: Path) -> None:
    """Of a missed patient the other row would win, and the miss be gone."""
    log, labels = tmp_path / "log.csv", tmp_path / "outcomes.csv"
    decided(log, {"e0": 0.1, "e1": 0.7})
    write_manifest(labels, [["e0", "1"], ["E0", "0"], ["e1", "0"]], ("study", "label"))
    with pytest.raises(InputError, match=r"outcomes.csv: several rows, or no name, for 1 study \(e0\)\. Keep one row"):
        calibration_cohort(log, labels, tmp_path / "out")


@pytest.mark.parametrize("name", ["labels.csv", "scores.csv"])
def test_what_the_cohort_is_made_of_is_not_overwritten(tmp_path: Path, name: str) -> None:
    log, labels = tmp_path / "log.csv", outcomes(tmp_path / "labels.csv", {"a": "1", "b": "0", "waits": ""})
    decided(log, {"a": 0.3, "b": 0.7})
    (tmp_path / "out").mkdir()
    mine = (labels if name == "labels.csv" else log).rename(tmp_path / "out" / name)
    before = mine.read_bytes()
    pair = (log, mine) if name == "labels.csv" else (mine, labels)
    with pytest.raises(InputError, match=rf"{name} would be overwritten by the cohort that is made of it: choose"):
        calibration_cohort(*pair, tmp_path / "out")
    assert mine.read_bytes() == before


def test_decisions_at_several_thresholds_and_below_the_gate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "log.csv"
    row = {"study": "gate", "score": 0.1, "threshold": 0.4, "dce_needed": 1}
    append_decisions(log, [row], np.zeros((1, 2)), point=POINT, checkpoints=ONE)
    labels = outcomes(tmp_path / "labels.csv", {"gate": "1", "other": "0"})
    found = read_rows(calibration_cohort(log, labels, tmp_path / "out")[0])
    assert (found[0]["dce_needed"], found[0]["quality"]) == ("1", BELOW_GATE)
    append_decisions(
        log, [row | {"study": "other", "threshold": ""}], np.zeros((1, 2)), point=POINT, checkpoints=ONE
    )  # fmt: skip
    found = read_rows(calibration_cohort(log, labels, tmp_path / "out")[0])
    assert found == [{"study": "gate", "score": "0.1"}, {"study": "other", "score": "0.1"}]
    assert "decided at several thresholds" in caplog.text


def test_mixed_models_are_refused_and_a_run_says_which_one(
    trained: Path, manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From a log to a threshold: what is calibrated is what was logged, and of this very model."""
    log, run = tmp_path / "log.csv", TrainedRun(trained)
    test = [row for row in read_rows(manifest) if row["side"] == "test"]
    scores = {row["study"]: float(row["score"]) for row in read_rows(trained / "scores.csv")}
    decided(log, scores, run.checkpoints)
    decided(log, {"Z": 0.5}, TWO)
    labels = outcomes(tmp_path / "labels.csv", {row["study"]: row["label"] for row in test})
    with pytest.raises(InputError, match=rf"of 2 models \({model_digest(run.checkpoints)[:8]}: 12, .*Name the model's"):
        calibration_cohort(log, labels, tmp_path / "out")
    file, found = calibration_cohort(log, labels, tmp_path / "out", run=trained)
    direct = operating_point(run, trained / "scores.csv", manifest, alpha=0.5, eps=0.4)
    assert operating_point(run, file, found, alpha=0.5, eps=0.4) == direct
    other = tmp_path / "other.csv"
    decided(other, scores, TWO)
    with pytest.raises(InputError, match=r"holds no decision of .*: its 12 rows are of other models"):
        calibration_cohort(other, labels, tmp_path / "out", run=trained)
    file, found = calibration_cohort(other, labels, tmp_path / "out")
    with pytest.raises(InputError, match="holds scores of another model"):
        operating_point(run, file, found, alpha=0.5, eps=0.4)


def test_the_programs_log_and_evaluate(
    trained: Path, manifest: Path, one_exam: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("mri_alm.scoring.new_exams.study_picture", lambda *_: b"")
    log, run = tmp_path / "log.csv", TrainedRun(trained)
    words = ["--model", trained, "--input", one_exam, "--output", tmp_path / "out", "--threads", 1, "--log", log]
    program: Callable[..., int] = load_program("score").main
    assert program([str(word) for word in words]) == 0
    (row,), (scored,) = decisions_of(log, model_digest(run.checkpoints)), read_rows(tmp_path / "out" / "scores.csv")
    assert {name: row[name] for name in ("study", "score", "threshold", "dce_needed")} == {
        name: scored[name] for name in ("study", "score", "threshold", "dce_needed")
    }
    assert len(row["members"].split()) == 3
    others = {one["study"]: float(one["score"]) for one in read_rows(trained / "scores.csv")}
    decided(log, {name: score for name, score in others.items() if name != row["study"]}, run.checkpoints)
    labels = outcomes(tmp_path / "labels.csv", {one["study"]: one["label"] for one in read_rows(manifest)})
    output = tmp_path / "evaluation"
    words = ["--log", log, "--labels", labels, "--output", output, "--run", trained, "--draws", 100]
    capsys.readouterr()
    assert load_program("evaluate").main([str(word) for word in words]) == 0
    assert "12 exams" in capsys.readouterr().out
    assert (output / "evaluation.json").is_file()
    assert len(read_rows(output / "scores.csv")) == 12


def test_a_log_that_cannot_be_used_is_refused_before_anything_is_prepared(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "log.csv").write_text("study,score\n")
    with pytest.raises(InputError, match="is no log of decisions"):
        Watch(TrainedRun(trained), tmp_path / "log.csv")
