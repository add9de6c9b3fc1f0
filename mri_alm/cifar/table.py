"""What a table of the paper asks for, and the training of what it still lacks, each model resumed where it was cut off.

The tables themselves (settings, the printed numbers and where they are printed) are data: ``tables.json``.
"""

import difflib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError
from mri_alm.runtime.files import write_bytes
from mri_alm.runtime.locks import InUseError, exclusive_lock
from mri_alm.runtime.tasks import Pool, TaskResult, run_tasks

Results = Mapping[tuple[str, int, int], Mapping[str, Any]]  # by method, seed and split

TABLES = Path(__file__).with_name("tables.json")
NULL_SEED = 1  # the baseline is trained again with this seed: what chance alone does


@dataclass(frozen=True)
class Method:
    """One row of a table.

    Attributes:
        key: Its name in commands and folders, such as ``"alm_bce"``: a variant in front of a loss, or a loss alone.
        name: As printed.
        loss: The base loss's key, which is also the method it is compared with.
        settings: Overrides of the config.
        printed: The paper's numbers; empty if it has no such row.
    """

    key: str
    name: str
    loss: str
    settings: dict[str, Any]
    printed: tuple[float, ...]

    @property
    def constrained(self) -> bool:
        """Whether the constraint is used."""
        return self.key != self.loss


@dataclass(frozen=True)
class Training:
    """One model to train."""

    method: Method
    seed: int
    split: int


class BenchmarkTable:
    """One table under one protocol.

    Attributes:
        name: Such as ``"cifar10_binary_100"``.
        protocol: Such as ``"paper"`` or ``"quick"``; results of different protocols lie apart and are never mixed.
        config: The bundle config.
        settings: Overrides for all methods.
        splits: Number of splits of the protocol.
        tpr: True-positive rates of the binary columns; empty for multi-class tables.
        source: Where the numbers are printed.

    Args:
        path: :data:`TABLES`, or a file like it.
        name: See above.
        protocol: See above.
        tuned: ``configs/tuned.json``, whose settings then replace those of its methods. Results lie apart.

    Raises:
        InputError: If there is no such table or protocol, or nothing was tuned for it.
    """

    def __init__(self, path: Path, name: str, protocol: str, tuned: Path | None = None) -> None:
        self._all = json.loads(path.read_text("utf-8"))
        self._table = _pick(self._all["tables"], name, "table")
        chosen = _pick(self._all["protocols"], protocol, "protocol")
        self.name, self.protocol = name, protocol + ("_tuned" if tuned else "")
        self._tuned: dict[str, Any] = _tuned_methods(tuned, name, protocol) if tuned else {}
        self.config: str = self._table["config"]
        kind = "binary" if "tpr" in self._table else "longtail"
        self.settings: dict[str, Any] = chosen[kind] | self._table["settings"]
        self.splits: int = chosen["splits"]
        self.tpr: tuple[float, ...] = tuple(self._table.get("tpr", ()))
        self.source: str = self._table["source"]

    @property
    def baseline(self) -> str:
        """The plain likelihood, which other base losses are compared with."""
        return "bce" if self.tpr else "ce"

    def method(self, key: str) -> Method:
        """A row by its key.

        Raises:
            InputError: If the variant or the loss is unknown, or the authors published no value for it.
        """
        variant, loss = "", key
        for name in self._all["variants"]:
            if name and key.startswith(f"{name}_"):
                variant, loss = name, key.removeprefix(f"{name}_")
        if loss not in self._all["losses"]:
            known = [*self._all["losses"], *(f"{v}_{self.baseline}" for v in self._all["variants"] if v)]
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise InputError(f'There is no method "{key}".{hint} A method is a loss, or a variant and a loss: {known}.')
        made = self._all["variants"][variant]
        settings = {"loss": loss} | self._table["loss_settings"].get(loss, {}) | made["settings"]
        if variant == "published":
            if loss not in self._table["published"]:
                raise InputError(f"{self.name}: no published mu0 and delta for {loss}.")
            settings |= dict(zip(("mu0", "delta"), self._table["published"][loss], strict=True))
        settings |= self._tuned.get(key, {})
        printed = self._table["paper"].get(f"alm_{loss}" if variant == "published" else key, ())
        return Method(key, made["name"].format(self._all["losses"][loss]), loss, settings, tuple(printed))

    def custom(self, settings: Mapping[str, Any], split: int) -> Training:
        """A training with any settings, outside the rows of the table."""
        return Training(Method("custom", "custom", str(settings["loss"]), dict(settings), ()), 0, split)

    def methods(self) -> list[str]:
        """The rows that the paper prints."""
        return list(self._table["paper"])

    def trainings(self, methods: Sequence[str], splits: int, seeds: int = 1) -> list[Training]:
        """Every training of a table, in the order to do them: the baseline twice (the null), then method by method.

        Args:
            methods: Keys; a constrained method brings the loss it is compared with.
            splits: The first so many.
            seeds: Trainings per method and split; the baseline has two at least.
        """
        keys = [self.baseline]
        for key in methods:
            keys += [self.method(key).loss, key]
        plan = []
        for key in dict.fromkeys(keys):
            for seed in range(max(seeds, NULL_SEED + 1) if key == self.baseline else seeds):
                plan += [Training(self.method(key), seed, split) for split in range(splits)]
        return plan

    def folder(self, results: Path) -> Path:
        """Where the results of this table and protocol lie."""
        return results / self.name / self.protocol

    def result(self, results: Path, training: Training) -> Path:
        """The result file of one training."""
        name = (
            f"split_{training.split}.json" if not training.seed else f"split_{training.split}_seed_{training.seed}.json"
        )
        return self.folder(results) / training.method.key / name

    def overrides(self, training: Training, data: Path, runs: Path) -> dict[str, Any]:
        """The settings of one training, for the bundle config."""
        run = self.folder(runs) / training.method.key / f"seed_{training.seed}"
        return self.settings | training.method.settings | {
            "data": _as_text(data), "run_dir": _as_text(run), "seed": training.seed, "only_split": training.split,
            "splits": max(10, training.split + 1),
        }  # fmt: skip


