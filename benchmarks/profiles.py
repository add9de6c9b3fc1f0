"""Seconds and memory of a training step of each profile, with and without micro-batches, and what an exam costs.

python benchmarks/profiles.py            # by hand; prints a line a case, each measured in a process of its own
python benchmarks/profiles.py --steps 5  # more steps than the three of which the fastest is shown
python benchmarks/profiles.py --counts   # operations, memory and draws an exam alone
"""

import argparse
import os
import resource
import subprocess
import sys
import time

import torch
from monai.bundle import ConfigParser
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mri_alm import AugmentedLagrangian
from mri_alm.bundle import profile
from mri_alm.networks import AutocastInferer, exam_network

BATCH = 8


def count(name: str, steps: int) -> str:
    """What one exam costs: operations (a multiplication and an addition are two), kept values, a draw of `light`."""
    chosen = profile(name)
    network = exam_network(
        chosen.architecture,
        diffusion_channels=2, t2_channels=1, features=chosen.features, norm=chosen.norm, fusion="late",
    )  # fmt: skip
    image = torch.randn(1, 3, *chosen.size)
    kept: dict[int, int] = {}  # values by where they lie, so that none counts twice

    def keep(one: torch.Tensor) -> torch.Tensor:
        if not isinstance(one, nn.Parameter):
            kept[one.data_ptr()] = one.numel()
        return one

    with FlopCounterMode(display=False) as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        logit = network(image)
    with FlopCounterMode(display=False) as backward:
        logit.backward()
    config = ConfigParser({"augmentations": "%configs/parts/augmentation.json", "size": chosen.size})
    draw = config.get_parsed_content("augmentations::light")
    start = time.process_time()
    for _ in range(10 * steps):
        item = {"image": image[0]}
        for transform in draw:
            item = transform(item)
    seconds = (time.process_time() - start) / (10 * steps)
    total = forward.get_total_flops() + backward.get_total_flops()
    return (
        f"| {name} | {forward.get_total_flops() / 1e9:.2f} | {total / 1e9:.2f} | {sum(kept.values()) / 1e6:.1f} | "
        f"{1000 * seconds:.1f} |"
    )


def measure(name: str, micro_batch: int, form: str, steps: int) -> str:
    """The line of a case; micro_batch 0: the whole batch at once."""
    chosen = profile(name)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    options = {"features": chosen.features, "norm": chosen.norm, "fusion": "late"}
    network = exam_network(chosen.architecture, diffusion_channels=2, t2_channels=1, **options)
    network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    image, label = torch.randn(BATCH, 3, *chosen.size), (torch.arange(BATCH) % 8 == 0).float()
    inferer = AutocastInferer(form == "bfloat16", micro_batch or None)
    objective = AugmentedLagrangian(nn.BCEWithLogitsLoss(), BATCH, mu=1e-3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    wall, processor = [], []
    for _ in range(steps):
        start, used = time.perf_counter(), time.process_time()
        objective(inferer(image, network), label, torch.arange(BATCH)).backward()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"| {name} | {micro_batch or 'none'} | {form} | {min(processor):.2f} | {min(wall):.2f} | {peak - before:.0f} | "
        f"{sum(parameter.numel() for parameter in network.parameters()):,} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--counts", action="store_true")
    parser.add_argument(
        "--case", nargs=3, metavar=("PROFILE", "MICRO_BATCH", "FORMAT"), help="one case, in this process"
    )
    arguments = parser.parse_args()
    if arguments.case:
        name, micro_batch, form = arguments.case
        print(measure(name, int(micro_batch), form, arguments.steps))
        return
    print(f"torch {torch.__version__}, one thread, batch {BATCH}, load of the machine {os.getloadavg()[0]:.1f}")
    torch.set_num_threads(1)
    print("| profile | GFLOP forward | forward and backward | million values kept | ms a draw of `light` |")
    print("|---|---|---|---|---|", *(count(name, arguments.steps) for name in ("laptop", "clinical")), sep="\n")
    if arguments.counts:
        return
    print("\n| profile | micro-batch | format | processor s a step | s a step | MB above the start | parameters |")
    print("|---|---|---|---|---|---|---|", flush=True)
    cases = [("laptop", "0"), ("laptop", "4"), ("clinical", "0"), ("clinical", "4"), ("clinical", "1")]
    for case in [*((*one, "float32") for one in cases), ("laptop", "0", "bfloat16"), ("clinical", "0", "bfloat16")]:
        words = [sys.executable, __file__, "--steps", str(arguments.steps), "--case", *case]
        subprocess.run(words, check=True)  # noqa: S603 - this program itself


if __name__ == "__main__":
    main()
