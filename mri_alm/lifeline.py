"""A worker process that does not outlive the process that started it."""

import functools
import os
import threading
import time


@functools.cache
def end_with(driver: int) -> None:
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
