"""The batch scripts, without SLURM: their syntax, what they submit, and their bodies run by hand."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_cohort import SETTINGS, train

from mri_alm.files import load_tensors

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "slurm"
SCRIPTS = sorted(FOLDER.iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_correct_bash(script: Path) -> None:
    found = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert "set -euo pipefail" in script.read_text("utf-8")
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, str(script)], check=True)


def test_the_ensemble_is_submitted_after_the_array(tmp_path: Path) -> None:
    """A stand-in for ``sbatch`` that writes down what it is given and answers with a number."""
    stand_in = tmp_path / "sbatch"
    stand_in.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path / "calls"}\necho 4711\n')
    stand_in.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["10", "--run_dir", "runs/mine", "--max_epochs", "60"]
    subprocess.run([str(FOLDER / "submit.sh"), *words], check=True, env=environment, capture_output=True)
    first, second = (tmp_path / "calls").read_text().splitlines()
    settings = "--splits 10 --run_dir runs/mine --max_epochs 60"
    assert first == f"--parsable --array=0-9 {FOLDER}/splits.sbatch {settings}"
    assert second == f"--dependency=afterany:4711 {FOLDER}/ensemble.sbatch {settings}"


def test_an_array_script_outside_an_array_says_so() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_ARRAY_TASK_ID"}
    found = subprocess.run(
        ["bash", str(FOLDER / "splits.sbatch")], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode != 0
    assert "submit this as an array" in found.stderr


@pytest.mark.slow
def test_array_tasks_and_the_ensemble_make_the_run_of_one_command(manifest: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"splits": 2, "max_epochs": 1, "cohort": manifest, "cache_dir": manifest.parent / "cache"}
    run = tmp_path / "run"
    words = [word for name, value in settings.items() if name != "threads" for word in (f"--{name}", str(value))]
    environment = os.environ | {"PYTHON": sys.executable, "SLURM_CPUS_PER_TASK": "1", "SLURM_SUBMIT_DIR": str(ROOT)}
    jobs = [("splits.sbatch", {"SLURM_ARRAY_TASK_ID": "1"}), ("ensemble.sbatch", {})]  # array task 0 was lost
    for script, slurm in jobs:
        command = ["bash", str(FOLDER / script), *words, "--run_dir", str(run)]
        done = subprocess.run(command, env=environment | slurm, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert (run / "threshold.json").exists() == (script == "ensemble.sbatch")
    theirs = train(manifest, tmp_path / "one", splits=2, max_epochs=1)
    for k in range(2):
        ours, one = (load_tensors(folder / f"split_{k}" / "model.pt")["model"] for folder in (run, theirs))
        assert all(torch.equal(ours[name], one[name]) for name in one)
    assert (run / "scores.csv").read_bytes() == (theirs / "scores.csv").read_bytes()
