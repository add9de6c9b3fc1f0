"""A run whose splits are folds: every positive patient held out once, by a member that nothing of its fold chose."""

import html
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from scipy.special import expit
from sklearn.metrics import roc_auc_score
from small_cohort import inference, read_rows, train

from mri_alm.bundle.export import export_bundle
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.cohort.manifest import read_manifest
from mri_alm.evaluation.analysis import evaluate
from mri_alm.scoring.new_exams import operating_point
from mri_alm.training.run import runs_on_cohort

FOLDS: dict[str, Any] = {
    "split_rule": "partition", "splits": 5, "checkpoint_rule": "last", "mu_cap": 1, "max_epochs": 1, "max_fn": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(manifest, tmp_path_factory.mktemp("partition") / "run", **FOLDS)


def test_every_positive_is_held_out_once_by_one_member(manifest: Path, run: Path) -> None:
    training = [row for row in read_rows(manifest) if row["side"] == "train"]
    positive = {row["study"] for row in training if row["label"] == "1"}
    assert len(positive) == 10
    held_out = [{row["study"] for row in read_rows(run / f"split_{k}" / "validation.csv")} for k in range(5)]
    times = Counter(study for fold in held_out for study in fold)
    assert {times[study] for study in positive} == {1}
    assert [len(fold & positive) for fold in held_out] == [2] * 5
    assert [len(fold - positive) for fold in held_out] == [4] * 5
    assert {row["members"] for row in read_rows(run / "heldout.csv")} == {"1"}


def test_models_of_the_same_patients_are_counted_once_each(
    manifest: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(run / "threshold.json")["runs_on_this_cohort"] >= 1
    studies = [study for study in read_manifest(manifest) if study.side == "train"]
    monkeypatch.setenv("MRI_ALM_STATE", str(tmp_path))
    one, two = "1" * 64, "2" * 64
    assert [runs_on_cohort(studies, model) for model in (one, one, two, one)] == [1, 1, 2, 2]
    assert runs_on_cohort(studies[::-1], one) == 2  # however they are ordered
    assert runs_on_cohort(studies[:-1], one) == 1  # other patients
    (tmp_path / "file").touch()
    monkeypatch.setenv("MRI_ALM_STATE", str(tmp_path / "file"))
    assert runs_on_cohort(studies, two) is None
    assert "How many runs shared these patients cannot be counted" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"checkpoint_rule": "best"}, ["checkpoint_rule best chooses the weights by the fold"]),
        ({"preset": "official_2022", "checkpoint_rule": "last", "mu_cap": "official"}, ["mu grows when the AUC of"]),
        ({"mu_cap": 8.0}, ["mu grows when the AUC of the held-out fold falls"]),
        ({"checkpoint_rule": "official", "mu_cap": None}, ["checkpoint_rule official chooses", "mu grows"]),
        ({"patience": 3}, ["patience 3 waits for a better epoch, and checkpoint_rule last knows none"]),
        ({"splits": 11}, ["10 positive and 20 negative patients; a partition into 11 folds needs"]),
        ({"split_rule": "random", "splits": "loo"}, ["one positive patient out at a time: it needs"]),
        ({"split_rule": "disjoint"}, ['split_rule must be random or partition, got "disjoint"']),
        ({"splits": "loo", "max_fn": 10}, ["Cannot allow 10 false negatives: 10 positive"]),
        ({"splits": "loo", "only_split": 10}, ["only_split must be a whole number below splits = 10, got 10"]),
    ],
    ids=str,
)
def test_what_a_partition_cannot_be_is_refused_before_anything_is_written(
    manifest: Path, tmp_path: Path, change: dict[str, Any], said: list[str], refusal: Callable[..., str]
) -> None:
    text = refusal(train, manifest, tmp_path / "run", **FOLDS | change)
    assert [part for part in said if part not in text] == []
    assert not (tmp_path / "run" / "config.json").exists()


