"""The residual networks of the paper's CIFAR experiments: ResNet-10 (binary) and ResNet-32 (long-tailed)."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from mri_alm.errors import InputError, one_of
from mri_alm.networks import CosineContrast, NormalizedLinear, in_float32


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with batch normalisation, added to the input.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        stride: Of the first convolution.
        shortcut: What the input goes through where the shape changes. ``"projection"``: 1 x 1 convolution and batch
            normalisation (option B of He et al.). ``"padding"``: every second pixel, zeros for the new channels (option
            A, without parameters).
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, *, shortcut: Literal["projection", "padding"] = "projection"
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projected = shortcut == "projection"
            self.shortcut = _projection(inputs, outputs, stride) if projected else _Padding(outputs - inputs, stride)

    def forward(self, maps: Tensor) -> Tensor:
        """``(B, inputs, H, W)`` -> ``(B, outputs, H / stride, W / stride)``."""
        inner = relu(self.norm1(self.conv1(maps)))
        return relu(self.norm2(self.conv2(inner)) + self.shortcut(maps))


class CifarResNet(nn.Module):
    """A residual network for 32 x 32 images: 3 x 3 stem, stages that halve the image, mean over space, one layer.

    Args:
        features: Channels of the stages.
        blocks: Blocks per stage.
        outputs: 1 for two classes (one logit), or the number of classes.
        shortcut: See `BasicBlock`.
        normalised: LDAM's head: cosines (`NormalizedLinear`), or with one output `CosineContrast`.
        cosine_scale: LDAM's scale, for `CosineContrast`.

    Raises:
        InputError: If a count is less than 1 or ``shortcut`` is unknown.
    """

    def __init__(
        self,
        features: Sequence[int],
        blocks: int,
        *,
        outputs: int = 1,
        shortcut: Literal["projection", "padding"] = "projection",
        normalised: bool = False,
        cosine_scale: float = 30.0,
    ) -> None:
        super().__init__()
        one_of("shortcut", shortcut, ("projection", "padding"))
        if min(blocks, outputs, len(features), *features) < 1:
            raise InputError(
                f"features, blocks and outputs must be 1 or more, got {list(features)}, {blocks}, {outputs}."
            )
        self.conv = nn.Conv2d(3, features[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(features[0])
        stages: list[nn.Module] = []
        inputs = features[0]
        for stage, width in enumerate(features):
            for block in range(blocks):
                stages.append(BasicBlock(inputs, width, 2 if stage and not block else 1, shortcut=shortcut))
                inputs = width
        self.stages = nn.Sequential(*stages)
        self.head = _head(inputs, outputs, normalised=normalised, scale=cosine_scale)

    def forward(self, image: Tensor) -> Tensor:
        """Logits ``(B, outputs)`` (cosines with the normalised head and classes) of an image ``(B, 3, 32, 32)``."""
        maps = self.stages(relu(self.norm(self.conv(image))))
        return in_float32(self.head, maps.mean((2, 3)))


def resnet10(width: float = 1.0, *, normalised: bool = False, cosine_scale: float = 30.0) -> CifarResNet:
    """ResNet-10, four stages of one block, 64 to 512 channels, one logit: 4 898 625 parameters.

    Args:
        width: Factor on all channels.
        normalised: See `CifarResNet`.
        cosine_scale: See `CifarResNet`.

    References:
        He et al., CVPR 2016, with the 3 x 3 stem that is usual for CIFAR, as the authors of the ALM paper used it.
    """
    return CifarResNet(_scaled((64, 128, 256, 512), width), 1, normalised=normalised, cosine_scale=cosine_scale)


def resnet32(width: float = 1.0, *, outputs: int = 10, normalised: bool = False) -> CifarResNet:
    """ResNet-32 for CIFAR, three stages of five blocks, 16 to 64 channels: 464 154 parameters with ten outputs.

    Args:
        width: Factor on all channels.
        outputs: See `CifarResNet`.
        normalised: See `CifarResNet`.

    References:
        He et al., CVPR 2016, section 4.2 (n = 5, shortcuts without parameters), as Cao et al., NeurIPS 2019, used it;
        He et al.'s normal initialisation (2015), which deep residual networks start from.
    """
    features = _scaled((16, 32, 64), width)
    network = CifarResNet(features, 5, outputs=outputs, shortcut="padding", normalised=normalised)
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
    return network


def _scaled(features: Sequence[int], width: float) -> list[int]:
    return [round(channels * width) for channels in features]


def _head(inputs: int, outputs: int, *, normalised: bool, scale: float) -> nn.Module:
    if not normalised:
        return nn.Linear(inputs, outputs)
    return CosineContrast(inputs, scale) if outputs == 1 else NormalizedLinear(inputs, outputs)


def _projection(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    # Pixels are dropped first, which is the same: on CPUs, torch 2.13's strided 1 x 1 convolution of less than eight
    # channels, channels last, writes outside its memory ("double free or corruption" in the backward pass).
    pixels = nn.AvgPool2d(1, stride)
    return nn.Sequential(pixels, nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))


class _Padding(nn.Module):
    """Every ``stride``-th pixel, and ``extra`` channels of zeros, half of them in front."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra, self.stride = extra, stride

    def forward(self, maps: Tensor) -> Tensor:
        before = self.extra // 2
        return pad(maps[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.extra - before))
