"""Who trains what: the models that a table still lacks, and the paper's staged search for settings.

Every training is kept in a result file. What was cut off goes on, and several processes, also on several machines, may
work on one table or one search: each model is trained by one of them.
"""

import itertools
import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mri_alm.bundle.config import require_checkout
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.cifar.table import BenchmarkTable, Method, Training, read_results
from mri_alm.errors import InputError
from mri_alm.runtime.files import read_json, write_bytes, write_json
from mri_alm.runtime.interruption import reached
from mri_alm.runtime.locks import InUseError, exclusive_lock
from mri_alm.runtime.tasks import Pool, TaskResult, run_tasks

logger = logging.getLogger("mri_alm.cifar.training")

Grid = Mapping[str, Sequence[Any]]  # setting to the values tried
COMMON = {"learning_rate": (3e-4, 1e-3, 3e-3), "weight_decay": (0.0, 2e-4)}
MU0_RHO: Grid = {"mu0": ("auto", 1e-7, 1e-6, 1e-5, 1e-4, 1e-3), "rho": (2.0, 3.0)}
DELTA: dict[str, Grid] = {"binary": {"delta": (0.1, 0.25, 0.5, 1.0)}, "multiclass": {"delta": (0.05, 0.1)}}
OWN: dict[str, Grid] = {
    **{loss: {"margin": (0.5, 2.0, 4.0)} for loss in ("s_ml", "a_ml", "s_lm", "a_lm")},
    **{loss: {"gamma": (0.5, 1.0, 2.0)} for loss in ("s_fl", "a_fl", "fl")},
    **{loss: {"beta": (0.99, 0.999, 0.9999)} for loss in ("cb_bce", "cb_ce")},
}


def train_missing(
    table: BenchmarkTable,
    trainings: Sequence[Training],
    *,
    data: Path,
    runs: Path,
    results: Path,
    pool: Pool,
    wait: bool = False,
) -> int:
    """Train every model whose result file is not there yet; after each, say how long the rest will take.

    Args:
        table: What is trained.
        trainings: In this order.
        data: Where the images lie.
        runs: Checkpoints; may be deleted when all is done.
        results: Where the result files go.
        pool: Where the models are trained.
        wait: Wait for a model that another process trains, instead of leaving it.

    Returns:
        How many were left to other processes.

    Raises:
        InputError: If the settings or the archive cannot be used.
    """
    waiting = [training for training in trainings if not table.result(results, training).exists()]
    logger.info("%s, protocol %s: %d of %d models trained.", table.name, table.protocol,
                len(trainings) - len(waiting), len(trainings))  # fmt: skip
    if waiting:
        require_checkout(table.config)
    start = time.monotonic()
    failed: list[TaskResult] = []
    elsewhere = number = 0
    reached(lambda: f"with {number} of {len(waiting)} models trained")
    task = partial(_train_and_keep, table, data=data, runs=runs, results=results, wait=wait)
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
        logger.info("%s: kept epoch %d, validation %.3f, %s; %d models left, about %s",
                    name, outcome.result["epoch"], outcome.result["auc"], duration(each),
                    len(waiting) - number, duration(each * (len(waiting) - number)))  # fmt: skip
    for outcome in sorted(failed, key=lambda one: not one.trace):  # a bug shows its traceback
        outcome.get()
    return elsewhere


def _train_and_keep(
    table: BenchmarkTable, training: Training, *, data: Path, runs: Path, results: Path, wait: bool
) -> dict[str, float]:
    """One model and its result file, unless another process has written it meanwhile; gives the epoch it kept."""
    path = table.result(results, training)
    with exclusive_lock(path.with_suffix(".lock"), wait=wait):
        if not path.exists():
            kept = table.asked(training) | {"method": training.method.key} | train_one(table, training, data, runs)
            kept |= {"made": {"date": date.today().isoformat(), "machine": _machine(), "torch": version("torch")}}
            text = json.dumps(kept, separators=(",", ":"), allow_nan=False)  # one line: it holds thousands of numbers
            write_bytes(path, f"{text}\n".encode())
    best: dict[str, float] = read_json(path)["best"]
    return best


