"""The binary base losses, one class per row of the paper's tables.

Each is called with logits ``(B,)`` and labels ``(B,)``, 1 for the critical class and 0 for the others, and gives the
mean loss of the batch: float64 for float64 logits, else float32. Values and gradients stay finite at logits of any
size met in training. Values of labels are not checked here, since that would stall a GPU at every step: what is not 1
counts as 0.

Those that need a normalised head, or take several classes, are in `mri_alm.alm.losses_multiclass`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from torch.utils.hooks import RemovableHandle

from mri_alm.alm.processes import world_size
from mri_alm.errors import InputError, numbers_only


class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy (BCE): the plain likelihood every other loss here is a variant of."""

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar."""
        logits = checked_pair(logits, label)
        return binary_cross_entropy_with_logits(logits, (label == 1).to(logits.dtype))


class WeightedBinaryCrossEntropy(nn.Module):
    """Binary cross-entropy that counts each positive several times (W-BCE).

    The paper tries N/3, 2N/3 and N, where N is the number of negatives per positive.

    Args:
        positive_weight: Factor on the loss of positives, > 0. One gives plain binary cross-entropy.

    Raises:
        InputError: If ``positive_weight`` is not positive and finite.
    """

    def __init__(self, positive_weight: float) -> None:
        super().__init__()
        numbers_only(positive_weight=positive_weight)
        if not 0 < positive_weight < math.inf:
            raise InputError(f"positive_weight must be a finite number > 0, got {positive_weight}")
        self.positive_weight = positive_weight

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch (divided by B, not by the weights): ``logits`` (B,), ``label`` (B,) -> scalar."""
        logits = checked_pair(logits, label)
        weight = logits.new_full((), self.positive_weight)
        return binary_cross_entropy_with_logits(logits, (label == 1).to(logits.dtype), pos_weight=weight)


class ClassBalancedBinaryCrossEntropy(nn.Module):
    """Binary cross-entropy weighted by the effective number of samples of each class (CB-BCE).

    Args:
        counts: Training samples without and with the critical class, ``(negatives, positives)``.
        beta: Overlap of samples in [0, 1); the paper tries 0.99, 0.999, 0.9999. Zero gives plain BCE.
        normalise: Scale the two weights to sum to 2, as in the reference; without, as in the code of the ALM paper, the
            loss is 100 to 1000 times smaller.

    Raises:
        InputError: If ``beta`` is outside [0, 1), or ``counts`` does not hold two counts of at least one.

    References:
        Cui et al., "Class-Balanced Loss Based on Effective Number of Samples", CVPR 2019.
    """

    def __init__(self, counts: Sequence[int], beta: float, *, normalise: bool = True) -> None:
        super().__init__()
        if len(counts) != 2:
            raise InputError(f"counts must be (negatives, positives), got {len(counts)} numbers")
        self.negative_weight, self.positive_weight = class_balanced_weights(counts, beta, normalise=normalise)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch (divided by B, not by the weights): ``logits`` (B,), ``label`` (B,) -> scalar."""
        loss = -logsigmoid(_toward_label(logits, label))
        return torch.where(label == 1, self.positive_weight * loss, self.negative_weight * loss).mean()


class SmoothedBinaryCrossEntropy(nn.Module):
    """Binary cross-entropy towards labels that are not quite certain: 1 - s/2 for positives, s/2 for negatives.

    Args:
        smoothing: s in [0, 1). Zero gives plain binary cross-entropy.

    Raises:
        InputError: If ``smoothing`` is outside [0, 1).

    References:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016, section 7.
    """

    def __init__(self, smoothing: float = 0.1) -> None:
        super().__init__()
        numbers_only(smoothing=smoothing)
        if not 0 <= smoothing < 1:
            raise InputError(f"smoothing must be in [0, 1), got {smoothing}")
        self.smoothing = smoothing

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar."""
        logits = checked_pair(logits, label)
        target = (1 - self.smoothing) * (label == 1).to(logits.dtype) + self.smoothing / 2
        return binary_cross_entropy_with_logits(logits, target)


