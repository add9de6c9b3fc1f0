"""The multi-class base losses, and LDAM for two classes or more.

Each is called with logits ``(B, C)`` and labels ``(B,)``, integer classes in [0, C), and gives the mean loss of the
batch: float64 for float64 logits, else float32. Values and gradients stay finite at logits of any size met in training.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from mri_alm.alm.losses import checked_counts, checked_pair, class_balanced_weights, full_precision, non_negative
from mri_alm.errors import InputError


class CrossEntropy(nn.Module):
    """Softmax cross-entropy (CE)."""

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B, C), ``label`` (B,) in [0, C) -> scalar."""
        return cross_entropy(*_checked(logits, label))


class ClassBalancedCrossEntropy(nn.Module):
    """Cross-entropy weighted by the effective number of samples of each class (CB-CE).

    Args:
        counts: Training samples of each class.
        beta: Overlap of samples in [0, 1); the paper tries 0.99, 0.999, 0.9999. Zero gives plain cross-entropy.
        normalise: Scale the weights to sum to C, as in the reference.

    Raises:
        InputError: If ``beta`` is outside [0, 1) or a class has no sample.

    References:
        Cui et al., "Class-Balanced Loss Based on Effective Number of Samples", CVPR 2019.
    """

    weights: Tensor

    def __init__(self, counts: Sequence[int], beta: float, *, normalise: bool = True) -> None:
        super().__init__()
        weights = class_balanced_weights(counts, beta, normalise=normalise)
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float64), persistent=False)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch (divided by B, not by the weights): ``logits`` (B, C), ``label`` (B,) -> scalar."""
        logits, label = _checked(logits, label)
        return cross_entropy(logits, label, weight=self.weights.to(logits.dtype), reduction="none").mean()


class MulticlassFocal(nn.Module):
    """Cross-entropy that down-weights easy samples of all classes (FL), by (1 - p)^gamma for the true class's p.

    Args:
        gamma: Focusing exponent, >= 0; the paper tries 0.5, 1, 2. Zero gives plain cross-entropy.

    Raises:
        InputError: If ``gamma`` is negative or not finite.

    References:
        Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, Eq. 4, on softmax probabilities.
    """

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = non_negative("gamma", gamma)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B, C), ``label`` (B,) in [0, C) -> scalar."""
        logits, label = _checked(logits, label)
        return (_focus(logits, label, self.gamma) * cross_entropy(logits, label, reduction="none")).mean()


class MulticlassAsymmetricFocal(nn.Module):
    """Cross-entropy that down-weights easy samples of the non-critical classes only (A-FL).

    Args:
        gamma: Focusing exponent, >= 0; the paper tries 0.5, 1, 2. Zero gives plain cross-entropy.
        critical: The rare classes, which keep their full loss.

    Raises:
        InputError: If ``gamma`` is negative or not finite, or ``critical`` is empty.

    References:
        Li, Kamnitsas, Glocker, "Overfitting of neural nets under class imbalance", MICCAI 2019.
    """

    def __init__(self, gamma: float, critical: Sequence[int]) -> None:
        super().__init__()
        self.gamma = non_negative("gamma", gamma)
        self.critical = _some_classes(critical)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B, C), ``label`` (B,) in [0, C) -> scalar."""
        logits, label = _checked(logits, label)
        focus = torch.where(_among(label, self.critical), 1.0, _focus(logits, label, self.gamma))
        return (focus * cross_entropy(logits, label, reduction="none")).mean()


class MulticlassMargin(nn.Module):
    """Cross-entropy after the true class's logit is lowered by a margin (S-LM).

    Args:
        margin: In units of the logit, >= 0; the paper tries 0.5, 2, 4. Zero gives plain cross-entropy.

    Raises:
        InputError: If ``margin`` is negative or not finite.

    References:
        Liu et al., "Large-Margin Softmax Loss", ICML 2016, in the additive form of Li, Kamnitsas, Glocker, MICCAI 2019.
    """

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = non_negative("margin", margin)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B, C), ``label`` (B,) in [0, C) -> scalar."""
        logits, label = _checked(logits, label)
        return cross_entropy(_lowered(logits, label, torch.full_like(label, self.margin, dtype=logits.dtype)), label)


