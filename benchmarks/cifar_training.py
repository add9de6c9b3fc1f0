"""Images per second of CIFAR training: ours, and a naive loop; where a step's time goes; share of the measured peak.

python benchmarks/cifar_training.py --data data/cifar --width 0.125     # by hand, on a quiet machine

The naive loop is written from the paper as many would write it: a data set that crops, flips and normalises one image
at a time, the constraint as a double loop over pairs, contiguous memory, validation one image at a time. Both train
the same network on the same set from the same weights, for --epochs epochs with a validation after each.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torch.utils.flop_counter import FlopCounterMode

from mri_alm import AugmentedLagrangian
from mri_alm.alm.batches import StratifiedBatchSampler
from mri_alm.alm.losses import BinaryCrossEntropy
from mri_alm.cifar.batches import STATISTICS, BatchLoader, CropFlip, ImagePart
from mri_alm.cifar.networks import resnet10
from mri_alm.cifar.sets import ImageSet, binary_set
from mri_alm.metrics.ranking import auc
from mri_alm.networks import AutocastInferer

BATCH, MU, DELTA = 64, 1e-4, 0.25


class Times:
    """Seconds by name, and the validation AUC of every epoch."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.auc: list[float] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        synchronise()
        start = time.perf_counter()
        yield
        synchronise()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def batches_of(images: ImageSet, positives: int) -> list[list[int]]:
    """An epoch's batches, as they come or with so many positives in each."""
    if positives:
        return list(StratifiedBatchSampler(images.labels(0), BATCH, positives))
    return list(BatchSampler(RandomSampler(range(len(images.labels(0)))), BATCH, drop_last=False))


def ours(
    images: ImageSet,
    plan: list[list[int]],
    width: float,
    epochs: int,
    device: torch.device,
    *,
    compiled: bool,
    bfloat16: bool,
) -> Times:
    times = Times()
    inferer = AutocastInferer(bfloat16)
    network = resnet10(width).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    run = torch.compile(network) if compiled else network
    objective = AugmentedLagrangian(BinaryCrossEntropy(), images.size, mu=MU).to(device)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    transform = CropFlip()
    transform.set_random_state(seed=0)
    training = ImagePart(images, "training", 0, device=device, transform=transform)
    validation = ImagePart(images, "validation", 0, device=device)
    loader = BatchLoader(training, plan)
    if compiled:
        warm: Tensor = inferer(training.batch(range(BATCH))["image"], run).mean()  # compiles; not timed
        warm.backward()  # type: ignore[no-untyped-call]
    for _ in range(epochs):
        network.train()
        batches = iter(loader)
        for _ in range(len(loader)):
            with times.measure("data"):
                batch = next(batches)
            with times.measure("forward"):
                logits = inferer(batch["image"], run)
            with times.measure("objective"):
                loss = objective(logits, batch["label"], batch["index"])
            with times.measure("backward"):
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
            with times.measure("optimiser"):
                optimizer.step()
                objective.dual_step()
        with times.measure("validation"), torch.inference_mode():
            network.eval()
            batch = validation.batch(range(len(validation)))
            logits = inferer(batch["image"], network).flatten()
            times.auc.append(auc(batch["label"].cpu().numpy(), logits.cpu().numpy()))
            objective.end_epoch(times.auc[-1])
    return times


class OneByOne(Dataset[tuple[Tensor, int, int]]):
    """One image at a time."""

    def __init__(self, images: ImageSet, part: str, *, augment: bool) -> None:
        self.images, self.rows, self.augment = images, images.rows(part, 0), augment
        self.mean, self.deviation = (torch.tensor(v)[:, None, None] for v in STATISTICS["cifar10"])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> tuple[Tensor, int, int]:
        row = int(self.rows[position])
        image = torch.from_numpy(self.images.image[row])
        if self.augment:
            padded = nn.functional.pad(image, (4, 4, 4, 4))
            top, left = (int(v) for v in torch.randint(9, (2,)))
            image = padded[:, top : top + 32, left : left + 32]
            if float(torch.rand(1)) < 0.5:
                image = image.flip(2)
        return (image.float() / 255 - self.mean) / self.deviation, int(self.images.label[row]), row


