"""The paper's staged search: common settings on the plain loss, the loss's own value, mu0 and rho, delta.

Each stage is a grid in an Optuna study and keeps what the stages before it chose. Only validation metrics count. A
study lives in a database: several processes may work on one search, and one that was cut off goes on.
"""

import hashlib
import itertools
import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mri_alm.cifar.table import BenchmarkTable, Training
from mri_alm.errors import InputError
from mri_alm.runtime.files import write_json
from mri_alm.runtime.tasks import Pool, run_tasks

logger = logging.getLogger("mri_alm.cifar.search")

Evaluate = Callable[[Mapping[str, Any], int], float]
MU0 = ("auto", 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
RHO = (2.0, 3.0)
_POLL_S = 10.0
DELTA = {"binary": (0.1, 0.25, 0.5, 1.0), "multiclass": (0.05, 0.1)}
COMMON = {"learning_rate": (3e-4, 1e-3, 3e-3), "weight_decay": (0.0, 2e-4)}
OWN: dict[str, dict[str, tuple[float, ...]]] = {
    **{loss: {"margin": (0.5, 2.0, 4.0)} for loss in ("s_ml", "a_ml", "s_lm", "a_lm")},
    **{loss: {"gamma": (0.5, 1.0, 2.0)} for loss in ("s_fl", "a_fl", "fl")},
    **{loss: {"beta": (0.99, 0.999, 0.9999)} for loss in ("cb_bce", "cb_ce")},
}


@dataclass(frozen=True)
class Stage:
    """One grid.

    Attributes:
        name: Of its study.
        grid: Setting to the values tried.
        fixed: Settings of all points.
    """

    name: str
    grid: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any]


