"""Where a network looks: gradient maps of each branch over its image, and whether they depend on what was learnt."""

import io
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from monai.visualize import VanillaGrad
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from scipy.stats import spearmanr
from torch import Tensor, nn

from mri_alm.files import write_bytes

Maps = dict[str, NDArray[np.float64]]

METHOD = (
    "Gradient of the ensemble's mean logit with respect to each voxel (MONAI VanillaGrad), times the channel's "
    "standard deviation, absolute, summed over a branch's channels, smoothed by one voxel."
)
SANITY = (
    "Spearman correlation of each map with that of the same network with random weights (Adebayo et al. 2018). Near 0: "
    "the map depends on what was learnt. Near 1: it shows the image only and explains nothing."
)


class MeanLogit(nn.Module):
    """An ensemble as one network: the mean of its members' logits, which the decision rests on.

    Args:
        ensemble: Maps ``(B, C, X, Y, Z)`` to logits ``(B, M)``.
    """

    def __init__(self, ensemble: nn.Module) -> None:
        super().__init__()
        self.ensemble = ensemble

    def forward(self, image: Tensor) -> Tensor:
        """Logits ``(B, 1)`` of an image ``(B, C, X, Y, Z)``."""
        logits: Tensor = self.ensemble(image).mean(dim=1, keepdim=True)
        return logits


def branch_maps(network: nn.Module, image: Tensor, channels: Sequence[int]) -> Maps:
    """How strongly the logit answers to one standard deviation of change, voxel by voxel and branch by branch.

    Args:
        network: Maps ``(1, C, X, Y, Z)`` to one logit ``(1, 1)``, in evaluation mode.
        image: ``(C, X, Y, Z)``.
        channels: Leading channels of the diffusion branch, then those of the T2 branch.

    Returns:
        ``diffusion`` and ``t2``: ``(X, Y, Z)``, at least 0, in logits.
    """
    gradient = VanillaGrad(network)(image[None].clone(), index=0)[0].detach().cpu().double()
    spread = image.detach().cpu().double().flatten(1).std(1)
    answer = gradient.abs() * spread[:, None, None, None]
    parts = torch.split(answer, list(channels), dim=0)
    return {
        name: gaussian_filter(part.sum(0).numpy(), 1.0) for name, part in zip(("diffusion", "t2"), parts, strict=True)
    }


def randomised(network: nn.Module, seed: int = 0) -> nn.Module:
    """A copy of a network whose every layer has been initialised anew; the global random state is left alone."""
    copy = deepcopy(network)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in copy.modules():
            if reset := getattr(module, "reset_parameters", None):
                reset()
    return copy


def similarity(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Spearman's rank correlation of two maps of equal shape; 0 where one of them is constant (it shows nothing)."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(spearmanr(one.ravel(), other.ravel()).statistic)


def nearest_threshold(rows: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """The ``count`` studies whose score lies nearest to the threshold; the lowest scores where everyone is examined.

    Args:
        rows: See :func:`mri_alm.ensemble.score_rows`.
        count: How many; fewer when there are fewer.
    """
    distance = {row["study"]: abs(row["score"] - (row["threshold"] or 0.0)) for row in rows}
    return sorted(distance, key=lambda study: (distance[study], study))[:count]


def write_explanations(
    ensemble: nn.Module,
    images: Mapping[str, Tensor],
    output: Path,
    *,
    channels: Sequence[int],
    spacing: Sequence[float],
) -> dict[str, Any]:
    """Write ``<study>_explanation.png`` for every study, and say how far the maps depend on the weights.

    Args:
        ensemble: Maps ``(1, C, X, Y, Z)`` to logits ``(1, M)``, in evaluation mode.
        images: Study to prepared image ``(3, X, Y, Z)``: ADC, high b-value, T2.
        output: Folder to write to.
        channels: See :func:`branch_maps`.
        spacing: Millimetres along X, Y and Z.

    Returns:
        Method, the sanity check in words, its mean per branch, and per study the peak's voxel and the similarity.

    Raises:
        InputError: If a picture cannot be written.

    References:
        Adebayo et al., "Sanity checks for saliency maps", NeurIPS 2018.
    """
    network = MeanLogit(ensemble)
    untrained = randomised(network)
    device = next(network.parameters()).device
    studies: dict[str, Any] = {}
    for study, image in images.items():
        maps = branch_maps(network, image.to(device), channels)
        random = branch_maps(untrained, image.to(device), channels)
        studies[study] = {
            name: {
                "peak_voxel": [int(i) for i in np.unravel_index(int(maps[name].argmax()), maps[name].shape)],
                "similarity_to_random_weights": round(similarity(maps[name], random[name]), 4),
            }
            for name in maps
        }
        write_bytes(output / f"{study}_explanation.png", explanation_picture(image, maps, random, spacing))
    mean = {
        name: round(float(np.mean([study[name]["similarity_to_random_weights"] for study in studies.values()])), 4)
        for name in ("diffusion", "t2")
        if studies
    }
    return {"method": METHOD, "sanity_check": SANITY, "mean_similarity": mean, "studies": studies}


def explanation_picture(image: Tensor, maps: Maps, random: Maps, spacing: Sequence[float]) -> bytes:
    """PNG: per branch its image at the map's peak, the map over it, and the map of random weights over it."""
    figure = Figure(figsize=(9, 6.6), facecolor="black", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("What moves the score, and what a network without training shows   research only", color="white")
    axes = figure.subplots(2, 3)
    aspect = spacing[1] / spacing[0]
    for row, (name, channel) in zip(axes, (("diffusion", 0), ("t2", 2)), strict=True):
        level = int(np.unravel_index(int(maps[name].argmax()), maps[name].shape)[2])
        anatomy = image[channel, :, :, level].cpu().numpy().T
        title = f"{'ADC' if name == 'diffusion' else 'T2'}, slice {level + 1}"
        for axis, (label, shown) in zip(
            row, ((title, None), ("trained", maps[name]), ("random weights", random[name])), strict=True
        ):
            axis.imshow(anatomy, cmap="gray", aspect=aspect, interpolation="bilinear")
            if shown is not None and shown.max() > 0:
                share = shown[:, :, level].T / shown.max()
                axis.imshow(share, cmap="inferno", vmin=0, vmax=1, alpha=np.clip(share, 0, 0.8), aspect=aspect)
            axis.set_title(label, color="white", fontsize=9)
            axis.axis("off")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=80, metadata={"Software": None})
    return buffer.getvalue()
