"""Several processes do what one would: in float64, to the last few bits, and through the main config under torchrun."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.bundle import ConfigWorkflow
from small_cohort import SETTINGS, train
from two_processes import CASES, steps

from mri_alm.alm.processes import barrier, first_process_first, first_visits, gather, process_rank, world_size
from mri_alm.bundle.checkpoints import load_tensors

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run(*words: str) -> str:
    done = subprocess.run([*TORCHRUN, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_one_process_is_the_first_of_one() -> None:
    assert (process_rank(), world_size()) == (0, 1)
    barrier()
    with first_process_first():
        pass
    rows = torch.randn(3, requires_grad=True)
    assert gather(rows)[0] is rows


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_first_visits_are_the_first(index: list[int]) -> None:
    expected = [row for row, sample in enumerate(index) if sample not in index[:row]]
    assert first_visits(torch.tensor(index)).tolist() == expected


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What either of two processes found, by case."""
    found = tmp_path_factory.mktemp("two") / "found"
    run("tests/two_processes.py", str(found))
    return [torch.load(found.with_suffix(f".{process}"), weights_only=True) for process in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(case: str, two: list[dict[str, Any]]) -> None:
    one, first, second = steps(case), two[0][case], two[1][case]
    for name in ("gradients", "multipliers", "mu"):
        assert torch.equal(first[name], second[name])  # every process moves all multipliers alike
        torch.testing.assert_close(first[name], one[name], rtol=0, atol=1e-12)
    assert first["reports"] == second["reports"]
    for two_report, one_report in zip(first["reports"], one["reports"], strict=True):
        assert two_report == pytest.approx(one_report, rel=1e-9)
    assert one["multipliers"].count_nonzero() > 5
    assert one["mu"] == 0.3 * 9


@pytest.mark.slow
def test_main_config_trains_on_two_processes_and_one_goes_on(manifest: Path, tmp_path: Path) -> None:
    """Early stopping ends both together (else one would wait for the other for ever), and only the first reports."""
    folder = tmp_path / "run"
    settings: dict[str, Any] = SETTINGS | {
        "cohort": str(manifest), "cache_dir": str(tmp_path / "cache"), "run_dir": str(folder), "splits": 1, "mu0": 0.01,
        "max_epochs": 10, "preset": "default", "patience": 2, "learning_rate": 1e-9, "sam_radius": 0.05,
    }  # fmt: skip
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    configs = ["configs/prostate_alm.json", "configs/multi_gpu.json", str(tmp_path / "settings.json")]
    text = run("-m", "monai.bundle", "run", "--config_file", str(configs), "--logging_file", "configs/logging.conf")
    assert text.count("Threshold ") == text.count("No better epoch for 2: stopped.") == 1
    last = load_tensors(folder / "split_0" / "last.pt")
    epochs = len(last["history"])
    assert 3 <= epochs < 10
    assert not any(name.startswith("module.") for name in last["model"])
    (folder / "split_0" / "split.json").unlink()
    record = json.loads((folder / "config.json").read_text())
    record["config"]["patience"] = None
    (folder / "config.json").write_text(json.dumps(record))
    own = {"cache_dir": settings["cache_dir"], "splits": 1, "mu0": 0.01, "learning_rate": 1e-9, "sam_radius": 0.05}
    train(manifest, folder, max_epochs=10, **own)
    history = json.loads((folder / "split_0" / "split.json").read_text())["epochs"]
    assert [report["epoch"] for report in history] == list(range(1, 11))
    assert history[:epochs] == last["history"]


@pytest.mark.slow
def test_without_torchrun_the_overlay_says_what_to_do(refusal: Any) -> None:
    files = ["configs/prostate_alm.json", "configs/multi_gpu.json"]
    workflow = ConfigWorkflow(
        config_file=files, meta_file="configs/metadata.json", logging_file=None, workflow_type="train"
    )
    assert "multi_gpu.json needs torchrun: torchrun --standalone --nproc_per_node=2" in refusal(workflow.initialize)
