"""One split of a run trained to its end: what the main job does split by split, and what a worker of a cluster does."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ignite.engine import Events
from monai.bundle import ConfigParser
from monai.data import DataLoader
from monai.engines import SupervisedEvaluator
from numpy.typing import NDArray

from mri_alm.alm.processes import barrier, process_rank
from mri_alm.bundle.checkpoints import is_intact
from mri_alm.bundle.config import member_parser
from mri_alm.bundle.trained_run import collect, load_member
from mri_alm.cohort.manifest import Cohort
from mri_alm.errors import InputError
from mri_alm.runtime.files import DamagedFileError, read_json, sha256, write_json
from mri_alm.runtime.tables import write_csv

logger = logging.getLogger("mri_alm")

Progress = Callable[[list[dict[str, float]]], None]


class SplitTraining:
    """The splits of one run folder; it travels to the workers that train them.

    Args:
        config: The config with macros resolved and overrides applied.
        folder: The run's.
        cohort: Its studies.
    """

    def __init__(self, config: dict[str, Any], folder: Path, cohort: Cohort) -> None:
        self.config, self.folder, self.cohort = config, folder, cohort

    def finished(self, split: int) -> bool:
        """Whether a split is trained to its end; refused when it is not of this cohort, or its model was changed."""
        folder = self.folder / f"split_{split}"
        try:
            record = self.record(split)
        except FileNotFoundError:
            return False
        except DamagedFileError as error:
            logger.warning("%s It is made again from last.pt.", error)
            return False
        if record.get("guard") != self.cohort.split_digest(split):
            raise InputError(
                f"{folder} was trained on other studies than the cohort gives it now. Restore the cohort, or give this "
                "run another --run_dir."
            )
        model = folder / "model.pt"
        if model.is_file() and not is_intact(model):
            return False  # the split begins again, and says so
        if not model.is_file() or sha256(model) != record["model_sha256"]:
            raise InputError(f"{model} is not the model that was trained there. Restore it, or delete {folder}.")
        return True

    def record(self, split: int) -> dict[str, Any]:
        """The ``split.json`` of a finished split."""
        return read_json(self.folder / f"split_{split}" / "split.json")

    def __call__(self, split: int, progress: Progress = lambda _: None) -> None:
        """Train one split of a run that is set up, from wherever an earlier start came to.

        Args:
            split: Its number.
            progress: Called with the history of its epochs: of an earlier start, then after every epoch.
        """
        finished = self.finished(split)
        barrier()  # all have looked before the first one writes
        if finished:
            progress(self.record(split)["epochs"])
            return
        parser = member_parser(self.config, split, self.cohort)
        parser.get_parsed_content("seed_everything")
        trainer = parser.get_parsed_content("train#trainer")
        end = parser.get_parsed_content("epoch_end")
        progress(end.history)
        if not end.finished(trainer):
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: progress(end.history))
            trainer.run()
        if process_rank() == 0:
            self._write(split, parser, end)

    def _write(self, split: int, parser: ConfigParser, end: Any) -> None:
        """Held-out scores by the best epoch's weights, then the record that makes the split finished."""
        folder = self.folder / f"split_{split}"
        network = load_member(parser.get_parsed_content("network"), folder / "model.pt")
        names, logits = self.predict(network, parser, "validation")
        write_csv(folder / "validation.csv", ["study", "logit"], _rows(names, logits))
        record = {"best": end.selection.best, "model_sha256": sha256(folder / "model.pt")} | end.record
        write_json(folder / "split.json", record | {"epochs": end.history})

    def predict(self, network: Any, parser: ConfigParser, part: str) -> tuple[list[str], NDArray[np.float64]]:
        """Names ``(N,)`` and logits ``(N, M)`` of a part of the cohort (see :meth:`mri_alm.cohort.Cohort.items`)."""
        parser["part"] = part
        device = parser.get_parsed_content("device")
        evaluator = SupervisedEvaluator(
            device=device,
            val_data_loader=DataLoader(parser.get_parsed_content("prepared"), batch_size=self.config["batch_size"]),
            network=network.to(device),
            inferer=parser.get_parsed_content("inferer"),
            decollate=False,
        )
        evaluator.logger.setLevel(logging.WARNING)
        return collect(evaluator)


def _rows(names: list[str], logits: NDArray[np.float64]) -> list[dict[str, Any]]:
    return [{"study": name, "logit": float(value)} for name, value in zip(names, logits[:, 0], strict=True)]
