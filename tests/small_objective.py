"""An objective of six samples with a base loss that is obvious, and the step of the method notes for it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mri_alm import AugmentedLagrangian, MuSchedule, RankingConstraint

# Three positives, three negatives, logits as scores: q = (7/5, 4/5, 11/5), two negatives above every positive.
STEP_SCORE = (0.1, 0.4, -0.3, 0.2, -1.0, 0.9)
STEP_LABEL = torch.tensor([1, 1, 1, 0, 0, 0])


class Zero(nn.Module):
    """A base loss of zero, still tied to the logits, so that the objective is the ALM term alone."""

    def forward(self, logits: Tensor, _: Tensor) -> Tensor:
        return 0 * logits.sum()


class Ramp(nn.Module):
    """A base loss whose gradient is (1, 2, ..., B)."""

    def forward(self, logits: Tensor, _: Tensor) -> Tensor:
        return (logits * torch.arange(1, len(logits) + 1)).sum()


def objective(base: nn.Module | None = None, samples: int = 6, mu: Any = 0.1, **options: Any) -> AugmentedLagrangian:
    """Options of the constraint and of the multipliers' steps go there, the others to the Lagrangian itself."""
    fields = {name: options.pop(name) for name in list(options) if name in RankingConstraint.__dataclass_fields__}
    constraint = RankingConstraint(**{"score": "logit"} | fields)
    steps = {name: options.pop(name) for name in ("dual_rate", "dual_decay", "gradient_cap") if name in options}
    schedule = replace(options.pop("schedule", MuSchedule()), **steps)
    return AugmentedLagrangian(base or Zero(), samples, mu=mu, constraint=constraint, schedule=schedule, **options)
