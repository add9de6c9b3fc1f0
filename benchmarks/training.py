"""Where a training step spends its time, and what bfloat16 and channels-last do to it.

python benchmarks/training.py            # by hand, on a quiet machine; prints medians and ratios
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from mri_alm import AugmentedLagrangian
from mri_alm.bundle.trained_run import Ensemble
from mri_alm.networks import TwoBranchCNN

BATCH, SHAPE, REPEATS = 8, (3, 40, 40, 28), 7


def median(action: Callable[[], object]) -> float:
    """Median seconds of REPEATS calls after one to warm up."""
    action()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def as_layout(network: nn.Module, layout: torch.memory_format) -> nn.Module:
    return network.to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


def step(network: nn.Module, image: torch.Tensor, *, bfloat16: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = network(image)
    logits.float().square().mean().backward()


def main() -> None:
    torch.manual_seed(0)
    image = torch.randn(BATCH, *SHAPE)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {BATCH} of {SHAPE}")
    baseline = 0.0
    for last in (False, True):
        for bfloat16 in (False, True):
            layout = torch.channels_last_3d if last else torch.contiguous_format
            network = as_layout(TwoBranchCNN(), layout)
            seconds = median(partial(step, network, image, bfloat16=bfloat16))
            baseline = baseline or seconds
            name = f"{'channels_last_3d' if last else 'contiguous'}, {'bfloat16' if bfloat16 else 'float32'}"
            print(f"forward + backward, {name:30} {1000 * seconds:8.0f} ms   {seconds / baseline:5.2f} x the first row")
            if last and not bfloat16:
                whole = seconds

    logits = torch.randn(BATCH, 1, requires_grad=True)
    label = (torch.arange(BATCH) % 8 == 0).float()
    index = torch.arange(BATCH)
    objective = AugmentedLagrangian(nn.BCEWithLogitsLoss(), BATCH, mu=1e-3)

    def base() -> None:
        objective.base(logits.flatten(), label).backward()

    def constrained() -> None:
        objective(logits, label, index).backward()
        objective.dual_step()

    extra = median(constrained) - median(base)
    print(f"ALM term, diagnostics and dual step: {1000 * extra:.2f} ms, {100 * extra / whole:.2f} % of a training step")

    ensemble = as_layout(Ensemble([TwoBranchCNN() for _ in range(10)]).eval(), torch.channels_last_3d)
    with torch.inference_mode():
        seconds = median(lambda: ensemble(image[:1]))
    print(f"one prepared exam through ten members: {1000 * seconds:.0f} ms")


if __name__ == "__main__":
    main()