def test_no_constraint_needs_no_cap(manifest: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    """The check that comes next is the one that refuses."""
    text = refusal(train, manifest, tmp_path / "run", **FOLDS | {"mu0": 0, "mu_cap": 8.0, "max_fn": 10})
    assert "Cannot allow 10 false negatives" in text
    assert "mu grows" not in text


def test_other_folds_of_a_run_are_refused(manifest: Path, run: Path, refusal: Callable[..., str]) -> None:
    text = refusal(train, manifest, run, **FOLDS | {"splits": 4})
    assert "was trained on other studies than the cohort gives it now" in text


def test_the_report_says_how_patients_were_dealt(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert "5 folds of the training patients, every positive one held out once" in text
    assert "random stratified splits" not in text


# --- The decision -----------------------------------------------------------------------------------------------------


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_threshold_is_the_second_smallest_held_out_score_with_the_bound_of_five_folds(run: Path) -> None:
    point = load(run / "threshold.json")
    held_out = [(float(row["logit"]), row["label"]) for row in read_rows(run / "heldout.csv")]
    lowest = sorted(logit for logit, label in held_out if label == "1")
    below = max(logit for logit, _ in held_out if logit < lowest[1])
    assert point["threshold"] == pytest.approx((expit(below) + expit(lowest[1])) / 2, abs=1e-12)
    assert (point["rule"], point["rank"], point["folds"]) == ("minmax", 2, 5)
    assert point["expected_miss_rate"] == pytest.approx((2 + 2 - 1) / (10 + 2))
    assert point["miss_rate_upper_95"] is None


def test_exams_are_decided_by_the_largest_member_score_in_training_and_in_scoring(
    manifest: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mri_alm.scoring.new_exams.study_picture", lambda *_: b"")
    rows = read_rows(manifest)
    trained, point = TrainedRun(run), load(run / "threshold.json")
    prepare, ensemble = trained.preprocessing(), trained.ensemble()
    items = [row | {c: str(manifest.parent / row[c]) for c in ("t2", "adc", "hbv")} | {"index": 0} for row in rows]
    with torch.no_grad():
        logits = ensemble(torch.stack([prepare(item)["image"] for item in items])).double().numpy()
    test = [i for i, row in enumerate(rows) if row["side"] == "test"]
    largest = logits.max(1)
    assert (largest > logits.mean(1)).all()
    found = read_rows(run / "scores.csv")
    assert [float(row["logit"]) for row in found] == pytest.approx(largest[test].tolist(), abs=1e-5)
    wanted = [str(int(logit >= logit_of(point["threshold"]))) for logit in largest[test]]
    assert [row["dce_needed"] for row in found] == wanted
    labels = [int(rows[i]["label"]) for i in test]
    assert load(run / "metrics.json")["test"]["ensemble_auc"] == pytest.approx(roc_auc_score(labels, largest[test]))

    inference(run, manifest, tmp_path / "out").run()
    scored = read_rows(tmp_path / "out" / "scores.csv")
    assert [float(row["logit"]) for row in scored] == pytest.approx(largest.tolist(), abs=1e-5)
    wanted = [str(int(logit >= logit_of(point["threshold"]))) for logit in largest]
    assert [row["dce_needed"] for row in scored] == wanted
    assert load(tmp_path / "out" / "report.json")["threshold"] == {
        name: value for name, value in point.items() if name != "checkpoints"
    }
    with_cohort = operating_point(trained, run / "scores.csv", manifest, alpha=0.5, eps=0.5)
    assert with_cohort.folds == 0  # another rule, whose scores are the largest members' all the same
    scores, positive = [float(row["score"]) for row in found], [label == 1 for label in labels]
    at = sorted(s for s, y in zip(scores, positive, strict=True) if y)[with_cohort.rank - 1]
    assert max([s for s in scores if s < at], default=0) < with_cohort.threshold < at


def logit_of(score: float) -> float:
    return float(np.log(score / (1 - score)))


def test_report_and_bundle_say_rule_and_bound(manifest: Path, run: Path, tmp_path: Path) -> None:
    trained = TrainedRun(run)
    words = trained.point.in_words()
    assert "at most 25.0 % of new patients who need DCE are missed" in words
    assert words.replace("\n", " ") in html.unescape((run / "report.html").read_text())
    evaluation = evaluate({"run": run / "scores.csv"}, manifest, run=run, draws=10)
    assert [slider.key for slider in evaluation.trade_offs] == ["evaluated"]  # its law is not that of a largest score
    card = html.unescape((run / "report.html").read_text())
    assert "one model each, the largest logit counts." in card

    bundle = tmp_path / "bundle"
    export_bundle(trained, bundle, licence=Path("LICENSE"))
    text = (bundle / "docs" / "README.md").read_text()
    assert words in text
    assert " 5 networks, the largest logit counts, then the sigmoid.\n" in text
    description = load(bundle / "configs" / "metadata.json")["description"]
    assert description.endswith(
        ", 5 folds of patients, the largest logit of their members, threshold by the minmax rule."
    )
    assert RunFolder(bundle).operating_point()[0] == trained.point
    parser = ConfigParser(load(bundle / "configs" / "inference.json"))
    network = parser.get_parsed_content("network_def").eval()
    network.load_state_dict(torch.load(bundle / "models" / "model.pt", weights_only=True))
    image = torch.randn(2, 3, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(network(image), trained.ensemble()(image).amax(1, keepdim=True))
