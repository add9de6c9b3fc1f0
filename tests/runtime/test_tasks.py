"""Tasks that fail, die or wait, and the same work done in one process."""

import fcntl
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import SimpleITK as sitk  # noqa: N813

import mri_alm.runtime.tasks
from mri_alm.errors import InputError, StudyError
from mri_alm.runtime.tasks import Pool, TaskResult, joined, run_tasks

BACKENDS = [Pool("threading", 2), Pool("loky", 1), Pool("loky", 2)]


def square(number: int) -> int:
    if number == 3:
        raise StudyError("no_t2", "study 3 has no T2")
    if number == 4:
        raise KeyError("a bug")
    return number * number


class StuckError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def test_file_formats_are_known_before_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """ITK's registration of them beside another thread ends in a segmentation fault, in a few of a thousand starts."""
    order: list[str] = []
    reader = SimpleNamespace(GetRegisteredImageIOs=lambda: order.append("formats"))
    monkeypatch.setattr(sitk, "ImageFileReader", lambda: reader)
    for outcome in run_tasks(lambda _: order.append("task"), range(2), Pool("threading", 2)):
        outcome.get()
    assert order == ["formats", "task", "task"]


def raise_unpicklable(_: int) -> None:
    raise StuckError("one", "two")


class LockedError(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


def raise_locked(item: int) -> int:
    if item == 0:
        raise LockedError
    return item


def where(_: int) -> tuple[str, int, int]:
    import torch

    return str(Path.cwd()), os.getpid(), torch.get_num_threads()


def die_once(marks: Path) -> str:
    """Killed at the first call; the second finds the mark."""
    mark = marks / "died"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def die_always(item: int) -> int:
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


@pytest.mark.parametrize("pool", BACKENDS, ids=lambda pool: f"{pool.backend}-{pool.workers}")
def test_a_failed_task_loses_no_other(pool: Pool) -> None:
    found = {outcome.item: outcome for outcome in run_tasks(square, range(6), pool)}
    assert {item: outcome.result for item, outcome in found.items()} == {0: 0, 1: 1, 2: 4, 3: None, 4: None, 5: 25}
    with pytest.raises(StudyError, match=r"^study 3 has no T2$") as refused:
        found[3].get()
    assert refused.value.code == "no_t2"
    with pytest.raises(KeyError, match="a bug") as bug:
        found[4].get()
    assert "in square" in str(bug.value.__cause__)
    assert found[5].get() == 25


def test_an_error_that_cannot_travel_is_told_as_text() -> None:
    (outcome,) = run_tasks(raise_unpicklable, [0], Pool("loky", 2))
    assert str(outcome.error) == "StuckError: one two"
    assert "raise_unpicklable" in outcome.trace


def test_an_error_that_holds_a_lock_loses_no_other() -> None:
    found = {outcome.item: outcome for outcome in run_tasks(raise_locked, range(4), Pool("loky", 2))}
    assert [found[item].result for item in range(4)] == [None, 1, 2, 3]
    assert str(found[0].error) == "LockedError: locked"


def die_or_count_threads(mark: Path) -> int:
    """The threads of the last, lonely try."""
    import torch

    with mark.open("a") as file:
        file.write("x")
    if mark.stat().st_size <= 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.get_num_threads()


def test_the_last_try_has_the_threads_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("joblib._parallel_backends.cpu_count", lambda: 8)
    pool = Pool("loky", 4, retries=1)
    (outcome,) = run_tasks(die_or_count_threads, [tmp_path / "mark"], pool)
    assert outcome.get() == 2


def test_outcomes_come_as_they_are_ready() -> None:
    gate = threading.Event()

    def wait(item: int) -> int:
        if item == 0:
            assert gate.wait(20)
        return item

    outcomes = run_tasks(wait, range(2), Pool("threading", 2))
    assert next(outcomes).item == 1
    gate.set()
    assert next(outcomes).item == 0


def test_threads_that_are_given_up_are_waited_for() -> None:
    """Who holds a lock while tasks write may release it then."""
    beside, begun, ended = threading.Event(), [], []

    def wait(item: int) -> None:
        if item == 0:
            assert beside.wait(20)
            raise KeyError("a bug")
        begun.append(item)
        beside.set()
        time.sleep(0.2)
        ended.append(item)

    with closing(run_tasks(wait, range(9), Pool("threading", 2))) as outcomes:
        while next(outcomes).error is None:
            pass
    assert sorted(ended) == sorted(begun)


def test_workers_share_the_cores_and_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    found = [outcome.get() for outcome in run_tasks(where, range(4), Pool("loky", 3))]
    assert {folder for folder, _, _ in found} == {str(tmp_path)}
    assert os.getpid() not in {process for _, process, _ in found}
    assert {threads for _, _, threads in found} == {max(1, (os.cpu_count() or 1) // 3)}


def test_one_worker_is_this_process() -> None:
    (outcome,) = run_tasks(where, [0], Pool())
    assert outcome.result[1] == os.getpid()


def test_a_task_whose_process_is_killed_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = [outcome.get() for outcome in run_tasks(die_once, [tmp_path], Pool("loky", 2))]
    assert found == ["done"]
    assert "A worker died (killed, or out of memory). 1 tasks start again." in caplog.text


def test_a_task_that_always_dies_is_named_and_the_others_finish() -> None:
    found = {outcome.item: outcome for outcome in run_tasks(die_always, range(5), Pool("loky", 2, retries=1))}
    assert {item: found[item].result for item in (0, 1, 3, 4)} == {0: 0, 1: 1, 3: 3, 4: 4}
    with pytest.raises(InputError, match=r"^Task 2: its process died each time it was started \(2 times\): killed, or"):
        found[2].get()


DRIVER = """
import fcntl, sys, time
from pathlib import Path
from mri_alm.runtime.tasks import Pool, run_tasks

def begin(number):
    with (Path(sys.argv[1]) / str(number)).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Path(file.name + ".begun").touch()
        time.sleep(20)

if __name__ == "__main__":
    list(run_tasks(begin, range(6), Pool("loky", 2)))
"""


def test_workers_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    """Each task holds a lock: what can be taken is of a task that has ended."""
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)]) as driver:
        wait_for(lambda: len(list(tmp_path.glob("*.begun"))) == 2)
        driver.kill()
    killed = time.monotonic()
    files = [path.with_suffix("").open() for path in tmp_path.glob("*.begun")]
    for file in files:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.close()
    assert time.monotonic() - killed < 10
    time.sleep(1)
    assert len(list(tmp_path.glob("*.begun"))) == len(files) == 2


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "dask"}, r"^backend must be one of loky, ray, threading, got \"dask\""),
        ({"workers": 0}, r"^workers must be 1 or more, got 0"),
        ({"retries": -1}, r"retries must be 0 or more, got 0 and -1"),
        ({"gpus": 1}, r"GPUs per task are Ray's, and the backend is loky. Choose --backend ray"),
        ({"address": "auto"}, r"Choose --backend ray"),
    ],
)
def test_pools_that_cannot_be_meant_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Pool(**changes)


