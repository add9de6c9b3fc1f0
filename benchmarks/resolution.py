"""Does the grid matter? The main job at 2.8, 1.4 and 0.75 mm in plane on the phantom of real difficulty.

    python benchmarks/resolution.py runs/resolution --train 300 --test 300 --seeds 3 --max_epochs 30

One network for every grid: equal channels and stages, so an equal number of weights, with the slices at 3 mm. Each
training is the main job with its own run folder; what was stopped goes on, and each finished one stands in
`resolution.json`. `pipelines/evaluate.py` compares the `scores.csv` of two of them, patient by patient.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.phantom.cohort import make_cohort
from mri_alm.runtime.files import read_json, write_json

GRIDS = {2.8: 40, 1.4: 80, 0.75: 160}  # spacing in plane in mm: points along rows and columns; 112, 112 and 120 mm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of the cohort, the runs and resolution.json")
    parser.add_argument("--train", type=int, default=300, help="training exams (default %(default)s)")
    parser.add_argument("--test", type=int, default=300, help="test exams (default %(default)s)")
    parser.add_argument("--ratio", type=int, default=8, help="negatives per positive (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings per grid (default %(default)s)")
    parser.add_argument("--grids", type=float, nargs="+", choices=GRIDS, default=list(GRIDS), help="spacings in mm")
    known, settings = parser.parse_known_args()  # what is left are settings of the main job
    cohort = known.work / "phantom"
    make_cohort(cohort, train=known.train, test=known.test, ratio=known.ratio, difficulty="real")
    path = known.work / "resolution.json"
    rows: list[dict[str, Any]] = read_json(path)["trainings"] if path.exists() else []
    for seed in range(known.seeds):  # a whole comparison first, then its repetitions
        for spacing in known.grids:
            row = {"spacing_mm": spacing, "seed": seed, "train": known.train, "ratio": known.ratio}
            row |= {"settings": settings}
            if not any(row.items() <= done.items() for done in rows):
                rows.append(row | train(known.work / f"{spacing}_{seed}", cohort / "manifest.csv", row))
                write_json(path, {"trainings": rows})
    show(rows)


def train(run: Path, manifest: Path, row: dict[str, Any]) -> dict[str, Any]:
    """The main job on one grid, from wherever it was stopped: figures of the test cohort, weights, seconds."""
    points, spacing = GRIDS[row["spacing_mm"]], row["spacing_mm"]
    words = ["--cohort", manifest, "--run_dir", run, "--cache_dir", run.parent / "cache", "--seed", row["seed"]]
    words += ["--spacing", f"[{spacing}, {spacing}, 3.0]", "--size", f"[{points}, {points}, 28]", *row["settings"]]
    start = time.time()
    command = [sys.executable, "-m", "monai.bundle", "run", "--config_file", "configs/prostate_alm.json"]
    subprocess.run([*command, *map(str, words)], check=True)  # noqa: S603 - our own program
    test = read_json(run / "metrics.json")["test"]
    weights = sum(one.numel() for one in TrainedRun(run).network().parameters())
    return {"weights": weights, "seconds_of_last_start": round(time.time() - start), "test": test}


def show(rows: list[dict[str, Any]]) -> None:
    """Mean and standard deviation over the seeds."""
    for spacing in sorted({row["spacing_mm"] for row in rows}, reverse=True):
        mine = [row for row in rows if row["spacing_mm"] == spacing]
        figures = {"AUC": [row["test"]["ensemble_auc"] for row in mine]}
        figures |= {f"FPR @{k} FN": [row["test"]["fpr_at_fn"][k] for row in mine] for k in mine[0]["test"]["fpr_at_fn"]}
        text = "  ".join(f"{name} {np.mean(v):.3f} ± {np.std(v):.3f}" for name, v in figures.items())
        print(f"{spacing} mm, {mine[0]['weights']} weights, {len(mine)} trainings: {text}")


if __name__ == "__main__":
    main()
