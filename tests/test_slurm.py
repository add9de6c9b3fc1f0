"""The batch scripts, without SLURM: their syntax, what they submit, and their bodies run by hand."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from shell import WarmPython
from small_cohort import SETTINGS, train

from mri_alm.bundle.checkpoints import load_tensors

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


def run_script(name: str, folder: Path, slurm: dict[str, str], **stand_ins: str) -> subprocess.CompletedProcess[str]:
    """A script's body with programs that write down their words; a stand-in given as text is run after that."""
    for program in ("torchrun", "srun", "scontrol", "ray", "python", "sleep"):
        text = (
            f'#!/bin/bash\necho "{program} $OMP_NUM_THREADS $*" >> {folder / "calls"}\n{stand_ins.get(program, "")}\n'
        )
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "BIN": str(folder)} | slurm
    command = ["bash", str(FOLDER / name), "--run_dir", "runs/mine"]
    with (folder / "log").open("w") as log:  # no pipe: what a script leaves in the background would hold it open
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False, cwd=folder)
    texts = ((folder / name).read_text() for name in ("calls", "log"))
    return subprocess.CompletedProcess(command, done.returncode, *texts)


@pytest.mark.parametrize(
    ("gpus", "cores", "processes", "threads"), [("4", "16", 4, 4), ("a100:2", "16", 2, 8), ("4", "2", 4, 1)]
)
def test_one_model_has_a_process_per_gpu_and_a_thread_each(
    tmp_path: Path, gpus: str, cores: str, processes: int, threads: int
) -> None:
    done = run_script("one_model.sbatch", tmp_path, {"SLURM_GPUS_PER_TASK": gpus, "SLURM_CPUS_PER_TASK": cores})
    assert done.returncode == 0, done.stderr
    words = f"--standalone --nproc_per_node={processes} -m monai.bundle run --config_file"
    assert done.stdout.startswith(f"torchrun {threads} {words} ")
    assert done.stdout.endswith("--run_dir runs/mine\n")


RAY_JOB = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "1234567", "SLURM_CPUS_PER_TASK": "16"}
SRUN = '[[ "$*" = *--head* ]] || exit 0\n'
NODES = 'printf "n1\\nn2\\n"'


def test_the_ray_job_joins_its_own_head_when_it_is_up(tmp_path: Path) -> None:
    status = f"[[ -e {tmp_path / 'up'} ]] || {{ touch {tmp_path / 'up'}; exit 1; }}"
    done = run_script("ray.sbatch", tmp_path, RAY_JOB, scontrol=NODES, srun=f"{SRUN}exec /bin/sleep 5", ray=status)
    assert done.returncode == 0, done.stderr
    calls = done.stdout
    assert calls.count("status --address=n1:24567") == 2
    assert f"-w n1 {tmp_path}/ray start --head --port=24567 " in calls
    assert f"-w n2 {tmp_path}/ray start --address=n1:24567 " in calls
    assert "--backend ray --ray-address n1:24567 --run_dir runs/mine" in calls


@pytest.mark.parametrize(("srun", "most"), [(f"{SRUN}exit 1", 3), (f"{SRUN}exec /bin/sleep 5", 60)])
def test_a_ray_head_that_does_not_come_up_ends_the_job(tmp_path: Path, srun: str, most: int) -> None:
    done = run_script("ray.sbatch", tmp_path, RAY_JOB, scontrol=NODES, srun=srun, ray="/bin/sleep 0.02; exit 1")
    assert done.returncode == 1
    assert "Ray's head did not come up at n1:24567." in done.stderr
    assert done.stdout.count(" status --address") <= most
    assert "train_ensemble.py" not in done.stdout


@pytest.mark.slow
def test_array_tasks_and_the_ensemble_make_the_run_of_one_command(
    manifest: Path, tmp_path: Path, python: WarmPython
) -> None:
    settings = SETTINGS | {"splits": 2, "max_epochs": 1, "cohort": manifest, "cache_dir": manifest.parent / "cache"}
    run = tmp_path / "run"
    words = [word for name, value in settings.items() if name != "threads" for word in (f"--{name}", str(value))]
    slurm = {"SLURM_CPUS_PER_TASK": "1", "SLURM_SUBMIT_DIR": str(ROOT)}
    environment = os.environ | slurm | {"PYTHON": str(python.program)}
    jobs = [("splits.sbatch", {"SLURM_ARRAY_TASK_ID": "1"}), ("ensemble.sbatch", {})]  # array task 0 was lost
    for script, task in jobs:
        command = ["bash", str(FOLDER / script), *words, "--run_dir", str(run)]
        done = subprocess.run(command, env=environment | task, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert (run / "threshold.json").exists() == (script == "ensemble.sbatch")
    theirs = train(manifest, tmp_path / "one", splits=2, max_epochs=1)
    for k in range(2):
        ours, one = (load_tensors(folder / f"split_{k}" / "model.pt")["model"] for folder in (run, theirs))
        assert all(torch.equal(ours[name], one[name]) for name in one)
    assert (run / "scores.csv").read_bytes() == (theirs / "scores.csv").read_bytes()
