"""Networks: one image tensor in, logits out."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from monai.inferers import SimpleInferer
from monai.networks.blocks import ADN, Convolution
from monai.networks.layers.utils import get_norm_layer
from monai.networks.nets.resnet import ResNetBlock
from torch import Tensor, nn
from torch.nn.functional import linear, normalize
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from mri_alm.errors import InputError, one_of


class OneBranchCNN(nn.Module):
    """One path of `TwoBranchCNN` in front of a fully connected layer, for images whose channels belong together.

    Args:
        channels: Of the input.
        features: See `TwoBranchCNN`; so are ``norm``, ``dropout`` and ``cosine_scale``.

    Raises:
        InputError: If there is no channel, no stage, or a stage has no channels.
    """

    def __init__(
        self,
        channels: int = 1,
        features: Sequence[int] = (16, 32, 64),
        *,
        norm: str | tuple[str, dict[str, object]] | None = None,
        dropout: float = 0.0,
        cosine_scale: float | None = None,
    ) -> None:
        super().__init__()
        if min(channels, len(features), *features) < 1:
            raise InputError(
                f"The path needs a channel and a stage: got channels={channels}, features={list(features)}."
            )
        self.path = _path(channels, features, norm)
        self.dropout = nn.Dropout(dropout)
        width = 2 * features[-1]
        self.head = nn.Linear(width, 1) if cosine_scale is None else CosineContrast(width, cosine_scale)

    def forward(self, image: Tensor) -> Tensor:
        """Logits ``(B, 1)`` of an image ``(B, channels, X, Y, Z)``."""
        maps = self.path(image).flatten(2)
        return in_float32(self.head, self.dropout(torch.cat([maps.amax(2), maps.mean(2)], dim=1)))


class TwoBranchCNN(nn.Module):
    """Two parallel 3D paths, one for diffusion and one for T2, that meet in the last layer or after their first stage.

    Each stage of a path is convolution (kernel 3), max-pooling by 2, normalisation (optional) and ReLU; after the last
    stage the feature maps are reduced over space, so that any image size fits. The paths do not share weights. With the
    default three stages a feature sees 22 voxels along each axis (its receptive field: 3 -> 4 -> 8 -> 10 -> 18 -> 22),
    that is 62 x 62 x 66 mm on the default grid of 2.8 x 2.8 x 3 mm, and the network has 35 449 parameters (two
    diffusion channels and one T2 channel, no normalisation).

    With ``fusion="late"`` the paths are identical and only their pooled features meet, so that the network cannot see
    whether findings of the two lie in the same place. With ``"spatial"`` each path has the first stage only; the
    maps of both are joined, and the further stages see them together. Those stages are the square root of 2 wider, down
    to a multiple of 4, which gives 33 217 parameters with the same stages.

    Args:
        diffusion_channels: Leading channels of the input that go down the diffusion path.
        t2_channels: Remaining channels, for the T2 path.
        features: Channels of the stages of each path.
        norm: MONAI normalisation of each stage, such as ``"instance"`` or ``("group", {"num_groups": 4})``; None: none.
        dropout: Probability of dropping a feature in front of the fully connected layer, in [0, 1).
        cosine_scale: With a number the last layer is LDAM's normalised head, `CosineContrast` of that scale.
        fusion: ``"late"`` or ``"spatial"``, see above.
        pooling: How maps are reduced over space: ``"max_mean"``, `MaxMean`; ``"lse"``, `LogSumExp`; ``"attention"``,
            `GatedAttention`.

    Raises:
        InputError: If a path would have no stage, a stage no channels, ``"spatial"`` no stage behind the join, or if
            fusion or pooling is unknown.

    References:
        Sangalli et al., NeurIPS 2021, supplement ("two, identical and parallel structures"): late fusion; kernel sizes,
        widths and the reduction over space are not given there and are ours.
    """

    def __init__(
        self,
        diffusion_channels: int = 2,
        t2_channels: int = 1,
        features: Sequence[int] = (8, 16, 32),
        *,
        norm: str | tuple[str, dict[str, object]] | None = None,
        dropout: float = 0.0,
        cosine_scale: float | None = None,
        fusion: str = "late",
        pooling: str = "max_mean",
    ) -> None:
        super().__init__()
        if min(diffusion_channels, t2_channels, len(features), *features) < 1:
            raise InputError(
                f"Each path needs a channel and a stage: got diffusion_channels={diffusion_channels}, "
                f"t2_channels={t2_channels}, features={list(features)}."
            )
        one_of("fusion", fusion, ("late", "spatial"))
        self.channels = [int(diffusion_channels), int(t2_channels)]
        own, joined = (features, []) if fusion == "late" else _around_the_join(features)
        self.diffusion = _path(diffusion_channels, own, norm)
        self.t2 = _path(t2_channels, own, norm)
        self.spatial = bool(joined)
        self.joined = _path(2 * own[-1], joined, norm)  # empty, and not called, in late fusion
        width = joined[-1] if joined else features[-1]
        self.pools = nn.ModuleList([_pool(pooling, width) for _ in range(1 if joined else 2)])
        self.dropout = nn.Dropout(dropout)
        width *= len(self.pools) * (2 if pooling == "max_mean" else 1)
        self.head = nn.Linear(width, 1) if cosine_scale is None else CosineContrast(width, cosine_scale)

    def forward(self, image: Tensor) -> Tensor:
        """Logits ``(B, 1)`` of an image ``(B, diffusion_channels + t2_channels, X, Y, Z)``."""
        diffusion, t2 = torch.split(image, self.channels, dim=1)
        maps = [self.diffusion(diffusion), self.t2(t2)]
        if self.spatial:
            maps = [self.joined(torch.cat(maps, dim=1))]
        features = torch.cat([pool(maps[number].flatten(2)) for number, pool in enumerate(self.pools)], dim=1)
        features = self.dropout(features)
        if torch.jit.is_scripting():  # TorchScript cannot turn autocast off
            return self.head(features)
        return in_float32(self.head, features)


class ResidualCNN(nn.Module):
    """A residual network over all channels together, for grids of fine slices: MONAI's ResNet blocks, a path of them.

    The first convolution and the first block halve the image within the slices only, every further block along all
    axes: voxels of 0.75 x 0.75 x 3 mm are 3 x 3 x 3 mm after the first block and 12 x 12 x 12 mm after the third.
    MONAI's own ``ResNet`` halves all axes alike, and its blocks take batch normalisation whatever it is asked for. With
    the default stages it has 884 609 parameters (three channels).

    Args:
        diffusion_channels: Leading channels of the input; they and the others are seen together, and told apart in
            explanations only.
        t2_channels: Remaining channels.
        features: Channels of the first convolution, then of each block.
        norm: See `TwoBranchCNN`; so are ``dropout``, ``cosine_scale`` and ``pooling``.

    Raises:
        InputError: If there is no channel, no block, or one without channels, or if pooling is unknown.

    References:
        He et al., CVPR 2016 (the block).
    """

    def __init__(
        self,
        diffusion_channels: int = 2,
        t2_channels: int = 1,
        features: Sequence[int] = (16, 32, 64, 128),
        *,
        norm: str | tuple[str, dict[str, object]] | None = ("group", {"num_groups": 8}),
        dropout: float = 0.0,
        cosine_scale: float | None = None,
        pooling: str = "max_mean",
    ) -> None:
        super().__init__()
        if min(diffusion_channels, t2_channels, len(features) - 1, *features) < 1:
            raise InputError(
                "The residual network needs a channel of each kind, and two stages or more: got diffusion_channels="
                f"{diffusion_channels}, t2_channels={t2_channels}, features={list(features)}."
            )
        self.channels = [int(diffusion_channels), int(t2_channels)]
        within, along_all = (2, 2, 1), (2, 2, 2)
        first = Convolution(
            3, sum(self.channels), features[0], strides=within, act="RELU", norm=norm, adn_ordering="NA"
        )
        strides = [within, *[along_all] * (len(features) - 2)]
        blocks = [_block(*widths, stride, norm) for widths, stride in zip(pairwise(features), strides, strict=True)]
        self.path = nn.Sequential(first, *blocks)
        self.pool = _pool(pooling, features[-1])
        self.dropout = nn.Dropout(dropout)
        width = features[-1] * (2 if pooling == "max_mean" else 1)
        self.head = nn.Linear(width, 1) if cosine_scale is None else CosineContrast(width, cosine_scale)

    def forward(self, image: Tensor) -> Tensor:
        """Logits ``(B, 1)`` of an image ``(B, diffusion_channels + t2_channels, X, Y, Z)``, Z across the slices."""
        features = self.dropout(self.pool(self.path(image).flatten(2)))
        if torch.jit.is_scripting():  # TorchScript cannot turn autocast off
            return self.head(features)
        return in_float32(self.head, features)


def _block(inputs: int, outputs: int, stride: tuple[int, int, int], norm: Any) -> nn.Module:
    """MONAI's block with what brings its input to its output's form; normalisation None is "" to MONAI."""
    name = norm or ""
    shortcut = nn.Sequential(
        nn.Conv3d(inputs, outputs, 1, stride, bias=False), get_norm_layer(name, spatial_dims=3, channels=outputs)
    )
    return ResNetBlock(inputs, outputs, 3, cast(int, stride), shortcut, norm=name)


def exam_network(
    architecture: str, *, diffusion_channels: int, t2_channels: int, fusion: str, **options: Any
) -> TwoBranchCNN | ResidualCNN:
    """The network of a name, for exams; what the config calls.

    Args:
        architecture: ``"two_branch"``, `TwoBranchCNN`, or ``"residual"``, `ResidualCNN`.
        diffusion_channels: See these classes.
        t2_channels: See these classes.
        fusion: Of the two branches; the residual network joins all channels in its first layer, so that ``"late"``, the
            default, says nothing about it.
        **options: See these classes: what both take.

    Raises:
        InputError: If the name is unknown, or fusion ``"spatial"`` is asked of the residual network.
    """
    one_of("architecture", architecture, ("two_branch", "residual"))
    if architecture == "two_branch":
        return TwoBranchCNN(diffusion_channels, t2_channels, fusion=fusion, **options)
    if fusion != "late":
        raise InputError(
            f"fusion {fusion} is of architecture two_branch: the residual network sees all channels together from its "
            "first layer on. Leave --fusion out."
        )
    return ResidualCNN(diffusion_channels, t2_channels, **options)


class MaxMean(nn.Module):
    """Maps reduced over space to their maxima and their means."""

    def forward(self, maps: Tensor) -> Tensor:
        """Maps ``(B, F, N)`` of N places -> ``(B, 2 F)``."""
        return torch.cat([maps.amax(2), maps.mean(2)], dim=1)


class LogSumExp(nn.Module):
    """Maps reduced over space to ``log(mean(exp(r x))) / r``: between the mean (r to 0) and the maximum (large r).

    Unlike the maximum it has a gradient at every place; places that are 1 / r below the highest count e times less.

    Args:
        sharpness: r, > 0, the reciprocal of a temperature.

    References:
        Pinheiro and Collobert, CVPR 2015, whose r of 5 is the default.
    """

    def __init__(self, sharpness: float = 5.0) -> None:
        super().__init__()
        self.sharpness = sharpness

    def forward(self, maps: Tensor) -> Tensor:
        """Maps ``(B, F, N)`` of N places -> ``(B, F)``, float32."""
        total = torch.logsumexp(self.sharpness * maps.float(), dim=2)
        return (total - math.log(maps.shape[2])) / self.sharpness


class GatedAttention(nn.Module):
    """Maps reduced over space to a mean whose weights the network finds: one weight a place, for all maps.

    Args:
        features: Number of maps F; a quarter of it, at least one, are the hidden units of each of the two layers that
            the weight is made of.

    References:
        Ilse et al., ICML 2018, equation 9: softmax over the places of ``w . (tanh(V x) * sigmoid(U x))``.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        hidden = max(1, features // 4)
        self.value, self.gate = nn.Linear(features, hidden), nn.Linear(features, hidden)
        self.weight = nn.Linear(hidden, 1, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps ``(B, F, N)`` of N places -> ``(B, F)``."""
        places = maps.transpose(1, 2)
        weights = self.weight(torch.tanh(self.value(places)) * torch.sigmoid(self.gate(places))).softmax(dim=1)
        return (places * weights).sum(dim=1)


def _pool(name: str, features: int) -> nn.Module:
    one_of("pooling", name, ("max_mean", "lse", "attention"))
    if name == "max_mean":
        return MaxMean()
    return LogSumExp() if name == "lse" else GatedAttention(features)


def in_float32(head: nn.Module, features: Tensor) -> Tensor:
    """A last layer outside of autocast: logits in bfloat16 have so few values that scores tie and thresholds jump."""
    with torch.autocast(features.device.type, enabled=False):
        logits: Tensor = head(features.to(next(head.parameters()).dtype))
    return logits


def _path(channels: int, features: Sequence[int], norm: Any) -> nn.Sequential:
    stages: list[nn.Module] = []
    for width in features:
        convolution = Convolution(3, channels, width, kernel_size=3, conv_only=True)
        # Pooling first is the same function up to the normalisation's statistics, on an eighth of the voxels.
        stages += [convolution, nn.MaxPool3d(2), ADN("NA", in_channels=width, act="RELU", norm=norm, norm_dim=3)]
        channels = width
    return nn.Sequential(*stages)


def _around_the_join(features: Sequence[int]) -> tuple[list[int], list[int]]:
    """Channels of the stages of each path, and of those behind the join, of about as many weights as late fusion."""
    if len(features) < 2:
        raise InputError(
            f'fusion "spatial" needs two stages or more, as the paths meet after the first: got {list(features)}.'
        )
    return [features[0]], [max(4, int(math.sqrt(2) * width) // 4 * 4) for width in features[1:]]


class NormalizedLinear(nn.Module):
    """Last layer that gives the cosine between the features and each class's direction: the head LDAM is made for.

    Args:
        in_features: Length F of the feature vector.
        out_features: Number of classes C.

    References:
        Cao et al., NeurIPS 2019.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        # Normal and not uniform: all directions are then equally likely at the start. Lengths do not matter.
        self.weight = nn.Parameter(torch.randn(out_features, in_features))

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(B, F)`` -> cosines ``(B, C)`` in [-1, 1]; zero for a zero feature vector."""
        return linear(normalize(features), normalize(self.weight))


class CosineContrast(NormalizedLinear):
    """`NormalizedLinear` for two classes as one logit: scale times (cosine of class 1 - cosine of class 0).

    Args:
        in_features: Length F of the feature vector.
        scale: That of the loss, > 0.
    """

    def __init__(self, in_features: int, scale: float) -> None:
        super().__init__(in_features, 2)
        self.scale = scale

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(B, F)`` -> logit ``(B, 1)`` in [-2 scale, 2 scale]."""
        cosines = super().forward(features)
        return self.scale * (cosines[:, 1:] - cosines[:, :1])


def can_be_in_parts(network: nn.Module, size: int) -> None:
    """Refuse a network in training of which `in_parts` would not be exact.

    Raises:
        InputError: If a layer normalises by the statistics of what it is given, as batch normalisation does.
    """
    if any(isinstance(layer, _BatchNorm) and layer.training for layer in network.modules()):
        raise InputError(
            f"micro_batch {size} cannot be exact with batch normalisation, which sees one part at a time: leave "
            "micro_batch out, or choose another norm, such as instance."
        )


def in_parts(network: nn.Module, image: Tensor, size: int) -> Tensor:
    """The network's logits of a batch too large for memory, computed in parts and again in the backward pass.

    The term couples all scores of a batch, so the losses of its parts do not add up to the loss of the whole (gradients
    accumulated over micro-batches are those of another objective). This is exact: every score is there before the
    loss, and one part's activations at a time are in memory. It costs one more forward pass. Random numbers
    (dropout) repeat. Batch normalisation is refused in training: it would take each part's statistics for the batch's.

    Args:
        network: Maps ``(b, ...)`` to ``(b, ...)``.
        image: ``(B, ...)``.
        size: Samples per part, >= 1.

    Raises:
        InputError: See `can_be_in_parts`.
    """
    can_be_in_parts(network, size)
    return torch.cat(
        [cast(Tensor, checkpoint(network, part, use_reentrant=False)) for part in torch.split(image, size)]
    )


class AutocastInferer(SimpleInferer):
    """Run the network in bfloat16 where that is faster (GPUs, CPUs with instructions for it); logits are float32.

    Args:
        enabled: False runs in the weights' own type; ``"gpu"``: True on a GPU (CUDA), False elsewhere.
        micro_batch: Samples in memory at a time, see :func:`mri_alm.networks.in_parts`; None: the whole batch.
    """

    def __init__(self, enabled: bool | Literal["gpu"] = False, micro_batch: int | None = None) -> None:
        super().__init__()
        if micro_batch is not None and micro_batch < 1:
            raise InputError(f"micro_batch must be 1 or more exams, or None for the whole batch, got {micro_batch}.")
        self.enabled, self.micro_batch = enabled, micro_batch

    def __call__(self, inputs: Tensor, network: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Logits of ``inputs``."""
        enabled = inputs.device.type == "cuda" if self.enabled == "gpu" else bool(self.enabled)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=enabled):
            if self.micro_batch and torch.is_grad_enabled():
                return in_parts(network, inputs, self.micro_batch).float()
            logits: Tensor = super().__call__(inputs, network, *args, **kwargs)
        return logits.float()
