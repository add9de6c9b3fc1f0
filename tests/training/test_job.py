import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit
from sklearn.metrics import roc_auc_score, roc_curve
from small_cohort import COHORT_COLUMNS, SETTINGS, read_rows, snapshot, train, write_cohort, write_manifest

import mri_alm.training.run
from mri_alm.bundle.checkpoints import load_tensors, save_tensors
from mri_alm.bundle.trained_run import TrainedRun, load_member
from mri_alm.errors import InputError
from mri_alm.evaluation.analysis import evaluate
from mri_alm.training.run import hardest_positives

SPLITS = range(SETTINGS["splits"])


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a split was trained")

    monkeypatch.setattr("mri_alm.training.engine.IndexedTrainer.run", fail)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


# --- What a finished run holds --------------------------------------------------------------------------------------


def test_files_of_a_run(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert names == {
        "config.json", "splits.csv", "heldout.csv", "threshold.json", "scores.csv", "metrics.json", "report.html",
        "protocol.json", "run.log", "hardest.csv",
        *(f"split_{k}" for k in SPLITS),
    }  # fmt: skip
    for k in SPLITS:
        inside = {path.name for path in (trained / f"split_{k}").iterdir() if not path.name.startswith("events.")}
        assert inside == {"model.pt", "last.pt", "previous.pt", "split.json", "validation.csv", "multipliers.csv"}


def test_test_patients_are_in_no_split_and_no_patient_on_two_sides(manifest: Path, trained: Path) -> None:
    cohort = {row["study"]: row for row in read_rows(manifest)}
    rows = read_rows(trained / "splits.csv")
    assert {row["study"] for row in rows} == {name for name, row in cohort.items() if row["side"] == "train"}
    for k in SPLITS:
        held_out = {row["study"] for row in rows if row[f"split_{k}"] == "validation"}
        assert {row["study"] for row in read_rows(trained / f"split_{k}" / "validation.csv")} == held_out
        assert len(held_out) == 6
        assert sum(cohort[name]["label"] == "1" for name in held_out) == 2
        guarded = load_tensors(trained / f"split_{k}" / "last.pt")["objective"]["multipliers"].nonzero().flatten()
        visited = {list(cohort)[i] for i in guarded.tolist()}
        assert visited == {r["study"] for r in rows if r["label"] == "1"} - held_out  # the multipliers that moved


def test_the_hardest_positives_are_those_of_the_largest_multipliers(manifest: Path, trained: Path) -> None:
    studies = [row["study"] for row in read_rows(manifest)]
    shares: dict[str, list[float]] = {}
    for k in SPLITS:
        multipliers = load_tensors(trained / f"split_{k}" / "last.pt")["objective"]["multipliers"]
        for i in multipliers.nonzero().flatten().tolist():
            shares.setdefault(studies[i], []).append(float(multipliers[i] / multipliers.max()))
    rows = read_rows(trained / "hardest.csv")
    assert list(rows[0]) == ["study", "label", "lambda", "rank", "members"]
    assert {row["study"] for row in rows} == shares.keys()
    for row in rows:
        assert float(row["lambda"]) == pytest.approx(np.mean(shares[row["study"]]))
        assert (row["label"], int(row["members"])) == ("1", len(shares[row["study"]]))
    assert [int(row["rank"]) for row in rows] == list(range(1, len(rows) + 1))
    values = [float(row["lambda"]) for row in rows]
    assert values == sorted(values, reverse=True)


def test_hardest_positives_by_hand() -> None:
    """Of the second member nothing was violated; b and c are equal, so the name decides."""
    rows = hardest_positives([{"a": 1.0, "b": 4.0}, {"a": 0.0, "c": 0.0}, {"a": 6.0, "c": 3.0, "d": 0.0, "b": 0.0}])
    assert [(row["study"], row["lambda"], row["rank"], row["members"]) for row in rows] == [
        ("a", 0.625, 1, 2), ("b", 0.5, 2, 2), ("c", 0.5, 3, 1), ("d", 0.0, 4, 1),
    ]  # fmt: skip
    assert hardest_positives([{"a": 0.0}, {}]) == []


def test_scores_have_the_promised_columns_and_one_row_per_test_exam(manifest: Path, trained: Path) -> None:
    header, *rows = csv.reader((trained / "scores.csv").read_text().splitlines())
    assert header[:7] == ["study", "logit", "score", "spread", "threshold", "dce_needed", "warnings"]
    assert header[7:] == ["quality", "model_note", "gland_ml", "gland_confidence"]
    assert [row[0] for row in rows] == [row["study"] for row in read_rows(manifest) if row["side"] == "test"]
    threshold = load(trained / "threshold.json")["threshold"]
    for _, logit, score, spread, tau, needed, *_ in rows:
        assert float(score) == pytest.approx(1 / (1 + np.exp(-float(logit))))
        assert float(tau) == threshold
        assert needed == str(int(float(score) >= threshold))
        assert float(spread) > 0


def test_metrics_equal_scikit_learn_s(manifest: Path, trained: Path) -> None:
    labels = {row["study"]: int(row["label"]) for row in read_rows(manifest)}
    rows = read_rows(trained / "scores.csv")
    y = np.array([labels[row["study"]] for row in rows])
    logit = np.array([float(row["logit"]) for row in rows])
    metrics = load(trained / "metrics.json")
    test = metrics["test"]
    assert (test["positives"], test["negatives"]) == (y.sum(), (1 - y).sum())
    assert test["ensemble_auc"] == pytest.approx(roc_auc_score(y, logit))
    fpr, tpr, _ = roc_curve(y, logit, drop_intermediate=False)
    assert test["fpr_at_fn"].keys() == {"0", "1", "2"}  # 4 positives: 5 false negatives cannot be
    for k, value in test["fpr_at_fn"].items():
        assert value == pytest.approx(fpr[tpr >= (y.sum() - int(k)) / y.sum() - 1e-12].min())
    assert test["fpr_at_tpr"].keys() == {"98", "95", "92", "90"}
    for percent, value in test["fpr_at_tpr"].items():
        assert value == pytest.approx(fpr[tpr >= int(percent) / 100 - 1e-12].min())
    needed = np.array([int(row["dce_needed"]) for row in rows])
    assert test["at_threshold"] == {
        "false_negatives": ((y == 1) & (needed == 0)).sum(),
        "false_positives": ((y == 0) & (needed == 1)).sum(),
        "spared": (needed == 0).sum(),
    }
    assert test["member_auc"]["mean"] == pytest.approx(np.mean(test["member_auc"]["members"]))
    assert test["member_auc"]["sd"] == pytest.approx(np.std(test["member_auc"]["members"], ddof=1))


def member_logits(run: Path, k: int, images: torch.Tensor) -> torch.Tensor:
    network = TrainedRun(run).network().eval()
    network.load_state_dict(torch.load(run / f"split_{k}" / "model.pt", weights_only=True)["model"])
    with torch.no_grad():
        logits: torch.Tensor = network(images)
        return logits.flatten().double()


def test_logits_are_those_of_the_members_run_by_hand(manifest: Path, trained: Path) -> None:
    rows = [row for row in read_rows(manifest) if row["side"] == "test"]
    prepare = TrainedRun(trained).preprocessing()
    items = [
        prepare(row | {c: str(manifest.parent / row[c]) for c in ("t2", "adc", "hbv")} | {"index": 0}) for row in rows
    ]
    images = torch.stack([item["image"] for item in items])
    logits = torch.stack([member_logits(trained, k, images) for k in SPLITS], dim=1)
    found = read_rows(trained / "scores.csv")
    assert [float(row["logit"]) for row in found] == pytest.approx(logits.mean(1).tolist(), abs=1e-5)
    assert [float(row["spread"]) for row in found] == pytest.approx(logits.numpy().std(1).tolist(), abs=1e-5)
    y = [int(row["label"]) for row in rows]
    expected = [roc_auc_score(y, logits[:, k]) for k in SPLITS]
    assert load(trained / "metrics.json")["test"]["member_auc"]["members"] == pytest.approx(expected)
    whole = TrainedRun(trained).ensemble()(images)
    torch.testing.assert_close(whole.double(), logits, rtol=0, atol=1e-5)


def test_validation_auc_of_each_member_is_that_of_its_last_epoch(manifest: Path, trained: Path) -> None:
    labels = {row["study"]: int(row["label"]) for row in read_rows(manifest)}
    for k in SPLITS:
        record = load(trained / f"split_{k}" / "split.json")
        rows = read_rows(trained / f"split_{k}" / "validation.csv")
        auc = roc_auc_score([labels[row["study"]] for row in rows], [float(row["logit"]) for row in rows])
        assert record["best"]["auc"] == pytest.approx(auc)
        last = record["epochs"][-1]
        assert record["best"] == {"auc": last["val_auc"], "epoch": last["epoch"], "loss": last["val_loss"]}
    members = [load(trained / f"split_{k}" / "split.json")["best"]["auc"] for k in SPLITS]
    assert load(trained / "metrics.json")["validation_auc"]["members"] == members


def test_threshold_is_of_the_held_out_scores_and_nothing_else(manifest: Path, trained: Path) -> None:
    labels = {row["study"]: int(row["label"]) for row in read_rows(manifest)}
    logits: dict[str, list[float]] = {}
    for k in SPLITS:
        for row in read_rows(trained / f"split_{k}" / "validation.csv"):
            logits.setdefault(row["study"], []).append(float(row["logit"]))
    held_out = {row["study"]: row for row in read_rows(trained / "heldout.csv")}
    assert held_out.keys() == logits.keys()
    for name, values in logits.items():
        assert float(held_out[name]["logit"]) == pytest.approx(np.mean(values), abs=1e-12)
        assert int(held_out[name]["members"]) == len(values)
        assert int(held_out[name]["label"]) == labels[name]
    positive = sorted(expit(float(row["logit"])) for row in held_out.values() if row["label"] == "1")
    negative = [expit(float(row["logit"])) for row in held_out.values() if row["label"] == "0"]
    point = load(trained / "threshold.json")
    below = max((s for s in negative if s < positive[0]), default=positive[0] * (1 - 2e-4))
    assert point["threshold"] == pytest.approx((positive[0] + below) / 2, abs=1e-12)  # max_fn = 0: the lowest positive
    assert (point["n_positive"], point["n_negative"]) == (len(positive), len(negative))
    assert point["false_positive_rate"] == pytest.approx(np.mean(np.array(negative) >= positive[0]))


def test_test_labels_do_not_move_the_threshold(manifest: Path, run: Path, tmp_path: Path, no_training: None) -> None:
    """The same exams with the test cohort's labels turned round."""
    rows = read_rows(manifest)
    for row in rows:
        for column in ("t2", "adc", "hbv"):
            row[column] = str(manifest.parent / row[column])
        if row["side"] == "test":
            row["label"] = str(1 - int(row["label"]))
    other = write_manifest(tmp_path / "manifest.csv", [[row[c] for c in COHORT_COLUMNS] for row in rows])
    config = (run / "config.json").read_text().replace(json.dumps(str(manifest)), json.dumps(str(other)))
    (run / "config.json").write_text(config)
    before = {name: (run / name).read_bytes() for name in ("threshold.json", "scores.csv", "heldout.csv")}
    auc = load(run / "metrics.json")["test"]["ensemble_auc"]
    train(other, run, cache_dir=str(manifest.parent / "cache"), allow_outside_paths=True)
    assert {name: (run / name).read_bytes() for name in before} == before
    assert load(run / "metrics.json")["test"]["ensemble_auc"] == pytest.approx(1 - auc)


def test_recorded_config_scores_alone(trained: Path) -> None:
    record = load(trained / "config.json")
    assert record["settings"]["size"] == SETTINGS["size"]
    assert record["settings"]["score"] == "probability"
    assert record["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in record["versions"]["torch"]
    ensemble = TrainedRun(trained).ensemble()
    assert len(ensemble.members) == len(SPLITS)
    assert not ensemble.training


# --- Starting again -------------------------------------------------------------------------------------------------


def test_a_finished_run_trains_nothing_again(manifest: Path, run: Path, no_training: None) -> None:
    before = snapshot(run)
    train(manifest, run)
    after = snapshot(run)
    assert after.keys() == before.keys()
    for files in (before, after):
        files.pop("config.json")  # names the folder, which is a copy here
        files.pop("report.html")  # shows that file's digest
        files.pop("run.log")  # tells of both starts
    assert {name: content for name, (_, content) in after.items()} == {n: c for n, (_, c) in before.items()}
    for name in before:
        if name.startswith("split_"):
            assert after[name][0] == before[name][0]


def test_free_settings_may_change(manifest: Path, run: Path, no_training: None) -> None:
    before = load(run / "threshold.json")
    train(manifest, run, max_fn=2, threads=1)
    after = load(run / "threshold.json")
    assert after["threshold"] > before["threshold"]
    assert after["rule"] != before["rule"]
    train(manifest, run, splits=2, max_fn=0)
    assert len(load(run / "threshold.json")["checkpoints"]) == 2


def test_the_authors_fpr_rule_reaches_the_figures(manifest: Path, run: Path, no_training: None) -> None:
    """With four positives no TPR rounds to 98 %, and their rule then reports a perfect 0."""
    train(manifest, run, fpr_rule="official")
    assert load(run / "metrics.json")["test"]["fpr_at_tpr"]["98"] == 0


def test_one_split_at_a_time_makes_the_same_run(manifest: Path, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for k in reversed(SPLITS):
        train(manifest, run, only_split=k)
        assert {p.name for p in run.glob("split_*.*")} == set()
        assert {int(p.name[-1]) for p in run.glob("split_?")} == set(range(k, SETTINGS["splits"]))
        assert (run / "threshold.json").exists() == (k == 0)
    for k in SPLITS:
        ours, theirs = (load_tensors(folder / f"split_{k}" / "model.pt")["model"] for folder in (run, trained))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("threshold.json", "heldout.csv", "scores.csv", "metrics.json", "splits.csv"):
        assert (run / name).read_bytes() == (trained / name).read_bytes()


def test_a_changed_setting_is_refused_with_both_values(manifest: Path, run: Path, refusal: Callable[..., str]) -> None:
    before = snapshot(run)
    text = refusal(train, manifest, run, delta=0.5, loss="a_fl")
    assert f"{run} holds a run with other settings:\n  delta: 0.25 -> 0.5\n  loss: " in text
    assert '"bce" -> "a_fl"\nModels of different settings are not mixed. Give this run another --run_dir' in text
    assert snapshot(run) == before


def changed_cohort(manifest: Path, folder: Path, change: Callable[[list[dict[str, str]]], None]) -> Path:
    """A cohort of its own that can be changed while a run refers to it."""
    target = Path(shutil.copytree(manifest.parent, folder, ignore=shutil.ignore_patterns("cache"))) / "manifest.csv"
    rows = read_rows(target)
    change(rows)
    return write_manifest(target, [[row[c] for c in COHORT_COLUMNS] for row in rows])


def swap_two_labels(rows: list[dict[str, str]]) -> None:
    rows[0]["label"], rows[1]["label"] = rows[1]["label"], rows[0]["label"]


def drop_a_training_row(rows: list[dict[str, str]]) -> None:
    del rows[5]


@pytest.mark.parametrize("change", [swap_two_labels, drop_a_training_row])
@pytest.mark.parametrize("finished", [True, False])
def test_a_changed_cohort_is_refused(
    manifest: Path, run: Path, tmp_path: Path, refusal: Callable[..., str], change: Any, finished: bool
) -> None:
    other = changed_cohort(manifest, tmp_path / "cohort", change)
    config = (run / "config.json").read_text().replace(str(manifest.parent), str(other.parent))
    (run / "config.json").write_text(config)
    if not finished:
        for k in SPLITS:
            (run / f"split_{k}" / "split.json").unlink()
    models = {k: (run / f"split_{k}" / "model.pt").read_bytes() for k in SPLITS}
    message = "was trained on other studies than the cohort gives it now" if finished else "belongs to another cohort"
    assert message in refusal(train, other, run)
    assert {k: (run / f"split_{k}" / "model.pt").read_bytes() for k in SPLITS} == models


def test_another_split_s_checkpoint_is_refused(manifest: Path, run: Path, refusal: Callable[..., str]) -> None:
    (run / "split_1" / "split.json").unlink()
    shutil.copy(run / "split_0" / "last.pt", run / "split_1" / "last.pt")
    text = refusal(train, manifest, run)
    assert f"{run / 'split_1' / 'last.pt'} belongs to another cohort or split." in text


def test_another_split_s_model_is_refused(manifest: Path, run: Path, refusal: Callable[..., str]) -> None:
    shutil.copy(run / "split_0" / "model.pt", run / "split_1" / "model.pt")
    text = refusal(train, manifest, run)
    assert f"{run / 'split_1' / 'model.pt'} is not the model that was trained there." in text
    with pytest.raises(InputError, match=r"split_1/model\.pt is not the checkpoint that the threshold was set for"):
        TrainedRun(run).ensemble()


def test_a_member_of_another_network_is_refused(trained: Path, tmp_path: Path) -> None:
    save_tensors(tmp_path / "model.pt", {"model": torch.nn.Linear(2, 1).state_dict()})
    with pytest.raises(InputError, match=r"holds the weights of another network than the run's config describes"):
        load_member(TrainedRun(trained).network(), tmp_path / "model.pt")


def test_a_run_that_is_not_finished_does_not_score(run: Path) -> None:
    (run / "threshold.json").unlink()
    with pytest.raises(InputError, match=re.escape(f"{run} has no threshold.json: it is no finished run.")):
        TrainedRun(run)


def test_a_run_folder_that_is_a_file(manifest: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "run").write_text("a file")
    assert f"Cannot write {tmp_path / 'run' / '.split_0.lock'}" in refusal(train, manifest, tmp_path / "run")
    assert (tmp_path / "run").read_text() == "a file"


# --- Exams that fail ------------------------------------------------------------------------------------------------


def test_failing_exams_are_named_together_and_the_others_are_kept(
    tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_cohort(tmp_path / "cohort", train=30, test=6)
    for name in ("S04", "S11"):
        (manifest.parent / name / "adc.nii").write_text("no image")
    run = tmp_path / "run"
    text = refusal(train, manifest, run)
    assert (
        "2 of 36 studies cannot be used (the others are kept):\n  study S04: Column adc: the .nii file is no " in text
    )
    assert "  study S11: Column adc" in text
    assert "Correct them, or leave them out with --exclude \"['S04', 'S11']\"." in text
    assert len(list((manifest.parent / "cache").glob("*.pt"))) == 34
    assert not run.exists()
    # The remedy works in the same run folder, without preparing the others again.
    monkeypatch.setattr("mri_alm.imaging.exam._read_volume", lambda *_: pytest.fail("prepared again"))
    train(manifest, run, exclude=["S04", "S11"], splits=1, max_epochs=1)
    assert (run / "scores.csv").exists()
    assert {"S04", "S11"}.isdisjoint(row["study"] for row in read_rows(run / "splits.csv"))


def test_a_cohort_without_test_exams_ends_with_the_threshold(tmp_path: Path) -> None:
    manifest = write_cohort(tmp_path / "cohort", train=30, test=0)
    run = train(manifest, tmp_path / "run", splits=1, max_epochs=1)
    assert "test" not in load(run / "metrics.json")
    assert (run / "threshold.json").exists()
    assert not (run / "scores.csv").exists()


def test_max_fn_is_bounded_by_the_held_out_positives(
    manifest: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    text = refusal(train, manifest, tmp_path / "run", splits=1, max_fn=2)
    expected = "2 positive patients are held out by the 1 splits, so --max_fn must be between 0 and 1."
    assert f"Cannot allow 2 false negatives: {expected}" in text


def test_a_network_that_cannot_be_is_refused_before_a_cohort_is_read_or_drawn(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    text = refusal(train, tmp_path / "none.csv", tmp_path / "run", fusion="spatial", features=[8])
    assert text.endswith('fusion "spatial" needs two stages or more, as the paths meet after the first: got [8].\n')


def test_a_full_disk_loses_nothing(
    manifest: Path, run: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(run)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert "No space left on device. Free space or choose another place" in refusal(train, manifest, run)
    assert snapshot(run) == before


def test_table_3_and_the_threshold_are_printed(manifest: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(manifest, run)
    text = capsys.readouterr().out
    metrics, point = load(run / "metrics.json")["test"], load(run / "threshold.json")
    assert re.search(r"FPR @0 FN +FPR @1 FN +FPR @2 FN +avg AUC +ensemble AUC", text)
    assert f"{100 * metrics['ensemble_auc']:.1f}" in text
    mean, sd = (100 * metrics["member_auc"][key] for key in ("mean", "sd"))
    assert f"{mean:.1f} ± {sd:.1f}" in text
    assert f"Threshold {point['threshold']:.6g} on the score" in text
    assert f"{point['n_positive']} positives stand behind it" in text
    assert str(run) in text


def test_false_negatives_of_table_3_are_the_paper_s() -> None:
    assert mri_alm.metrics.ranking.FALSE_NEGATIVES == (0, 1, 2, 5)


def test_what_the_positives_can_promise_is_told_before_training(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise InputError("before training")

    monkeypatch.setattr("mri_alm.training.run.TrainingRun._prepare", stop)
    with pytest.raises(SystemExit, match=r"^2$"):
        train(manifest, tmp_path / "run", splits=1)
    text = capsys.readouterr().out
    assert "Held out: 2 positives cannot certify a miss rate of 10 % at 90 % confidence; 22 can." in text


def test_the_threshold_counts_patients(manifest: Path, tmp_path: Path) -> None:
    """Two exams of every patient, as rows of their own: half as many positives stand behind the threshold."""
    rows = read_rows(manifest)
    for row in rows:
        row.update({c: str(manifest.parent / row[c]) for c in ("t2", "adc", "hbv")})
    training = [row for row in rows if row["side"] == "train"]
    for number, row in enumerate(training):
        row["patient"] = f"P{number // 6}{number % 3}"  # exams 0 and 3, 1 and 4, ...: equal labels
    twice = write_manifest(tmp_path / "manifest.csv", [[row[c] for c in COHORT_COLUMNS] for row in rows])
    run = train(twice, tmp_path / "run", splits=3, max_epochs=1, max_fn=1, allow_outside_paths=True)
    patient = {row["study"]: row["patient"] for row in rows}
    held_out = read_rows(run / "heldout.csv")
    positives = [row for row in held_out if row["label"] == "1"]
    patients = {patient[row["study"]] for row in positives}
    point = load(run / "threshold.json")
    assert len(positives) == 2 * len(patients)
    assert point["n_positive"] == len(patients)
    assert point["n_negative"] == len({patient[row["study"]] for row in held_out}) - len(patients)
    lowest = sorted(min(float(row["logit"]) for row in positives if patient[row["study"]] == p) for p in patients)
    highest = [max(float(r["logit"]) for r in held_out if r["label"] == "0" and patient[r["study"]] == p)
               for p in {patient[r["study"]] for r in held_out if r["label"] == "0"}]  # fmt: skip
    below = max(expit(x) for x in [*lowest, *highest] if x < lowest[1])
    assert point["threshold"] == pytest.approx((below + expit(lowest[1])) / 2, abs=1e-12)
    slider, _ = evaluate({"run": run / "scores.csv"}, twice, run=run, draws=10).trade_offs
    assert (slider.key, slider.positives, len(slider.steps)) == ("held_out", len(patients), len(patients) + 1)
    assert slider.steps[slider.start].allowed == 1
    assert slider.steps[slider.start].threshold == point["threshold"]
