"""The bundle as a user runs it: commands in processes of their own, one of them killed again and again."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from shell import WarmPython
from small_cohort import command, train

from mri_alm.bundle.checkpoints import load_tensors
from mri_alm.bundle.config import refuse_other_settings, running_config, user_errors
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.errors import InputError, StudyError

SEVERAL = {"splits": 2, "max_epochs": 4}
PATIENCE_S = 180


def kill_when(ready: Callable[[], bool], words: list[str], log: Path) -> None:
    """Start a command and kill -9 it as soon as something is there."""
    with log.open("wb") as file, subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT) as process:
        end = time.monotonic() + PATIENCE_S
        while not ready() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert ready()


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_one_never_killed(
    manifest: Path, tmp_path: Path, python: WarmPython
) -> None:
    killed, cache = tmp_path / "killed", tmp_path / "cache"
    words = command(manifest, killed, cache, **SEVERAL)
    moments: list[Callable[[], bool]] = [
        lambda: len(list(cache.glob("*.pt"))) > 3,  # while exams are prepared
        (killed / "split_0" / "last.pt").exists,
        (killed / "split_1" / "last.pt").exists,
    ]
    for number, moment in enumerate(moments):
        kill_when(moment, words, tmp_path / f"{number}.log")
    assert not (killed / "split_1" / "split.json").exists()
    assert not (killed / "threshold.json").exists()
    done = python.run(*words[1:], timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert f"Ensemble of 2 models in {killed}" in done.stdout
    assert "Traceback" not in done.stderr

    whole = train(manifest, tmp_path / "whole", **SEVERAL)
    for k in range(2):
        for name in ("last.pt", "model.pt"):
            one, other = (load_tensors(run / f"split_{k}" / name) for run in (whole, killed))
            same(one, other, f"split_{k}/{name}")
        objective = load_tensors(killed / f"split_{k}" / "last.pt")["objective"]
        assert objective["multipliers"].max() > 0
        assert objective["mu"] > 0
        assert objective["epoch"] == 4
    for name in ("splits.csv", "heldout.csv", "scores.csv", "metrics.json", "threshold.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def same(one: Any, other: Any, place: str) -> None:
    """Equal in structure, and bit for bit; NaN equals NaN."""
    assert type(one) is type(other), place
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            same(one[key], other[key], f"{place}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for number, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{place}/{number}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=place)
    else:
        assert one == other, place


@pytest.mark.slow
def test_a_misspelt_override_ends_with_status_2_and_a_sentence(
    manifest: Path, tmp_path: Path, python: WarmPython
) -> None:
    words = command(manifest, tmp_path / "run", tmp_path / "cache", max_epoch=1)
    done = python.run(*words[1:])
    assert done.returncode == 2
    assert done.stderr.endswith('\nThere is no setting "max_epoch". Did you mean "max_epochs"?\n')
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- What stands behind it ------------------------------------------------------------------------------------------


def raising(error: Exception, cause: BaseException | None = None) -> Callable[[], None]:
    def fail() -> None:
        with user_errors():
            raise error from cause

    return fail


def test_a_user_s_error_leaves_with_status_2_also_when_wrapped(refusal: Callable[..., str]) -> None:
    assert refusal(raising(InputError("a sentence"))) == "\na sentence\n"
    assert refusal(raising(RuntimeError("MONAI"), StudyError("no_t2", "no T2"))) == "\nno T2\n"
    wrapped = RuntimeError("outer")
    wrapped.__cause__ = InputError("inner")
    assert refusal(raising(RuntimeError("outermost"), wrapped)) == "\ninner\n"


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(KeyError, match="a bug"):
        raising(KeyError("a bug"))()
    with pytest.raises(ValueError, match="not for the user"):
        raising(ValueError("not for the user"), KeyError("x"))()


def test_running_config_is_for_expressions_of_a_config_only() -> None:
    with pytest.raises(RuntimeError, match=r"works inside the expressions of a MONAI bundle config only\.$"):
        running_config()


def test_an_empty_folder_is_no_other_run(tmp_path: Path) -> None:
    refuse_other_settings(RunFolder(tmp_path), {"delta": 1})
    assert list(tmp_path.iterdir()) == []
