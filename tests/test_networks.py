import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mri_alm.bundle import profile
from mri_alm.cifar.networks import resnet10, resnet32
from mri_alm.errors import InputError
from mri_alm.networks import (
    AutocastInferer,
    GatedAttention,
    LogSumExp,
    MaxMean,
    OneBranchCNN,
    ResidualCNN,
    TwoBranchCNN,
    exam_network,
)

DOCUMENTATION = " ".join((TwoBranchCNN.__doc__ or "").split())


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_parameter_count_is_the_documented_one() -> None:
    def convolution(inputs: int, outputs: int) -> int:
        return outputs * (inputs * 27 + 1)

    path = convolution(8, 16) + convolution(16, 32)
    by_hand = convolution(2, 8) + path + convolution(1, 8) + path + 4 * 32 + 1
    count = sum(parameter.numel() for parameter in TwoBranchCNN().parameters())
    assert count == by_hand == 35_449
    assert "35 449 parameters" in DOCUMENTATION


def test_receptive_field_is_the_documented_one() -> None:
    """One feature's gradient with respect to the input, its values such that every voxel within reach counts."""
    network = TwoBranchCNN()
    # Sums in place of maxima, and no ReLU, make the feature depend on all it sees.
    for path in (network.diffusion, network.t2):
        modules = [nn.AvgPool3d(2) if isinstance(m, nn.MaxPool3d) else m for m in path.modules()]
        kept = [m for m in modules if isinstance(m, (nn.Conv3d, nn.AvgPool3d))]
        for convolution in kept[::2]:
            nn.init.ones_(convolution.weight)  # type: ignore[arg-type]
        image = torch.zeros(1, kept[0].in_channels, 48, 48, 48, requires_grad=True)  # type: ignore[arg-type]
        features = nn.Sequential(*kept)(image)
        features[0, 0, 3, 3, 3].backward()
        assert image.grad is not None
        seen = image.grad[0, 0].nonzero()
        assert (seen.max(0).values - seen.min(0).values + 1).tolist() == [22, 22, 22]
    assert "22 voxels along each axis" in DOCUMENTATION


def test_the_extent_in_millimetres_is_of_the_default_grid() -> None:
    text = " x ".join(f"{22 * spacing:.0f}" for spacing in profile("laptop").spacing)
    assert f"{text} mm" in DOCUMENTATION


def test_each_branch_sees_its_own_channels_only() -> None:
    network = TwoBranchCNN().eval()
    image = torch.randn(1, 3, 8, 8, 8, requires_grad=True)
    with torch.no_grad():
        network.head.weight[:, 64:] = 0  # only the diffusion path reaches the logit
    network(image).sum().backward()
    assert image.grad is not None
    assert image.grad[:, :2].abs().amin(dim=1).max() > 0
    assert image.grad[:, 2].abs().max() == 0
    image.grad = None
    with torch.no_grad():
        network.head.weight.copy_(torch.cat([torch.zeros(1, 64), torch.randn(1, 64)], dim=1))
    network(image).sum().backward()
    assert image.grad[:, :2].abs().max() == 0  # type: ignore[index]
    assert image.grad[:, 2].abs().max() > 0  # type: ignore[index]


def test_paths_are_identical_in_build_and_share_no_weights() -> None:
    network = TwoBranchCNN(diffusion_channels=1)
    diffusion, t2 = network.diffusion.state_dict(), network.t2.state_dict()
    assert {k: v.shape for k, v in diffusion.items()} == {k: v.shape for k, v in t2.items()}
    assert not any(torch.equal(diffusion[key], t2[key]) for key in diffusion)
    assert str(network.diffusion) == str(network.t2)


@pytest.mark.parametrize("norm", [None, "instance", ("instance", {"affine": True}), ("group", {"num_groups": 2})])
@pytest.mark.parametrize("size", [(8, 8, 8), (9, 17, 12)])
def test_any_size_gives_one_logit_per_image(norm: Any, size: tuple[int, ...]) -> None:
    network = TwoBranchCNN(features=(4, 4, 4), norm=norm)
    network.eval() if size == (8, 8, 8) else network.train()
    if size == (8, 8, 8) and norm is not None:
        size = (16, 16, 16)  # a normalisation needs more than one voxel in the last stage
    logits = network(torch.randn(5, 3, *size))
    assert logits.shape == (5, 1)
    assert torch.isfinite(logits).all()
    assert len(logits.unique()) == 5


def test_images_of_a_batch_do_not_touch_each_other() -> None:
    network = TwoBranchCNN(norm=("instance", {"affine": True})).eval()
    images = torch.randn(3, 3, 16, 16, 16)
    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(network(images), alone, rtol=1e-5, atol=1e-6)