class VectorScaling(nn.Module):
    """Binary cross-entropy of a logit that is scaled and shifted by how rare its class is (VS), or shifted only (LA).

    A sample of class y has the loss log(1 + exp(tau log(n_other / n_y) - (n_y / n_max)^gamma m)), where m is its logit
    towards its own class. So rare positives have to reach a larger logit (tau), and their logit counts less (gamma).

    Args:
        counts: Training samples without and with the critical class, as the loss sees them: of the batches, where those
            have another share of positives than the cohort.
        tau: Strength of the shift, >= 0. One is what makes the unshifted logit right for classes of equal frequency.
        gamma: Exponent of the scale, >= 0. Zero is logit adjustment.

    Raises:
        InputError: If ``tau`` or ``gamma`` is negative or not finite, or ``counts`` does not hold two counts of at
            least one.

    References:
        Kini, Paraskevas, Oymak, Thrampoulidis, "Label-Imbalanced and Group-Sensitive Classification under
        Overparameterization", NeurIPS 2021 (the binary VS loss, its weights 1). Menon et al., "Long-tail learning via
        logit adjustment", ICLR 2021.
    """

    def __init__(self, counts: Sequence[int], *, tau: float = 1.0, gamma: float = 0.0) -> None:
        super().__init__()
        if len(counts) != 2:
            raise InputError(f"counts must be (negatives, positives), got {len(counts)} numbers")
        negatives, positives = checked_counts(counts)
        self.tau = non_negative("tau", tau)
        self.log_ratio = math.log(negatives / positives)
        largest = max(counts)
        self.scales = [(count / largest) ** non_negative("gamma", gamma) for count in (negatives, positives)]

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar."""
        signed, shift = _toward_label(logits, label), self._tau(logits) * self.log_ratio
        own = torch.where(label == 1, self.scales[1] * signed - shift, self.scales[0] * signed + shift)
        return -logsigmoid(own).mean()

    def _tau(self, logits: Tensor) -> float | Tensor:  # noqa: ARG002
        return self.tau


class LossConditional(VectorScaling):
    """VS with another tau at every step, which the network hears (loss-conditional training, LCT).

    A training step takes tau from the uniform distribution over [0, ``largest``]. A small network of this module's own
    turns it into a factor and a summand for each feature in front of the last layer (FiLM). Both are differences from
    their values at the tau that is kept. So the network without them is the one of that tau: it is validated, saved,
    exported and scored as with any other loss, and the loss of logits without a gradient is VS of that tau.

    The optimiser has to be given this module's parameters too, and :meth:`draw` has to be called after each step;
    `AugmentedLagrangian.dual_step` does so. A network hears the loss that was made last; a copy of it hears none.

    Args:
        counts: See `VectorScaling`; so is ``gamma``.
        network: Its last layer, an ``nn.Linear`` to one logit with the name ``head``, hears tau in training mode.
        tau: The one that is kept, in [0, ``largest``]. The authors' code scores at 3 unless told otherwise.
        gamma: Exponent of the scale, >= 0.
        largest: Of the values drawn, > 0.

    Raises:
        InputError: If the network has no such layer, several processes train it, a number is out of range, or a step's
            logits come from a network that did not hear of its tau.

    References:
        Lieberman, Yuan, Ravindran, Tomasi, "Optimizing for ROC Curves on Class-Imbalanced Data by Training over a
        Family of Loss Functions", arXiv 2402.05400 (tau in [0, 3], gamma 0.2, FiLM of 128 hidden units in
        front of the last layer).
        Dosovitskiy, Djolonga, "You Only Train Once: Loss-Conditional Training of Deep Networks", ICLR 2020.
    """

    drawn: Tensor

    def __init__(
        self,
        counts: Sequence[int],
        network: nn.Module,
        *,
        tau: float = 1.0,
        gamma: float = 0.2,
        largest: float = 3.0,
    ) -> None:
        super().__init__(counts, tau=tau, gamma=gamma)
        head = getattr(network, "head", None)
        if not (isinstance(head, nn.Linear) and head.out_features == 1):
            raise InputError(
                "Loss-conditional training changes the features in front of the network's last layer, an nn.Linear to "
                f"one logit with the name head: {type(network).__name__} has none. Choose another loss, such as vs."
            )
        if world_size() > 1:
            raise InputError("Loss-conditional training is for one process: choose another loss, such as vs.")
        if not tau <= non_negative("largest", largest) > 0:
            raise InputError(f"Loss-conditional training draws tau from 0 to {largest}, so it cannot keep {tau}.")
        self.largest = largest
        self.film = nn.Sequential(nn.Linear(1, 128), nn.ReLU(), nn.Linear(128, 2 * head.in_features))
        self.register_buffer("drawn", torch.zeros(()))
        self.draw()
        earlier: RemovableHandle | None = getattr(head, "told", None)
        if earlier is not None:  # by another loss: two would both change the features
            earlier.remove()
        head.told = head.register_forward_pre_hook(self._tell)  # type: ignore[assignment]
        self._head = id(head)

    def draw(self) -> None:
        """Another tau, for the next step."""
        self.drawn.uniform_(0, self.largest)
        self._heard: bool | None = None  # not called since

    def _tau(self, logits: Tensor) -> float | Tensor:
        if not logits.requires_grad:
            return self.tau
        if self._heard is None:
            raise InputError(
                "No network heard of this step's tau: its layer head was not called since tau was drawn, or the loss "
                "was copied, or another loss was made for the network. Make the loss anew for the network it trains."
            )
        return self.drawn if self._heard else self.tau

    def _tell(self, head: nn.Module, inputs: tuple[Tensor]) -> Tensor | None:
        """The features in front of the last layer, as the step's tau changes them."""
        if id(head) != self._head:  # of a copy
            return None
        self._heard = head.training and torch.is_grad_enabled()
        if not self._heard:
            return None
        features, taus = inputs[0], torch.stack([self.drawn, torch.full_like(self.drawn, self.tau)])
        with torch.autocast(features.device.type, enabled=False):
            drawn, kept = self.film(taus[:, None] / self.largest)
            factor, summand = (drawn - kept).chunk(2)
            return (features * (1 + factor) + summand).to(features.dtype)