class MulticlassAsymmetricMargin(nn.Module):
    """Cross-entropy with a margin for the critical classes only (A-LM).

    Args:
        margin: In units of the logit, >= 0; the paper tries 0.5, 2, 4. Zero gives plain cross-entropy.
        critical: The rare classes, which get the margin.

    Raises:
        InputError: If ``margin`` is negative or not finite, or ``critical`` is empty.

    References:
        Li, Kamnitsas, Glocker, "Overfitting of neural nets under class imbalance", MICCAI 2019.
    """

    def __init__(self, margin: float, critical: Sequence[int]) -> None:
        super().__init__()
        self.margin = non_negative("margin", margin)
        self.critical = _some_classes(critical)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B, C), ``label`` (B,) in [0, C) -> scalar."""
        logits, label = _checked(logits, label)
        margin = self.margin * _among(label, self.critical).to(logits.dtype)
        return cross_entropy(_lowered(logits, label, margin), label)


class LDAM(nn.Module):
    """Cross-entropy with a margin that is larger for rarer classes, proportional to count^(-1/4).

    It is made for the cosines of `NormalizedLinear`, also in the binary case, which therefore has two columns here.
    Margins only mean something against bounded logits.

    Args:
        counts: Training samples of each class; for two classes ``(negatives, positives)``.
        max_margin: Margin of the rarest class, >= 0, in units of the cosine. Zero gives CE of the scaled logits.
        scale: Factor on the cosines before the softmax, > 0; they alone could not give a confident probability.

    Raises:
        InputError: If a class has no sample, or ``max_margin`` or ``scale`` is out of range.

    References:
        Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", NeurIPS 2019.
    """

    margins: Tensor

    def __init__(self, counts: Sequence[int], *, max_margin: float = 0.5, scale: float = 30.0) -> None:
        super().__init__()
        rarity = torch.tensor(checked_counts(counts), dtype=torch.float64) ** -0.25
        margins = non_negative("max_margin", max_margin) * rarity / rarity.max()
        self.register_buffer("margins", margins, persistent=False)
        if non_negative("scale", scale) == 0:
            raise InputError("scale must be > 0: with 0 the loss does not depend on the network")
        self.scale = scale

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B, C), cosines in [-1, 1], ``label`` (B,) in [0, C) -> scalar."""
        logits, label = _checked(logits, label)
        margin = self.margins.to(logits.dtype)[label]
        return cross_entropy(self.scale * _lowered(logits, label, margin), label)


class BinaryLDAM(nn.Module):
    """`LDAM` for two classes and one logit, that of `CosineContrast`: scale times the difference of the two cosines.

    The softmax of two columns depends on their difference only, so this is the same loss as `LDAM` on ``(B, 2)``.

    Args:
        counts: Training samples ``(negatives, positives)``.
        max_margin: As in `LDAM`.
        scale: As in `LDAM` and in `CosineContrast`.

    Raises:
        InputError: As in `LDAM`.
    """

    def __init__(self, counts: Sequence[int], *, max_margin: float = 0.5, scale: float = 30.0) -> None:
        super().__init__()
        if len(counts) != 2:
            raise InputError(f"counts must be (negatives, positives), got {len(counts)} numbers")
        columns = LDAM(counts, max_margin=max_margin, scale=scale)
        self.negative_margin, self.positive_margin = (scale * columns.margins).tolist()

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Mean loss of a batch: ``logits`` (B,), ``label`` (B,) in {0, 1} -> scalar."""
        logits = checked_pair(logits, label)
        positive = -logsigmoid(logits - self.positive_margin)
        negative = -logsigmoid(-logits - self.negative_margin)
        return torch.where(label == 1, positive, negative).mean()


def _checked(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dim() != 2 or label.shape != logits.shape[:1]:
        raise InputError(f"need logits (B, C) and label (B,), got {tuple(logits.shape)} and {tuple(label.shape)}")
    return full_precision(logits), label.long()


def _focus(logits: Tensor, label: Tensor, gamma: float) -> Tensor:
    """(1 - p)^gamma of the true class, from the logits of the other classes: no cancellation when p is close to 1."""
    others = logits.scatter(1, label.unsqueeze(1), -torch.inf)
    return torch.exp(gamma * (others.logsumexp(1) - logits.logsumexp(1)))


def _lowered(logits: Tensor, label: Tensor, margin: Tensor) -> Tensor:
    """The logits with the true class's lowered by the sample's ``margin`` (B,)."""
    return logits.scatter_add(1, label.unsqueeze(1), -margin.unsqueeze(1))


def _among(label: Tensor, classes: Sequence[int]) -> Tensor:
    return torch.stack([label == c for c in classes]).any(0)


def _some_classes(critical: Sequence[int]) -> tuple[int, ...]:
    if len(critical) == 0:
        raise InputError("critical must name at least one class")
    return tuple(critical)
