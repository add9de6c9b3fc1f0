"""Where a network looks: gradient maps of each branch over its image, and whether they depend on what was learnt."""

import io
import logging
import math
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

from mri_alm.bundle.trained_run import MeanLogit
from mri_alm.runtime.files import write_bytes

Maps = dict[str, NDArray[np.float64]]

METHOD = (
    "Gradient of the ensemble's mean logit with respect to each voxel (MONAI VanillaGrad), times the channel's "
    "standard deviation, absolute, summed over a branch's channels, smoothed by one voxel."
)
SANITY = (
    "Each map beside that of the same network with random weights (Adebayo et al. 2018). Similarity: Spearman's rank "
    "correlation over all voxels; near 0 the map depends on what was learnt, near 1 on the image alone. Shared peak: "
    "share of the strongest 1 % of voxels, which is what the picture shows, that both have; by chance 0.01."
)
FAILED = 0.5  # similarity from which a map counts as one of the image
PEAK = 0.01

logger = logging.getLogger("mri_alm")


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


def shared_peak(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Share of the strongest 1 % of voxels of one map that are among those of the other; 0 where a map is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    count = math.ceil(PEAK * one.size)
    strongest = [set(np.argsort(part, axis=None)[-count:].tolist()) for part in (one, other)]
    return len(strongest[0] & strongest[1]) / count


def nearest_threshold(rows: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """The ``count`` studies whose score lies nearest to the threshold; the lowest scores where everyone is examined.

    Args:
        rows: See :func:`mri_alm.bundle.trained_run.score_rows`.
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
        Method, the sanity check in words, its means per branch, and per study the peak's voxel, the similarity and the
        shared peak.

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
                "similarity": round(similarity(maps[name], random[name]), 4),
                "shared_peak": round(shared_peak(maps[name], random[name]), 4),
            }
            for name in maps
        }
        write_bytes(output / f"{study}_explanation.png", explanation_picture(image, maps, random, spacing))
    mean = _mean(studies)
    for name, figures in mean.items():
        if figures["similarity"] >= FAILED:
            logger.warning(
                "Explanations: the %s maps resemble those of random weights (%.2f; shared peak %.2f). Where weak, "
                "they show the image, not what was learnt.",
                *(name, figures["similarity"], figures["shared_peak"]),
            )
    return {"method": METHOD, "sanity_check": SANITY, "mean": mean, "studies": studies}


def _mean(studies: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Means over the studies of the two figures of the sanity check, per branch."""
    return {
        name: {
            figure: round(float(np.mean([study[name][figure] for study in studies.values()])), 4)
            for figure in ("similarity", "shared_peak")
        }
        for name in ("diffusion", "t2")
        if studies
    }


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
        alike = similarity(maps[name], random[name])
        for axis, (label, shown) in zip(
            row,
            ((title, None), ("trained", maps[name]), (f"random weights, similarity {alike:.2f}", random[name])),
            strict=True,
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
