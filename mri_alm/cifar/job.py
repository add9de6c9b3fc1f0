"""What the CIFAR configs run: train every split, test each model on the balanced test set, write its scores."""

import contextlib
import json
import logging
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ignite.engine import Events
from monai.bundle import ConfigParser
from numpy.typing import NDArray
from tqdm.contrib.logging import logging_redirect_tqdm

from mri_alm.alm.processes import barrier, process_rank
from mri_alm.bundle.config import member_parser, refuse_other_settings, running_config, user_errors, write_run_config
from mri_alm.bundle.trained_run import load_member
from mri_alm.cifar.sets import ImageSet
from mri_alm.errors import InputError
from mri_alm.metrics.ranking import auc
from mri_alm.runtime.files import write_json
from mri_alm.runtime.locks import exclusive_lock
from mri_alm.runtime.progress import progress_bar

logger = logging.getLogger("mri_alm")


def train_and_test(folder: str) -> None:
    """What ``run`` of the CIFAR configs calls; goes on from whatever an earlier start finished.

    Args:
        folder: Run folder. Each split gets ``split_k/`` with ``model.pt``, ``last.pt`` (to go on from) and
            ``result.json``: settings of the set, best epoch, epochs, scores on the test set.
    """
    config = running_config()
    with user_errors(), logging_redirect_tqdm():
        CifarJob(config, Path(folder)).run()


class CifarJob:
    """One run folder; see :func:`train_and_test`.

    Args:
        config: The config with macros resolved and overrides applied.
        folder: Run folder.

    Raises:
        InputError: If the settings, the archive or the run folder cannot be used.
    """

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.config, self.folder = config, folder
        self.images: ImageSet = ConfigParser(deepcopy(config)).get_parsed_content("cohort_data")
        parser = member_parser(config, 0, self.images)
        for part in ("objective_def", "optimizer", "epoch_end::selection", "train::batches"):
            parser.get_parsed_content(part)  # wrong values are refused before hours of work

    def run(self) -> None:
        """Train what is not trained yet."""
        todo = range(self.config["splits"]) if self.config["only_split"] is None else [self.config["only_split"]]
        with contextlib.ExitStack() as held:
            barrier()
            if process_rank() == 0:
                for split in todo:  # other splits may be trained by other processes meanwhile
                    held.enter_context(exclusive_lock(self.folder / f".split_{split}.lock"))
                with exclusive_lock(self.folder / ".lock", wait=True):
                    refuse_other_settings(self.folder, self.config)
                    write_run_config(self.folder, self.config)
            barrier()
            self._train_all(todo)

    def _train_all(self, todo: Sequence[int]) -> None:
        with progress_bar("train", len(todo) * self.config["max_epochs"], "epoch", shown=process_rank() == 0) as bar:
            for split in todo:
                bar.set_description(f"split {split}")
                self._train(split, bar)
        if process_rank() == 0:
            logger.info("%s", self._closing(list(todo)))

    def _train(self, split: int, bar: Any) -> None:
        path = self.folder / f"split_{split}" / "result.json"
        if self._finished(path, split):
            bar.update(self.config["max_epochs"])
            return
        parser = member_parser(self.config, split, self.images)
        parser.get_parsed_content("seed_everything")
        trainer = parser.get_parsed_content("train#trainer")
        end = parser.get_parsed_content("epoch_end")
        bar.update(trainer.state.epoch)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: bar.update(1))
        trainer.logger.setLevel(logging.WARNING)
        parser.get_parsed_content("validate#evaluator").logger.setLevel(logging.WARNING)
        start = time.perf_counter()
        if not end.finished(trainer):
            trainer.run()
        seconds = time.perf_counter() - start
        if process_rank() == 0:
            network = load_member(parser.get_parsed_content("network"), path.parent / "model.pt")
            logits = predict(network, parser)
            content = self.images.record | end.record | {"split": split, "seed": self.config["seed"]}
            content |= {
                "counts": list(self.images.counts(split)),
                "best": end.selection.best,
                "seconds": round(seconds),
            }
            test = scores_to_keep(logits, self.images.label[self.images.rows("test", split)], self._critical(parser))
            epochs = [{name: brief(value) for name, value in epoch.items()} for epoch in end.history]
            write_json(path, content | {"epochs": epochs, "test": test})

    def _finished(self, path: Path, split: int) -> bool:
        if not path.exists():
            return False
        if json.loads(path.read_text())["guard"] != self.images.split_digest(split):
            raise InputError(f"{path} is of other images than the set gives now. Choose another run_dir, or delete it.")
        return True

    def _critical(self, parser: ConfigParser) -> list[int] | None:
        constraint = parser.get_parsed_content("objective_def").constraint
        return None if constraint.critical is None else list(constraint.critical)

    def _closing(self, splits: list[int]) -> str:
        lines = [f"{len(splits)} of {self.config['splits']} models in {self.folder}"]
        results = [json.loads((self.folder / f"split_{k}" / "result.json").read_text()) for k in splits]
        if "critical" not in results[0]["test"]:
            scores = np.array([result["test"]["score"] for result in results])
            label = results[0]["test"]["label"]
            members = np.array([auc(label, row) for row in scores])
            lines.append(
                f"Test AUC {100 * members.mean():.1f} on average, ensemble {100 * auc(label, scores.mean(0)):.1f}"
            )
        return "\n".join(
            [*lines, "Written per split: result.json (scores on the test set), model.pt, TensorBoard events."]
        )


def predict(network: torch.nn.Module, parser: ConfigParser) -> NDArray[np.float64]:
    """Logits ``(N, outputs)`` of the images of the config's ``part``, in the set's order."""
    device, inferer = (parser.get_parsed_content(name) for name in ("device", "inferer"))
    network = network.to(device).eval()
    with torch.inference_mode():
        logits = [inferer(batch["image"], network) for batch in parser.get_parsed_content("prepared")]
    return np.asarray(torch.cat(logits).double().cpu().numpy())


def scores_to_keep(logits: NDArray[np.float64], label: NDArray[np.int64], critical: list[int] | None) -> dict[str, Any]:
    """What the tables need of the test logits, small enough to be kept in a repository.

    Args:
        logits: ``(N, 1)``, or ``(N, C)`` with critical classes.
        label: ``(N,)``.
        critical: The critical classes; None for one logit.

    Returns:
        ``label`` and ``score`` (the logit); for classes ``label``, ``critical``, ``classes``, per sample the logits of
        the critical ones (``score``), the best other class (``other``) and its logit (``other_score``).
    """
    labels = label.tolist()
    if critical is None:
        return {"label": labels, "score": [brief(value) for value in logits[:, 0]]}
    others = np.delete(np.arange(logits.shape[1]), critical)
    best = others[logits[:, others].argmax(1)]
    return {
        "label": labels,
        "critical": critical,
        "classes": logits.shape[1],
        "score": [[brief(value) for value in row] for row in logits[:, critical]],
        "other": best.tolist(),
        "other_score": [brief(value) for value in logits[np.arange(len(logits)), best]],
    }


def brief(value: float) -> float:
    """A number to five significant digits."""
    return float(f"{value:.5g}")
