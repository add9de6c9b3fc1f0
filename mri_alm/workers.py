"""Studies prepared side by side; those that may have cost a process its life, alone and in a process of their own."""

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from typing import Any

from tqdm import tqdm

from mri_alm.atomic import sweep
from mri_alm.dicom_file import silence_readers
from mri_alm.errors import InputError, StudyError
from mri_alm.preparation import Job, Preparation
from mri_alm.tasks import LostTaskError, Outcome, Pool, run_tasks

logger = logging.getLogger("mri_alm")

KILLED = StudyError(
    "killed",
    "The process that prepared this study alone was killed, most likely for want of memory. Free memory, or make its "
    "images smaller; --resume tries it again.",
)


def prepare_all(preparation: Preparation, jobs: Sequence[Job], *, pool: Pool, strict: bool) -> int:
    """Prepare the studies that are not finished; gives how many that were.

    A process that is killed, as the system does when memory runs out, takes all its studies in work with it. Threads
    are this very process: the next start finds the traces and prepares these studies last, one at a time, each in a
    process of its own. Of a pool of processes or a cluster they are begun again at once. A study whose process is
    killed each time becomes a failed one, ``killed``.

    Args:
        preparation: The cohort, which this process alone writes to.
        jobs: All studies.
        pool: Where studies are prepared.
        strict: Stop at the first failed study.

    Raises:
        InputError: If a study failed and ``strict`` is set, or the disk is full.
    """
    begun = {part.name for part in preparation.folder.glob(".part-*/*")}
    sweep(preparation.folder)
    todo = [job for job in jobs if preparation.finished(job) is None]
    apart = [job for job in todo if job.key in begun]
    if apart:
        logger.warning(
            "%d studies were in work when an earlier run was killed, perhaps for want of memory: they come last, each "
            "alone in a process of its own.",
            len(apart),
        )
    at_once = [job for job in todo if job.key not in begun]
    with closing(run_tasks(preparation.prepare, at_once, pool)) as together:
        first = (_record(preparation, outcome) for outcome in together)
        records = chain(first, (prepare_apart(preparation, job) for job in apart))
        for record in tqdm(records, "prepare", len(todo), unit="study", mininterval=_interval()):
            if strict and record["status"] == "failed":
                raise InputError(
                    f"Study {record['study']} failed ({record['error_code']}): {record['error_text']} With "
                    "--strict the run stops here; finished studies are kept for --resume, no manifest is written."
                )
    sweep(preparation.folder)
    return len(todo)


def _record(preparation: Preparation, outcome: Outcome) -> Any:
    if isinstance(outcome.error, LostTaskError):
        return preparation.prepare(outcome.item, refused=KILLED)
    return outcome.get()


def _interval() -> float:
    """Seconds between lines of progress: many on a terminal, one a minute in a log file."""
    return 0.2 if sys.stderr.isatty() else 60.0


def prepare_apart(preparation: Preparation, job: Job) -> dict[str, Any]:
    """What :meth:`Preparation.prepare` does, where the system may kill it for memory without harm to the others.

    A killed study becomes a failed one, ``killed``.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=silence_readers) as pool:
        try:
            return pool.submit(preparation.prepare, without_headers(job)).result()
        except BrokenProcessPool:
            sweep(preparation.folder)
            return preparation.prepare(job, refused=KILLED)


def without_headers(job: Job) -> Job:
    """The study as another process can be told of it: open headers stay here, and are read again there."""
    item = job.source.item
    if "dicom" not in item:
        return job
    return replace(job, source=replace(job.source, item=item | {"dicom": replace(item["dicom"], headers=[])}))