def naive(images: ImageSet, plan: list[list[int]], width: float, epochs: int, device: torch.device) -> Times:
    times = Times()
    network = resnet10(width).to(device)
    optimizer = torch.optim.Adam(network.parameters())
    training = DataLoader(OneByOne(images, "training", augment=True), batch_sampler=plan)
    validation = DataLoader(OneByOne(images, "validation", augment=False), 1)
    multipliers, mu = dict.fromkeys(images.rows("training", 0).tolist(), 0.0), MU
    for _ in range(epochs):
        network.train()
        batches = iter(training)
        for _ in range(len(training)):
            with times.measure("data"):
                image, label, index = next(batches)
                image = image.to(device)
            with times.measure("forward"):
                logits = network(image).flatten()
            with times.measure("objective"):
                loss = nn.functional.binary_cross_entropy_with_logits(logits, label.to(device).float())
                score = torch.sigmoid(logits)
                positives, negatives = (torch.nonzero(label == side).flatten().tolist() for side in (1, 0))
                violations = {}
                for j in positives:
                    q = torch.zeros((), device=device)
                    for k in negatives:
                        q = q + torch.clamp(DELTA - (score[j] - score[k]), min=0)
                    violations[int(index[j])] = q
                pairs = max(len(positives) * len(negatives), 1)
                for row, q in violations.items():
                    loss = loss + mu / (2 * pairs) * q**2 + multipliers[row] / pairs * q
            with times.measure("backward"):
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            with times.measure("optimiser"):
                optimizer.step()
                for row, q in violations.items():
                    multipliers[row] += mu * float(q.detach())
        with times.measure("validation"), torch.no_grad():
            network.eval()
            held_out = [(int(label), float(network(image.to(device)))) for image, label, _ in validation]
            times.auc.append(auc(*zip(*held_out, strict=True)))
    return times


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second: the best of a large matrix product and a 3 x 3 convolution, of ten each.

    They are done by different libraries on a CPU, of which either may know its instructions better.
    """
    a = torch.randn(1024, 1024, device=device, dtype=dtype)
    image = torch.randn(16, 64, 32, 32, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(64, 64, 3, 3, device=device, dtype=dtype)
    rates = []
    for _ in range(10):
        times = Times()
        with times.measure("matmul"):
            a @ a
        with times.measure("convolution"):
            nn.functional.conv2d(image, weight, padding=1)
        rates += [2 * 1024**3 / times.seconds["matmul"], 2 * 16 * 1024 * 9 * 64**2 / times.seconds["convolution"]]
    return max(rates)


def step_flops(width: float) -> int:
    """Floating-point operations of the forward and backward pass of one image."""
    counter = FlopCounterMode(display=False)
    with counter:
        resnet10(width)(torch.randn(2, 3, 32, 32)).mean().backward()
    return counter.get_total_flops() // 2


def convolution_share(width: float) -> float:
    """Share of the convolutions' kernels, which both loops need, in a compiled forward and backward pass on the CPU."""
    network = resnet10(width).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    run = torch.compile(network)
    image = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        run(image).mean().backward()  # type: ignore[no-untyped-call]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(10):
            run(image).mean().backward()  # type: ignore[no-untyped-call]
    spent = {str(event.key): float(event.self_cpu_time_total) for event in found.key_averages()}
    return sum(seconds for name, seconds in spent.items() if "convolution" in name) / sum(spent.values())


