"""Faults that really happen: kills at file operations, full disks, flipped bits, two runs at once, odd clocks."""

import itertools
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from exams import GRID, dicom_exam, prepare, write_text
from ignite.engine import Events
from killed import digest
from locking import holder
from programs import load_program
from small_cohort import SETTINGS, command, snapshot, train
from small_training import training

from mri_alm.bundle.checkpoints import is_intact, load_tensors
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.errors import InputError
from mri_alm.runtime.files import DamagedFileError, read_json

SPLITS = range(SETTINGS["splits"])
RESULTS = ("threshold.json", "heldout.csv", "scores.csv", "metrics.json", "splits.csv")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export") / "in"
    for number in range(3):
        dicom_exam(root / f"p{number}", number)
    write_text(root.parent / "rules.json", GRID)
    return root


def flip(path: Path, share: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 16
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


DAMAGES = pytest.mark.parametrize("damage", [flip, cut])


def same_results(run: Path, trained: Path) -> None:
    for name in RESULTS:
        assert (run / name).read_bytes() == (trained / name).read_bytes(), name


# --- kill -9 --------------------------------------------------------------------------------------------------------


def killed(case: str, place: Path, step: int, *words: Path) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(ROOT / "tests" / "killed.py"), case, str(place), str(step), *map(str, words)]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_killed_anywhere_in_the_writing_of_checkpoints_the_training_ends_the_same(tmp_path: Path) -> None:
    found = killed("epochs", tmp_path, 3, tmp_path)
    assert found["wrong"] == []
    assert found["kills"] >= 10
    assert found["files"] == ["last.pt", "model.pt", "previous.pt"]


@pytest.mark.slow
def test_killed_anywhere_in_the_preparation_no_row_is_lost_or_done_again(export: Path, tmp_path: Path) -> None:
    found = killed("cohort", tmp_path, 17, export)
    assert found["wrong"] == []
    assert found["kills"] >= 8
    assert {"manifest.csv", "qc.html", "cohort.json"} <= {*found["files"]}
    assert sum(name.endswith("study.json") for name in found["files"]) == 3


@pytest.mark.slow
def test_killed_anywhere_in_the_ensemble_the_results_are_the_same(
    manifest: Path, run: Path, tmp_path: Path, trained: Path
) -> None:
    for name in (*RESULTS, "report.html"):
        (run / name).unlink()
    found = killed("ensemble", tmp_path, 41, manifest, run)
    assert found["wrong"] == []
    assert found["kills"] >= 2
    assert {*RESULTS} <= {*found["files"]}


# --- Damaged files --------------------------------------------------------------------------------------------------


def stopped_after(epoch: int, folder: Path, *aucs: float) -> None:
    trainer, _ = training(folder, *aucs)
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=epoch), trainer.terminate)
    trainer.run()


@DAMAGES
def test_a_damaged_last_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    aucs = (0.6, 0.8, 0.7)
    training(tmp_path / "whole", *aucs)[0].run()
    stopped_after(2, tmp_path / "run", *aucs)
    damage(tmp_path / "run" / "last.pt")
    trainer, end = training(tmp_path / "run", *aucs)
    assert trainer.state.epoch == 1
    assert re.search(r"run/last\.pt is .* Going on from what was written before it\.", caplog.text)
    end.validator.aucs = iter(aucs[1:])
    trainer.run()
    for name in ("last.pt", "previous.pt", "model.pt"):
        one, other = (load_tensors(tmp_path / folder / name)["model"] for folder in ("whole", "run"))
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert [epoch["epoch"] for epoch in end.history] == [1, 2, 3]


@pytest.mark.parametrize("names", [("last.pt", "previous.pt"), ("model.pt",)])
@DAMAGES
def test_without_a_whole_one_training_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...], damage: Callable[[Path], None]
) -> None:
    training(tmp_path, 0.6, 0.8)[0].run()
    model = load_tensors(tmp_path / "model.pt")["model"]
    for name in names:
        damage(tmp_path / name)
    trainer, end = training(tmp_path, 0.6, 0.8)
    assert f"{tmp_path}: training begins again." in caplog.text
    assert (trainer.state.epoch, end.history) == (0, [])
    assert not (tmp_path / "last.pt").exists()
    trainer.run()
    again = load_tensors(tmp_path / "model.pt")["model"]
    assert all(torch.equal(model[key], again[key]) for key in model)


