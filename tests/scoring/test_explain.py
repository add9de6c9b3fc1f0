"""Explanations of a network whose answer is known: it fires on one planted spot, in one branch."""

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from mri_alm.bundle.trained_run import Ensemble, MeanLogit
from mri_alm.networks import TwoBranchCNN
from mri_alm.scoring.explain import (
    branch_maps,
    explanation_picture,
    nearest_threshold,
    randomised,
    shared_peak,
    similarity,
    write_explanations,
)

CHANNELS = (2, 1)
SPOT = (14, 6, 9)  # centre of the planted lesion
SHAPE = (20, 20, 16)


@pytest.fixture
def image() -> Tensor:
    """Noise in three channels, with a bright ball of 3 voxels' radius in T2 and in the high b-value."""
    noise = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0)) * 0.3
    axes = torch.meshgrid(*(torch.arange(n) for n in SHAPE), indexing="ij")
    ball = sum((axis - centre) ** 2 for axis, centre in zip(axes, SPOT, strict=True)) <= 9
    noise[1:] += 3.0 * torch.as_tensor(ball)
    return noise


def bright_spot_detector(branch: str) -> TwoBranchCNN:
    """The project's network with weights set by hand: the logit is the largest local mean of one branch's image."""
    network = TwoBranchCNN(*CHANNELS, features=(1, 1))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        for path in (network.diffusion, network.t2):
            for module in path.modules():
                if isinstance(module, nn.Conv3d):
                    module.weight[:, -1] = 1 / 27  # the high b-value; T2
        network.head.weight[0, 0 if branch == "diffusion" else 2] = 1.0  # the maximum over space
    return network.eval()


@pytest.mark.parametrize(("branch", "other"), [("diffusion", "t2"), ("t2", "diffusion")])
def test_the_peak_lies_in_the_lesion_that_the_network_answers_to(image: Tensor, branch: str, other: str) -> None:
    network = MeanLogit(Ensemble([bright_spot_detector(branch)]))
    maps = branch_maps(network, image, CHANNELS)
    peak = np.unravel_index(maps[branch].argmax(), SHAPE)
    assert np.linalg.norm(np.subtract(peak, SPOT)) <= 3
    assert maps[other].max() == 0
    far = np.linalg.norm(np.subtract(np.indices(SHAPE).reshape(3, -1).T, SPOT), axis=1).reshape(SHAPE) > 12
    assert maps[branch][far].max() < 1e-3 * maps[branch].max()


def test_the_map_is_that_of_the_mean_logit(image: Tensor) -> None:
    """One member answers to T2, the other to nothing: half the map of the first."""
    silent = bright_spot_detector("t2")
    nn.init.zeros_(silent.head.weight)
    alone = branch_maps(MeanLogit(Ensemble([bright_spot_detector("t2")])), image, CHANNELS)
    half = branch_maps(MeanLogit(Ensemble([bright_spot_detector("t2"), silent])), image, CHANNELS)
    np.testing.assert_allclose(half["t2"], alone["t2"] / 2, rtol=1e-6)


