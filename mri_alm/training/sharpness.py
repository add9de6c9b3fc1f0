"""Sharpness-aware minimisation: the gradient of a step is that where the loss is highest nearby."""

from typing import Any

import torch
from ignite.engine import Engine
from monai.engines.utils import IterationEvents
from torch.nn.modules.batchnorm import _BatchNorm

from mri_alm.alm.lagrangian import AugmentedLagrangian
from mri_alm.errors import InputError


class SharpnessAware:
    """Between a trainer's backward pass and its optimiser's step: replace the gradient by that at a worse point nearby.

    The weights move by ``radius`` along the gradient, the gradient is taken there by a second forward and backward pass
    of the same batch, and the weights move back exactly. So a step costs twice the time. Logits, loss and violations,
    by which the multipliers move, are those of the first pass, and so are the statistics of batch normalisation. A
    gradient of 0, or one that is not finite (a gradient scaler then leaves the step out), stays as it is.

    Args:
        radius: Length of the move over all weights together (the paper's rho), such as 0.05.
        objective: The loss; the second pass leaves its multipliers and its figures alone.

    Raises:
        InputError: If the radius is not a positive number, or the objective caps the term's gradient or keeps a bank of
            negatives: both would treat the two passes differently.

    References:
        Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", ICLR 2021, Algorithm 1.
    """

    def __init__(self, radius: float, objective: AugmentedLagrangian) -> None:
        if isinstance(radius, bool) or not 0 < radius < float("inf"):
            raise InputError(f"sam_radius must be 0 (off) or a positive number, such as 0.05, got {radius}.")
        if objective.schedule.gradient_cap is not None or len(objective.negatives):
            raise InputError("sam_radius works with neither gradient_cap nor negative_bank: leave out one of them.")
        self.radius, self.objective = radius, objective

    def attach(self, engine: Engine) -> None:
        """Act after every backward pass of a MONAI trainer."""
        engine.add_event_handler(IterationEvents.BACKWARD_COMPLETED, self)

    def __call__(self, engine: Any) -> None:
        """Replace the gradients of the batch that was just seen."""
        weights = [weight for weight in engine.network.parameters() if weight.grad is not None]
        gradients = [weight.grad for weight in weights]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients]))
        if not (torch.isfinite(norm) and norm > 0):
            return
        before = [weight.detach().clone() for weight in weights]
        counting = [m for m in engine.network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.add_(gradient * (self.radius / norm))
        self._switch(counting, first=False)
        try:
            self._second_pass(engine)
        finally:
            self._switch(counting, first=True)
            with torch.no_grad():
                for weight, value in zip(weights, before, strict=True):
                    weight.copy_(value)

    def _switch(self, counting: list[_BatchNorm], *, first: bool) -> None:
        """What remembers something of a batch does so in the first pass only."""
        self.objective.train(first)
        for layer in counting:
            layer.track_running_stats = first

    def _second_pass(self, engine: Any) -> None:
        image, label = engine.state.output["image"], engine.state.output["label"]  # on their device by now
        engine.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", **(engine.amp_kwargs or {}), enabled=bool(engine.scaler)):
            loss = engine.loss_function(engine.inferer(image, engine.network), label)
        (engine.scaler.scale(loss) if engine.scaler else loss).backward()