@DAMAGES
def test_a_split_whose_model_is_damaged_is_trained_again(
    manifest: Path, run: Path, trained: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    damage(run / "split_1" / "model.pt")
    others = [(run / f"split_{k}" / "model.pt").stat().st_mtime_ns for k in (0, 2)]
    train(manifest, run)
    text = "".join(capsys.readouterr())
    assert f"{run / 'split_1'}: training begins again." in text
    same_results(run, trained)
    assert [(run / f"split_{k}" / "model.pt").stat().st_mtime_ns for k in (0, 2)] == others


def test_a_damaged_record_of_a_split_is_made_again(
    manifest: Path, run: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "split_1" / "split.json").write_bytes((run / "split_1" / "split.json").read_bytes()[:200])
    train(manifest, run)
    text = "".join(capsys.readouterr())
    assert "split.json is damaged" in text
    same_results(run, trained)
    assert read_json(run / "split_1" / "split.json") == read_json(trained / "split_1" / "split.json")


@DAMAGES
def test_a_damaged_model_does_not_score(run: Path, damage: Callable[[Path], None]) -> None:
    damage(run / "split_2" / "model.pt")
    message = (
        f"{run / 'split_2' / 'model.pt'} is not the checkpoint that the threshold was set for: its SHA-256 differs"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        TrainedRun(run).ensemble()


@pytest.mark.parametrize("name", ["config.json", "threshold.json"])
def test_a_damaged_run_folder_does_not_score(run: Path, name: str) -> None:
    (run / name).write_bytes((run / name).read_bytes()[:50])
    with pytest.raises(DamagedFileError, match=re.escape(f"{run / name} is damaged (")):
        TrainedRun(run)


def test_damaged_cache_entries_are_made_again_and_that_is_said_once(
    manifest: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"  # the shared one also holds exams that other tests prepared otherwise
    train(manifest, tmp_path / "short", cache_dir=str(cache), splits=1, max_epochs=1)
    capsys.readouterr()
    entries = sorted(cache.glob("*.pt"))
    assert len(entries) == 42
    before, content = [digest(load_tensors(entry)) for entry in entries], entries[0].read_bytes()
    voxels = load_tensors(entries[0])["image"].numpy().tobytes()
    place = content.index(voxels) + len(voxels) // 2
    flip(entries[0], (place + 0.5) / len(content))
    assert not torch.equal(
        torch.load(entries[0])["image"], torch.frombuffer(bytearray(voxels), dtype=torch.float32).view(3, 8, 8, 8)
    )
    cut(entries[1])
    entries[2].write_bytes(b"")
    run = train(manifest, tmp_path / "run", cache_dir=str(cache))
    text = "".join(capsys.readouterr())
    same_results(run, trained)
    # Not their bytes: what a pickle writes depends on which equal strings were one object.
    assert [digest(load_tensors(entry)) for entry in entries] == before
    assert text.count("The exam is prepared again.") == 3
    for entry in entries[:3]:
        assert text.count(entry.name) == 1


# --- Full disks -----------------------------------------------------------------------------------------------------


class Disk:
    """A file system of 3 MB where the system lets us mount one; else a limit on the size of files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.filler = folder, folder / "filler"
        words = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
        self.mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0

    def fill(self, room: int) -> None:
        """Leave room for this many bytes."""
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            return
        free = shutil.disk_usage(self.folder).free
        self.filler.write_bytes(bytes(max(0, free - room)))

    def free(self) -> None:
        """Give the space back."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.filler.unlink(missing_ok=True)

    def close(self) -> None:
        self.free()
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    (tmp_path / "disk").mkdir()
    found = Disk(tmp_path / "disk")
    yield found
    found.close()


FULL = r"(No space left on device|File too large)\. Free space or choose another place, then start the same command"


def unfinished(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.name != ".lock"]


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(tmp_path: Path, disk: Disk) -> None:
    aucs = (0.6, 0.8)
    training(tmp_path / "whole", *aucs)[0].run()
    run = disk.folder / "run"
    stopped_after(1, run, *aucs)
    before = (run / "last.pt").read_bytes()
    trainer, end = training(run, *aucs)
    end.validator.aucs = iter(aucs[1:])
    disk.fill(4096)  # enough for model.pt, not for last.pt
    with pytest.raises(InputError, match=rf"Cannot write {re.escape(str(run))}/(model|last)\.pt: {FULL}"):
        trainer.run()
    end.writer.close()
    assert (run / "last.pt").read_bytes() == before
    assert is_intact(run / "model.pt")
    assert unfinished(disk.folder) == []
    disk.free()
    trainer, end = training(run, *aucs)
    assert trainer.state.epoch == 1
    end.validator.aucs = iter(aucs[1:])
    trainer.run()
    one, other = (load_tensors(folder / "model.pt")["model"] for folder in (tmp_path / "whole", run))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_disk_that_fills_up_while_exams_are_cached(
    manifest: Path, tmp_path: Path, disk: Disk, refusal: Callable[..., str]
) -> None:
    cache = disk.folder / "cache"
    disk.fill(70_000 if disk.mounted else 5_000)
    text = refusal(train, manifest, tmp_path / "run", cache_dir=str(cache), splits=1, max_epochs=1)
    assert re.search(rf"Cannot write {re.escape(str(cache))}/\w+\.pt: {FULL}", text)
    assert unfinished(disk.folder) == []
    assert not (tmp_path / "run").exists()
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("*.pt")}
    assert len(kept) < 42
    disk.free()
    train(manifest, tmp_path / "run", cache_dir=str(cache), splits=1, max_epochs=1)
    assert len(list(cache.glob("*.pt"))) == 42
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_a_disk_that_fills_up_while_studies_are_prepared(
    export: Path, tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    output, main = disk.folder / "c", load_program("prepare_cohort").main
    words = ["--input", str(export), "--output", str(output), "--rules", str(export.parent / "rules.json")]
    disk.fill(60_000 if disk.mounted else 2_000)
    assert main([*words, "--workers", "1"]) == 2
    assert re.search(rf"error: Cannot write {re.escape(str(output))}/.*: {FULL}", capsys.readouterr().err)
    assert unfinished(output) == []
    assert not (output / "manifest.csv").exists()
    disk.free()
    assert main([*words, "--workers", "1", "--resume"]) == 0
    assert len((output / "manifest.csv").read_text().splitlines()) == 4


# --- Two at once ----------------------------------------------------------------------------------------------------


def test_a_second_run_of_the_same_splits_is_refused_and_of_others_is_not(
    manifest: Path, run: Path, refusal: Callable[..., str]
) -> None:
    before = snapshot(run)
    with holder(run / ".split_1.lock") as other:
        for options in ({}, {"only_split": 1}):
            text = refusal(train, manifest, run, **options)
            assert f"{run} is in use by process {other.pid} on " in text
            assert "(lock .split_1.lock). Wait until it ends, end it, or choose another folder" in text
        assert {name: now for name, now in snapshot(run).items() if not name.startswith(".")} == before
        train(manifest, run, only_split=0)
        other.kill()
        other.wait()
        train(manifest, run, only_split=1)


@pytest.mark.slow
def test_two_splits_trained_at_once_from_nothing_make_one_run(manifest: Path, tmp_path: Path) -> None:
    """Configuration, cache and splits are written by both; the ensemble by whoever comes last."""
    run, options = tmp_path / "run", {"splits": 2, "max_epochs": 1}
    words = [command(manifest, run, tmp_path / "cache", only_split=k, **options) for k in (0, 1)]
    both = [subprocess.Popen(w, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for w in words]
    texts = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    assert any("Ensemble of 2 models" in out for out, _ in texts)
    whole = train(manifest, tmp_path / "whole", **options)
    same_results(run, whole)
    assert unfinished(run) == []


def test_a_cohort_that_another_process_prepares_is_refused(export: Path, tmp_path: Path) -> None:
    output = tmp_path / "c"
    with holder(output / ".lock") as other:
        for resume in (False, True):
            with pytest.raises(InputError, match=rf"{re.escape(str(output))} is in use by process {other.pid} on "):
                prepare(export, output, resume=resume)
        assert [path.name for path in output.iterdir()] == [".lock"]
    assert prepare(export, output).failed == 0


# --- Clocks ---------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_while_exams_are_prepared_and_splits_trained_changes_nothing(
    manifest: Path, trained: Path, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = itertools.cycle([0, -86_400, 10 * 365 * 86_400, -3_600])
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + next(jumps))
    assert prepare(export, tmp_path / "c").failed == 0
    assert prepare(export, tmp_path / "c", resume=True).kept == 3
    run = train(manifest, tmp_path / "run")
    same_results(run, trained)


@pytest.mark.parametrize("moment", [4_000_000_000, 0], ids=["future", "past"])
def test_a_clock_that_was_set_decides_nothing(
    manifest: Path, run: Path, trained: Path, export: Path, tmp_path: Path, moment: int
) -> None:
    """What was finished under another clock stays finished, and what was not is gone on with."""
    prepare(export, tmp_path / "c")
    (run / "split_1" / "split.json").unlink()
    for name in ("last.pt", "previous.pt"):
        assert (run / "split_1" / name).exists()
    (run / "split_1" / "last.pt").unlink()  # its last epoch is trained again
    for path in [*run.rglob("*"), *(tmp_path / "c").rglob("*")]:
        os.utime(path, (moment, moment))
    assert prepare(export, tmp_path / "c", resume=True).kept == 3
    train(manifest, run)
    same_results(run, trained)
    assert (run / "split_0" / "model.pt").stat().st_mtime == moment
    assert (
        load_tensors(run / "split_1" / "last.pt")["trainer"] == load_tensors(trained / "split_1" / "last.pt")["trainer"]
    )


# --- Who may read ---------------------------------------------------------------------------------------------------


def test_a_run_and_a_cohort_are_their_owner_s_only(manifest: Path, export: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        train(manifest, tmp_path / "out" / "run", cache_dir=str(tmp_path / "out" / "cache"), splits=1, max_epochs=1)
        (tmp_path / "c_rules.json").touch()
        prepare(export, tmp_path / "out" / "c", key_file=tmp_path / "out" / "keys" / "keys.csv")
    finally:
        assert os.umask(before) == 0
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*")}
    wrong = {str(p): oct(mode) for p, mode in modes.items() if mode != (0o700 if p.is_dir() else 0o600)}
    assert {path: mode for path, mode in wrong.items() if not path.endswith("_rules.json")} == {}
    assert any(path.name.startswith("events.out") for path in modes)
