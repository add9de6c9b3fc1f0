"""Damaged files against the readers: `python benchmarks/fuzz_ingest.py --files 5000`, by hand; CI runs a few hundred.

Every case is one written exam with one to three files damaged: bytes flipped, cut short, elements removed, absurd
sizes. Reading must end in volumes or in an `InputError`, within time and memory, and never in anything else. Each case
runs in a process of its own with a limit on both, so that a crash in a decoder's C++ is seen too.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fuzz import FORMATS, make, read, write_sources

SECONDS = 20
MEMORY = 1 << 30  # bytes of address space above what the process holds at its start


def guarded(form: str, folder: Path) -> str:
    """Read one case in a forked process under limits of time and address space."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(form, folder, sender))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return "HANG"
    return str(receiver.recv()) if receiver.poll() else f"CRASH {process.exitcode}"


def _child(form: str, folder: Path, sender: Any) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    seen: Counter[str] = Counter()
    warnings.showwarning = lambda *given: seen.update([given[1].__name__])
    try:
        outcome = read(form, folder)
    except BaseException as error:  # what the run is there to find
        outcome = f"BUG {type(error).__name__}: {error}"[:200]
    sender.send(outcome + (f" (warned: {', '.join(seen)})" if seen else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=5000, help="number of damaged cases (5000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder that gets the cases that went wrong")
    args = parser.parse_args()
    outcomes: Counter[tuple[str, str]] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as place:
        sources = write_sources(Path(place) / "sources")
        for number in range(args.files):
            form = FORMATS[number % len(FORMATS)]
            folder = Path(place) / str(number)
            make(sources[form], folder, np.random.default_rng([args.seed, number]))
            start = time.perf_counter()
            outcome = guarded(form, folder)
            slowest = max(slowest, time.perf_counter() - start)
            outcomes[form, outcome] += 1
            if args.keep and outcome.split()[0] in ("BUG", "HANG", "CRASH"):
                args.keep.mkdir(parents=True, exist_ok=True)
                folder.rename(args.keep / f"{form}_{number}")
                print(number, form, outcome, flush=True)
    for (form, outcome), count in sorted(outcomes.items()):
        print(f"{form} | {outcome} | {count}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"{args.files} cases, slowest {slowest:.2f} s, largest resident memory of a process {peak} MiB")


if __name__ == "__main__":
    main()