def _as_text(path: Path) -> str:
    """A path that MONAI does not evaluate, as it does texts that begin with one of these marks."""
    return f"./{path}" if str(path).startswith(("$", "@", "%")) else str(path)


def read_results(
    table: BenchmarkTable, results: Path, trainings: Iterable[Training]
) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Finished trainings by method, seed and split.

    Raises:
        InputError: If a file is of another protocol or other settings than the table asks for.
    """
    found = {}
    for training in trainings:
        path = table.result(results, training)
        if path.exists():
            content = json.loads(path.read_text("utf-8"))
            wanted = {"table": table.name, "protocol": table.protocol, "settings": _plain(table, training)}
            for name, value in wanted.items():
                if content.get(name) != value:
                    raise InputError(
                        f"{path} has {name} {content.get(name)}, but the table asks for {value}. "
                        "Results of different settings are not mixed: move that file away and train again."
                    )
            found[training.method.key, training.seed, training.split] = content
    return found


def has_all_models(results: Results, key: str, seed: int, splits: int) -> bool:
    """Whether a method has all its models."""
    return all((key, seed, split) in results for split in range(splits))


def described(table: BenchmarkTable, training: Training, result: dict[str, Any]) -> dict[str, Any]:
    """A training's result with what it was asked for, as it is kept."""
    head = {"table": table.name, "protocol": table.protocol, "settings": _plain(table, training)}
    return head | {"method": training.method.key} | result


def _plain(table: BenchmarkTable, training: Training) -> dict[str, Any]:
    return table.settings | training.method.settings


def _tuned_methods(path: Path, name: str, protocol: str) -> dict[str, Any]:
    tables = json.loads(path.read_text("utf-8"))
    methods: dict[str, Any] = _pick(_pick(tables, name, "tuned table"), protocol, "tuned protocol")["methods"]
    return methods


def _pick(options: dict[str, Any], name: str, what: str) -> Any:
    if name not in options:
        raise InputError(f'There is no {what} "{name}". Choose one of: {", ".join(options)}.')
    return options[name]


logger = logging.getLogger("mri_alm.benchmark")


def train_missing(
    table: BenchmarkTable, trainings: Sequence[Training], *, data: Path, runs: Path, results: Path, pool: Pool
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
    failed: list[TaskResult] = []
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


def _train_and_keep(
    table: BenchmarkTable, training: Training, *, data: Path, runs: Path, results: Path
) -> dict[str, float]:
    """One model and its result file, unless another process has written it meanwhile; gives its best epoch."""
    path = table.result(results, training)
    with exclusive_lock(path.with_suffix(".lock")):
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


def train_one(table: BenchmarkTable, training: Training, data: Path, runs: Path) -> dict[str, Any]:
    """Train one model, going on from where an earlier start was cut off; what its ``result.json`` says."""
    from monai.bundle import ConfigWorkflow

    overrides = table.overrides(training, data, runs)
    workflow = ConfigWorkflow(table.config, meta_file=None, logging_file=False, workflow_type="train", **overrides)
    workflow.initialize()
    workflow.run()
    workflow.finalize()
    path = Path(overrides["run_dir"]) / f"split_{training.split}" / "result.json"
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return result