class SymmetricFocal(nn.Module):
    """Binary cross-entropy that down-weights easy samples of both classes (S-FL), by (1 - p of the true class)^gamma.

    Args:
        gamma: Focusing exponent, >= 0; the paper tries 0.5, 1, 2. Zero gives plain binary cross-entropy.
        log_offset: Added inside the logarithm, >= 0: 0, or 1e-4 as in the authors' code.

    Raises:
        InputError: If a value is negative or not finite.

    References:
        Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, Eq. 4.
    """

    def __init__(self, gamma: float, *, log_offset: float = 0.0) -> None:
        super().__init__()
        self.log_offset = non_negative("log_offset", log_offset)
        self.gamma = non_negative("gamma", gamma)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar."""
        signed = _toward_label(logits, label)
        return (_focus(signed, self.gamma) * _nll(signed, self.log_offset)).mean()


class AsymmetricFocal(SymmetricFocal):
    """Binary cross-entropy that down-weights easy negatives only (A-FL).

    Positives keep their full loss, so the rare, critical class is never discounted.

    Args:
        gamma: Focusing exponent, >= 0; the paper tries 0.5, 1, 2. Zero gives plain binary cross-entropy.
        log_offset: Added inside the logarithm, >= 0: 0, or 1e-4 as in the authors' code.

    Raises:
        InputError: If a value is negative or not finite.

    References:
        Li, Kamnitsas, Glocker, "Overfitting of neural nets under class imbalance", MICCAI 2019.
    """

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar."""
        signed = _toward_label(logits, label)
        return (torch.where(label == 1, 1.0, _focus(signed, self.gamma)) * _nll(signed, self.log_offset)).mean()


