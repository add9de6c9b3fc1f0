"""What is each choice worth, on each task? From the kept results of every table and of benchmarks/recipe.py.

python benchmarks/evidence.py   # a minute; trains nothing, prints the tables and writes docs/recipe.png

A cell compares two ways of training in one thing, on the splits (and of those the seeds) that both have: the gain in
AUC of the ensembles with its 95 % interval over splits and test images, and in parentheses the number of splits; in the
second table what the FPR at 95 % TPR changes by; in the third the gain in AUC of single models, mean and standard
deviation over the splits, and in parentheses how many splits would settle a gain of that size. A null row is the same
way of training with other seeds. Choices with fewer than five splits have empty cells.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mri_alm.cifar.table import BenchmarkTable, Training, read_results
from mri_alm.metrics.comparison import Trained, TrainingComparison, compare_trainings
from mri_alm.runtime.files import read_json

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "mri_alm" / "cifar" / "tables.json"
PHANTOMS = ROOT / "benchmarks" / "results" / "recipe"
FIGURE = ROOT / "docs" / "recipe.png"
TASKS: dict[str, tuple[str, str] | None] = {
    "CIFAR-10, 1:100": ("cifar10_binary_100", "quick"),
    "CIFAR-100, 1:100": ("cifar100_binary_100", "quick"),
    "vessel, 1:7.9": ("vessel", "official_narrow"),
    "adrenal, 1:3.6": ("adrenal", "official_narrow"),
    "phantoms, 1:8": None,
}
TPR = (0.95,)
TWO = "two positives"
# The choice: its method and the one it is compared with, of the tables; the same two of the phantoms (last epochs).
CHOICES: dict[str, tuple[str, str, str, str]] = {
    "null, batches as they come": ("bce, other seed", "bce", "reference, other seed", "reference"),
    "null, filled batches": ("bce8, other seed", "bce8", f"{TWO}, other seed", TWO),
    "filled batches": ("bce8", "bce", TWO, "reference"),
    "constraint, batches as they come": ("alm_bce", "bce", "constraint", "reference"),
    "constraint, filled batches": ("alm_bce8", "bce8", f"{TWO}, constraint", TWO),
    "the same, a tenth of the run": ("held_bce8", "bce8", f"{TWO}, held", TWO),
    "the same with decay": ("decayed_bce8", "bce8", f"{TWO}, decayed", TWO),
    "the same with tolerance": ("tolerant_bce8", "bce8", f"{TWO}, tolerant", TWO),
    "penalty only": ("penalty_bce8", "bce8", f"{TWO}, penalty", TWO),
    "AUC margin loss": ("aucm", "bce8", f"{TWO}, AUC margin", TWO),
    "partial AUC loss": ("pauc", "bce8", f"{TWO}, partial AUC", TWO),
    "logit adjustment": ("la8", "bce8", f"{TWO}, logit adjustment", TWO),
    "vector scaling": ("vs8", "bce8", f"{TWO}, vector scaling", TWO),
    "loss-conditional training": ("lct8", "bce8", f"{TWO}, loss-conditional", TWO),
    "smoothed labels": ("ls8", "bce8", f"{TWO}, smoothed", TWO),
    "sharpness-aware": ("bce8sam", "bce8", f"{TWO}, SAM", TWO),
    "averaged weights (last epoch)": ("bce8ema", "bce8", f"{TWO}, EMA", TWO),
    "last epoch, not the best": ("bce8last", "bce8best", TWO, f"{TWO} best"),
    "AdamW, warm-up, cosine": ("", "", f"{TWO}, cosine", TWO),
    "field augmentation": ("", "", f"{TWO}, field", TWO),
    "twice as wide": ("bce8, wide", "bce8", f"{TWO}, 16-32-64", TWO),
    "spatial fusion, batches as they come": ("", "", "spatial", "reference"),
    "spatial fusion, AdamW, warm-up, cosine": ("", "", "together", TWO),
    "no registration, late fusion": ("", "", "no registration", "reference"),
    "no registration, spatial fusion": ("", "", "spatial, no registration", "spatial"),
    "mirrored at scoring": ("", "", f"{TWO}, last, mirrored", TWO),
}
# Which epoch a table's bce8 keeps.
KEPT = {"quick": "bce8best", "official_narrow": "bce8last"}
Found = tuple[np.ndarray, Trained]
Compared = tuple[TrainingComparison, int]


class Task:
    """The kept trainings of one task."""

    def __init__(self, results: Path, task: tuple[str, str] | None) -> None:
        self.results, self.task = results, task

    def trained(self, name: str) -> Found | None:
        """Labels and test scores of a way of training; None if there are none."""
        return self._of_phantoms(name) if self.task is None else self._of_table(*self.task, name)

    def _of_phantoms(self, name: str) -> Found | None:
        best = name.endswith(" best")
        stem = name.removesuffix(" best").replace(", ", "_").replace(" ", "_")
        kept = [PHANTOMS / f"{stem}{end}.json" for end in ([""] if best else ["_last", ""])]
        path = next((path for path in kept if path.exists()), None)
        if path is None:
            return None
        record = read_json(path)
        if not best and "_last" not in path.stem and "checkpoint_rule" not in record["settings"]:
            return None  # its best epochs only
        return np.array(record["label"]), Trained(np.array(record["logit"])[:, None])

    def _of_table(self, table: str, protocol: str, name: str) -> Found | None:
        key, _, more = name.partition(", ")
        key = "bce8" if key == KEPT[protocol] else key
        if more == "wide":
            protocol = "official"
        if not key or not (self.results / table / protocol).exists():
            return None
        asked = BenchmarkTable(TABLES, table, protocol)
        seeds = (1,) if more == "other seed" else (0, 1)
        trainings = [Training(asked.method(key), split=split, seed=seed) for seed in seeds for split in range(10)]
        found = read_results(asked, self.results, trainings)
        splits = next((k for k in range(10) if (key, seeds[0], k) not in found), 10)
        if splits < 5:  # too few to show
            return None
        full = [seed for seed in seeds if all((key, seed, split) in found for split in range(splits))]
        label = np.array(found[key, full[0], 0]["test"]["label"])
        return label, Trained(np.array([[found[key, s, k]["test"]["score"] for s in full] for k in range(splits)]))


def compare(task: Task, name: str, against: str) -> Compared | None:
    """The comparison on the splits that both have, and their number."""
    found, other = task.trained(name), task.trained(against)
    if found is None or other is None:
        return None
    (label, method), (other_label, baseline) = found, other
    if name.endswith("other seed"):
        baseline = Trained(baseline.score[:, :1])
    if not np.array_equal(label, other_label):
        raise SystemExit(f"{name} and {against} were tested on other exams, or in another order: compare them anew.")
    splits = min(len(method.score), len(baseline.score))
    return compare_trainings(label, Trained(method.score[:splits]), Trained(baseline.score[:splits]), TPR), splits


def of_ensembles(found: Compared, figure: int) -> str:
    value, low, high = (100 * part for part in found[0].difference.of(figure))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}] ({found[1]})"


def of_single_models(found: Compared) -> str:
    one = found[0]
    splits = f"{one.splits_to_settle:.0f}" if one.splits_to_settle <= 1000 else "> 1000"
    return f"{100 * one.gain:+.1f} ± {100 * one.gain_deviation:.1f} ({splits})"


def show(title: str, grid: dict[str, dict[str, Any]], text: Callable[[Compared], str]) -> None:
    print(f"\n{title}:\n\n| " + " | ".join(["choice", *TASKS]) + " |\n|" + (len(TASKS) + 1) * "---|")
    for choice, row in grid.items():
        print(f"| {choice} | {' | '.join(text(found) if found else '' for found in row.values())} |")


def draw(grid: dict[str, dict[str, Any]]) -> None:
    """Gains and intervals, a row per choice, a colour per task."""
    figure = Figure(figsize=(9, 0.52 * len(grid) + 1.2), layout="constrained")
    axes = figure.subplots()
    for column, task in enumerate(TASKS):
        for row, found in enumerate(grid.values()):
            if found[task] is not None:
                value, low, high = (100 * part for part in found[task][0].difference.of(0))
                label = task if row == next(i for i, f in enumerate(grid.values()) if f[task] is not None) else None
                style: dict[str, Any] = {
                    "marker": "os^Dv"[column],
                    "color": f"C{column}",
                    "markersize": 4,
                    "linestyle": "",
                }
                axes.errorbar(value, row + 0.15 * (column - 2), xerr=[[value - low], [high - value]],
                              elinewidth=1, label=label, **style)  # fmt: skip
    axes.axvline(0, color="0.6", linewidth=1, zorder=0)
    for row in range(0, len(grid), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="0.95", zorder=-1)
    axes.set(yticks=range(len(grid)), yticklabels=list(grid), xlim=(-15, 15), ylim=(len(grid) - 0.5, -0.5),
             xlabel="gain in AUC of the ensemble, percentage points (95 % over splits and test images)")  # fmt: skip
    figure.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(FIGURE, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    arguments = parser.parse_args()
    tasks = {name: Task(arguments.results, task) for name, task in TASKS.items()}
    grid: dict[str, dict[str, Any]] = {}
    for choice, (method, against, phantom, reference) in CHOICES.items():
        pairs = {name: (phantom, reference) if tasks[name].task is None else (method, against) for name in tasks}
        row = {name: compare(tasks[name], *pair) for name, pair in pairs.items()}
        if any(row.values()):
            grid[choice] = row
    show("Gain in AUC of the ensemble", grid, lambda found: of_ensembles(found, 0))
    show(f"Change of its FPR at {100 * TPR[0]:.0f} % TPR", grid, lambda found: of_ensembles(found, 1))
    show("Gain in AUC of single models (splits that would settle it)", grid, of_single_models)
    draw(grid)


if __name__ == "__main__":
    main()
