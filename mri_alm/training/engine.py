"""What MONAI's trainer needs to train with multipliers: the sample index, the dual step, seeds, an exact checkpoint."""

import logging
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from ignite.engine import Engine, Events
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter

from mri_alm.alm.lagrangian import AugmentedLagrangian
from mri_alm.alm.processes import first_visits, gather, process_rank
from mri_alm.bundle.checkpoints import is_intact, load_tensors, save_tensors
from mri_alm.bundle.run_folder import SplitFolder
from mri_alm.errors import InputError, one_of
from mri_alm.metrics.ranking import auc
from mri_alm.runtime.atomic import explain_os_errors
from mri_alm.runtime.files import DamagedFileError
from mri_alm.training.sharpness import SharpnessAware

logger = logging.getLogger("mri_alm")


class IndexedTrainer(SupervisedTrainer):
    """MONAI's trainer, with the loss called as ``loss(logits, label, index=batch["index"])``, then the dual step.

    Under ``amp=True`` the multipliers stay when the gradient scaler found an infinity and the optimiser did not step.

    Args:
        sam_radius: Of :class:`~mri_alm.training.sharpness.SharpnessAware`; 0: an ordinary step.
        arguments: Those of MONAI's trainer.
    """

    def __init__(self, *, sam_radius: float = 0.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        if sam_radius != 0:
            SharpnessAware(sam_radius, arguments["loss_function"]).attach(self)

    def _iteration(self, engine: Any, batchdata: dict[str, Any]) -> dict[str, Any]:
        objective = cast(AugmentedLagrangian, self.loss_function)
        objective.train()
        self.loss_function: Any = partial(objective, index=batchdata["index"].to(engine.state.device))
        scale = self.scaler.get_scale() if self.scaler else 0.0
        try:
            output: dict[str, Any] = super()._iteration(engine, batchdata)
        finally:
            self.loss_function = objective
        objective.dual_step(skip=self.scaler is not None and self.scaler.get_scale() < scale)
        return output


_OF_A_PROCESS = 2_654_435_761  # seeds of processes are so far apart, modulo 2**32; those of runs by a multiple of 1e6


class EpochSeed:
    """Seed batch order and augmentation by (seed, epoch), so that a resumed run repeats an unbroken one.

    Processes that train one model together draw the same batches, of which each takes its share, and augment
    differently.

    Args:
        seed: Of the run.
        dataset: Whose random transforms are seeded.
        batches: Batch sampler with ``set_epoch``.
    """

    def __init__(self, seed: int, dataset: Any, batches: Any) -> None:
        self.seed, self.dataset, self.batches = seed, dataset, batches

    def attach(self, engine: Engine) -> None:
        """Called by MONAI."""
        engine.add_event_handler(Events.EPOCH_STARTED, self)

    def __call__(self, engine: Engine) -> None:
        """Seed the epoch that starts."""
        seed = self.seed + engine.state.epoch
        torch.manual_seed(seed)
        self.batches.set_epoch(engine.state.epoch)
        self.dataset.transform.set_random_state(seed=seed + _OF_A_PROCESS * process_rank())


class Collected:
    """What an engine predicted since it was last asked, of all processes together."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def attach(self, engine: Engine) -> None:
        """Keep the output of every iteration."""
        engine.add_event_handler(Events.ITERATION_COMPLETED, self)

    def __call__(self, engine: Any) -> None:
        """Keep this iteration's."""
        output = engine.state.output
        device = output["pred"].device
        self._rows.append((output["pred"].detach(), output["label"].to(device), engine.state.batch["index"].to(device)))

    def take(self) -> tuple[Tensor, Tensor]:
        """Logits ``(N, ...)`` and labels ``(N,)`` of every sample once; forgets them."""
        logits, label, index = gather(*map(torch.cat, zip(*self._rows, strict=True)))
        self._rows = []
        once = first_visits(index)
        return logits[once], label[once].flatten()


@dataclass
class CheckpointRule:
    """Which epoch's weights are kept, whether averaged, and when there is no point in going on.

    Args:
        metric: Name of the validation metric, larger is better.
        rule: ``"best"``: the highest metric, the earlier epoch on a tie. ``"official"`` (the authors' code): on a tie
            the epoch of lower validation loss, if its training AUC is above the best metric - 0.05 (without a training
            AUC, as of several classes or with `LossConditional`, no such condition). ``"last"``: the last epoch, so
            that validation chooses nothing.
        patience: Stop after this many epochs without a better one; None: never.
        ema: Decay per step, in [0, 1), of an exponential moving average of the weights, which is validated and kept in
            their place; training goes on with the weights themselves. 0: no average.
        best: The epoch kept so far; saved with the run.

    Raises:
        InputError: If ``rule`` is unknown, ``patience`` less than 1 or given with ``"last"``, or ``ema`` out of range.
    """

    metric: str = "val_auc"
    rule: Literal["best", "official", "last"] = "best"
    patience: int | None = None
    ema: float = 0.0
    best: dict[str, float] = field(default_factory=lambda: {"auc": -1.0, "epoch": 0, "loss": math.inf})

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        one_of("checkpoint_rule", self.rule, ("best", "official", "last"))
        if self.patience is not None and self.patience < 1:
            raise InputError(f"patience must be 1 or more epochs, or None to train them all, got {self.patience}.")
        if self.patience is not None and self.rule == "last":
            raise InputError(
                f"patience {self.patience} waits for a better epoch, and checkpoint_rule last knows none. Leave "
                "patience out, or choose checkpoint_rule best."
            )
        if not 0 <= self.ema < 1:
            raise InputError(f"ema must be 0 (no average) or a decay below 1, such as 0.99, got {self.ema}.")

    def improves(self, report: dict[str, float]) -> bool:
        """Whether an epoch's weights are to be kept; remembers it if so."""
        if self.rule == "last" and self.metric not in report:  # of a model that nobody was held out from
            self.best = {"epoch": int(report["epoch"])}
            return True
        value, loss = report[self.metric], report["val_loss"]
        tie = self.rule == "official" and value == self.best["auc"] and loss < self.best["loss"]
        trained = report.get("train_auc", math.inf)
        if not (self.rule == "last" or value > self.best["auc"] or (tie and trained > value - 0.05)):
            return False
        self.best = {"auc": value, "epoch": int(report["epoch"]), "loss": loss}
        return True

    def exhausted(self, epoch: int) -> bool:
        """Whether the last improvement lies too far back."""
        return self.patience is not None and epoch - self.best["epoch"] >= self.patience


class EpochEnd:
    """After each epoch's validation: let mu follow the metric, report, keep the best model, save everything.

    ``model.pt`` (weights of the epoch that is kept) is written before ``last.pt`` (all that the next epoch depends on),
    whose predecessor stays as ``previous.pt``: whatever the moment of a crash, starting again repeats the unfinished
    epoch and ends the same. A damaged ``last.pt`` is replaced by its predecessor; without one, or with a damaged
    ``model.pt``, the training begins again; a warning says so. Of several processes the first one writes; what it
    writes can be gone on from by one process or by any number.

    Args:
        folder: Where to write; TensorBoard's event files too.
        network: The model trained.
        optimizer: Its optimiser.
        objective: The loss, with multipliers and mu.
        validator: Evaluator that has just computed the selection's metric; of the averaged weights where the selection
            asks for an average.
        split_digest: Names cohort and split; a checkpoint with another one is refused.
        preset: Name of the preset, for the record.
        selection: Which epoch's weights are kept.
    """

    def __init__(
        self,
        folder: Path | str,
        network: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: AugmentedLagrangian,
        validator: SupervisedEvaluator,
        *,
        split_digest: str,
        preset: str,
        selection: CheckpointRule,
    ) -> None:
        self.files = SplitFolder(Path(folder))
        self.validator, self.selection = validator, selection
        self.record = {"guard": split_digest, "preset": preset}
        self.seen = {"train": Collected(), "val": Collected()}
        self.parts: dict[str, Any] = {"model": network, "optimizer": optimizer, "objective": objective}
        self.kept = network
        if selection.ema:
            step = get_ema_multi_avg_fn(selection.ema)  # type: ignore[no-untyped-call]
            average = AveragedModel(network, multi_avg_fn=step, use_buffers=True)
            self.parts["average"], self.kept = average, average.module
            validator.network = self.kept
        self.history: list[dict[str, float]] = []

    def attach(self, engine: Engine) -> None:
        """Called by MONAI: resume from ``last.pt`` when there is one, and act after each epoch."""
        for name, source in (("train", engine), ("val", self.validator)):
            self.seen[name].attach(source)
        if "average" in self.parts:
            engine.add_event_handler(Events.ITERATION_COMPLETED, self._average)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self)
        self._resume(engine)
        if process_rank() == 0:
            with explain_os_errors(self.files.path):
                self.writer = SummaryWriter(self.files.path)
            engine.add_event_handler(Events.COMPLETED, lambda _: self.writer.close())

    def __call__(self, engine: Engine) -> None:
        """Close one epoch."""
        report = self._report(engine.state.epoch)
        self._refuse_divergence(report)
        self.history.append(report)
        better = self.selection.improves(report)
        if process_rank() == 0:
            self._write(engine, report, better)
        if self.selection.exhausted(engine.state.epoch):
            engine.terminate()

    def finished(self, trainer: Any) -> bool:
        """Whether a resumed trainer has nothing left to do."""
        return bool(trainer.state.epoch >= trainer.state.max_epochs or self.selection.exhausted(trainer.state.epoch))

    def _average(self) -> None:
        self.parts["average"].update_parameters(self.parts["model"])

    def _report(self, epoch: int) -> dict[str, float]:
        objective = cast(AugmentedLagrangian, self.parts["objective"])
        name, metrics = self.selection.metric, self.validator.state.metrics
        metric = float(metrics.get(name, math.nan))  # not a number where nobody is held out: mu rests
        logits, label = self.seen["train"].take()
        held_out = self.seen["val"].take() if name in metrics else ()
        report = {"epoch": epoch} | ({name: metric} if held_out else {})
        scores = torch.cat([part.flatten() for part in (logits, *held_out[:1])])
        self._refuse_divergence(report | {"scores": float(scores.double().sum())})
        if logits[0].numel() == 1 and not objective.conditional:
            report["train_auc"] = auc(label.flatten().cpu().numpy(), logits.flatten().float().cpu().numpy())
        measured = objective.diagnose(*held_out) if held_out else {}
        report |= {f"val_{name}": value for name, value in measured.items()}
        return report | objective.end_epoch(metric, measured.get("violation"))

    def _refuse_divergence(self, report: dict[str, float]) -> None:
        wrong = [f"{name} {value:g}" for name, value in report.items() if not math.isfinite(value)]
        if wrong:
            rate = self.parts["optimizer"].defaults["lr"]
            raise InputError(
                f"Training diverged in epoch {report['epoch']} of {self.files.path}: {', '.join(wrong)}. No study is "
                f"at fault. Lower --learning_rate (now {rate:g}), --mu0 or --mu_cap, and choose another --run_dir; "
                "earlier epochs are kept."
            )

    def _write(self, engine: Engine, report: dict[str, float], better: bool) -> None:
        text = "  ".join(f"{name} {value:.4g}" for name, value in report.items())
        logging.getLogger("mri_alm.figures").info("%s  %s", self.files.name, text)
        if self.selection.exhausted(engine.state.epoch):
            logger.info("No better epoch for %d: stopped.", self.selection.patience)
        if better:
            save_tensors(self.files.model, {"model": self.kept.state_dict()} | self.record)
        state = {name: part.state_dict() for name, part in self.parts.items()} | self.record
        state |= {"trainer": dict(engine.state_dict()), "best": self.selection.best, "history": self.history}
        save_tensors(self.files.last, state, previous=self.files.previous)
        with explain_os_errors(self.files.path):
            for name, value in report.items():
                self.writer.add_scalar(name, value, engine.state.epoch)
            self.writer.flush()

    def _resume(self, engine: Engine) -> None:
        files = [self.files.last, self.files.previous]
        found = [path for path in files if path.exists()]
        for path in found:
            try:
                state = load_tensors(path)
            except DamagedFileError as error:
                logger.warning("%s Going on from what was written before it.", error)
                self._discard(path)
                continue
            if state.get("guard") != self.record["guard"]:
                raise InputError(f"{path} belongs to another cohort or split. Restore it, or choose another run_dir.")
            if is_intact(self.files.model):
                self._restore(engine, path, state)
                return
            logger.warning("%s, the best weights so far, is damaged or lost.", self.files.model)
            self._discard(*files)
            break
        if found:
            logger.warning("%s: training begins again.", self.files.path)

    def _discard(self, *paths: Path) -> None:
        if process_rank() == 0:  # a process that looks later decides the same without them
            for path in paths:
                path.unlink(missing_ok=True)

    def _restore(self, engine: Engine, path: Path, state: dict[str, Any]) -> None:
        try:
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            engine.load_state_dict(state["trainer"])
            self.selection.best, self.history = state["best"], state["history"]
        except (KeyError, RuntimeError, ValueError) as error:
            raise InputError(
                f"{path} is no checkpoint of this network. Restore it, or choose another run_dir."
            ) from error
        logger.info("Going on after epoch %d.", engine.state.epoch)