def test_memory_layout_does_not_change_the_result() -> None:
    network, image = TwoBranchCNN().eval(), torch.randn(2, 3, 16, 16, 8)
    expected = network(image)
    found = network.to(memory_format=torch.channels_last_3d)(image)  # type: ignore[call-overload]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_pooling_before_normalisation_and_relu_is_the_same_network() -> None:
    """ReLU and max-pooling commute: the order of the stage is a matter of speed."""
    network, image = TwoBranchCNN(), torch.randn(2, 3, 16, 16, 16)
    maps = []
    for path, part in ((network.diffusion, image[:, :2]), (network.t2, image[:, 2:])):
        convolutions = [module for module in path.modules() if isinstance(module, nn.Conv3d)]
        stages = [module for c in convolutions for module in (c, nn.ReLU(), nn.MaxPool3d(2))]
        maps.append(nn.Sequential(*stages)(part).flatten(2))
    features = [reduced for part in maps for reduced in (part.amax(2), part.mean(2))]
    expected = network.head(torch.cat(features, dim=1))
    torch.testing.assert_close(network(image), expected, rtol=1e-5, atol=1e-6)


def test_dropout_acts_in_training_only() -> None:
    network, image = TwoBranchCNN(dropout=0.5), torch.randn(1, 3, 8, 8, 8)
    assert len({network(image).item() for _ in range(5)}) > 1
    network.eval()
    assert len({network(image).item() for _ in range(5)}) == 1


@pytest.mark.parametrize("norm", [None, ("instance", {"affine": True})])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what MONAI's ckpt_export calls
def test_torchscript_gives_the_same_logits(norm: Any) -> None:
    network = TwoBranchCNN(norm=norm).eval()
    scripted = torch.jit.script(network)
    for image in (torch.randn(2, 3, 16, 16, 16), torch.randn(1, 3, 17, 20, 18)):
        torch.testing.assert_close(scripted(image), network(image), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"diffusion_channels": 0}, "diffusion_channels=0, t2_channels=1, features=[8, 16, 32]"),
        ({"t2_channels": -1}, "diffusion_channels=2, t2_channels=-1, features=[8, 16, 32]"),
        ({"features": ()}, "diffusion_channels=2, t2_channels=1, features=[]"),
        ({"features": (8, 0)}, "diffusion_channels=2, t2_channels=1, features=[8, 0]"),
    ],
)
def test_a_path_without_channels_or_stages_is_refused(options: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"Each path needs a channel and a stage: got {found}.")):
        TwoBranchCNN(**options)


def test_dropout_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="dropout"):
        TwoBranchCNN(dropout=1.5)


def test_wrong_number_of_channels_is_an_error() -> None:
    for channels in itertools.chain(range(1, 3), (4,)):
        with pytest.raises(RuntimeError, match="split_with_sizes"):
            TwoBranchCNN()(torch.zeros(1, channels, 8, 8, 8))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (TwoBranchCNN, (64, 3, 8, 8, 8)),
        (lambda: TwoBranchCNN(cosine_scale=30), (64, 3, 8, 8, 8)),
        (lambda: resnet10(0.125), (64, 3, 32, 32)),
        (lambda: resnet10(0.125, normalised=True), (64, 3, 32, 32)),
        (lambda: resnet32(0.25, normalised=True), (64, 3, 32, 32)),
    ],
    ids=["two_branch", "two_branch_cosine", "resnet10", "resnet10_cosine", "resnet32_cosine"],
)
def test_logits_are_float32_under_autocast_so_that_scores_do_not_tie(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    network, image = make().eval(), torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(image)
    assert logits.dtype == torch.float32
    assert len(logits[:, 0].unique()) == 64 > len(logits[:, 0].bfloat16().unique())
    assert torch.allclose(logits, network(image), atol=0.1 * float(logits.detach().std()))


# --- Where the branches meet, and how maps become features ------------------------------------------------------------

FUSED = [
    (fusion, pooling) for fusion in ("late", "spatial") for pooling in ("max_mean", "lse", "attention")
]  # the first one is what every test above is about


def test_only_joined_maps_let_the_network_see_whether_findings_coincide() -> None:
    """A late logit is one part of diffusion and one of T2: what an image adds does not depend on the other one."""
    image, other = torch.randn(2, 1, 3, 16, 16, 16)
    four = [torch.cat([one[:, :2], two[:, 2:]], 1) for one in (image, other) for two in (image, other)]
    for fusion, pooling in FUSED:
        network = TwoBranchCNN(fusion=fusion, pooling=pooling, norm="instance").eval()
        one, two, three, four_ = network(torch.cat(four))[:, 0].tolist()
        together = abs(one - two - three + four_)
        assert together < 1e-6 if fusion == "late" else together > 1e-4, (fusion, pooling)


def test_one_finding_in_both_images_counts_where_two_at_a_distance_do_not() -> None:
    """Weights by hand: each path marks bright voxels, and the joined stage asks for the two marks in one place."""
    network = TwoBranchCNN(1, 1, (1, 4), fusion="spatial").eval()
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv3d)]
    for convolution in convolutions:
        convolution.weight.data[0, :, 1, 1, 1] = 1
    convolutions[2].bias.data[0] = -1.5  # type: ignore[index, union-attr]
    network.head.weight.data[0, 0] = 1  # of the maximum
    apart, together = torch.zeros(2, 1, 2, 16, 16, 16)
    apart[0, 0, 3, 3, 3] = apart[0, 1, 12, 12, 12] = together[0, 0, 3, 3, 3] = together[0, 1, 3, 3, 3] = 1
    assert (network(apart).item(), network(together).item()) == (0.0, 0.5)


