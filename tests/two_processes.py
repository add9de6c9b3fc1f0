"""What each of two processes runs under ``torchrun``: steps on its share of the batches, then what came of them.

torchrun --nproc_per_node=2 tests/two_processes.py CASE FILE
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mri_alm import AugmentedLagrangian, MuSchedule, RankingConstraint
from mri_alm.alm.batches import ProcessShare
from mri_alm.alm.losses import BinaryCrossEntropy, MiniBatchAUC
from mri_alm.alm.losses_multiclass import CrossEntropy
from mri_alm.networks import in_parts

SAMPLES = 30
CASES: dict[str, dict[str, Any]] = {
    "binary": {},
    "mean": {"constraint": RankingConstraint(normalisation="mean")},
    "bank": {"negative_bank": 200},
    "per_epoch": {"dual_update": "per_epoch"},
    "falling": {
        "schedule": MuSchedule(rho=3, dual_decay=0.2, gradient_cap=0.3),
        "constraint": RankingConstraint(0.1, tolerance=0.05),
    },
    "pairwise_base": {"base": MiniBatchAUC()},
    "classes": {"base": CrossEntropy(), "constraint": RankingConstraint(0.1, critical=[2], kind=2), "columns": 3},
    "parts": {"size": 2},
}


def steps(case: str) -> dict[str, Any]:
    """Three epochs in float64, on batches of 7, so that shares are unequal and the last batch has one sample."""
    options = dict(CASES[case])
    columns: int = options.pop("columns", 1)
    size: int | None = options.pop("size", None)
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    label = torch.arange(SAMPLES) % 4 == 0 if columns == 1 else torch.arange(SAMPLES) % 3
    network: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, columns)).double()
    if dist.is_initialized():
        network = DistributedDataParallel(network)
    base = options.pop("base", BinaryCrossEntropy())
    alm = AugmentedLagrangian(base, SAMPLES, mu=0.3, **{"schedule": MuSchedule(rho=3)} | options)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    gradients: list[Tensor] = []
    reports = []
    for epoch in range(3):
        order = torch.randperm(SAMPLES - 1, generator=torch.Generator().manual_seed(epoch))  # 29 = 4 * 7 + 1
        for rows in ProcessShare([part.tolist() for part in torch.split(order, 7)]):
            part = torch.tensor(rows)
            optimizer.zero_grad()
            logits = in_parts(network, x[part], size) if size else network(x[part])
            alm(logits, label[part], part).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
            optimizer.step()
            alm.dual_step()
        reports.append(alm.end_epoch(1.0 - epoch))
    return {"gradients": torch.stack(gradients), "multipliers": alm.multipliers, "mu": alm.mu, "reports": reports}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.save({case: steps(case) for case in CASES}, Path(sys.argv[1]).with_suffix(f".{dist.get_rank()}"))
    dist.destroy_process_group()