def _machine() -> str:
    """The kind of GPU, or of processor; nothing that names this one machine."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    information = Path("/proc/cpuinfo")
    lines = information.read_text("utf-8").splitlines() if information.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def train_one(table: BenchmarkTable, training: Training, data: Path, runs: Path) -> dict[str, Any]:
    """Train one model, going on from where an earlier start was cut off; what its ``result.json`` says."""
    from monai.bundle import ConfigWorkflow

    overrides = table.overrides(training, data, runs)
    workflow = ConfigWorkflow(table.config, meta_file=None, logging_file=False, workflow_type="train", **overrides)
    workflow.initialize()
    workflow.run()
    workflow.finalize()
    return read_json(RunFolder(overrides["run_dir"]).split(training.split).result)


@dataclass(frozen=True)
class Search:
    """The stages of one table: common settings on the plain loss, the loss's own value, mu0 and rho, delta.

    Each is a grid and keeps what the stages before it chose. Only validation metrics count.

    Args:
        table: What is trained.
        data: Where the images lie.
        folder: Checkpoints and result files, a folder per settings; processes that share it share the search.
        runs: Trainings per point (the paper: 10).
        pool: Where they run.

    Raises:
        InputError: If ``runs`` is less than 1.
    """

    table: BenchmarkTable
    data: Path
    folder: Path
    runs: int
    pool: Pool

    def __post_init__(self) -> None:
        """Refuse a search without trainings."""
        if self.runs < 1:
            raise InputError(f"runs must be 1 or more trainings per point, got {self.runs}.")

    def common(self) -> dict[str, Any]:
        """Settings shared by all methods, chosen on the plain loss; for long tails those of the literature (none)."""
        return self._best(COMMON if self.table.binary else {}, self.table.method(self.table.baseline).settings)

    def method(self, key: str, common: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that is chosen for one method, including ``common``.

        Args:
            key: See :meth:`mri_alm.cifar.table.BenchmarkTable.method`.
            common: What :meth:`common` found.
        """
        method = self.table.method(key)
        own, *constraint = _grids(self.table, method)
        fixed = {name: value for name, value in method.settings.items() if name not in {*own, "mu0"}} | dict(common)
        # The loss's own value does not depend on the constraint, so it is searched once for all of its methods.
        plain = {name: value for name, value in (fixed | {"mu0": 0}).items() if name in ("loss", "mu0", *COMMON)}
        chosen = self._best(own, plain)
        for grid in constraint:
            chosen |= self._best(grid, fixed | chosen)
        return dict(common) | chosen

    def _best(self, grid: Grid, fixed: Mapping[str, Any]) -> dict[str, Any]:
        """The point of a grid whose mean validation metric over the runs is highest; of equal ones the first."""
        points = _points_of(grid)
        if not points:
            return {}
        plan = [[self.table.custom({**fixed, **point}, split) for split in range(self.runs)] for point in points]
        trainings = list(itertools.chain(*plan))
        train = partial(train_missing, self.table, trainings, data=self.data, pool=self.pool)
        if train(runs=self.folder, results=self.folder):  # others are at some
            train(runs=self.folder, results=self.folder, wait=True)
        found = read_results(self.table, self.folder, trainings)
        values = [[found[one.method.key, 0, one.split]["best"]["auc"] for one in runs] for runs in plan]
        means = [sum(runs) / self.runs for runs in values]
        best = points[means.index(max(means))]
        logger.info("%s: %s, validation %.4f", fixed["loss"], best, max(means))
        return best


def points(table: BenchmarkTable, methods: Sequence[str]) -> int:
    """How many points a search of these methods has, for the time it will take."""
    wanted = [table.method(key) for key in methods]
    own = {method.loss: _grids(table, method)[0] for method in wanted}  # once for all methods of a loss
    constraints = [grid for method in wanted for grid in _grids(table, method)[1:]]
    return sum(len(_points_of(grid)) for grid in [COMMON if table.binary else {}, *own.values(), *constraints])


def write_tuned(path: Path, table: BenchmarkTable, runs: int, chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Add what was chosen to ``tuned.json``, beside what other searches put there.

    Args:
        path: The file.
        table: What was searched.
        runs: Trainings per point.
        chosen: Method to settings.
    """
    with exclusive_lock(path.with_suffix(".lock"), wait=True):
        content = read_json(path) if path.exists() else {}
        here = content.setdefault(table.name, {}).setdefault(table.protocol, {"runs": runs, "methods": {}})
        here["runs"] = runs
        here["methods"] |= {key: dict(settings) for key, settings in chosen.items()}
        write_json(path, content)


def _grids(table: BenchmarkTable, method: Method) -> list[Grid]:
    """The stages of a method: the loss's own value; with the constraint mu0 and rho, then delta."""
    own = OWN.get(method.loss, {})
    if method.loss == "w_bce" and "ratio" in table.settings:
        ratio = float(table.settings["ratio"])
        own = {"positive_weight": (round(ratio / 3, 3), round(2 * ratio / 3, 3), ratio)}
    return [own, MU0_RHO, DELTA["binary" if table.binary else "multiclass"]] if method.constrained else [own]


def _points_of(grid: Grid) -> list[dict[str, Any]]:
    values = itertools.product(*grid.values()) if grid else ()
    return [dict(zip(grid, point, strict=True)) for point in values]
