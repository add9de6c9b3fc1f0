"""How often does the test for shifted scores cry, with reason and without? Normal scores, as in a cohort of thirteen.

python benchmarks/shift.py   # prints the table of docs/operating_point.md; seconds
"""

import numpy as np
from numpy.typing import NDArray

from mri_alm.scoring.shift import FEWEST, LEAST_P, mixture_p_value

LABEL = np.repeat([1, 0], [13, 104])
DRAWS = 400
CASES = [(share, 0.0) for share in (0.05, 0.11, 0.4, 0.9)] + [(0.11, -0.5), (0.11, -1.0), (0.11, 1.0)]


def logits(rng: np.random.Generator, label: NDArray[np.int64], moved: float) -> NDArray[np.float64]:
    """Normal with standard deviation 1; those of positives are 2 higher."""
    return rng.normal(2.0 * label + moved, 1)


def main() -> None:
    sizes = (FEWEST, 2 * FEWEST, 8 * FEWEST)
    print(f"| share of positives | logits moved by | {' | '.join(f'{size} new exams' for size in sizes)} |")
    print("|---|---|---|---|---|")
    for share, moved in CASES:
        cries = []
        for size in sizes:
            rng = np.random.default_rng([size, round(100 * share), round(10 * moved) + 10])
            draws = (
                (logits(rng, LABEL, 0), logits(rng, (rng.random(size) < share).astype(np.int64), moved))
                for _ in range(DRAWS)
            )
            cries.append(sum(mixture_p_value(LABEL, known, new) < LEAST_P for known, new in draws))
        print(f"| {share:.0%} | {moved:+.1f} | {' | '.join(f'{count} of {DRAWS}' for count in cries)} |")


if __name__ == "__main__":
    main()
