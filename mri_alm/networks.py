"""Networks: one image tensor in, logits out."""

from collections.abc import Sequence
from typing import Any

import torch
from monai.networks.blocks import ADN, Convolution
from torch import Tensor, nn

from mri_alm.errors import InputError
from mri_alm.losses_multiclass import CosineContrast


class TwoBranchCNN(nn.Module):
    """Two identical, parallel 3D paths, one for diffusion and one for T2, that meet in the fully connected layer.

    Each stage of a path is convolution (kernel 3), max-pooling by 2, normalisation (optional) and ReLU; after the last
    stage the feature maps are reduced to their maximum and mean over space, so that any image size fits. The paths do
    not share weights. With the default three stages a feature sees 22 voxels along each axis (its receptive field:
    3 -> 4 -> 8 -> 10 -> 18 -> 22), that is 62 x 62 x 66 mm on the default grid of 2.8 x 2.8 x 3 mm, and the network has
    35 449 parameters (two diffusion channels and one T2 channel, no normalisation).

    Args:
        diffusion_channels: Leading channels of the input that go down the diffusion path.
        t2_channels: Remaining channels, for the T2 path.
        features: Channels of the stages of each path.
        norm: MONAI normalisation of each stage, such as ``"instance"`` or ``("group", {"num_groups": 4})``; None: none.
        dropout: Probability of dropping a feature in front of the fully connected layer, in [0, 1).
        cosine_scale: With a number the last layer is LDAM's normalised head, `CosineContrast` of that scale.

    Raises:
        InputError: If a path would have no stage, or a stage no channels.

    References:
        Sangalli et al., NeurIPS 2021, supplement ("two, identical and parallel structures"); kernel sizes, widths
        and the reduction over space are not given there and are ours.
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
    ) -> None:
        super().__init__()
        if min(diffusion_channels, t2_channels, len(features), *features) < 1:
            raise InputError(
                f"Each path needs a channel and a stage: got diffusion_channels={diffusion_channels}, "
                f"t2_channels={t2_channels}, features={list(features)}."
            )
        self.channels = [int(diffusion_channels), int(t2_channels)]
        self.diffusion = _path(diffusion_channels, features, norm)
        self.t2 = _path(t2_channels, features, norm)
        self.dropout = nn.Dropout(dropout)
        width = 4 * features[-1]
        self.head = nn.Linear(width, 1) if cosine_scale is None else CosineContrast(width, cosine_scale)

    def forward(self, image: Tensor) -> Tensor:
        """Logits ``(B, 1)`` of an image ``(B, diffusion_channels + t2_channels, X, Y, Z)``."""
        diffusion, t2 = torch.split(image, self.channels, dim=1)
        maps = [self.diffusion(diffusion).flatten(2), self.t2(t2).flatten(2)]
        features = torch.cat([maps[0].amax(2), maps[0].mean(2), maps[1].amax(2), maps[1].mean(2)], dim=1)
        features = self.dropout(features)
        if torch.jit.is_scripting():  # TorchScript cannot turn autocast off
            return self.head(features)
        return in_float32(self.head, features)


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
