"""Base losses that MONAI has, as this package calls a loss."""

from typing import cast

from monai.losses import AUCMLoss
from torch import Tensor, nn
from torch.func import functional_call

from mri_alm.alm.losses import checked_pair


class AUCMargin(nn.Module):
    """MONAI's AUC-margin loss on probabilities: a comparison row beside `MiniBatchAUC`, not for use with constraints.

    A min-max problem: its a and b are minimised and its alpha is maximised with the network's weights, all by the same
    optimiser, which therefore has to be given this module's parameters too; alpha's gradient arrives reversed, and
    alpha is kept >= 0 (its saddle point for a positive margin).

    Args:
        margin: By which positives are to exceed negatives, in units of the probability.

    References:
        Yuan, Yan, Sonka, Yang, "Large-scale Robust Deep AUC Maximization", ICCV 2021.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        self.loss = AUCMLoss(margin=margin, version="v2")  # v1 needs the class ratio of the cohort

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar."""
        self.loss.alpha.data.clamp_(min=0)
        score = checked_pair(logits, label).sigmoid()
        alpha = self.loss.alpha
        reversed_ = {"alpha": 2 * alpha.detach() - alpha}  # its value; unlike a hook, a copy of the module has it too
        return cast(Tensor, functional_call(self.loss, reversed_, (score[:, None], label.to(score.dtype)[:, None])))
