"""Independent tasks - splits, trainings, studies - on one machine or a Ray cluster; each has an outcome of its own."""

import contextlib
import functools
import logging
import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from logging.handlers import QueueHandler
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mri_alm.errors import InputError, find_cause, one_of
from mri_alm.runtime.atomic import private_files
from mri_alm.runtime.interruption import deaf_children, kept_answers

logger = logging.getLogger("mri_alm")

BACKENDS = ("loky", "ray", "threading")

# Ray's errors that say that a process or its machine went away.
_LOST = ("LocalRayletDiedError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError", "WorkerCrashedError")
# Ray reads it when it is imported. Without it ``ray.init`` puts the machine's own address in the place of 127.0.0.1,
# and then its servers listen on all interfaces; with "0" a node that is started here is reached from here alone.
_ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@dataclass(frozen=True)
class Pool:
    """Where tasks run. No backend sends anything to anybody but the cluster's own machines.

    Args:
        backend: ``"loky"``: processes of this machine. ``"ray"``: a Ray cluster, whose machines see this folder under
            the same path and have the package installed. ``"threading"``: threads of this process, for functions that
            leave the interpreter's lock.
        workers: Tasks at once, >= 1. Each gets its share of the cores (the number of workers times their threads is at
            most the number of cores). One worker of ``"loky"`` is this process itself.
        address: Of a Ray cluster that runs, such as ``"auto"`` or ``"head:6379"``; None starts one on this machine.
        gpus: GPUs per task, by Ray; a fraction shares one.
        retries: How often a task whose process or machine died is started again, >= 0.

    Raises:
        InputError: If a value is none of these, or Ray is asked for and not installed.
    """

    backend: str = "loky"
    workers: int = 1
    address: str | None = None
    gpus: float = 0
    retries: int = 2

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        one_of("backend", self.backend, BACKENDS)
        if self.workers < 1:
            raise InputError(f"workers must be 1 or more, got {self.workers}.")
        if self.gpus < 0 or self.retries < 0:
            raise InputError(f"GPUs per task and retries must be 0 or more, got {self.gpus} and {self.retries}.")
        if self.backend != "ray" and (self.address or self.gpus):
            raise InputError(
                f"An address and GPUs per task are Ray's, and the backend is {self.backend}. Choose --backend ray."
            )
        if self.backend == "ray":
            if not self.address:
                os.environ[_ON_LOOPBACK] = "0"
            _ray()


class LostTaskError(InputError):
    """A task whose process died each time it was started."""


@dataclass(frozen=True)
class TaskResult:
    """What became of one task.

    Attributes:
        item: What the task was given.
        result: What it returned.
        error: Why it failed; an :class:`InputError` is the user's to mend, anything else is a bug.
        trace: Where a bug was met, as text.
    """

    item: Any
    result: Any = None
    error: Exception | None = None
    trace: str = ""

    def get(self) -> Any:
        """The result; raises the error of a task that failed, a bug with its traceback."""
        if self.error is None:
            return self.result
        raise self.error from (RuntimeError(f"in a task:\n{self.trace}") if self.trace else None)


Calls = Generator[tuple[int, TaskResult], None, None]


def run_tasks(function: Callable[[Any], Any], items: Iterable[Any], pool: Pool) -> Generator[TaskResult, None, None]:
    """Apply a function to every item; outcomes come as they are ready, in any order, and none is lost by another's.

    Args:
        function: Importable under its name on every worker. It may be called again with the same item after a crash,
            so it has to go on from what it finished.
        items: Small: files are read and written by the tasks themselves. Messages name them by ``str``.
        pool: Where.

    Yields:
        One outcome per item.

    Raises:
        InputError: If the cluster cannot be reached.
    """
    driver = os.getpid() if pool.backend == "loky" else None
    task = _Task(function, Path.cwd(), os.environ.get("MRI_ALM_UMASK"), driver, threads=pool.backend == "threading")
    with joined(pool):
        run = {"loky": _in_processes, "ray": _on_ray, "threading": _in_threads}[pool.backend]
        yield from run(task, list(items), pool)