def test_the_map_is_the_answer_to_a_standard_deviation() -> None:
    """A linear network: the map before smoothing is |weight| times the channel's SD, and constant, so smoothing is not
    seen."""

    class Linear(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return (image.sum((2, 3, 4)) @ torch.tensor([2.0, -3.0, 5.0]))[:, None]

    image = torch.randn(3, 6, 6, 6, generator=torch.Generator().manual_seed(1))
    image *= torch.tensor([1.0, 10.0, 0.1])[:, None, None, None]
    maps = branch_maps(Linear(), image, CHANNELS)
    sd = image.double().flatten(1).std(1).numpy()
    np.testing.assert_allclose(maps["diffusion"], 2 * sd[0] + 3 * sd[1], rtol=1e-6)
    np.testing.assert_allclose(maps["t2"], 5 * sd[2], rtol=1e-6)


def test_explaining_changes_neither_image_nor_network(image: Tensor) -> None:
    network = MeanLogit(Ensemble([bright_spot_detector("t2")]))
    before, weights = image.clone(), [p.clone() for p in network.parameters()]
    with torch.no_grad():
        logit = network(image[None])
    branch_maps(network, image, CHANNELS)
    assert torch.equal(image, before)
    assert not image.requires_grad
    assert all(torch.equal(p, w) for p, w in zip(network.parameters(), weights, strict=True))
    with torch.no_grad():
        assert torch.equal(network(image[None]), logit)


def test_random_weights_decorrelate(image: Tensor) -> None:
    trained = MeanLogit(Ensemble([bright_spot_detector("t2")]))
    for seed in range(3):
        random = randomised(trained, seed)
        maps, other = (branch_maps(network, image, CHANNELS) for network in (trained, random))
        assert other["diffusion"].max() > 0
        assert abs(similarity(maps["t2"], other["t2"])) < 0.6
        assert similarity(maps["t2"], maps["t2"]) == pytest.approx(1.0)
        assert shared_peak(maps["t2"], other["t2"]) < 0.5


def test_randomised_is_another_network_of_its_own() -> None:
    network = TwoBranchCNN(features=(4, 8), norm="instance")
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    one, other, again = randomised(network, 0), randomised(network, 1), randomised(network, 0)
    assert torch.equal(state, torch.random.get_rng_state())
    for a, b, c, mine in zip(
        one.parameters(), other.parameters(), again.parameters(), network.parameters(), strict=True
    ):
        assert torch.equal(a, c)
        assert not torch.equal(a, b)
        assert not torch.equal(a, mine)


def test_similarity_by_hand() -> None:
    one = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert similarity(one, one**3) == pytest.approx(1)
    assert similarity(one, -one) == pytest.approx(-1)
    assert similarity(one, np.array([[1.0, 2.0], [4.0, 3.0]])) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert similarity(one, np.zeros((2, 2))) == 0


def test_shared_peak_by_hand() -> None:
    one = np.arange(400.0).reshape(20, 20)  # the strongest 1 %: 396 to 399
    assert shared_peak(one, one) == 1
    assert shared_peak(one, -one) == 0
    other = one.copy()
    other[0, 0], other[0, 1] = 500, 501  # 398 and 399 remain
    assert shared_peak(one, other) == 0.5
    assert shared_peak(one, np.zeros((20, 20))) == 0


def test_a_map_that_ignores_what_was_learnt_is_called_so(
    image: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A network without weights is its own randomised copy."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, image: Tensor) -> Tensor:
            return image.pow(2).sum((1, 2, 3, 4))[:, None]

    with caplog.at_level(logging.WARNING, "mri_alm"):
        record = write_explanations(Fixed(), {"s": image}, tmp_path, channels=CHANNELS, spacing=(3, 3, 3))
    assert record["mean"]["t2"] == {"similarity": 1.0, "shared_peak": 1.0}
    assert "Explanations: the t2 maps resemble those of random weights (1.00; shared peak 1.00)" in caplog.text


def rows(threshold: Any) -> list[dict[str, Any]]:
    return [{"study": name, "score": s, "threshold": threshold} for name, s in (("c", 0.4), ("b", 0.5), ("a", 0.6))]


def test_nearest_to_the_threshold() -> None:
    assert nearest_threshold(rows(0.45), 2) == ["b", "c"] or nearest_threshold(rows(0.45), 2) == ["c", "b"]
    assert nearest_threshold(rows(0.58), 1) == ["a"]
    assert nearest_threshold(rows(0.0), 9) == ["c", "b", "a"]
    assert nearest_threshold(rows(""), 1) == ["c"]  # everyone is examined: the first who would not be


def test_written_explanations(image: Tensor, tmp_path: Path) -> None:
    ensemble = Ensemble([bright_spot_detector("t2")])
    record = write_explanations(ensemble, {"s": image}, tmp_path, channels=CHANNELS, spacing=(3, 3, 3))
    study = record["studies"]["s"]
    assert np.linalg.norm(np.subtract(study["t2"]["peak_voxel"], SPOT)) <= 3
    assert (study["diffusion"]["similarity"], study["diffusion"]["shared_peak"]) == (0, 0)
    assert record["mean"] == {
        name: {figure: study[name][figure] for figure in ("similarity", "shared_peak")} for name in study
    }
    assert "Adebayo" in record["sanity_check"]
    assert [path.name for path in tmp_path.iterdir()] == ["s_explanation.png"]


def test_nothing_to_explain(tmp_path: Path) -> None:
    ensemble = Ensemble([bright_spot_detector("t2")])
    record = write_explanations(ensemble, {}, tmp_path, channels=CHANNELS, spacing=(3, 3, 3))
    assert (record["studies"], record["mean"]) == ({}, {})


def test_the_picture_shows_the_map_in_colour_over_the_lesion(image: Tensor) -> None:
    maps = {name: np.zeros(SHAPE) for name in ("diffusion", "t2")}
    plain = explanation_picture(image, maps, maps, (3, 3, 3))
    maps["t2"][SPOT] = 1.0
    pixels = [
        np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
        for data in (plain, explanation_picture(image, maps, maps, (3, 3, 3)))
    ]
    colour = [np.ptp(p, axis=2).max() for p in pixels]
    assert colour[0] == 0  # grey only
    assert colour[1] > 50
