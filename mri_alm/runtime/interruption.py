"""How a program ends early: one sentence, for Ctrl-C and SIGTERM (status 130, 143) as for bad input (2)."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from types import FrameType, TracebackType

from mri_alm.errors import InputError, find_cause

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)
_PATIENCE = 1.0  # seconds: a shell or `timeout` may send one stop twice; a second one later is a person's who insists


class StoppedError(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived. What is open closes on the way up, as after any error; nothing catches it.

    Args:
        number: The signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class _Stop:
    """What this process does when it is told to stop."""

    def __init__(self) -> None:
        self.where: Callable[[], str] = str
        self.advice = "the same command goes on"
        self.since: float | None = None

    def arrive(self, number: int, frame: FrameType | None) -> None:
        if not _in_program(frame):  # it has ended, and exit functions run
            self.leave(number, at_exit=False)
        elif self.since is None:
            self.since = time.monotonic()
            raise StoppedError(number)
        elif time.monotonic() - self.since > _PATIENCE:
            self.leave(number, at_exit=False)

    def report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.leave(getattr(error, "number", signal.SIGINT))
        if cause := find_cause(error, InputError):  # of a part that MONAI makes, where no block of ours stands around
            sys.stderr.write(f"\n{cause}\n")
            raise SystemExit(2)
        sys.__excepthook__(kind, error, trace)

    def leave(self, number: int, *, at_exit: bool = True) -> None:
        """Without the interpreter's own end, which waits for threads, and aborts over those of C++."""
        with contextlib.suppress(Exception):
            if os.environ.get("RANK", "0") == "0":  # one of the processes that torchrun started speaks
                sys.stderr.write(f"\nStopped{self.where()}; {self.advice}.\n")
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            if at_exit:
                _end_idle_workers()
                atexit._run_exitfuncs()  # workers of joblib and Ray end
        os._exit(128 + number)


def _in_program(frame: FrameType | None) -> bool:
    """Whether a frame stands, through its callers, in the program itself: a script or what follows ``python -m``."""
    while frame and frame.f_back:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("<module>", "_run_module_as_main")


def _end_idle_workers() -> None:
    """Joblib's, which multiprocessing's exit function waits for; only the interpreter's own end would end them."""
    if "joblib.externals.loky.reusable_executor" in sys.modules:
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor(reuse=True).shutdown(kill_workers=True)


_stop = _Stop()


def answer_signals(advice: str | None = None) -> None:
    """From now on SIGINT, SIGTERM and bad input end this process in one sentence, with status 130, 143 and 2.

    A signal that the caller ignores (``nohup``, a job in the background) or handles stays the caller's. A worker
    (:func:`deaf_children`) is ended by the process that started it.

    Args:
        advice: The end of the sentence: what is kept and how to go on.
    """
    worker = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if worker or threading.current_thread() is not threading.main_thread():
        return
    _stop.advice = advice or _stop.advice
    for number in SIGNALS:
        if signal.getsignal(number) in _DEFAULTS:
            signal.signal(number, _stop.arrive)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _stop.report


def reached(where: Callable[[], str]) -> None:
    """Remember how far the work is.

    Args:
        where: Asked when a signal comes; such as ``"after epoch 7 of split 2"``.
    """
    _stop.where = lambda: f" {where()}"


@contextlib.contextmanager
def kept_answers() -> Iterator[None]:
    """The answers to signals stay as they are, whatever a library puts in their place meanwhile, as Ray does."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, answer in before.items():
                signal.signal(number, answer)


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that start meanwhile never see Ctrl-C, which a terminal sends to them too: their parent ends them."""
    resource_tracker.ensure_running()  # the first worker starts it otherwise, and it takes the mask away
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Print an :class:`InputError`, also one that MONAI wrapped, without a traceback and leave with status 2."""
    try:
        yield
    except Exception as error:
        cause = find_cause(error, InputError)
        if cause is None:
            raise
        sys.stderr.write(f"\n{cause}\n")
        raise SystemExit(2) from error