@contextlib.contextmanager
def joined(pool: Pool) -> Iterator[None]:
    """Join the pool's Ray cluster once for every :func:`run_tasks` in the block; nothing with other backends.

    Raises:
        InputError: If the cluster cannot be reached.
    """
    own = pool.backend == "ray" and not _ray().is_initialized()
    try:
        if own:
            with kept_answers():
                _join(_ray(), pool)
        yield
    finally:
        if own:
            _ray().shutdown()


@dataclass(frozen=True)
class _Task:
    function: Callable[[Any], Any]
    folder: Path
    mask: str | None  # MRI_ALM_UMASK of the driver, which a worker of Ray does not see
    driver: int | None  # the process whose locks protect what the task writes, where it may be the worker's parent
    threads: bool  # which share folder, environment and umask with the caller

    def __call__(self, item: Any) -> TaskResult:
        if self.driver is not None and self.driver != os.getpid():
            _exit_with_parent(self.driver)
        try:
            if self.threads:
                return TaskResult(item, self.function(item))
            self._enter()
            with private_files():  # a worker has an umask of its own
                return TaskResult(item, self.function(item))
        except (Exception, SystemExit) as error:  # a bundle config that refuses its input leaves
            if cause := find_cause(error, InputError):
                return TaskResult(item, error=_portable(cause))
            return TaskResult(item, error=_portable(error), trace=traceback.format_exc())

    def _enter(self) -> None:
        """The driver's folder: a worker may be on another machine, or of an earlier start."""
        os.environ.update({"MRI_ALM_UMASK": self.mask} if self.mask else {})
        try:
            if Path.cwd() != self.folder:
                os.chdir(self.folder)
        except OSError as error:
            raise InputError(
                f"This machine ({socket.gethostname()}) has no folder {self.folder} ({error.strerror}). Start the "
                "command in a folder that all machines of the cluster see under the same path."
            ) from error


@functools.cache
def _exit_with_parent(driver: int) -> None:
    """End this worker when the driver ends, even by ``kill -9``: it would go on writing, without the driver's locks.

    A thread that looks, since Linux's PR_SET_PDEATHSIG goes by the thread that started the worker, not its process.

    Args:
        driver: The process that started this one.
    """

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(0.5)
        os._exit(1)

    if os.getppid() != driver:
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


def _portable(error: BaseException) -> Exception:
    """An error that reaches another process: some exceptions cannot be pickled, others not be read back."""
    try:
        if not isinstance(error, Exception):
            raise TypeError("no error")
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _lost(item: Any, pool: Pool) -> TaskResult:
    text = (
        f"Task {item}: its process died each time it was started ({pool.retries + 1} times): killed, or out of memory. "
        "Lower --workers or the memory of a task, then start the same command again: it goes on from what is finished."
    )
    return TaskResult(item, error=LostTaskError(text))


def _in_threads(task: _Task, items: list[Any], pool: Pool) -> Iterator[TaskResult]:
    """Not joblib's threads: given up early, they would go on behind the caller, who has left its locks."""
    import SimpleITK as sitk  # noqa: N813

    # ITK enters its file formats into a list of its own at the first image that is read or written. A thread that goes
    # through the list meanwhile crashes the process, of fresh starts of two threads a few in a thousand (decision 62).
    sitk.ImageFileReader().GetRegisteredImageIOs()
    with ThreadPoolExecutor(pool.workers) as threads:
        try:
            for call in as_completed([threads.submit(task, item) for item in items]):
                yield call.result()
        finally:
            threads.shutdown(cancel_futures=True)


