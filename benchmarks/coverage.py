"""How often does the interval of an AUC hold the AUC? Binormal scores, few positives.

python benchmarks/coverage.py   # seconds; writes benchmarks/results/coverage.json and docs/coverage.png

Each case draws cohorts of so many positives and negatives, whose scores are normal with one standard deviation and
means apart by what gives the AUC. Ours is what mri_alm.metrics.delong_auc gives (Newcombe's method 5); beside it what
was printed before version 0.5.0, DeLong's with the Wald interval, and the same on the scale of the logit, where an AUC
of 1 has none and counts as held.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.stats import norm

from mri_alm.metrics.uncertainty import delong_auc
from mri_alm.runtime.files import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURE = ROOT / "benchmarks" / "results" / "coverage.json", ROOT / "docs" / "coverage.png"
SIZES, AUCS = ((8, 64), (16, 128), (40, 320)), (0.8, 0.9, 0.97)
METHODS = ("Newcombe (ours)", "logit DeLong", "DeLong, Wald")
LEAST = 0.93


def case(positives: int, negatives: int, auc: float, draws: int, rng: np.random.Generator) -> dict[str, float]:
    """Shares of cohorts whose interval holds the AUC, and the mean width of ours."""
    label, shift = np.repeat([1, 0], [positives, negatives]), float(norm.ppf(auc)) * 2**0.5
    held, widths = np.zeros(3), []
    for _ in range(draws):
        found = delong_auc(label, rng.normal(size=label.size) + shift * label)
        low, high = found.interval
        half, distance = 1.959964 * found.variance**0.5, abs(found.auc - auc)
        slope = found.auc * (1 - found.auc)
        apart = abs(np.log(found.auc / (1 - found.auc)) - np.log(auc / (1 - auc))) if slope else 0.0
        held += [low <= auc <= high, apart <= half / slope if slope else True, distance <= half]
        widths.append(high - low)
    return dict(zip(METHODS, (held / draws).tolist(), strict=True)) | {"mean width": float(np.mean(widths))}


def draw(rows: list[dict[str, float]]) -> None:
    """Coverage of each method over the number of positives, a panel per AUC."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, auc in zip(np.atleast_1d(figure.subplots(1, len(AUCS), sharey=True)), AUCS, strict=True):
        of = [row for row in rows if row["auc"] == auc]
        for method, marker in zip(METHODS, "os^", strict=True):
            axes.plot([row["positives"] for row in of], [100 * row[method] for row in of], marker, ls="-", label=method)
        axes.axhline(95, color="0.7", linewidth=1)
        axes.set(title=f"AUC {auc:g}", xlabel="positives (eight times as many negatives)", ylim=(74, 100))
        axes.set_xticks([size[0] for size in SIZES])
    figure.axes[0].set_ylabel("holds the AUC, % (promised: 95)")
    figure.axes[0].legend(loc="lower right", fontsize=8)
    figure.savefig(FIGURE, dpi=100, metadata={"Software": None})


def main() -> int:
    """Draw, print, keep; status 1 where ours holds the AUC in fewer than 93 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, rows = np.random.default_rng(arguments.seed), []
    print(f"positives:negatives  AUC   {'  '.join(METHODS)}  mean width of ours")
    for (positives, negatives), auc in ((size, auc) for size in SIZES for auc in AUCS):
        found = case(positives, negatives, auc, arguments.draws, rng)
        rows.append({"positives": positives, "negatives": negatives, "auc": auc} | found)
        shown = "  ".join(f"{100 * found[name]:{len(name) - 2}.1f} %" for name in METHODS)
        print(f"{positives:9d}:{negatives:<9d}  {auc:.2f}  {shown}  {found['mean width']:.3f}", flush=True)
    write_json(RESULTS, {"draws": arguments.draws, "seed": arguments.seed, "rows": rows})
    draw(rows)
    return int(min(row[METHODS[0]] for row in rows) < LEAST)


if __name__ == "__main__":
    raise SystemExit(main())
