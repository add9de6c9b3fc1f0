"""What a table asks for: settings, methods, the trainings of each, and the results that are there.

The tables themselves (settings, the printed numbers and where they are printed) are data: ``tables.json``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mri_alm.bundle.config import choose
from mri_alm.errors import InputError, did_you_mean
from mri_alm.runtime.files import read_json

Results = Mapping[tuple[str, int, int], Mapping[str, Any]]  # by method, seed and split

TABLES = Path(__file__).with_name("tables.json")
NULL_SEED = 1  # what others are compared with is trained again with this seed: what chance alone does


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
        config: The bundle config and what is laid over it, in the order that MONAI merges them.
        settings: Overrides for all methods.
        splits: Number of splits of the protocol.
        tpr: True-positive rates of the binary columns; empty for multi-class tables, and where misses are counted.
        false_negatives: In their place, how many of the test positives may be missed in each column.
        source: Where the numbers are printed.
        published: Printed AUCs on the same test images, in percent, by who printed them; no methods of ours.
        data: Where the images lie if nothing is said.

    Args:
        path: :data:`TABLES`, or a file like it.
        name: See above.
        protocol: See above.
        tuned: ``configs/tuned.json``, whose settings then replace those of its methods. Results lie apart.

    Raises:
        InputError: If there is no such table or protocol, or nothing was tuned for it.
    """

    def __init__(self, path: Path, name: str, protocol: str, tuned: Path | None = None) -> None:
        self._all = read_json(path)
        self._table = choose(self._all["tables"], name, "table")
        self.tpr: tuple[float, ...] = tuple(self._table.get("tpr", ()))
        self.false_negatives: tuple[int, ...] = tuple(self._table.get("false_negatives", ()))
        kind = self._table.get("kind", "binary" if self.tpr else "longtail")
        known = {key: content for key, content in self._all["protocols"].items() if kind in content}
        chosen = choose(known, protocol, "protocol")
        self.name, self.protocol = name, protocol + ("_tuned" if tuned else "")
        self._tuned: dict[str, Any] = {}
        if tuned:
            protocols = choose(read_json(tuned), name, "tuned table")
            self._tuned = choose(protocols, protocol, "tuned protocol")["methods"]
        self.config: list[str] = self._table["config"]
        self.settings: dict[str, Any] = chosen[kind] | self._table["settings"]
        self.splits: int = self.settings.pop("splits", chosen["splits"])
        self.source: str = self._table["source"]
        self.published: dict[str, str] = self._table.get("published_auc", {})
        self.data = Path(self._table.get("data", "data/cifar"))

    @property
    def binary(self) -> bool:
        """Whether there are two classes, one of them critical."""
        return bool(self.tpr or self.false_negatives)

    @property
    def baseline(self) -> str:
        """The method that other base losses are compared with: the plain likelihood, if the table names no other."""
        named: str = self._table.get("baseline", "bce" if self.binary else "ce")
        return named

    def method(self, key: str) -> Method:
        """A row by its key.

        Raises:
            InputError: If the variant or the loss is unknown, or the authors published no value for it.
        """
        losses, variants = self._all["losses"], [name for name in self._all["variants"] if name]
        variant, _, loss = ("", "", key) if key in losses else key.partition("_")
        if key not in losses and not (variant in variants and loss in losses):
            known = [*losses, *(f"{name}_{self.baseline}" for name in variants)]
            hint = did_you_mean(key, known)
            raise InputError(f'There is no method "{key}". {hint}A method is a loss, or a variant and a loss: {known}.')
        made = self._all["variants"][variant]
        settings: dict[str, Any] = {"loss": loss}
        for place in (self._all, self._table):
            settings |= place.get("loss_settings", {}).get(loss, {})
        settings |= made["settings"]
        if variant == "published":
            if loss not in self._table.get("published", {}):
                raise InputError(f"{self.name}: no published mu0 and delta for {loss}.")
            settings |= dict(zip(("mu0", "delta"), self._table["published"][loss], strict=True))
        settings |= self._tuned.get(key, {})
        printed = self._table["paper"].get(f"alm_{loss}" if variant == "published" else key, ())
        return Method(key, made["name"].format(losses[loss]), loss, settings, tuple(printed))

    def against(self, method: Method) -> str:
        """The method that one is compared with: its loss alone; a loss with the baseline."""
        return method.loss if method.constrained else self.baseline

    def custom(self, settings: Mapping[str, Any], split: int) -> Training:
        """A training with any settings, outside the rows of the table; its key says them."""
        key = ",".join(f"{name}={value}" for name, value in sorted(settings.items()))
        return Training(Method(key, key, str(settings["loss"]), dict(settings), ()), 0, split)

    def baselines(self, methods: Iterable[str]) -> list[str]:
        """The baseline, then the other losses that some of these methods are compared with."""
        return list(dict.fromkeys([self.baseline, *(self.against(self.method(key)) for key in methods)]))

    def methods(self) -> list[str]:
        """The rows that the paper prints, or those that the table names."""
        return list(self._table.get("methods", self._table["paper"]))

    def kept(self, results: Path) -> list[str]:
        """The methods of which trainings are kept, in the order of the tables' file."""
        keys = (f"{variant}_{loss}".lstrip("_") for loss in self._all["losses"] for variant in self._all["variants"])
        return [key for key in keys if any(self.folder(results).glob(f"{key}/split_*.json"))]

    def trainings(self, methods: Sequence[str], splits: int, seeds: int = 1) -> list[Training]:
        """Every training of a table, in the order to do them: the baseline, then method by method, then the nulls.

        Args:
            methods: Keys; a constrained method brings the loss it is compared with.
            splits: The first so many.
            seeds: Trainings per method and split; the baseline, and at the end each loss that a constrained method is
                compared with, have two at least: the null.
        """
        keys = [self.baseline]
        for key in methods:
            keys += [self.method(key).loss, key]
        order = [(key, range(max(seeds, NULL_SEED + 1) if key == self.baseline else seeds)) for key in keys]
        order += [(key, range(seeds, NULL_SEED + 1)) for key in self.baselines(methods)[1:]]
        plan = []
        for key, seeds_of in dict.fromkeys(order):
            for seed in seeds_of:
                plan += [Training(self.method(key), seed, split) for split in range(splits)]
        return plan

    def folder(self, results: Path) -> Path:
        """Where the results of this table and protocol lie."""
        return results / self.name / self.protocol

    def result(self, results: Path, training: Training) -> Path:
        """The result file of one training."""
        seed = f"_seed_{training.seed}" if training.seed else ""
        return self.folder(results) / training.method.key / f"split_{training.split}{seed}.json"

    def asked(self, training: Training) -> dict[str, Any]:
        """What a training is asked for, as its result file keeps it."""
        return {"table": self.name, "protocol": self.protocol, "settings": self.settings | training.method.settings}

    def overrides(self, training: Training, data: Path, runs: Path) -> dict[str, Any]:
        """The settings of one training, for the bundle config."""
        run = self.folder(runs) / training.method.key / f"seed_{training.seed}"
        return self.settings | training.method.settings | {
            "data": data, "run_dir": run, "seed": training.seed, "only_split": training.split,
            "splits": max(10, training.split + 1),
        }  # fmt: skip


def read_results(
    table: BenchmarkTable, results: Path, trainings: Iterable[Training]
) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Finished trainings by method, seed and split.

    Raises:
        InputError: If a file is damaged, or of another protocol or other settings than the table asks for.
    """
    found = {}
    for training in trainings:
        path = table.result(results, training)
        if path.exists():
            content = read_json(path)
            for name, value in table.asked(training).items():
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


def complete_methods(
    table: BenchmarkTable, results: Results, keys: Iterable[str], splits: int
) -> tuple[list[Method], dict[str, int]]:
    """The methods that have all their models, in order, and how many the others have.

    Raises:
        InputError: If the baseline is not complete.
    """
    counts = {key: sum((key, 0, split) in results for split in range(splits)) for key in keys}
    missing = {key: count for key, count in counts.items() if count < splits}
    if table.baseline not in counts.keys() - missing.keys():
        count = counts.get(table.baseline, 0)
        raise InputError(f"{table.name}: {table.baseline} has {count} of {splits} models. Train it first.")
    return [table.method(key) for key in counts if key not in missing], missing