class SymmetricMargin(nn.Module):
    """Binary cross-entropy after the logit of every sample is moved against it by a margin (S-ML).

    A sample has to lie a margin beyond the decision boundary before its loss is what plain cross-entropy would give.

    Args:
        margin: In units of the logit, >= 0; the paper tries 0.5, 2, 4. Zero gives plain binary cross-entropy.
        log_offset: Added inside the logarithm, >= 0: 0, or 1e-4 as in the authors' code.

    Raises:
        InputError: If a value is negative or not finite.

    References:
        Liu et al., "Large-Margin Softmax Loss", ICML 2016, in the additive form of Li, Kamnitsas, Glocker, MICCAI 2019.
    """

    def __init__(self, margin: float, *, log_offset: float = 0.0) -> None:
        super().__init__()
        self.log_offset = non_negative("log_offset", log_offset)
        self.margin = non_negative("margin", margin)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar."""
        return _nll(_toward_label(logits, label) - self.margin, self.log_offset).mean()


class AsymmetricMargin(SymmetricMargin):
    """Binary cross-entropy with a margin for positives only (A-ML).

    Scores of unseen samples of the rare class fall towards the boundary; only this class gets the reserve.

    Args:
        margin: In units of the logit, >= 0; the paper tries 0.5, 2, 4. Zero gives plain binary cross-entropy.
        log_offset: Added inside the logarithm, >= 0: 0, or 1e-4 as in the authors' code.

    Raises:
        InputError: If a value is negative or not finite.

    References:
        Li, Kamnitsas, Glocker, "Overfitting of neural nets under class imbalance", MICCAI 2019.
    """

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar."""
        signed = _toward_label(logits, label)
        return _nll(torch.where(label == 1, signed - self.margin, signed), self.log_offset).mean()


def class_balanced_weights(counts: Sequence[int], beta: float, *, normalise: bool = True) -> list[float]:
    """Weight of each class, (1 - beta) / (1 - beta^count): the inverse of its effective number of samples.

    Args:
        counts: Training samples of each class, all >= 1.
        beta: In [0, 1); zero weighs all classes alike, towards one the weight approaches 1 / count.
        normalise: Scale the weights to sum to the number of classes.

    Raises:
        InputError: If ``beta`` is outside [0, 1) or a class has no sample.

    References:
        Cui et al., CVPR 2019.
    """
    numbers_only(beta=beta)
    if not 0 <= beta < 1:
        raise InputError(f"beta must be in [0, 1), got {beta}")
    weights = [(1 - beta) / (1 - beta**count) for count in checked_counts(counts)]
    scale = len(weights) / sum(weights) if normalise else 1.0
    return [weight * scale for weight in weights]


def checked_counts(counts: Sequence[int]) -> Sequence[int]:
    """Samples per class, or an `InputError` if a class has none."""
    if min(counts, default=0) < 1:
        raise InputError(f"counts must hold at least one training sample per class, got {list(counts)}")
    return counts


def non_negative(name: str, value: float) -> float:
    """The value, or an `InputError` that names the parameter."""
    given: dict[str, Any] = {name: value}
    numbers_only(**given)
    if not 0 <= value < math.inf:
        raise InputError(f"{name} must be a finite number >= 0, got {value}")
    return value


def full_precision(logits: Tensor) -> Tensor:
    """Half precision to float32, as the losses need it under autocast; float32 and float64 as they are."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def checked_pair(logits: Tensor, label: Tensor) -> Tensor:
    """Logits ``(B,)`` in full precision, or an `InputError` if the labels' shape is another."""
    # Shapes (B, 1) and (B,) would broadcast to (B, B) and train on nonsense.
    if logits.dim() != 1 or label.shape != logits.shape:
        raise InputError(f"need logits (B,) and label (B,), got {tuple(logits.shape)} and {tuple(label.shape)}")
    return full_precision(logits)


