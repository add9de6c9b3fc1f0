"""The four CIFAR configs, as a user runs them, on tiny archives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from locking import holder
from monai.bundle import ConfigWorkflow
from small_cifar import SETTINGS, write_cifar10, write_cifar100
from small_cohort import initialised
from small_training import crash_after_epoch

from mri_alm.bundle.checkpoints import load_tensors
from mri_alm.cifar.job import brief, scores_to_keep
from mri_alm.cifar.sets import binary_set
from mri_alm.metrics.ranking import auc

BINARY_LOSSES = sorted(json.loads((Path(__file__).parents[2] / "configs/parts/losses.json").read_text()))
LOSSES = sorted(json.loads((Path(__file__).parents[2] / "configs/parts/losses_multiclass.json").read_text()))
OVER = {"cifar100_binary": "cifar10_binary", "cifar100_longtail": "cifar10_longtail"}  # an overlay and what it is over


def workflow(config: str, data: Path, run_dir: Path, **overrides: Any) -> ConfigWorkflow:
    """A CIFAR config, initialised, at a size that trains in a second."""
    settings = SETTINGS | {"data": str(data), "run_dir": str(run_dir)} | overrides
    return initialised(*filter(None, (OVER.get(config), config)), logging_file=False, **settings)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives in one folder."""
    return write_cifar100(write_cifar10(tmp_path_factory.mktemp("cifar")))


def result(run_dir: Path, split: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / f"split_{split}" / "result.json").read_text())
    return content


def train(config: str, data: Path, run_dir: Path, **overrides: Any) -> dict[str, Any]:
    workflow(config, data, run_dir, **{"splits": 1, "max_epochs": 1} | overrides).run()
    return result(run_dir)


@pytest.mark.parametrize("config", ["cifar10_binary", "cifar100_binary", "cifar10_longtail", "cifar100_longtail"])
def test_every_config_has_what_monai_asks_for_and_runs_an_epoch(config: str, data: Path, tmp_path: Path) -> None:
    found = workflow(config, data, tmp_path, splits=1, max_epochs=1, mu0=1e-3)
    assert found.check_properties() == []
    found.run()
    content = result(tmp_path)
    images = 20 if config == "cifar10_binary" else 40 if config == "cifar100_binary" else 100 if "10_" in config else 60
    assert len(content["test"]["label"]) == len(content["test"]["score"]) == images
    assert content["epochs"][0]["mu"] == 1e-3
    assert content["epochs"][0]["alm_term"] > 0


@pytest.mark.parametrize("per", ["positive", "pair"])
def test_a_run_that_is_cut_off_goes_on_to_the_same_end(data: Path, tmp_path: Path, per: str) -> None:
    """Four epochs straight equal two, a crash, and two more: weights, multipliers, mu and augmentation."""
    settings = {"mu0": 1e-2, "rho": 3.0, "mu_start_epoch": 1, "max_epochs": 4, "constraint_per": per}
    straight = train("cifar10_binary", data, tmp_path / "a", **settings)
    with crash_after_epoch(2):
        train("cifar10_binary", data, tmp_path / "b", **settings)
    assert not (tmp_path / "b" / "split_0" / "result.json").exists()
    resumed = train("cifar10_binary", data, tmp_path / "b", **settings)
    assert straight | {"seconds": 0} == resumed | {"seconds": 0}
    states = [load_tensors(tmp_path / side / "split_0" / "last.pt") for side in "ab"]
    for name, value in states[0]["model"].items():
        torch.testing.assert_close(states[1]["model"][name], value, rtol=0, atol=0)
    assert torch.equal(states[0]["objective"]["multipliers"], states[1]["objective"]["multipliers"])
    assert states[0]["objective"]["multipliers"].max() > 0


def test_finished_splits_are_not_trained_again_and_more_can_follow(data: Path, tmp_path: Path) -> None:
    train("cifar10_binary", data, tmp_path)
    time = (tmp_path / "split_0" / "result.json").stat().st_mtime_ns
    train("cifar10_binary", data, tmp_path, splits=2)
    assert (tmp_path / "split_0" / "result.json").stat().st_mtime_ns == time
    assert result(tmp_path, 1)["test"]["score"] != result(tmp_path, 0)["test"]["score"]


def test_a_split_in_use_is_refused_and_another_is_not(data: Path, tmp_path: Path, refusal: Any) -> None:
    with holder(tmp_path / "run" / ".split_1.lock") as other:
        text = refusal(train, "cifar10_binary", data, tmp_path / "run", splits=2)
        assert f"run is in use by process {other.pid}" in text
        assert not (tmp_path / "run" / "split_0").exists()
        train("cifar10_binary", data, tmp_path / "run", splits=2, only_split=0)
    assert list((tmp_path / "run").glob(".split_0.lock")) == []