def batched_over_separate(width: float, members: int, device: torch.device) -> float:
    """Seconds of a gradient of several members at once (torch.func) over those of one member after the other."""
    networks = [resnet10(width).to(device) for _ in range(members)]
    parameters, buffers = stack_module_state(networks)
    image = torch.randn(members, BATCH, 3, 32, 32, device=device)
    label = (torch.rand(members, BATCH, device=device) < 0.1).float()

    def loss(values: dict[str, Tensor], state: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits: Tensor = functional_call(networks[0], (values, state), (image,))
        return nn.functional.binary_cross_entropy_with_logits(logits.flatten(), label)

    gradient = vmap(grad(loss))
    times: dict[str, list[float]] = {"batched": [], "separate": []}
    last = [network.to(memory_format=torch.channels_last) for network in networks]  # type: ignore[call-overload]
    for _ in range(6):
        found = Times()
        with found.measure("batched"):
            gradient(parameters, buffers, image, label)
        with found.measure("separate"):
            for network, one, wanted in zip(last, image, label, strict=True):
                logits = network(one.contiguous(memory_format=torch.channels_last)).flatten()
                network.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(logits, wanted).backward()  # type: ignore[no-untyped-call]
        for name, seconds in found.seconds.items():
            times[name].append(seconds)
    return min(times["batched"]) / min(times["separate"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/cifar"))
    parser.add_argument("--width", type=float, default=0.125)
    parser.add_argument("--ratio", type=float, default=100)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--positives", type=int, default=0, help="positives in every batch (default: as they come)")
    parser.add_argument("--compile", action="store_true", help="also ours with torch.compile")
    parser.add_argument("--bfloat16", action="store_true", help="also ours in bfloat16")
    parser.add_argument("--members", type=int, default=5, help="networks whose gradients are batched (torch.func)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = binary_set(
        arguments.data,
        "cifar10",
        majority="truck",
        critical="automobile",
        ratio=arguments.ratio,
        validation=100,
        splits=1,
    )
    plan = batches_of(images, arguments.positives)[:-1]  # whole batches: torch.compile would compile the last one again
    count = BATCH * len(plan) * arguments.epochs
    types = [torch.float32, *([torch.bfloat16] if arguments.bfloat16 else [])]
    peaks = {dtype: measured_peak(device, dtype) for dtype in types}
    flops = step_flops(arguments.width)
    measured = ", ".join(f"{peak / 1e9:.0f} GFLOP/s in {str(dtype)[6:]}" for dtype, peak in peaks.items())
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, width {arguments.width}, "
          f"{count} images, peak {measured}")  # fmt: skip
    rates = {}
    names = ["naive", "ours", *(["compiled"] if arguments.compile else [])]
    for name in names + [f"{name} bfloat16" for name in names[1:] if arguments.bfloat16]:
        torch.manual_seed(0)
        common = images, plan, arguments.width, arguments.epochs, device
        if name == "naive":
            run = naive(*common)
        else:
            run = ours(*common, compiled=name.startswith("compiled"), bfloat16=name.endswith("bfloat16"))
        total = sum(run.seconds.values())
        rates[name] = count / total
        split = "  ".join(f"{part} {100 * seconds / total:.1f} %" for part, seconds in run.seconds.items())
        step = run.seconds["forward"] + run.seconds["backward"]
        peak = peaks[torch.bfloat16 if name.endswith("bfloat16") else torch.float32]
        print(f"{name:17} {rates[name]:7.0f} images/s   validation AUC {100 * run.auc[-1]:.1f}   {split}   "
              f"forward and backward at {100 * flops * count / step / peak:.0f} % of the peak")  # fmt: skip
        if name != "naive":
            print(f"{'':17} {rates[name] / rates['naive']:.2f} x the naive loop")
    if arguments.compile and device.type == "cpu":
        print(f"convolution kernels take {100 * convolution_share(arguments.width):.0f} % of a compiled step")
    ratio = batched_over_separate(arguments.width, arguments.members, device)
    print(f"a gradient of {arguments.members} members batched by torch.func takes {ratio:.2f} x the time of one by one")


if __name__ == "__main__":
    main()
