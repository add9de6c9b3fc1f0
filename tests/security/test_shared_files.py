"""What a command writes: nothing into a repository, an image or a model's folder, and readable where it is shared."""

import fnmatch
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT
from pages import PAGES
from shell import WarmPython
from small_cohort import snapshot

from mri_alm.bundle.export import export_bundle
from mri_alm.bundle.trained_run import TrainedRun

DOCUMENTS = [*PAGES, ROOT / "Makefile", ROOT / "mkdocs.yml", *sorted((ROOT / "docs" / "slurm").iterdir())]
_WRITTEN = re.compile(
    r"--(?:output|run_dir|runs-dir|key-file|cache_dir)[ =]([\w./%-]+)|make_phantom\.py ([\w./-]+)|sqlite:///([\w./-]+)"
    r"|\b(build/[\w./-]+)|site_dir: ([\w./-]+)"
)


def outputs() -> dict[str, str]:
    """Every path in the repository that a command of a document writes -> one such document."""
    found: dict[str, str] = {}
    for document in DOCUMENTS:
        for groups in _WRITTEN.findall(document.read_text("utf-8")):
            path = "".join(groups)
            if not path.startswith(("/", "..")):
                found[re.sub(r"%\w", "7", path)] = document.name
    return found


def test_the_documents_are_understood() -> None:
    """One of each kind."""
    expected = {
        "scores", "out", "evaluation", "calibration", "data/mine", "runs/mine", "runs/mine/mlflow.db", "build/site",
        "build/sbom.json", "prostate_bundle", "shared/report", "runs/demo_scores", "slurm-7-7.log",
        "data/secret_keys.csv",
    }  # fmt: skip
    assert expected - outputs().keys() == set()


@pytest.mark.parametrize("path", sorted({*outputs(), "mlflow.db", "site/index.html", "mlruns/0"}))
def test_no_output_is_committed_or_sent_into_an_image(path: str) -> None:
    """``/x`` in .dockerignore is a folder of the repository, ``**/x`` any file of that name."""
    inside = path if Path(path).suffix else f"{path}/scores.csv"
    git = ["git", "check-ignore", "--quiet", "--no-index", inside]
    assert subprocess.run(git, cwd=ROOT, check=False).returncode == 0
    patterns = (ROOT / ".dockerignore").read_text().split()
    first, name = path.partition("/")[0], Path(path).name
    assert f"/{first}" in patterns or any(
        fnmatch.fnmatch(name, pattern.removeprefix("**/")) for pattern in patterns if pattern.startswith("**/")
    )


def test_nothing_of_the_repository_itself_is_ignored() -> None:
    git = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout == ""
    assert "/docs" not in (ROOT / ".dockerignore").read_text().split()


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): stat.filemode(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o000])
def test_everybody_may_read_an_exported_bundle(trained: Path, tmp_path: Path, mask: int) -> None:
    with umask(mask):
        export_bundle(TrainedRun(trained), tmp_path / "bundle", licence=ROOT / "LICENSE")
    found = modes(tmp_path / "bundle")
    folders = {".", "configs", "docs", "models"}
    assert folders < found.keys()
    assert {found[name] for name in folders} == {"drwxr-xr-x"}
    assert {mode for name, mode in found.items() if name not in folders} == {"-rw-r--r--"}
    assert {path.name for path in tmp_path.iterdir()} == {"bundle"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "bundle"])
def test_scoring_writes_nothing_into_the_model_s_folder(
    trained: Path, one_exam: Path, tmp_path: Path, kind: str, python: WarmPython
) -> None:
    model = tmp_path / "model"
    if kind == "run":
        shutil.copytree(trained, model)
    else:
        export_bundle(TrainedRun(trained), model, licence=ROOT / "LICENSE")
    for path in (model, *model.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)  # which does not stop root: so names and times are compared too
    times = {path: path.stat().st_mtime_ns for path in (model, *model.rglob("*"))}
    before = snapshot(model)
    try:
        program, words = ROOT / "pipelines" / "score.py", ["--model", model, "--input", one_exam, "--threads", "2"]
        command = [python.program, program, *words, "--output", tmp_path / "out"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert snapshot(model) == before
        assert {path: path.stat().st_mtime_ns for path in (model, *model.rglob("*"))} == times
        assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}
        assert (tmp_path / "out" / "scores.csv").is_file()
    finally:
        for path in (model, *model.rglob("*")):
            path.chmod(0o755)