def _in_processes(task: _Task, items: list[Any], pool: Pool) -> Iterator[TaskResult]:
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import BrokenProcessPool

    waiting = dict(enumerate(items))

    def start(numbers: list[int], workers: int) -> Calls:
        # Idle workers stay: loky does not watch those that it starts in the place of ended ones, and waits for ever.
        stay = {"idle_worker_timeout": 10**6}
        parallel = Parallel(workers, "loky", return_as="generator_unordered", batch_size=1, **stay)
        with deaf_children():
            calls: Calls = parallel(delayed(_numbered)(task, n, waiting[n]) for n in numbers)
        return calls

    for _ in range(pool.retries):
        try:
            with _ended(start(list(waiting), pool.workers)) as calls:
                for number, outcome in calls:
                    yield outcome
                    del waiting[number]
            return
        except BrokenProcessPool:
            logger.warning("A worker died (killed, or out of memory). %d tasks start again.", len(waiting))
    for number in list(waiting):  # one process that dies takes the others' with it, so the last try is one by one
        try:
            # As many workers, for as many threads each; two at least, with one joblib would use this process.
            ((_, outcome),) = start([number], max(2, pool.workers))
        except BrokenProcessPool:
            outcome = _lost(waiting[number], pool)
        yield outcome


@contextlib.contextmanager
def _ended(calls: Calls) -> Iterator[Calls]:
    """Calls that are given up when the block ends early, without joblib's warning that nobody waits for them."""
    try:
        yield calls
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls.close()


def _numbered(task: _Task, number: int, item: Any) -> tuple[int, TaskResult]:
    return number, task(item)


def _on_ray(task: _Task, items: list[Any], pool: Pool) -> Iterator[TaskResult]:
    ray = _ray()
    cores = _cores_per_task(ray, pool)  # Ray bounds the threads by them
    remote = ray.remote(num_cpus=cores, num_gpus=pool.gpus, max_retries=pool.retries)(_call)
    queue, running = iter(items), {}
    while True:
        for item in queue:
            running[remote.remote(task, item)] = item
            if len(running) >= pool.workers:
                break
        if not running:
            return
        (done, *_), _ = ray.wait(list(running))
        item = running.pop(done)
        try:
            outcome, records = ray.get(done)
            for record in records:
                logger.handle(logging.makeLogRecord(vars(record)))  # of the kind that this process makes
        except ray.exceptions.RayError as error:
            lost = isinstance(error, tuple(getattr(ray.exceptions, name) for name in _LOST))
            logger.warning("Task %s %s: %s", item, "was lost" if lost else "failed", type(error).__name__)
            outcome = _lost(item, pool) if lost else TaskResult(item, error=error, trace=str(error))
        yield outcome


def _cores_per_task(ray: Any, pool: Pool) -> int:
    """Each task's share of the cluster, which one node must have: Ray waits for ever for what no node has."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [int(node.get("CPU", 0)) for node in nodes if node.get("GPU", 0) >= pool.gpus and node.get("CPU", 0) >= 1]
    if not fitting:
        found = ", ".join(f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise InputError(
            f"No node of the Ray cluster has a core and the {pool.gpus:g} GPUs of a task (nodes: {found or 'none'}). "
            "Lower --gpus-per-task, or add a node that has them."
        )
    return max(1, min(int(ray.cluster_resources().get("CPU", 1)) // pool.workers, max(fitting)))


def _call(task: _Task, item: Any) -> tuple[TaskResult, list[logging.LogRecord]]:
    """The outcome, and the warnings on the way: what a worker of Ray logs stays on its machine."""
    kept: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = QueueHandler(kept)  # makes plain text of what a record holds
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        outcome = task(item)
    finally:
        logger.removeHandler(handler)
    return outcome, [kept.get() for _ in range(kept.qsize())]


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise InputError("The backend ray needs Ray. Install it: pip install 'mri-alm[cluster]'.") from None
    return ray


def _join(ray: Any, pool: Pool) -> None:
    start = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False}
    where = {"address": pool.address} if pool.address else start
    try:
        ray.init(**where, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises this very class when its processes do not come up in time
        raise InputError(
            f"There is no Ray cluster at {pool.address or 'this machine'} ({error}). Start one with ray start --head, "
            "or leave out --address."
        ) from error
