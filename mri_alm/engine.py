"""What MONAI's trainer needs to train with multipliers: the sample index, the dual step, seeds, an exact checkpoint."""

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from ignite.engine import Engine, Events
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.inferers import SimpleInferer
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from mri_alm.alm import AugmentedLagrangian
from mri_alm.errors import InputError
from mri_alm.files import load_tensors, save_tensors

logger = logging.getLogger("mri_alm")


class IndexedTrainer(SupervisedTrainer):
    """MONAI's trainer, with the loss called as ``loss(logits, label, index=batch["index"])``, then the dual step."""

    def _iteration(self, engine: Any, batchdata: dict[str, Any]) -> dict[str, Any]:
        objective = cast(AugmentedLagrangian, self.loss_function)
        objective.train()
        self.loss_function: Any = partial(objective, index=batchdata["index"].to(engine.state.device))
        try:
            output: dict[str, Any] = super()._iteration(engine, batchdata)
        finally:
            self.loss_function = objective
        objective.dual_step()
        return output


class AutocastInferer(SimpleInferer):
    """Run the network in bfloat16 where that is faster (CPUs with AMX, GPUs); logits come back as float32.

    Args:
        enabled: False runs in the weights' own type.
    """

    def __init__(self, enabled: bool = False) -> None:
        super().__init__()
        self.enabled = enabled

    def __call__(self, inputs: Tensor, network: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Logits of ``inputs``."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.enabled):
            logits: Tensor = super().__call__(inputs, network, *args, **kwargs)
        return logits.float()


class EpochSeed:
    """Seed batch order and augmentation by (seed, epoch), so that a resumed run repeats an unbroken one."""

    def __init__(self, seed: int, dataset: Any) -> None:
        self.seed, self.dataset = seed, dataset

    def attach(self, engine: Engine) -> None:
        """Called by MONAI."""
        engine.add_event_handler(Events.EPOCH_STARTED, self)

    def __call__(self, engine: Engine) -> None:
        """Seed the epoch that starts."""
        seed = self.seed + engine.state.epoch
        torch.manual_seed(seed)
        self.dataset.transform.set_random_state(seed=seed)


class EpochEnd:
    """After each epoch's validation: let mu follow the metric, report, keep the best model, save everything.

    ``model.pt`` (weights of the best validation AUC; the earlier epoch on a tie) is written before ``last.pt`` (all
    that the next epoch depends on): whatever the moment of a crash, starting again repeats the unfinished epoch and
    ends the same.

    Args:
        folder: Where to write; TensorBoard's event files too.
        network: The model trained.
        optimizer: Its optimiser.
        objective: The loss, with multipliers and mu.
        validator: Evaluator that has just computed ``val_auc``.
        guard: Text that names cohort and split; a checkpoint with another guard is refused.
    """

    def __init__(
        self,
        folder: Path | str,
        network: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: AugmentedLagrangian,
        validator: SupervisedEvaluator,
        *,
        guard: str,
    ) -> None:
        self.folder = Path(folder)
        self.validator, self.guard = validator, guard
        self.parts: dict[str, Any] = {"model": network, "optimizer": optimizer, "objective": objective}
        self.best: dict[str, float] = {"auc": -1.0, "epoch": 0}
        self.history: list[dict[str, float]] = []

    def attach(self, engine: Engine) -> None:
        """Called by MONAI: resume from ``last.pt`` when there is one, and act after each epoch."""
        self.writer = SummaryWriter(self.folder)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self)
        engine.add_event_handler(Events.COMPLETED, lambda _: self.writer.close())
        if (self.folder / "last.pt").exists():
            self._resume(engine)

    def __call__(self, engine: Engine) -> None:
        """Close one epoch."""
        auc = float(self.validator.state.metrics["val_auc"])
        objective: Any = self.parts["objective"]
        report = {"epoch": engine.state.epoch, "val_auc": auc} | objective.end_epoch(auc)
        if not all(math.isfinite(value) for value in report.values()):
            raise InputError(
                f"{self.folder}: training diverged in epoch {engine.state.epoch}: "
                f"{', '.join(f'{name} {value:g}' for name, value in report.items())}. "
                "Lower --learning_rate, --mu0 or --mu_cap and choose another run_dir; earlier epochs are kept."
            )
        self.history.append(report)
        logger.info("  ".join(f"{name} {value:.4g}" for name, value in report.items()))
        for name, value in report.items():
            self.writer.add_scalar(name, value, engine.state.epoch)
        self.writer.flush()
        if auc > self.best["auc"]:
            self.best = {"auc": auc, "epoch": engine.state.epoch}
            save_tensors(self.folder / "model.pt", {"model": self.parts["model"].state_dict(), "guard": self.guard})
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"trainer": dict(engine.state_dict()), "best": self.best, "history": self.history, "guard": self.guard}
        save_tensors(self.folder / "last.pt", state)

    def _resume(self, engine: Engine) -> None:
        path = self.folder / "last.pt"
        state = load_tensors(path)
        if state.get("guard") != self.guard:
            raise InputError(f"{path} belongs to another cohort or split. Restore it, or choose another run_dir.")
        try:
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            engine.load_state_dict(state["trainer"])
            self.best, self.history = state["best"], state["history"]
        except (KeyError, RuntimeError, ValueError) as error:
            raise InputError(
                f"{path} is no checkpoint of this network. Restore it, or choose another run_dir."
            ) from error
        logger.info("Going on after epoch %d.", engine.state.epoch)
