"""Damage against the readers, by hand; CI runs a few hundred cases. Each runs in a process of its own.

`python benchmarks/fuzz_ingest.py --files 5000`: one written exam with one to three files damaged: bytes flipped, cut
short, elements removed, absurd sizes. Reading must end in volumes or in an `InputError`, within time and memory, and
never in anything else. A crash in a decoder's C++ is seen too.

`python benchmarks/fuzz_ingest.py --structure --files 2000`: a sound exam of known truth with one or two named damages
(a slice lost, two b-values exchanged, a second patient). What is read must be right, refused, or named by a warning;
what is none of these is listed, with its number.
"""

import argparse
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fuzz import FORMATS, make, read, write_sources
from fuzz_structure import EVERY, ORDER, WRONG, Outcome, structure_outcome

SECONDS = 20
MEMORY = 1 << 30  # bytes of address space above what the process holds at its start


def guarded(times: list[float], work: Callable[..., Any], *given: Any) -> Any:
    """What a function gives in a forked process under limits of time and address space, or a word for its end."""
    start = time.perf_counter()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(sender, work, *given))
    process.start()
    found = receiver.recv() if receiver.poll(SECONDS) else None
    process.join(1)
    times.append(time.perf_counter() - start)
    if process.is_alive():
        process.kill()
        process.join()
        return found or "HANG"
    return found or f"CRASH {process.exitcode}"


def _child(sender: Any, work: Callable[..., Any], *given: Any) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    seen: Counter[str] = Counter()
    warnings.showwarning = lambda *told: seen.update([told[1].__name__])
    try:
        found = work(*given)
    except BaseException as error:  # what the run is there to find
        found = f"BUG {type(error).__name__}: {error}"[:200]
    sender.send(found + f" (warned: {', '.join(seen)})" if seen and isinstance(found, str) else found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=5000, help="number of damaged cases (5000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder that gets the cases that went wrong")
    parser.add_argument("--structure", action="store_true", help="damage exams instead of files")
    args = parser.parse_args()
    times: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        wrong = (damage_structure if args.structure else damage_files)(Path(place), args, times)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"{args.files} cases in {sum(times):.0f} s, slowest {max(times):.2f} s, {peak} MiB of memory at most")
    sys.exit(1 if wrong else 0)


def damage_files(place: Path, args: argparse.Namespace, times: list[float]) -> int:
    """Bytes and elements; the number of cases that went wrong."""
    outcomes: Counter[tuple[str, str]] = Counter()
    sources, wrong = write_sources(place / "sources"), 0
    for number in range(args.files):
        form = FORMATS[number % len(FORMATS)]
        folder = place / str(number)
        make(sources[form], folder, np.random.default_rng([args.seed, number]))
        outcome = str(guarded(times, read, form, folder))
        outcomes[form, outcome] += 1
        if outcome.split(maxsplit=1)[0] in ("BUG", "HANG", "CRASH"):
            wrong += 1
            keep(folder, args.keep, f"{form}_{number}")
            print(number, form, outcome, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    for (form, outcome), count in sorted(outcomes.items()):
        print(f"{form} | {outcome} | {count}")
    return wrong


def damage_structure(place: Path, args: argparse.Namespace, times: list[float]) -> int:
    """Exams of known truth; the number of cases that went wrong."""
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in EVERY}
    codes: dict[str, set[str]] = {name: set() for name in EVERY}
    for number in range(args.files):
        first, folder = list(EVERY)[number % len(EVERY)], place / str(number)
        found = guarded(times, structure_outcome, number, args.seed, folder)
        outcome = found if isinstance(found, Outcome) else Outcome(first, ORDER[0], str(found))
        outcomes[first][outcome.kind] += 1
        if outcome.kind in (ORDER[0], WRONG):
            keep(folder, args.keep, str(number))
            print(f"case {number}: {outcome.damage}: {outcome.kind}: {outcome.detail}", flush=True)
        elif outcome.detail:
            codes[first].add(outcome.detail)
        shutil.rmtree(folder, ignore_errors=True)
    print(" | ".join(["damage", *ORDER[::-1], "refused as"]))
    for name, counts in outcomes.items():
        print(" | ".join([name, *(str(counts[kind]) for kind in ORDER[::-1]), " ".join(sorted(codes[name]))]))
    total: Counter[str] = sum(outcomes.values(), Counter())
    print(" | ".join(["all", *(str(total[kind]) for kind in ORDER[::-1])]))
    return total[ORDER[0]] + total[WRONG]


def keep(folder: Path, place: Path | None, name: str) -> None:
    """Keep a case that went wrong, if that is wanted."""
    if place and folder.is_dir():  # else it was not even made
        shutil.copytree(folder, place / name, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
