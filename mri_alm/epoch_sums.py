"""What the constraint does in an epoch, summed over its batches on their device, so that no step waits for a number."""

import torch
from torch import Tensor, nn

from mri_alm.ranking import Violations

_NAMES = ("base_loss", "alm_term", "base_gradient", "alm_gradient", "satisfied", "constraints", "batches", "active")


class EpochSums(nn.Module):
    """Sums since they were last taken; no part of a checkpoint, which is written between epochs."""

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(len(_NAMES), dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def add(self, logits: Tensor, base: Tensor, term: Tensor, found: Violations, *, measuring: bool) -> None:
        """Add one batch; gradients are taken on the logits, so this costs next to nothing.

        Args:
            logits: ``(B,)`` or ``(B, C)``, of which the others are functions.
            base: The base loss, a scalar.
            term: The ALM term, a scalar, or with ``measuring`` what would be it for mu = 1.
            found: The batch's constraints.
            measuring: The term is no part of the objective yet: only its gradient counts.
        """
        norms = torch.zeros(2, dtype=torch.float64, device=logits.device)
        if found.active and logits.requires_grad:
            gradients = [torch.autograd.grad(part, logits, retain_graph=True)[0] for part in (base, term)]
            norms = torch.stack([gradient.double().norm() for gradient in gradients])
        values = torch.stack([base.detach().double(), torch.zeros_like(term) if measuring else term.detach()])
        counts = [float(len(found.q)) * found.active, 1.0, float(found.active)]
        satisfied = ((found.q == 0).sum() * found.active).double().view(1)
        self.sums += torch.cat(
            [values, norms, satisfied, torch.tensor(counts, dtype=torch.float64, device=logits.device)]
        )

    def take(self) -> dict[str, float]:
        """The sums by name; they start anew."""
        values = self.sums.tolist()
        self.sums.zero_()
        return dict(zip(_NAMES, values, strict=True))


def averages(sums: dict[str, float], *, measuring: bool) -> dict[str, float]:
    """Of an epoch's sums, what `AugmentedLagrangian.end_epoch` reports of them."""
    return {
        "base_loss": ratio(sums["base_loss"], sums["batches"]),
        "alm_term": ratio(sums["alm_term"], sums["batches"]),
        "gradient_ratio": 0.0 if measuring else ratio(sums["alm_gradient"], sums["base_gradient"]),
        "satisfied": ratio(sums["satisfied"], sums["constraints"]),
        "batches_without_positives": sums["batches"] - sums["active"],
    }


def ratio(numerator: float, denominator: float) -> float:
    """A mean or a ratio; 0 where there was nothing to divide by."""
    return numerator / denominator if denominator else 0.0
