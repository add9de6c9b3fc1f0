"""What the image promises, as far as it can be tried without a container engine."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from exams import GRID, dicom_exam

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text("utf-8")
INSTALL = (ROOT / "docker" / "install.sh").read_text("utf-8")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    """Package -> version, of the lines that hold on Python 3.11."""
    lines = (ROOT / file).read_text("utf-8").splitlines()
    found = [re.match(r"([\w.-]+)==([^ ;]+)", line) for line in lines if "python_version < '3.11'" not in line]
    return {canonical(match[1]): match[2] for match in found if match}


def test_the_lock_agrees_with_the_constraints() -> None:
    lock, constraints = pins("requirements-lock.txt"), pins("constraints.txt")
    differing = {
        name: (lock[name], constraints[name]) for name in lock.keys() & constraints if lock[name] != constraints[name]
    }
    assert differing == {}, "after a change of constraints.txt: make lock"
    # pip itself comes as a dependency of pip-audit; whatever is there is kept
    assert lock.keys() - constraints.keys() <= {"pip"}, "packages without a version in constraints.txt"
    assert pins("docker/torch-cpu.txt")["torch"].partition("+")[0] == constraints["torch"]


def test_every_locked_package_has_a_hash() -> None:
    lines = [line for line in (ROOT / "requirements-lock.txt").read_text("utf-8").splitlines() if line[:1] != "#"]
    assert len(lines) > 100
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line)] == []


def test_the_core_is_a_part_of_the_lock_and_all_that_the_project_itself_asks_for() -> None:
    core, lock = ((ROOT / f"requirements-{name}.txt").read_text("utf-8").splitlines() for name in ("core", "lock"))
    assert set(core) < set(lock), "after a change of a dependency: make lock"
    asked = [re.match(r"[\w.-]+", text) for text in requires("mri-alm") or () if "extra ==" not in text]
    needed = {canonical(match[0]) for match in asked if match} - {"torch"}
    assert needed <= pins("requirements-core.txt").keys()
    assert pins("requirements-core.txt").keys().isdisjoint({"mlflow", "ray", "mkdocs", "pytest", "onnx", "pandas"})


def test_one_script_installs_everywhere() -> None:
    assert (ROOT / "Makefile").read_text("utf-8").count("docker/install.sh $(VENV)") == 2
    assert "docker/install.sh /opt/venv" in DOCKERFILE
    assert "make --keep-going" in (ROOT / ".ci" / "run").read_text("utf-8")
    assert INSTALL.count("--require-hashes --no-deps") == 2


def test_the_image_s_user_is_not_root_and_writes_to_volumes_only() -> None:
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["1000"]
    assert 'VOLUME ["/data", "/runs"]' in DOCKERFILE
    environment = dict(re.findall(r"\b(HOME|TMPDIR|XDG_CACHE_HOME|MPLCONFIGDIR)=(\S+)", DOCKERFILE))
    assert set(environment) == {"HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR"}
    assert all(path.startswith("/tmp") for path in environment.values())  # noqa: S108


@pytest.fixture
def for_everyone() -> Iterator[Path]:
    """A folder that other users may enter; pytest keeps its own to itself."""
    with tempfile.TemporaryDirectory(prefix="mri-alm-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None or shutil.which("setpriv") is None or os.geteuid() != 0,
    reason="needs root, unshare and setpriv to make a read-only checkout for another user",
)
def test_programs_run_on_a_read_only_checkout_without_a_home(for_everyone: Path) -> None:
    """Health check and preparation as user 1000: the checkout is read-only, data and runs are elsewhere."""
    app, data, runs, temporary = (for_everyone / name for name in ("app", "data", "runs", "tmp"))
    app.mkdir()
    for name in ("configs", "docker", "mri_alm", "pipelines"):
        shutil.copytree(ROOT / name, app / name, ignore=shutil.ignore_patterns("__pycache__"))
    for number in (1, 2):
        dicom_exam(data / "export" / f"exam_{number}", number)
    (data / "rules.json").write_text(json.dumps(GRID))
    for folder in (data, runs, temporary):
        folder.mkdir(exist_ok=True)
        os.chown(folder, 1000, 1000)
        (app / folder.name).symlink_to(folder)
    python = shlex_free(sys.executable)
    commands = f"""
        set -eu
        mount --bind -o ro {app} {app}
        cd {app}
        user="setpriv --reuid 1000 --regid 1000 --clear-groups"
        if $user touch configs/x 2>/dev/null || $user mkdir /root/x 2>/dev/null; then echo writable; exit 9; fi
        $user {python} docker/health.py
        $user {python} pipelines/prepare_cohort.py --input data/export --rules data/rules.json --output runs/one
    """
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(app), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent",
        "TMPDIR": str(temporary), "MPLCONFIGDIR": str(temporary / "matplotlib"),
        "MRI_ALM_STATE": str(runs / ".mri-alm"),
    }  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", commands], env=environment, capture_output=True, text=True, check=False
    )
    if "Operation not permitted" in done.stderr and "mount" in done.stderr:
        pytest.skip("mounting is not permitted here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alive: mri-alm" in done.stdout
    assert (runs / "one" / "manifest.csv").stat().st_uid == 1000


def shlex_free(path: str) -> str:
    """A path that needs no quotes in a shell."""
    assert re.fullmatch(r"[\w./+-]+", path)
    return path
