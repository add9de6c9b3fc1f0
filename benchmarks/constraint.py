"""Time and memory of the ranking constraint, forward and backward on one core: python benchmarks/constraint.py.

Each row is a batch of P positives and N negatives in float32. Ours is `ranking_violation` as users call it; broadcast
is the (P, N) matrix in float32; the double loop is the textbook sum over pairs of tensors, timed where it ends within
seconds. The yardstick is one `torch.sort` (values and indices, forward only) of the same P + N scores. Times are
medians; memory is the growth of the peak by one step in a fresh process (Linux only).
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mri_alm.alm import constraint
from mri_alm.alm.constraint import ranking_violation

SIZES = ((8, 56), (64, 448), (512, 4096), (4096, 32768), (16384, 262144))
DELTA = 0.25
MATRIX_LIMIT = 2**31  # bytes of one (P, N) float32 matrix: beyond, broadcast is not run
LOOP_LIMIT = 30_000  # pairs


def broadcast(score: Tensor, label: Tensor, delta: float) -> Tensor:
    positive, negative = score[label == 1], score[label == 0]
    return torch.relu(delta - (positive.unsqueeze(1) - negative)).sum(1)


def double_loop(score: Tensor, label: Tensor, delta: float) -> Tensor:
    positive, negative = score[label == 1], score[label == 0]
    return torch.stack([torch.stack([torch.relu(delta - (p - n)) for n in negative]).sum() for p in positive])


METHODS = {"ours": ranking_violation, "broadcast": broadcast, "double loop": double_loop}


def batch(positives: int, negatives: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    label = (torch.randperm(positives + negatives, generator=generator) < positives).long()
    return torch.randn(len(label), generator=generator) + label, label


def step(method: str, score: Tensor, label: Tensor) -> None:
    METHODS[method](score.requires_grad_(), label, DELTA).square().sum().backward()  # type: ignore[no-untyped-call]


def feasible(method: str, positives: int, negatives: int) -> bool:
    pairs = positives * negatives
    return {"ours": True, "broadcast": 4 * pairs <= MATRIX_LIMIT, "double loop": pairs <= LOOP_LIMIT}[method]


def median_ms(run: Callable[[], object], budget_s: float = 3.0) -> float:
    """Median of up to 101 runs within the budget, after one that is not counted unless it was long already."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 2 or (time.perf_counter() - began < budget_s and len(times) < 101):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def resident_mib(field: str) -> float:
    """VmRSS or VmHWM, the peak. Not getrusage: its peak starts at the parent's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak_mib(method: str, positives: int, negatives: int) -> float:
    """Growth of this process's peak memory by one step; only meaningful in a fresh process."""
    torch.set_num_threads(1)
    step(method, *batch(4, 4))  # loaded code and autograd's threads are not the method's memory
    score, label = batch(positives, negatives)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = resident_mib("VmRSS")
    step(method, score, label)
    return resident_mib("VmHWM") - before


def time_row(positives: int, negatives: int) -> dict[str, float]:
    score, label = batch(positives, negatives)
    row = {"sort": median_ms(score.sort)}
    for method in METHODS:
        if feasible(method, positives, negatives):
            row[method] = median_ms(lambda method=method: step(method, score.clone(), label))  # type: ignore[misc]
    return row


def print_times() -> None:
    print(
        f"{'P':>6} {'N':>7} {'sort ms':>9} {'ours ms':>9} {'/ sort':>7} {'broadcast':>10} {'/ ours':>7} {'loop ms':>9}"
    )
    for positives, negatives in SIZES:
        row = time_row(positives, negatives)
        ours, matrix, loop = row["ours"], row.get("broadcast"), row.get("double loop")
        print(
            f"{positives:6} {negatives:7} {row['sort']:9.3f} {ours:9.3f} {ours / row['sort']:7.2f} "
            + (f"{matrix:10.2f} {matrix / ours:7.1f} " if matrix else f"{'-':>10} {'-':>7} ")
            + (f"{loop:9.1f}" if loop else f"{'-':>9}")
        )


def print_memory() -> None:
    print(f"\n{'P':>6} {'N':>7} {'ours MiB':>9} {'broadcast MiB':>14}")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for positives, negatives in SIZES[2:]:
            ours = pool.apply(peak_mib, ("ours", positives, negatives))
            run_matrix = feasible("broadcast", positives, negatives)
            matrix = f"{pool.apply(peak_mib, ('broadcast', positives, negatives)):.1f}" if run_matrix else "-"
            print(f"{positives:6} {negatives:7} {ours:9.1f} {matrix:>14}")


def print_crossing() -> None:
    """Where `_BROADCAST_PAIRS` comes from."""
    print(f"\n{'pairs':>8} {'matrix ms':>10} {'sorted ms':>10}   one positive per eight negatives")
    for positives in (20, 40, 60, 80, 100, 120, 160):
        score, label = batch(positives, 8 * positives)
        times = []
        for constraint._BROADCAST_PAIRS in (10**12, 0):
            times.append(median_ms(lambda: step("ours", score.clone(), label), budget_s=1.0))  # noqa: B023
        print(f"{8 * positives**2:8} {times[0]:10.3f} {times[1]:10.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print_times()
    print_memory()
    print_crossing()
