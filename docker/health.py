"""Is this installation alive? Imports, runs a small network with the objective, and writes where it must be able to.

    python docker/health.py

Exit status 0 and a line of versions, or a traceback and 1: what the image's HEALTHCHECK calls.
"""

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from mri_alm import AugmentedLagrangian
from mri_alm.alm.losses import BinaryCrossEntropy
from mri_alm.networks import TwoBranchCNN


def main() -> int:
    """One training step on noise, and one file in each writable folder."""
    torch.manual_seed(0)
    network = TwoBranchCNN(features=(2, 4))
    objective = AugmentedLagrangian(BinaryCrossEntropy(), 4, mu=1.0)
    logits = network(torch.randn(4, 3, 8, 8, 8)).flatten()
    loss = objective(logits, torch.tensor([0, 1, 0, 1]), torch.arange(4))
    loss.backward()
    objective.dual_step()
    if not torch.isfinite(loss):
        raise ArithmeticError(f"a loss of {loss.item()} on noise")
    for folder in (Path(tempfile.gettempdir()), Path(os.environ.get("MPLCONFIGDIR", ".")), Path("runs"), Path("data")):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"alive: mri-alm {version('mri-alm')}, torch {torch.__version__}, monai {version('monai')}, {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
