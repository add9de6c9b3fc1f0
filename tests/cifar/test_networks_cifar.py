import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from mri_alm.cifar.networks import CifarResNet, resnet10, resnet32
from mri_alm.errors import InputError
from mri_alm.networks import CosineContrast, NormalizedLinear


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_resnet10_has_the_parameters_of_its_description() -> None:
    """3 x 3 stem; per stage two 3 x 3 convolutions, a 1 x 1 where the width changes; two numbers a channel of norm."""

    def norm(channels: int) -> int:
        return 2 * channels

    def stage(inputs: int, outputs: int) -> int:
        shortcut = inputs * outputs + norm(outputs) if inputs != outputs else 0
        return 9 * inputs * outputs + 9 * outputs**2 + 2 * norm(outputs) + shortcut

    by_hand = 27 * 64 + norm(64) + stage(64, 64) + stage(64, 128) + stage(128, 256) + stage(256, 512) + 513
    assert parameters(resnet10()) == by_hand == 4_898_625
    assert "4 898 625 parameters" in (resnet10.__doc__ or "")


def test_resnet32_has_the_0_46_million_parameters_of_he_et_al() -> None:
    def block(inputs: int, outputs: int) -> int:
        return 9 * inputs * outputs + 9 * outputs**2 + 4 * outputs

    stages = 5 * block(16, 16) + block(16, 32) + 4 * block(32, 32) + block(32, 64) + 4 * block(64, 64)
    assert parameters(resnet32()) == 27 * 16 + 32 + stages + 650 == 464_154
    assert "464 154 parameters" in (resnet32.__doc__ or "")


@pytest.mark.parametrize(("network", "layers"), [(resnet10(0.125), 10), (resnet32(0.25), 32)])
def test_the_number_in_the_name_counts_layers(network: nn.Module, layers: int) -> None:
    weights = [m for m in network.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    deep = [m for m in weights if not (isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1))]
    assert len(deep) == layers


def test_maps_shrink_as_in_the_papers() -> None:
    sizes: list[tuple[int, ...]] = []
    for network in (resnet10(0.25), resnet32()):
        for block in network.stages:
            block.register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape[1:])))
        network(torch.randn(2, 3, 32, 32))
    assert sizes[:4] == [(16, 32, 32), (32, 16, 16), (64, 8, 8), (128, 4, 4)]
    assert sizes[4:] == [(16, 32, 32)] * 5 + [(32, 16, 16)] * 5 + [(64, 8, 8)] * 5


def reference(network: CifarResNet, image: Tensor, stages: int, blocks: int, projection: bool) -> Tensor:
    """The forward pass in evaluation mode written out from the paper, on the same weights."""
    state = network.state_dict()

    def norm(maps: Tensor, name: str) -> Tensor:
        mean, var, scale, shift = (
            state[f"{name}.{k}"][:, None, None] for k in ("running_mean", "running_var", "weight", "bias")
        )
        return (maps - mean) / torch.sqrt(var + 1e-5) * scale + shift

    maps = norm(F.conv2d(image, state["conv.weight"], padding=1), "norm").clamp(min=0)
    for number in range(stages * blocks):
        name, stride = f"stages.{number}", 2 if number and number % blocks == 0 else 1
        inner = norm(F.conv2d(maps, state[f"{name}.conv1.weight"], stride=stride, padding=1), f"{name}.norm1").clamp(
            min=0
        )
        inner = norm(F.conv2d(inner, state[f"{name}.conv2.weight"], padding=1), f"{name}.norm2")
        if stride == 2 and projection:
            maps = norm(F.conv2d(maps, state[f"{name}.shortcut.1.weight"], stride=2), f"{name}.shortcut.2")
        elif stride == 2:
            wide = torch.zeros_like(inner)
            quarter = maps.shape[1] // 2
            wide[:, quarter : quarter + maps.shape[1]] = maps[:, :, ::2, ::2]
            maps = wide
        maps = (inner + maps).clamp(min=0)
    return maps.flatten(2).mean(2) @ state["head.weight"].T + state["head.bias"]


@pytest.mark.parametrize("deep", [False, True])
def test_forward_equals_a_reference_on_fixed_weights(deep: bool) -> None:
    network = (resnet32(0.5) if deep else resnet10(0.25)).double()
    image = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    for _ in range(3):
        network(torch.randn(8, 3, 32, 32, dtype=torch.float64))  # moves the running statistics
    network.eval()
    with torch.no_grad():
        expected = reference(network, image, *((3, 5, False) if deep else (4, 1, True)))
        torch.testing.assert_close(network(image), expected)
        channels_last = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.testing.assert_close(channels_last(image.to(memory_format=torch.channels_last)), expected)


def test_heads() -> None:
    image = torch.randn(4, 3, 32, 32)
    assert resnet10(0.125)(image).shape == (4, 1)
    assert resnet32(0.5, outputs=6)(image).shape == (4, 6)
    contrast = resnet10(0.125, normalised=True, cosine_scale=7.0)
    assert isinstance(contrast.head, CosineContrast)
    assert contrast.head.scale == 7.0
    cosines = resnet32(0.5, outputs=6, normalised=True)
    assert isinstance(cosines.head, NormalizedLinear)
    assert cosines(image).abs().max() <= 1
    assert parameters(resnet32(normalised=True)) == 464_154 - 10  # no bias


def test_width_scales_all_channels() -> None:
    assert [block.conv1.out_channels for block in resnet10(0.125).stages] == [8, 16, 32, 64]
    assert parameters(resnet10(0.5)) == 1_226_657


@pytest.mark.parametrize("width", [0, 0.001])
def test_a_network_without_channels_is_refused(width: float) -> None:
    with pytest.raises(InputError, match=r"^features, blocks and outputs must be 1 or more, got \[0, 0, 0"):
        resnet10(width)
    with pytest.raises(InputError, match=r"outputs must be 1 or more, got \[8, 16, 32, 64\], 1, 0\.$"):
        CifarResNet([8, 16, 32, 64], 1, outputs=0)


def test_an_unknown_shortcut_is_refused() -> None:
    with pytest.raises(InputError, match=r'^shortcut must be one of projection, padding, got "none"\.$'):
        CifarResNet([2], 1, shortcut="none")  # type: ignore[arg-type]
