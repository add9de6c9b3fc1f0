"""What the configs of images run: train every split, test each model on the test images, write its scores."""

import logging
import time
from copy import deepcopy
from typing import Any

import numpy as np
from monai.bundle import ConfigParser
from numpy.typing import NDArray
from tqdm.contrib.logging import logging_redirect_tqdm

from mri_alm.alm.processes import barrier, process_rank
from mri_alm.bundle.config import running_config
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.cifar.sets import ImageSet
from mri_alm.errors import InputError
from mri_alm.metrics.ranking import auc
from mri_alm.runtime.files import read_json, write_json
from mri_alm.runtime.interruption import user_errors
from mri_alm.training.member import Member, Progress, claimed, splits_to_train, train_in_turn

logger = logging.getLogger("mri_alm")


def train_and_test(folder: str) -> None:
    """What ``run`` of the configs of images calls; goes on from whatever an earlier start finished.

    Args:
        folder: Run folder. Each split gets ``split_k/`` with ``model.pt``, ``last.pt`` (to go on from) and
            ``result.json``: settings of the set, the epoch kept, all epochs, scores on the test set.
    """
    config = running_config()
    with user_errors(), logging_redirect_tqdm():
        images = ConfigParser(deepcopy(config)).get_parsed_content("cohort_data")
        Member(config, 0, images).check("train::batches")
        splits = ImageTraining(config, RunFolder(folder), images)
        with claimed(splits.run, config):
            train_in_turn(config, splits)
        if process_rank() == 0:
            logger.info("%s", splits.closing())


class ImageTraining:
    """The splits of one run folder of images.

    Args:
        config: The config with macros resolved and overrides applied.
        run: The folder.
        images: Its set.
    """

    def __init__(self, config: dict[str, Any], run: RunFolder, images: ImageSet) -> None:
        self.config, self.run, self.images = config, run, images

    def result(self, split: int) -> dict[str, Any] | None:
        """The ``result.json`` of a split, None before there is one; refused when it is of other images."""
        path = self.run.split(split).result
        if not path.exists():
            return None
        result = read_json(path)
        if result["guard"] != self.images.split_digest(split):
            raise InputError(f"{path} is of other images than the set gives now. Choose another run_dir, or delete it.")
        return result

    def __call__(self, split: int, progress: Progress) -> None:
        """Train one split, test its model, write the result.

        Args:
            split: Its number.
            progress: See :meth:`mri_alm.training.member.Member.train`.
        """
        result = self.result(split)
        barrier()  # all have looked before the first one writes
        if result:
            progress(result["epochs"])
            return
        member, folder = Member(self.config, split, self.images), self.run.split(split)
        start = time.perf_counter()
        end = member.train(progress)
        seconds = time.perf_counter() - start
        if process_rank() > 0:
            return
        _, logits = member.predict(member.network(folder.model), "test")
        content = self.images.record | end.record | {"split": split, "seed": self.config["seed"]}
        content |= {
            "counts": list(self.images.counts(split)),
            "best": end.selection.best,
            "seconds": round(seconds),
        }
        critical = end.parts["objective"].constraint.critical
        test = scores_to_keep(
            logits,
            self.images.label[self.images.rows("test", split)],
            None if critical is None else list(critical),
        )
        epochs = [{name: brief(value) for name, value in epoch.items()} for epoch in end.history]
        write_json(folder.result, content | {"epochs": epochs, "test": test})

    def closing(self) -> str:
        """How many models there are, and the AUCs of those that this process trained."""
        splits = splits_to_train(self.config)
        lines = [f"{len(splits)} of {self.config['splits']} models in {self.run.path}"]
        tests = [read_json(self.run.split(split).result)["test"] for split in splits]
        if "critical" not in tests[0]:
            scores, label = np.array([test["score"] for test in tests]), tests[0]["label"]
            mean = np.mean([auc(label, row) for row in scores])
            lines.append(f"Test AUC {100 * mean:.1f} on average, ensemble {100 * auc(label, scores.mean(0)):.1f}")
        lines.append("Written per split: result.json (scores on the test set), model.pt, TensorBoard events.")
        return "\n".join(lines)


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
