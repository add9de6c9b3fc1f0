"""Ctrl-C and SIGTERM, sent to real processes at several moments: one sentence, status 130 or 143, nobody is left."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from small_cohort import command

PATIENCE_S = 120
HEAD = """
import os, sys, time
from pathlib import Path
from mri_alm.runtime.interruption import answer_signals, reached
from mri_alm.runtime.locks import exclusive_lock
from mri_alm.runtime.progress import progress_bar
from mri_alm.runtime.tasks import Pool, run_tasks
here = Path(sys.argv[1])

def wait(number):
    (here / f"{number}-{os.getpid()}").touch()
    time.sleep(0.2 if sys.argv[2:] else 1000)

if __name__ == "__main__":
    answer_signals()
    with exclusive_lock(here / ".lock"):
"""


def stopped(
    words: list[str], ready: Callable[[], bool], *, number: int = signal.SIGINT, delay: float = 0
) -> tuple[int, str]:
    """Start a command, send its whole group a signal when it is ready; its status, and what it wrote to stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        end = time.monotonic() + PATIENCE_S
        while not ready() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(delay)
        os.killpg(process.pid, number)
        _, text = process.communicate(timeout=PATIENCE_S)
        return process.returncode, text.replace("\r", "\n")


def sentences(text: str) -> list[str]:
    """Lines of a log without bars."""
    return [line for line in text.splitlines() if line.strip() and "|" not in line]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


BODIES = {
    "at work": ('        reached(lambda: "after epoch 7 of split 2")\n        wait(0)', "after epoch 7 of split 2"),
    "bar": (
        '        with progress_bar("prepare", 9, "study") as bar:\n            bar.update(3)\n            wait(0)',
        'after 3 of 9 in the step "prepare"',
    ),
    "processes": (
        '        reached(lambda: "here")\n        list(run_tasks(wait, range(2), Pool("loky", 2)))',
        "here",
    ),
    "idle processes": (
        '        reached(lambda: "here")\n        sys.argv.append("short")\n'
        '        list(run_tasks(wait, range(2), Pool("loky", 2)))\n        sys.argv.pop()\n'
        '        (here / f"0-{os.getpid()}").touch()\n        time.sleep(1000)',
        "here",
    ),
    "threads": (
        '        reached(lambda: "here")\n'
        '        sys.argv.append("short")\n        list(run_tasks(wait, range(99), Pool("threading", 2)))',
        "here",
    ),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("case", BODIES)
def test_a_signal_ends_the_work_in_one_sentence(tmp_path: Path, case: str, number: int) -> None:
    body, where = BODIES[case]
    (tmp_path / "job.py").write_text(HEAD + body)
    place = tmp_path / "place"
    status, text = stopped(
        [sys.executable, str(tmp_path / "job.py"), str(place)], lambda: any(place.glob("0-*")), number=number
    )
    assert status == 128 + number
    assert sentences(text) == [f"Stopped {where}; the same command goes on."]
    assert not (place / ".lock").exists()
    workers = [int(path.name.split("-")[1]) for path in place.glob("*-*")]
    end = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, workers))


def test_a_signal_while_workers_start_is_quiet(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to them too; each would show where it was importing."""
    (tmp_path / "job.py").write_text(HEAD + BODIES["processes"][0])
    place = tmp_path / "place"
    status, text = stopped([sys.executable, str(tmp_path / "job.py"), str(place)], (place / ".lock").exists, delay=0.4)
    assert status == 130
    assert sentences(text)[-1].startswith("Stopped")
    assert len(sentences(text)) == 1


def test_a_program_is_quiet_from_its_first_imports_on(tmp_path: Path) -> None:
    """Whatever the moment; it answers within the second that Python itself takes to begin."""
    words = [sys.executable, "pipelines/make_phantom.py", str(tmp_path / "p")]
    for delay in (1.0, 2.0):
        status, text = stopped(words, lambda: True, delay=delay)
        assert (status, len(sentences(text))) == (130, 1), text
        assert sentences(text)[0].endswith("; the same command goes on.")


def test_a_signal_while_the_program_ends_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import atexit, sys, time\nfrom pathlib import Path\n"
        "from mri_alm.runtime.interruption import answer_signals\n"
        "def end():\n    Path(sys.argv[1]).touch()\n    time.sleep(1000)\n"
        "answer_signals()\natexit.register(end)\n"
    )
    place = tmp_path / "place"
    status, text = stopped([sys.executable, str(tmp_path / "job.py"), str(place)], place.exists)
    assert (status, sentences(text)) == (130, ["Stopped; the same command goes on."])


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    script = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from mri_alm.runtime.interruption import answer_signals\n"
        "answer_signals(); os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


@pytest.mark.slow
def test_the_main_command_stops_in_its_epochs_and_goes_on(manifest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = command(manifest, run, manifest.parent / "cache", splits=2, max_epochs=8)
    status, text = stopped(words, (run / "split_1" / "last.pt").exists)
    assert status == 130, text
    assert re.fullmatch(r"Stopped after epoch \d of split 1; the same command goes on\.", sentences(text)[-1])
    assert "Traceback" not in text
    assert not list(run.rglob(".*"))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "Going on after epoch" in done.stdout
