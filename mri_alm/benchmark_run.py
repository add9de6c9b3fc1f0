"""Train what a table still lacks, one model at a time, each resumed where it was cut off."""

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monai.bundle import ConfigWorkflow

from mri_alm.benchmark_plan import Table, Training, described
from mri_alm.files import write_bytes

logger = logging.getLogger("mri_alm.benchmark")


def train_missing(table: Table, trainings: Sequence[Training], *, data: Path, runs: Path, results: Path) -> int:
    """Train every model whose result file is not there yet; after each, say how long the rest will take.

    Args:
        table: What is trained.
        trainings: In this order.
        data: Where the CIFAR archive lies.
        runs: Checkpoints; may be deleted when all is done.
        results: Where the result files go.

    Returns:
        How many were trained now.

    Raises:
        InputError: If the settings or the archive cannot be used.
    """
    waiting = [training for training in trainings if not table.result(results, training).exists()]
    logger.info("%s, protocol %s: %d of %d models trained.", table.name, table.protocol,
                len(trainings) - len(waiting), len(trainings))  # fmt: skip
    start = time.monotonic()
    for number, training in enumerate(waiting, 1):
        result = train_one(table, training, data, runs)
        write_bytes(table.result(results, training), compact(described(table, training, result)))
        spent = time.monotonic() - start
        left = spent / number * (len(waiting) - number)
        logger.info("%s split %d seed %d: best epoch %d, validation %.3f, %s; %d models left, about %s",
                    training.method.key, training.split, training.seed, result["best"]["epoch"],
                    result["best"]["auc"], duration(spent / number), len(waiting) - number, duration(left))  # fmt: skip
    return len(waiting)


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