def test_ray_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(InputError, match=r"needs Ray. Install it: pip install 'mri-alm\[cluster\]'"):
        Pool("ray")


class OneByOne:
    """What `run_tasks` uses of Ray, in this process; item 1 is lost with its node, item 2 is not read there."""

    exceptions = SimpleNamespace(
        RayError=OSError, RayTaskError=PermissionError, WorkerCrashedError=ConnectionResetError,
        LocalRayletDiedError=(), NodeDiedError=(), ObjectLostError=(), OutOfMemoryError=(),
    )  # fmt: skip

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.resources = nodes or ({"CPU": 4.0, "GPU": 1.0},) * 2
        self.options: dict[str, Any] = {}
        self.waiting: list[Any] = []
        self.most = 0

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": sum(node.get("CPU", 0) for node in self.resources)}

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}
        return [dead, *({"Alive": True, "Resources": node} for node in self.resources)]

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda *given: (function, given))

    def wait(self, references: list[Any]) -> tuple[list[Any], list[Any]]:
        self.most = max(self.most, len(references))
        return references[-1:], references[:-1]

    def get(self, reference: Any) -> Any:
        function, given = reference
        if given[1] == 1:
            raise self.exceptions.WorkerCrashedError
        if given[1] == 2:
            raise self.exceptions.RayTaskError("No module named mri_alm")
        logger = logging.getLogger("mri_alm")
        logger.propagate = False  # what a worker logs stays there
        try:
            return function(*given)
        finally:
            logger.propagate = True


