"""Does a fresh process survive two threads that use SimpleITK? `python benchmarks/threads.py --starts 300`.

Each start is a fork that has imported SimpleITK and used nothing of it. Two threads resample and write small images in
it: by themselves, and as `mri_alm.runtime.tasks` starts them. Printed is how many starts ended by a signal.
"""

import argparse
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import SimpleITK as sitk  # noqa: N813

from mri_alm.runtime.tasks import Pool, run_tasks


def work(folder: Path, together: threading.Barrier, number: int) -> None:
    """What drawing a phantom begins with."""
    together.wait()
    image = sitk.GetImageFromArray(np.random.default_rng(number).normal(size=(8, 20, 20)).astype(np.float32))
    for _ in range(10):
        sitk.Resample(image, image, sitk.Transform(), sitk.sitkLinear)
    for count in range(10):
        sitk.WriteImage(image, folder / f"{number}_{count}.nii.gz", useCompression=True)


def by_themselves(task: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(task, range(2)))


def as_tasks(task: Callable[[int], None]) -> None:
    for outcome in run_tasks(task, range(2), Pool("threading", 2)):
        outcome.get()


def ended_by_a_signal(start: Callable[[Callable[[int], None]], None]) -> bool:
    """Whether a fork of this process that starts the threads dies."""
    with tempfile.TemporaryDirectory() as place:
        child = os.fork()
        if not child:
            start(partial(work, Path(place), threading.Barrier(2)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=300)
    starts = parser.parse_args().starts
    for start in (by_themselves, as_tasks):
        died = sum(ended_by_a_signal(start) for _ in range(starts))
        print(f"{start.__name__.replace('_', ' ')}: {died} of {starts} starts ended by a signal", flush=True)


if __name__ == "__main__":
    main()
