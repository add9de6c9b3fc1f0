"""One model of all patients: nobody is held out, so there is no threshold, and what reads the run says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import load_program
from small_cohort import COHORT_COLUMNS as COLUMNS
from small_cohort import read_rows, train, write_manifest

from mri_alm.bundle.checkpoints import load_tensors
from mri_alm.bundle.export import export_bundle
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.evaluation.analysis import evaluate
from mri_alm.scoring.new_exams import operating_point

ALL: dict[str, Any] = {"validation": 0, "splits": 1, "checkpoint_rule": "last", "max_epochs": 2}


@pytest.fixture(scope="module")
def run(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(manifest, tmp_path_factory.mktemp("all") / "run", **ALL)


def load(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def test_all_patients_are_trained_on_and_none_is_scored(manifest: Path, run: Path) -> None:
    training = {row["study"] for row in read_rows(manifest) if row["side"] == "train"}
    assert {row["study"] for row in read_rows(run / "splits.csv") if row["split_0"] == "training"} == training
    assert not (run / "heldout.csv").exists()
    assert not (run / "split_0" / "validation.csv").exists()
    record = load(run / "split_0" / "split.json")
    assert record["best"] == {"epoch": 2}  # the last one
    assert not any(name.startswith("val_") for epoch in record["epochs"] for name in epoch)
    assert {"train_auc", "mu", "base_loss"} <= record["epochs"][0].keys()
    multipliers = load_tensors(run / "split_0" / "last.pt")["objective"]["multipliers"]
    positive = {int(row["study"][1:]) for row in read_rows(manifest) if row["side"] == "train" and row["label"] == "1"}
    assert set(multipliers.nonzero().flatten().tolist()) == positive


def test_there_is_no_threshold_and_no_decision(run: Path) -> None:
    point = load(run / "threshold.json")
    assert (point["rule"], point["threshold"], point["n_positive"], point["miss_rate_upper_95"]) == ("none", None, 0, 1)
    rows = read_rows(run / "scores.csv")
    assert {(row["threshold"], row["dce_needed"]) for row in rows} == {("", "")}
    assert len({row["score"] for row in rows}) == 12
    metrics = load(run / "metrics.json")
    assert metrics.keys() == {"test"}
    assert "at_threshold" not in metrics["test"]


def test_the_report_and_the_evaluation_say_so(manifest: Path, run: Path) -> None:
    assert "nobody was held out from the training" in (run / "report.html").read_text("utf-8")
    found = evaluate({"run": run / "scores.csv"}, manifest, run=run, draws=50)
    assert found.data.models[0].threshold is None
    assert [one.key for one in found.trade_offs] == ["evaluated"]


def test_scores_come_without_a_decision_and_with_one_from_a_calibration_cohort(
    manifest: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score = load_program("score")
    monkeypatch.setattr("mri_alm.scoring.new_exams.study_picture", lambda *_: b"")
    rows = [row for row in read_rows(manifest) if row["side"] == "test"]
    for row in rows:
        row |= {name: str(manifest.parent / row[name]) for name in ("t2", "adc", "hbv")}
    table = write_manifest(tmp_path / "new.csv", [[row[name] for name in COLUMNS] for row in rows])
    words = ["--model", str(run), "--input", str(table), "--allow-outside-paths", "--output"]
    assert score.main([*words, str(tmp_path / "scores")]) == 0
    said = capsys.readouterr().out
    assert "12 exams scored, no decision, 0 not scored." in said
    assert "no share of missed patients can be promised" in said
    assert {row["dce_needed"] for row in read_rows(tmp_path / "scores" / "scores.csv")} == {""}
    calibrated = ["--calibration", str(tmp_path / "scores" / "scores.csv"), "--labels", str(table), "--alpha", "0.6"]
    assert score.main([*words, str(tmp_path / "decided"), *calibrated, "--eps", "0.4"]) == 0
    decided = read_rows(tmp_path / "decided" / "scores.csv")
    assert {row["dce_needed"] for row in decided} == {"0", "1"}
    assert "DCE needed in" in capsys.readouterr().out


def test_a_bundle_of_it_has_no_threshold_either(run: Path, tmp_path: Path) -> None:
    export_bundle(TrainedRun(run), tmp_path / "bundle", licence=Path("LICENSE"))
    bundle = TrainedRun(tmp_path / "bundle")
    assert operating_point(bundle, None, None, alpha=0.1, eps=0.1).n_positive == 0
    card = (tmp_path / "bundle" / "docs" / "README.md").read_text("utf-8")
    assert "No threshold." in card
    metadata = load(tmp_path / "bundle" / "configs" / "metadata.json")
    assert metadata["data_source"].endswith("All its patients were trained on, so there is no threshold.")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"splits": 2}, "validation 0 trains one model on all patients, and splits is 2: give --splits 1"),
        ({"checkpoint_rule": "best"}, "holds no patients out, and checkpoint_rule best chooses an epoch by them."),
        ({"growth": "violation"}, "holds no patients out, and growth violation lets mu follow their violation."),
    ],
    ids=str,
)
def test_what_asks_held_out_patients_is_refused(
    manifest: Path, tmp_path: Path, refusal: Callable[..., str], override: dict[str, Any], said: str
) -> None:
    assert said in refusal(train, manifest, tmp_path / "run", **ALL | override)
    assert not (tmp_path / "run").exists()