def test_parameters_of_spatial_fusion_are_the_documented_ones() -> None:
    def convolution(inputs: int, outputs: int) -> int:
        return outputs * (inputs * 27 + 1)

    by_hand = convolution(2, 8) + convolution(1, 8) + convolution(16, 20) + convolution(20, 44) + 2 * 44 + 1
    assert sum(parameter.numel() for parameter in TwoBranchCNN(fusion="spatial").parameters()) == by_hand == 33_217
    assert "33 217 parameters" in DOCUMENTATION


def test_the_late_network_has_the_names_that_old_checkpoints_have() -> None:
    names = [f"{path}.{stage}.conv.{kind}" for path in ("diffusion", "t2") for stage in (0, 3, 6) for kind in WEIGHTS]
    assert list(TwoBranchCNN().state_dict()) == [*names, *(f"head.{kind}" for kind in WEIGHTS)]


WEIGHTS = ("weight", "bias")


def test_maps_are_reduced_as_documented() -> None:
    maps = torch.tensor([[[0.0, 1.0], [3.0, 3.0]], [[1000.0, 0.0], [-1.0, 2.0]]])
    assert MaxMean()(maps).tolist() == [[1, 3, 0.5, 3], [1000, 2, 500, 0.5]]
    by_hand = [[math.log((1 + math.exp(5)) / 2) / 5, 3.0], [1000 - math.log(2) / 5, 2 + math.log1p(math.exp(-15)) / 5]]
    by_hand[1][1] -= math.log(2) / 5
    torch.testing.assert_close(LogSumExp()(maps), torch.tensor(by_hand), rtol=1e-6, atol=1e-6)
    assert LogSumExp()(maps.bfloat16()).dtype == torch.float32


def test_attention_is_a_mean_with_the_weights_of_ilse() -> None:
    maps = torch.randn(2, 8, 5)
    attention = GatedAttention(8)
    state = {name: value.double().numpy() for name, value in attention.state_dict().items()}
    for image, found in zip(maps.double().numpy(), attention(maps).detach().numpy(), strict=True):
        gate = 1 / (1 + np.exp(-(state["gate.weight"] @ image + state["gate.bias"][:, None])))
        height = state["weight.weight"] @ (np.tanh(state["value.weight"] @ image + state["value.bias"][:, None]) * gate)
        weight = np.exp(height[0]) / np.exp(height[0]).sum()
        np.testing.assert_allclose(found, image @ weight, rtol=1e-5, atol=1e-6)
    assert state["value.weight"].shape == (2, 8)
    nn.init.zeros_(attention.weight.weight)
    torch.testing.assert_close(attention(maps), maps.mean(2))