def _toward_label(logits: Tensor, label: Tensor) -> Tensor:
    """The logit of the true class: z for positives, -z for negatives."""
    logits = checked_pair(logits, label)
    return torch.where(label == 1, logits, -logits)


def _nll(signed: Tensor, offset: float) -> Tensor:
    """-log(p + offset) of the true class. With an offset badly wrong samples lose their gradient."""
    log_p = logsigmoid(signed)
    return -torch.logaddexp(log_p, log_p.new_tensor(offset).log()) if offset else -log_p


def _focus(signed: Tensor, gamma: float) -> Tensor:
    # Not sigmoid(-signed)**gamma, whose gradient is NaN once the sigmoid underflows.
    return torch.exp(gamma * logsigmoid(-signed))


class MiniBatchAUC(nn.Module):
    """Mean over all pairs of the batch of (1 - (p - n))^2, the square surrogate of the AUC (MBAUC).

    A comparison row of the binary tables, never combined with the constraint. The mean over pairs is
    (1 - mean(p) + mean(n))^2 + var(p) + var(n), so no pair is ever formed; this is also the min-max form of the AUC
    loss with its inner variables solved for exactly on the batch.

    References:
        Gultekin, Saha, Ratnaparkhi, Paisley, "MBA: Mini-Batch AUC Optimization", IEEE TNNLS 2020. Ying, Wen, Lyu,
        "Stochastic Online AUC Maximization", NeurIPS 2016, for the min-max form.
    """

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar; zero if one class is missing."""
        logits = checked_pair(logits, label)
        positive = (label == 1).to(logits.dtype)
        mean_positive, variance_positive = _moments(logits, positive)
        mean_negative, variance_negative = _moments(logits, 1 - positive)
        loss = (1 - mean_positive + mean_negative).square() + variance_positive + variance_negative
        return torch.where((label == 1).any() & (label != 1).any(), loss, 0 * logits.sum())


class PartialAUC(nn.Module):
    """Squared hinge over the pairs of the batch with its hardest negatives, a surrogate of the one-way partial AUC.

    A comparison row: what else aims at few false positives at the highest true-positive rates. For each positive the
    mean over the worst share of the negatives is its conditional value at risk (CVaR); the surrogate grows with the
    negative's score, so all positives share the same worst negatives. Never combined with the constraint.

    Args:
        max_fpr: Share of the negatives of the batch that count, in (0, 1], rounded up to whole negatives.
        margin: By which positives are to exceed them, in units of the probability, > 0.

    Raises:
        InputError: If a value is out of its range.

    References:
        Zhu, Li, Wang, Wu, Yang, "When AUC meets DRO: Optimizing Partial AUC for Deep Learning with Non-Convex
        Convergence Guarantee", ICML 2022: one-way partial AUC with CVaR, its inner variable solved on the batch.
    """

    def __init__(self, max_fpr: float = 0.3, *, margin: float = 1.0) -> None:
        super().__init__()
        numbers_only(max_fpr=max_fpr, margin=margin)
        if not 0 < max_fpr <= 1 or not 0 < margin < math.inf:
            raise InputError(f"max_fpr must be in (0, 1] and margin > 0 and finite, got {max_fpr} and {margin}.")
        self.max_fpr, self.margin = max_fpr, margin

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar; zero if one class is missing."""
        score = checked_pair(logits, label).sigmoid()
        positive, negative = score[label == 1], score[label != 1]
        if not len(positive) or not len(negative):
            return 0 * score.sum()
        hardest = negative.topk(math.ceil(self.max_fpr * len(negative))).values
        return (self.margin - positive[:, None] + hardest).clamp(min=0).square().mean()


def _moments(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of the values with weight one; zeros if there are none."""
    count = weight.sum().clamp(min=1)
    mean = (weight * values).sum() / count
    return mean, (weight * (values - mean).square()).sum() / count