def test_one_split_alone_is_the_split_of_the_whole_run(data: Path, tmp_path: Path) -> None:
    train("cifar10_binary", data, tmp_path / "a", splits=2)
    workflow("cifar10_binary", data, tmp_path / "b", splits=5, only_split=1, max_epochs=1).run()
    assert result(tmp_path / "a", 1)["test"] == result(tmp_path / "b", 1)["test"]


def test_the_training_seed_leaves_the_split_alone(data: Path, tmp_path: Path) -> None:
    first = train("cifar10_binary", data, tmp_path / "a")
    second = train("cifar10_binary", data, tmp_path / "b", seed=1)
    assert first["guard"] == second["guard"]
    assert first["test"]["score"] != second["test"]["score"]


@pytest.mark.parametrize("loss", BINARY_LOSSES)
def test_every_binary_loss_trains(loss: str, data: Path, tmp_path: Path) -> None:
    mu0 = 0 if loss in ("mbauc", "aucm", "pauc") else 1e-4
    content = train("cifar10_binary", data, tmp_path, loss=loss, mu0=mu0)
    assert np.isfinite(content["test"]["score"]).all()


@pytest.mark.parametrize(("loss", "kind"), [(loss, 1 + number % 2) for number, loss in enumerate(LOSSES)])
def test_every_multiclass_loss_trains_with_a_constraint(loss: str, kind: int, data: Path, tmp_path: Path) -> None:
    content = train("cifar100_longtail", data, tmp_path, loss=loss, kind=kind, mu0=1e-4, critical_classes=2)
    assert content["test"]["critical"] == [4, 5]
    assert content["test"]["classes"] == 6
    assert np.isfinite(content["test"]["score"]).all()
    assert content["epochs"][0]["alm_term"] > 0


@pytest.mark.parametrize("overlay", OVER)
def test_an_overlay_alone_is_refused_in_words(overlay: str, refusal: Any) -> None:
    found = ConfigWorkflow(f"configs/{overlay}.json", meta_file=None, logging_file=False, workflow_type="train")
    assert "This config only changes another one. Name both" in refusal(found.initialize)


def test_optimiser_and_rule_are_overrides(data: Path, tmp_path: Path) -> None:
    content = train("cifar10_binary", data, tmp_path, preset="official_2022", optimiser="sgd", learning_rate=0.01)
    assert content["preset"] == "official_2022"
    assert content["split_rule"] == "overlapping"


def test_it_learns_what_is_easy(data: Path, tmp_path: Path) -> None:
    content = train("cifar10_binary", data, tmp_path, max_epochs=6, mu0=0, learning_rate=0.01)
    assert auc(content["test"]["label"], content["test"]["score"]) > 0.9
    labels = binary_set(data, "cifar10", majority="truck", critical="automobile", ratio=4, validation=5, splits=1)
    assert content["test"]["label"] == labels.label[labels.rows("test", 0)].tolist()


def test_what_cannot_be_is_refused_before_training(data: Path, tmp_path: Path, refusal: Any) -> None:
    def run(**overrides: Any) -> None:
        train("cifar10_binary", overrides.pop("data", data), tmp_path / "run", **overrides)

    assert "There is no cifar-10-batches-bin" in refusal(run, data=tmp_path)
    assert 'There is no class "lorry"' in refusal(run, majority="lorry")
    assert 'There is no optimiser "adm". Did you mean "adam"?' in refusal(run, optimiser="adm")
    assert 'There is no setting "mu"' in refusal(run, mu=1)
    assert not (tmp_path / "run").exists()
    run()
    assert "holds a run with other settings" in refusal(run, delta=0.5)


def test_multiclass_scores_keep_what_the_metrics_need() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 5))
    kept = scores_to_keep(logits, np.arange(50) % 5, [1, 4])
    others = logits.copy()
    others[:, [1, 4]] = -np.inf
    assert kept["other"] == others.argmax(1).tolist()
    np.testing.assert_allclose(kept["other_score"], others.max(1), rtol=1e-4)
    np.testing.assert_allclose(kept["score"], logits[:, [1, 4]], rtol=1e-4)


@pytest.mark.parametrize(("value", "kept"), [(1.23456789, 1.2346), (-1e-9, -1e-9), (123456.7, 123460.0)])
def test_numbers_are_kept_to_five_digits(value: float, kept: float) -> None:
    assert brief(value) == kept