class Search:
    """The stages of one table.

    Args:
        table: What is trained.
        evaluate: Validation metric of settings and split, larger is better; see :func:`train_and_validate`.
        storage: Database of the studies, such as ``"sqlite:///search.db"``; any that SQLAlchemy knows.
        runs: Trainings per point (the paper: 10).
        pool: Where they run; a point is given up between two rounds of as many trainings as there are workers.

    Raises:
        InputError: If ``runs`` is less than 1.
    """

    def __init__(self, table: BenchmarkTable, evaluate: Evaluate, *, storage: str, runs: int, pool: Pool) -> None:
        if runs < 1:
            raise InputError(f"runs must be 1 or more trainings per point, got {runs}.")
        self.table, self.evaluate, self.runs, self.pool = table, evaluate, runs, pool
        self.storage = _open(storage)

    def common(self) -> dict[str, Any]:
        """Settings shared by all methods, chosen on the plain loss; for long tails those of the literature (none)."""
        if not self.table.tpr:
            return {}
        fixed = {"loss": self.table.baseline, "mu0": 0}
        return self._best(Stage(f"{self._prefix}/common", COMMON, fixed))

    def method(self, key: str, common: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that is chosen for one method, including ``common``.

        Args:
            key: See `benchmark_plan.Table`: a loss, or a variant of the constraint and a loss.
            common: What :meth:`common` found.
        """
        method = self.table.method(key)
        free = {name for grid in (self._own(method.loss), {"mu0": ()}) for name in grid}
        fixed = {name: value for name, value in method.settings.items() if name not in free} | dict(common)
        plain = fixed | {"mu0": 0}
        chosen = self._best(Stage(f"{self._prefix}/{method.loss}/own", self._own(method.loss), _without_alm(plain)))
        if method.constrained:
            settings = fixed | chosen
            chosen |= self._best(Stage(f"{self._prefix}/{key}/mu0", {"mu0": MU0, "rho": RHO}, settings))
            deltas = DELTA["binary" if self.table.tpr else "multiclass"]
            chosen |= self._best(Stage(f"{self._prefix}/{key}/delta", {"delta": deltas}, settings | chosen))
        return dict(common) | chosen

    @property
    def _prefix(self) -> str:
        return f"{self.table.name}/{self.table.protocol}/{self.runs}"

    def _own(self, loss: str) -> Mapping[str, Sequence[float]]:
        if loss == "w_bce":
            ratio = float(self.table.settings["ratio"])
            return {"positive_weight": (round(ratio / 3, 3), round(2 * ratio / 3, 3), ratio)}
        return OWN.get(loss, {})

    def _best(self, stage: Stage) -> dict[str, Any]:
        if not stage.grid:
            return {}
        import optuna

        study = optuna.create_study(
            study_name=stage.name,
            storage=self.storage,
            direction="maximize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=0),
            load_if_exists=True,
        )
        while states := self._unfinished(study, stage):
            if "WAITING" in states:
                study.optimize(lambda trial: self._point(trial, stage), n_trials=1)
            else:  # other processes are at the last points
                time.sleep(_POLL_S)
        best = study.best_trial
        logger.info("%s: %s, validation %.4f", stage.name, best.params, best.value)
        return dict(best.params)

    def _unfinished(self, study: Any, stage: Stage) -> set[str]:
        """States of the points without a value; puts those into the queue that nobody tries, as after a crash."""
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(study)
        alive = [trial for trial in study.trials if trial.state.name != "FAIL"]
        queued = [trial.params or trial.system_attrs.get("fixed_params") for trial in alive]
        grid = [dict(zip(stage.grid, values, strict=True)) for values in itertools.product(*stage.grid.values())]
        missing = [point for point in grid if point not in queued]
        for point in missing:
            study.enqueue_trial(point)
        return {trial.state.name for trial in alive if not trial.state.is_finished()} | (
            {"WAITING"} if missing else set()
        )

    def _point(self, trial: Any, stage: Stage) -> float:
        import optuna

        settings = dict(stage.fixed)
        settings |= {name: trial.suggest_categorical(name, list(values)) for name, values in stage.grid.items()}
        values: list[float] = []
        for first in range(0, self.runs, self.pool.workers):
            splits = range(first, min(first + self.pool.workers, self.runs))
            outcomes = list(run_tasks(partial(self.evaluate, settings), splits, self.pool))
            values += [outcome.get() for outcome in sorted(outcomes, key=lambda one: one.item)]
            mean = sum(values) / len(values)
            trial.report(mean, splits[-1])
            if len(values) < self.runs and trial.should_prune():
                raise optuna.TrialPruned
        return mean


def train_and_validate(
    table: BenchmarkTable,
    *,
    data: Path,
    runs: Path,
    train: Callable[[BenchmarkTable, Training, Path, Path], dict[str, Any]],
) -> Evaluate:
    """An `Evaluate` that trains the table's config; a training that is finished is not repeated.

    Args:
        table: What is trained.
        data: Where the archive lies.
        runs: Folder for checkpoints and results, a folder per settings.
        train: What trains, such as :func:`mri_alm.cifar.table.train_one`.
    """
    return partial(_train_and_read, table=table, data=data, runs=runs, train=train)


def _train_and_read(
    settings: Mapping[str, Any],
    split: int,
    *,
    table: BenchmarkTable,
    data: Path,
    runs: Path,
    train: Callable[[BenchmarkTable, Training, Path, Path], dict[str, Any]],
) -> float:
    text = json.dumps({**settings}, sort_keys=True)
    place = runs / hashlib.sha256(text.encode()).hexdigest()[:16]
    result = train(table, table.custom(settings, split), data, place)
    return float(result["best"]["auc"])


def write_tuned(path: Path, table: BenchmarkTable, runs: int, chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Add what was chosen to ``tuned.json``, beside what other searches put there.

    Args:
        path: The file.
        table: What was searched.
        runs: Trainings per point.
        chosen: Method to settings.
    """
    content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    here = content.setdefault(table.name, {}).setdefault(table.protocol, {"runs": runs, "methods": {}})
    here["runs"] = runs
    here["methods"] |= {key: dict(settings) for key, settings in chosen.items()}
    write_json(path, content)


def points(table: BenchmarkTable, methods: Sequence[str]) -> int:
    """How many points a search of these methods has at most, for the time it will take."""
    search = [len(list(itertools.product(*COMMON.values())))] if table.tpr else []
    losses = dict.fromkeys(table.method(key).loss for key in methods)
    search += [3 for loss in losses if loss in OWN or loss == "w_bce"]
    each = len(MU0) * len(RHO) + len(DELTA["binary" if table.tpr else "multiclass"])
    return sum(search) + each * sum(table.method(key).constrained for key in methods)


def _without_alm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the loss alone: its own value does not depend on the constraint, so it is searched once."""
    return {name: value for name, value in settings.items() if name in ("loss", "mu0", *COMMON)}


def _open(url: str) -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("The search needs Optuna. Install it: pip install 'mri-alm[sweep]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats
        return optuna.storages.RDBStorage(url, heartbeat_interval=60)
