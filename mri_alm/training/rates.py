"""The learning rate of each epoch, computed from its number, so that a run that goes on has the right one."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from ignite.engine import Engine, Events

from mri_alm.errors import InputError, one_of


class StepRate:
    """A constant learning rate, or one that falls in steps, after a warm-up.

    Args:
        optimizer: Whose rate is set.
        rate: Rate after the warm-up.
        milestones: Epochs (from 1) after which the rate is multiplied by ``factor``; none: a constant rate.
        factor: See ``milestones``.
        warmup: In the first epochs the rate is ``epoch / warmup`` of itself; 0: no warm-up.

    Raises:
        InputError: If ``rate`` or ``factor`` is not positive.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rate: float,
        *,
        milestones: Sequence[int] = (),
        factor: float = 0.1,
        warmup: int = 0,
    ) -> None:
        if not rate > 0 or not factor > 0:
            raise InputError(f"learning_rate and rate_factor must be greater than 0, got {rate} and {factor}.")
        self.optimizer, self.rate, self.milestones = optimizer, rate, milestones
        self.factor, self.warmup = factor, warmup

    def attach(self, engine: Engine) -> None:
        """Called by MONAI."""
        engine.add_event_handler(Events.EPOCH_STARTED, self)

    def __call__(self, engine: Any) -> None:
        """Set the rate of the epoch that starts."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.of(engine.state.epoch)

    def of(self, epoch: int) -> float:
        """The rate of an epoch, from 1."""
        drops = sum(epoch > milestone for milestone in self.milestones)
        return self.rate * min(1.0, epoch / max(self.warmup, 1)) * self.factor**drops


class CosineRate(StepRate):
    """After the warm-up the learning rate falls along half a cosine, to nearly 0 in the last epoch.

    Args:
        optimizer: Whose rate is set.
        rate: Rate after the warm-up.
        epochs: How many there are.
        warmup: See :class:`StepRate`; less than ``epochs``.

    Raises:
        InputError: If ``rate`` is not positive, or no epoch is left after the warm-up.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rate: float, *, epochs: int, warmup: int = 0) -> None:
        super().__init__(optimizer, rate, warmup=warmup)
        if warmup >= epochs:
            raise InputError(f"warmup must be less than max_epochs = {epochs}, got {warmup}.")
        self.epochs = epochs

    def of(self, epoch: int) -> float:
        """The rate of an epoch, from 1."""
        start = max(self.warmup, 1)
        past = max(epoch - start, 0) / (self.epochs - start + 1)
        return super().of(epoch) * (1 + math.cos(math.pi * past)) / 2


def scheduled_rate(
    schedule: str, optimizer: torch.optim.Optimizer, rate: float, *, epochs: int, warmup: int
) -> StepRate:
    """The schedule of that name.

    Args:
        schedule: ``"constant"`` or ``"cosine"`` (:class:`CosineRate`), after the warm-up.
        optimizer: Whose rate is set.
        rate: Rate after the warm-up.
        epochs: How many there are.
        warmup: In how many of them the rate rises; less than ``epochs``.

    Raises:
        InputError: If the schedule is unknown, ``rate`` is not positive, or no epoch is left after the warm-up.
    """
    one_of("schedule", schedule, ("constant", "cosine"))
    cosine = CosineRate(optimizer, rate, epochs=epochs, warmup=warmup)
    return cosine if schedule == "cosine" else StepRate(optimizer, rate, warmup=warmup)