def test_on_ray_tasks_wait_for_a_worker_and_a_lost_one_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = OneByOne()
    monkeypatch.setattr("mri_alm.runtime.tasks._ray", lambda: ray)
    pool = Pool("ray", 3, gpus=0.5, retries=4)
    found = {outcome.item: outcome for outcome in run_tasks(square, range(7), pool)}
    assert ray.options == {"num_cpus": 2, "num_gpus": 0.5, "max_retries": 4}
    assert ray.most == 3
    assert {item: found[item].result for item in (0, 5, 6)} == {0: 0, 5: 25, 6: 36}
    with pytest.raises(StudyError, match=r"^study 3 has no T2$"):
        found[3].get()
    with pytest.raises(InputError, match=r"^Task 1: its process died each time it was started \(5 times\)"):
        found[1].get()
    with pytest.raises(PermissionError, match="No module named mri_alm"):
        found[2].get()


def warn(item: int) -> int:
    logging.getLogger("mri_alm").warning("study %s has no gland", item)
    return item


def test_warnings_of_ray_s_workers_are_told_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mri_alm.runtime.tasks._ray", OneByOne)
    assert [outcome.get() for outcome in run_tasks(warn, [7], Pool("ray"))] == [7]
    assert caplog.messages == ["study 7 has no gland"]


class Joined(OneByOne):
    """A cluster that counts how often it is joined and left."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = self.left = 0

    def is_initialized(self) -> bool:
        return self.joined > self.left

    def init(self, **_: Any) -> None:
        self.joined += 1

    def shutdown(self) -> None:
        self.left += 1


def test_a_cluster_is_joined_once_for_all_rounds_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Joined()
    monkeypatch.setattr("mri_alm.runtime.tasks._ray", lambda: ray)
    with joined(Pool("threading")):
        assert ray.joined == 0
    pool = Pool("ray")
    with joined(pool):
        for _ in range(2):
            assert [outcome.get() for outcome in run_tasks(warn, [7], pool)] == [7]
            assert (ray.joined, ray.left) == (1, 0)
    assert (ray.joined, ray.left) == (1, 1)
    assert [outcome.get() for outcome in run_tasks(warn, [7], pool)] == [7]
    assert (ray.joined, ray.left) == (2, 2)


def mode_of_a_file(folder: Path) -> int:
    (folder / "file").touch()
    return stat.S_IMODE((folder / "file").stat().st_mode)


def test_a_task_writes_with_the_umask_that_its_driver_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = mri_alm.runtime.tasks._Task(mode_of_a_file, Path.cwd(), "027", None, threads=False)
    monkeypatch.setenv("MRI_ALM_UMASK", "077")  # as on another machine
    assert task(tmp_path).get() == 0o640


def test_a_machine_without_the_folder_is_said(tmp_path: Path) -> None:
    outcome = mri_alm.runtime.tasks._Task(square, tmp_path / "absent", None, None, threads=False)(0)
    with pytest.raises(InputError, match=r"^This machine \(.*\) has no folder .*absent \(No such file or directory\)"):
        outcome.get()


@pytest.mark.parametrize(
    ("nodes", "pool", "cores"),
    [
        ([{"CPU": 16.0}, {"CPU": 16.0}], Pool("loky", 1), 16),
        ([{"CPU": 16.0}, {"CPU": 16.0}], Pool("loky", 4), 8),
        ([{"CPU": 2.0}], Pool("loky", 4), 1),
        ([{"CPU": 64.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}], SimpleNamespace(workers=1, gpus=1), 8),
    ],
)
def test_a_task_on_ray_asks_for_no_more_than_a_node_has(nodes: list[dict[str, float]], pool: Any, cores: int) -> None:
    assert mri_alm.runtime.tasks._cores_per_task(OneByOne(*nodes), pool) == cores


def test_more_gpus_than_any_node_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = OneByOne({"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0})
    monkeypatch.setattr("mri_alm.runtime.tasks._ray", lambda: ray)
    message = r"a core and the 2 GPUs of a task \(nodes: 4 cores and 0 GPUs, 2 cores and 1 GPUs\)"
    with pytest.raises(InputError, match=message):
        next(run_tasks(square, [0], Pool("ray", gpus=2)))


def test_ray_takes_the_function_that_workers_call() -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mri-alm[cluster]'")
    assert ray.remote(num_cpus=1, num_gpus=0, max_retries=2)(mri_alm.runtime.tasks._call)


def test_an_outcome_without_error_is_its_result() -> None:
    assert TaskResult("item", 3).get() == 3


def test_threads_leave_the_caller_s_umask(tmp_path: Path) -> None:
    """Each thread's own setting and restoring would leave whichever came last."""
    before = os.umask(0o022)
    try:
        barrier = threading.Barrier(2)
        list(run_tasks(lambda _: barrier.wait(10), [1, 2], Pool("threading", 2)))
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
