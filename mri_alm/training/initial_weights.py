"""The weights that a training begins with, where those of an earlier run are to be built upon."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mri_alm.bundle.checkpoints import load_tensors
from mri_alm.errors import InputError
from mri_alm.runtime.files import sha256

logger = logging.getLogger("mri_alm")

MOST_IMAGES = 3  # channels of an exam: a convolution of so many or fewer looks at the images themselves


def start_from(network: nn.Module, path: Path | str | None) -> dict[str, Any]:
    """Put those weights of a file into a network that fit it; what does not fit stays as it was drawn.

    The file is a ``model.pt`` of ours, or one with weights under the name ``state_dict``, as MedicalNet's and many
    others are; ``module.`` in front of all their names, which training on several GPUs leaves there, is taken off.

    A tensor is taken where name and shape are the same. A first convolution of other input channels is adapted: the
    mean of the file's over its inputs, times the file's number of inputs over the network's, so that an image of equal
    channels gives the same maps.

    Args:
        network: Changed in place.
        path: The file; None: nothing is done.

    Returns:
        For the record: the file's SHA-256, and the names of the tensors that were ``loaded``, ``adapted`` and
        ``skipped`` (of the network, as drawn). Empty without a file.

    Raises:
        InputError: If the file cannot be read, is damaged or holds no weights, or if nothing of it fits.
    """
    if path is None:
        return {}
    path = Path(path)
    given, own = _weights(path), network.state_dict()
    taken = {name: tensor for name, tensor in given.items() if name in own and _form(tensor) == _form(own[name])}
    adapted = {name: _averaged(given[name], own[name]) for name in own if _is_first(given.get(name), own[name])}
    if not adapted and all(tensor.ndim < 2 for tensor in taken.values()):  # the last bias fits any network
        raise InputError(
            f"Nothing of {path} fits the network: it has {_shown(given)}, and the network {_shown(own)}. "
            "Choose the architecture, features and norm that it was trained with, or leave --init_weights out."
        )
    if lost := [name for name, one in (taken | adapted).items() if not bool(torch.isfinite(one).all())]:
        raise InputError(f"{path}: {lost[0]} holds values that are no finite numbers. Restore the file.")
    network.load_state_dict(own | taken | adapted)
    report = {
        "loaded": sorted(taken),
        "adapted": sorted(adapted),
        "skipped": sorted(own.keys() - taken.keys() - adapted.keys()),
    }
    counts = ", ".join(f"{what} {len(names)}" for what, names in report.items())
    logger.info("Initial weights, tensors: %s.", counts)
    for what in ("adapted", "skipped"):
        if report[what]:
            logger.info("Initial weights, %s: %s.", what, ", ".join(report[what]))
    return {"sha256": sha256(path)} | report


def _weights(path: Path) -> dict[str, Tensor]:
    state = load_tensors(path)
    given = state.get("model", state.get("state_dict"))
    if not isinstance(given, Mapping) or not all(isinstance(one, Tensor) for one in given.values()):
        raise InputError(
            f"{path} holds no weights under the names model or state_dict. --init_weights takes the model.pt of a run, "
            "or a PyTorch file with a state_dict."
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in given.items()}


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _is_first(given: Tensor | None, own: Tensor) -> bool:
    """Whether two weights are of convolutions over images that differ in the number of channels alone."""
    if given is None or own.ndim < 4 or given.ndim != own.ndim or given.dtype != own.dtype:
        return False
    images = 0 < given.shape[1] != own.shape[1] and max(given.shape[1], own.shape[1]) <= MOST_IMAGES
    return images and given.shape[0] == own.shape[0] and given.shape[2:] == own.shape[2:]


def _averaged(given: Tensor, own: Tensor) -> Tensor:
    return (given.mean(1, keepdim=True) * (given.shape[1] / own.shape[1])).expand_as(own).clone()


def _shown(state: Mapping[str, Any]) -> str:
    name, tensor = next(iter(state.items()), ("nothing", torch.empty(0)))
    return f"{len(state)} tensors such as {str(name)[:60]} {tuple(tensor.shape)}"
