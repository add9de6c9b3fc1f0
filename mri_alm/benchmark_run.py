"""Train what a table still lacks, each model a task that is resumed where it was cut off."""

import json
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from monai.bundle import ConfigWorkflow

from mri_alm.benchmark_plan import Table, Training, described
from mri_alm.files import write_bytes
from mri_alm.locks import InUseError, only_user
from mri_alm.tasks import Outcome, Pool, run_tasks

logger = logging.getLogger("mri_alm.benchmark")


def train_missing(
    table: Table, trainings: Sequence[Training], *, data: Path, runs: Path, results: Path, pool: Pool
) -> int:
    """Train every model whose result file is not there yet; after each, say how long the rest will take.

    Several processes may do so with one results folder, on several machines: each model is trained by one of them.

    Args:
        table: What is trained.
        trainings: In this order.
        data: Where the CIFAR archive lies.
        runs: Checkpoints; may be deleted when all is done.
        results: Where the result files go.
        pool: Where the models are trained.

    Returns:
        How many were trained now.

    Raises:
        InputError: If the settings or the archive cannot be used.
    """
    waiting = [training for training in trainings if not table.result(results, training).exists()]
    logger.info("%s, protocol %s: %d of %d models trained.", table.name, table.protocol,
                len(trainings) - len(waiting), len(trainings))  # fmt: skip
    start = time.monotonic()
    failed: list[Outcome] = []
    elsewhere = 0
    task = partial(_train_and_keep, table, data=data, runs=runs, results=results)
    for number, outcome in enumerate(run_tasks(task, waiting, pool), 1):
        training = outcome.item
        name = f"{training.method.key} split {training.split} seed {training.seed}"
        if isinstance(outcome.error, InUseError):
            logger.info("%s: another process is at it.", name)
            elsewhere += 1
            continue
        if outcome.error:
            logger.error("%s failed: %s", name, outcome.error)
            failed.append(outcome)
            continue
        each = (time.monotonic() - start) / (number - elsewhere)
        logger.info("%s: best epoch %d, validation %.3f, %s; %d models left, about %s",
                    name, outcome.result["epoch"], outcome.result["auc"], duration(each),
                    len(waiting) - number, duration(each * (len(waiting) - number)))  # fmt: skip
    if elsewhere:
        logger.warning("%d models were left to other processes: start this again when those have ended.", elsewhere)
    for outcome in sorted(failed, key=lambda one: not one.trace):  # a bug shows its traceback
        outcome.get()
    return len(waiting) - elsewhere


def _train_and_keep(table: Table, training: Training, *, data: Path, runs: Path, results: Path) -> dict[str, float]:
    """One model and its result file, unless another process has written it meanwhile; gives its best epoch."""
    path = table.result(results, training)
    with only_user(path.with_suffix(".lock")):
        if not path.exists():
            write_bytes(path, compact(described(table, training, train_one(table, training, data, runs))))
    best: dict[str, float] = json.loads(path.read_text("utf-8"))["best"]
    return best


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def compact(content: dict[str, Any]) -> bytes:
    """A JSON object on one line: a result holds thousands of numbers."""
    return (json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n").encode()


def train_one(table: Table, training: Training, data: Path, runs: Path) -> dict[str, Any]:
    """Train one model, going on from where an earlier start was cut off; what its ``result.json`` says."""
    overrides = table.overrides(training, data, runs)
    workflow = ConfigWorkflow(table.config, meta_file=None, logging_file=False, workflow_type="train", **overrides)
    workflow.initialize()
    workflow.run()
    workflow.finalize()
    path = Path(overrides["run_dir"]) / f"split_{training.split}" / "result.json"
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return result