@pytest.mark.parametrize(("fusion", "pooling"), FUSED[1:])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_every_form_exports_and_learns(fusion: str, pooling: str) -> None:
    network = TwoBranchCNN(features=(2, 4), norm="instance", fusion=fusion, pooling=pooling)
    image = torch.randn(2, 3, 8, 9, 10)
    network(image).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    torch.testing.assert_close(torch.jit.script(network.eval())(image), network(image), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # exporters'
def test_joined_maps_and_attention_export_to_onnx(tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name, reason="ONNX needs pip install -e '.[export]'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX needs pip install -e '.[export]'")
    network = TwoBranchCNN(features=(2, 4), norm="instance", fusion="spatial", pooling="attention").eval()
    image = torch.randn(2, 3, 8, 8, 8)
    torch.onnx.export(network, (image,), tmp_path / "model.onnx", verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (logit,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    np.testing.assert_allclose(logit, network(image).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fusion": "early"}, '^fusion must be one of late, spatial, got "early"'),
        ({"pooling": "max"}, '^pooling must be one of max_mean, lse, attention, got "max"'),
        ({"fusion": "spatial", "features": (8,)}, r'^fusion "spatial" needs two stages or more, .*: got \[8\]\.$'),
    ],
)
def test_an_unknown_form_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        TwoBranchCNN(**options)


# --- Residual ------------------------------------------------------------------------------------------------------


def test_the_residual_network_halves_within_slices_first() -> None:
    network = ResidualCNN(features=(2, 4, 4, 6), norm="instance")
    maps, shapes = torch.randn(1, 3, 32, 48, 12), []
    for stage in network.path:
        maps = stage(maps)
        shapes.append(tuple(maps.shape))
    assert shapes == [(1, 2, 16, 24, 12), (1, 4, 8, 12, 12), (1, 4, 4, 6, 6), (1, 6, 2, 3, 3)]


def test_parameters_of_the_residual_network_are_the_documented_ones() -> None:
    def block(inputs: int, outputs: int) -> int:  # two convolutions and a shortcut without bias, a norm behind each
        return 27 * inputs * outputs + 27 * outputs * outputs + inputs * outputs + 3 * 2 * outputs

    by_hand = (3 * 27 + 1) * 16 + 2 * 16 + block(16, 32) + block(32, 64) + block(64, 128) + 2 * 128 + 1
    assert sum(parameter.numel() for parameter in ResidualCNN().parameters()) == by_hand == 884_609
    assert "884 609 parameters" in " ".join((ResidualCNN.__doc__ or "").split())


@pytest.mark.parametrize("norm", [None, ["group", {"num_groups": 2}]])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_residual_network_exports_and_learns_and_exams_do_not_touch(norm: Any) -> None:
    network = ResidualCNN(features=(2, 4, 6), norm=norm, pooling="lse")
    image = torch.randn(2, 3, 16, 17, 8)
    network(image).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    scripted = torch.jit.script(network.eval())
    torch.testing.assert_close(scripted(image[:1]), network(image)[:1], rtol=1e-5, atol=1e-5)
    assert [type(module) for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)] == []


def test_a_network_is_made_by_its_name() -> None:
    options: dict[str, Any] = {"diffusion_channels": 2, "t2_channels": 1, "fusion": "late", "features": (2, 4)}
    residual, two = (exam_network(name, norm=None, **options) for name in ("residual", "two_branch"))
    assert (type(residual), type(two), residual.channels) == (ResidualCNN, TwoBranchCNN, [2, 1])
    with pytest.raises(InputError, match=r'^architecture must be one of two_branch, residual, got "vgg"'):
        exam_network("vgg", **options)
    with pytest.raises(InputError, match=r"^fusion spatial is of architecture two_branch: .* Leave --fusion out\.$"):
        exam_network("residual", **options | {"fusion": "spatial"})
    with pytest.raises(InputError, match=r"two stages or more: got diffusion_channels=2, .*features=\[8\]\.$"):
        ResidualCNN(features=(8,))


def test_bfloat16_of_a_gpu_is_float32_elsewhere() -> None:
    seen = []

    class Asking(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return image

    for enabled in (False, True, "gpu"):
        AutocastInferer(enabled)(torch.zeros(1), Asking())  # type: ignore[arg-type]
    assert seen == [False, True, False]


# --- One branch -----------------------------------------------------------------------------------------------------


def test_one_branch_is_a_path_of_the_two_branches() -> None:
    """With the weights of the T2 path, and a head that looks at nothing else."""
    two, one = TwoBranchCNN(features=(3, 4), norm="instance").eval(), OneBranchCNN(1, (3, 4), norm="instance").eval()
    one.path.load_state_dict(two.t2.state_dict())
    two.head.weight.data[:, :8] = 0
    one.head.load_state_dict({"weight": two.head.weight.data[:, 8:], "bias": two.head.bias.data})
    image = torch.randn(2, 3, 9, 8, 7)
    torch.testing.assert_close(one(image[:, 2:]), two(image), rtol=1e-6, atol=1e-6)


def test_one_branch_has_the_parameters_of_its_stages() -> None:
    stages = [27 * inputs * outputs + outputs for inputs, outputs in ((1, 16), (16, 32), (32, 64))]
    assert sum(parameter.numel() for parameter in OneBranchCNN().parameters()) == sum(stages) + 2 * 64 + 1


@pytest.mark.parametrize("arguments", [{"channels": 0}, {"features": ()}, {"features": (8, 0)}])
def test_one_branch_without_a_stage_or_a_channel_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^The path needs a channel and a stage: got channels="):
        OneBranchCNN(**arguments)
