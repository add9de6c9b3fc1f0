"""A job killed at its n-th file operation for n after n, started again, and compared with one that was never killed.

python tests/killed.py CASE FOLDER STEP SOURCE [FINISHED RUN]

Every start is a fork of this process, which has imported everything and runs nothing itself. SIGKILL comes as a call
makes, opens, renames or deletes something below the run's folder; what was found goes to stdout as JSON.
"""

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.bundle
import torch
from small_cohort import train
from small_training import training

import mri_alm.cohort.prepare_cohort
import mri_alm.training.run
from mri_alm.bundle.checkpoints import load_tensors
from mri_alm.cohort.prepare_cohort import Order, prepare_cohort
from mri_alm.runtime.atomic import sweep

assert mri_alm.training.run, monai.bundle
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "shutil.rmtree"}
BRANDED = ("events.out", "config.json", "report.html", "run.log")  # name the moment, or the folder


def epochs(folder: Path, _: Path) -> None:
    """Two epochs, the second better: model.pt and last.pt are written twice."""
    sweep(folder)  # as the job does, which holds the folder's lock
    aucs = (0.6, 0.8)
    trainer, end = training(folder, *aucs)
    end.validator.aucs = iter(aucs[trainer.state.epoch :])
    if not end.finished(trainer):
        trainer.run()


def cohort(folder: Path, source: Path) -> None:
    """A cohort prepared from an export, by one worker."""
    folder.mkdir(exist_ok=True)
    if not (folder / "salt").exists():
        (folder / "salt").write_text("0" * 32)  # it is drawn at random otherwise, and names depend on it
    mri_alm.cohort.prepare_cohort.prepare_apart = lambda preparation, job: preparation.prepare(
        job
    )  # tested in test_workers.py
    prepare_cohort(Order(source, folder, rules=source.parent / "rules.json", resume=True, workers=1))


def ensemble(folder: Path, manifest: Path) -> None:
    """Threshold, scores and report of splits that are trained."""
    train(manifest, folder)


CASES: dict[str, Callable[[Path, Path], None]] = {"epochs": epochs, "cohort": cohort, "ensemble": ensemble}


def kill_at(number: int, folder: Path) -> None:
    """Send SIGKILL to this process in its ``number``-th operation on files below a folder."""
    seen = 0

    def audit(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if (
            event in EVENTS
            and str(args[0]).startswith(str(folder))
            and not (event == "open" and args[1] in ("r", "rb"))
        ):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def start(case: str, folder: Path, source: Path, kill: int = 0) -> int:
    """Run a case in a fork; its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        with (folder.parent / f"{folder.name}.log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            torch.set_num_threads(1)
            if kill:
                kill_at(kill, folder)
            CASES[case](folder, source)
            (folder.parent / "modules").write_text("\n".join(sys.modules))
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def digest(state: Any) -> str:
    """Of every number in a checkpoint, NaN included."""
    if isinstance(state, dict):
        return repr([(key, digest(value)) for key, value in state.items()])
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.contiguous().numpy().tobytes()).hexdigest()
    return repr([digest(value) for value in state]) if isinstance(state, (list, tuple)) else repr(state)


def contents(folder: Path) -> dict[str, str]:
    """Every file but those that differ between any two runs."""
    return {
        str(path.relative_to(folder)): digest(load_tensors(path)) if path.suffix == ".pt" else path.read_bytes().hex()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(BRANDED)
    }


def finished(folder: Path) -> dict[str, int]:
    """When each whole study was written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.glob("[0-9a-f]*/study.json")}


def main(case: str, place: Path, step: int, source: Path, first: Path | None) -> dict[str, Any]:
    """Kills, what was wrong after them, and what the whole run left."""

    def begin(name: str) -> Path:
        return Path(shutil.copytree(first, place / name)) if first else place / name

    whole = begin("whole")
    if start(case, whole, source):
        raise SystemExit((place / "whole.log").read_text())
    for name in (place / "modules").read_text().split():  # imported once here, not in every fork
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    expected, kills, wrong = contents(whole), 0, []
    for number in range(1, 10_000, step):
        run = begin(str(number))
        if start(case, run, source, kill=number) == 0:
            break  # it has no so-manieth operation
        kills += 1
        done = finished(run)
        status = start(case, run, source)
        found = contents(run)
        different = [name for name in {*expected, *found} if expected.get(name) != found.get(name)]
        redone = [name for name, moment in done.items() if finished(run)[name] != moment]
        left = [str(path) for path in run.rglob(".*")]
        if status or different or redone or left:
            log = (place / f"{number}.log").read_text()[-2000:]
            wrong.append(
                {"kill": number, "status": status, "different": different, "redone": redone, "left": left, "log": log}
            )
        shutil.rmtree(run)
    return {"kills": kills, "wrong": wrong, "files": list(expected)}


if __name__ == "__main__":
    words = [Path(word) for word in sys.argv[4:]]
    found = main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), words[0], words[1] if words[1:] else None)
    sys.stdout.write(json.dumps(found))
