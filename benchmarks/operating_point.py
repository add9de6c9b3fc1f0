"""Does a promised miss rate hold on new patients? Whole small trainings on phantoms, one per seed.

python benchmarks/operating_point.py --seeds 20 --work /tmp/operating_point   # the same again goes on

Each seed paints its own exams, trains three splits with configs/prostate_alm.json on a coarse grid, and scores with
their ensemble a calibration cohort and new patients that training never saw. The scores are kept
(benchmarks/results/operating_point/); thresholds and miss rates are computed from them again at every start.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from monai.bundle import ConfigWorkflow
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import beta

from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.cohort.manifest import read_manifest
from mri_alm.metrics.ranking import auc
from mri_alm.metrics.threshold import (
    OperatingPoint,
    fixed_fn_threshold,
    mean_miss_rate_threshold,
    neyman_pearson_threshold,
)
from mri_alm.phantom.cohort import PhantomRow, write_cohort
from mri_alm.phantom.study import PhantomStudy, make_study
from mri_alm.runtime.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "operating_point"
FIGURE = ROOT / "docs" / "operating_point.png"
ALPHA, EPS = 0.1, 0.1
COHORTS = {"train": (20, 52), "calibration": (40, 10), "new": (100, 30)}  # positives, negatives
SETTINGS: dict[str, Any] = {
    "spacing": [4.5, 4.5, 4.5], "size": [20, 20, 16], "register": False, "splits": 3, "max_epochs": 8, "max_fn": 2,
    "threads": 1, "preset": "default",
}  # fmt: skip


def cohort(folder: Path, seed: int, parts: tuple[str, ...], *, first: int) -> Path:
    """Manifest of some parts; exams of different parts and seeds are different persons."""
    labels = [label for part in parts for label, n in zip((1, 0), COHORTS[part], strict=True) for _ in range(n)]
    rows = [PhantomRow(first + i, label, "train" if "train" in parts else "test") for i, label in enumerate(labels)]

    def make(row: PhantomRow) -> PhantomStudy:
        return make_study(row.index, row.label, seed=seed, coarse=3)

    return write_cohort(folder, rows, make, parameters={"form": "nifti", "seed": seed})


def run_seed(seed: int, work: Path) -> dict[str, Any]:
    """Paint, train, score: the scores of all that the thresholds and the miss rates are made from."""
    start = time.process_time()
    workflow = ConfigWorkflow(
        str(ROOT / "configs" / "prostate_alm.json"),
        logging_file=None,
        workflow_type="train",
        cohort=str(cohort(work / "train", seed, ("train",), first=0)),
        run_dir=str(work / "run"),
        cache_dir=str(work / "cache"),
        seed=seed,
        **SETTINGS,
    )
    workflow.initialize()
    workflow.run()
    held_out = np.genfromtxt(work / "run" / "heldout.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    record = {"held_out": scores_of(held_out["label"], expit(held_out["logit"]))}
    trained = TrainedRun(work / "run")
    prepare, ensemble = trained.preprocessing(), trained.ensemble()
    exams = read_manifest(cohort(work / "unseen", seed, ("calibration", "new"), first=1000))
    with torch.inference_mode():
        logits = [float(ensemble(prepare(exam.item())["image"][None]).double().mean()) for exam in exams]
    labels, score, split = np.array([exam.label for exam in exams]), expit(logits), sum(COHORTS["calibration"])
    record |= {
        "calibration": scores_of(labels[:split], score[:split]),
        "new": scores_of(labels[split:], score[split:]),
    }
    return {"seed": seed, "cpu_seconds": round(time.process_time() - start, 1), "settings": SETTINGS} | record


def scores_of(label: NDArray[np.int64], score: NDArray[np.float64]) -> dict[str, list[float]]:
    return {
        name: [round(float(value), 7) for value in score[label == kind]]
        for name, kind in (("positive", 1), ("negative", 0))
    }


def arrays(scores: dict[str, list[float]]) -> tuple[list[int], list[float]]:
    label = [1] * len(scores["positive"]) + [0] * len(scores["negative"])
    return label, scores["positive"] + scores["negative"]


def rules(record: dict[str, Any]) -> dict[str, OperatingPoint]:
    """The thresholds that are compared, each from data that the new patients are no part of."""
    calibration, held_out = arrays(record["calibration"]), arrays(record["held_out"])
    naive = {name: int(ALPHA * sum(label)) for name, (label, _) in (("c", calibration), ("h", held_out))}
    return {
        "Neyman-Pearson, calibration": neyman_pearson_threshold(*calibration, ALPHA, EPS, source="calibration"),
        "conformal mean, calibration": mean_miss_rate_threshold(*calibration, ALPHA, source="calibration"),
        "naive k FN, calibration": fixed_fn_threshold(*calibration, naive["c"], source="calibration"),
        "naive k FN, held out": fixed_fn_threshold(*held_out, naive["h"], source="pooled"),
    }


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Per rule: how often the miss rate of the new patients exceeded ALPHA, beside the law of an exact calibration."""
    result: dict[str, Any] = {}
    for name in rules(records[0]):
        points = [rules(record)[name] for record in records]
        new = [arrays(record["new"]) for record in records]
        needed = [(np.array(label), point.decide(s)) for point, (label, s) in zip(points, new, strict=True)]
        missed = np.array([1 - decided[label == 1].mean() for label, decided in needed])
        spared = np.array([1 - decided[label == 0].mean() for label, decided in needed])
        law = [beta.sf(ALPHA, p.rank, p.n_positive - p.rank + 1) if p.rank else 0.0 for p in points]
        result[name] = {
            "ranks": sorted({f"{p.rank} of {p.n_positive}" for p in points}),
            "miss_rates": missed.round(4).tolist(), "mean": float(missed.mean()), "largest": float(missed.max()),
            "exceeded": int((missed > ALPHA).sum()), "expected_share": float(np.mean(law)),
            "negatives_spared": float(spared.mean()),
        }  # fmt: skip
    return result


def figure(summary: dict[str, Any], path: Path) -> None:
    """Miss rates of new patients, a point per seed; filled where the promise was broken."""
    picture = Figure(figsize=(8, 3.4), layout="constrained")
    FigureCanvasAgg(picture)
    axis = picture.subplots()
    rng = np.random.default_rng(0)
    for height, (name, row) in enumerate(reversed(summary.items())):
        rates = 100 * np.array(row["miss_rates"])
        above = rates > 100 * ALPHA
        y = height + rng.uniform(-0.2, 0.2, rates.size)
        axis.scatter(rates[~above], y[~above], s=26, facecolors="none", edgecolors="#0072B2")
        axis.scatter(rates[above], y[above], s=26, color="#D55E00", marker="s")
        axis.plot([rates.mean()] * 2, [height - 0.3, height + 0.3], color="black", linewidth=2)
        text = f"{name}\n{row['exceeded']} of {rates.size} above"
        axis.text(-0.02, height, text, ha="right", va="center", transform=axis.get_yaxis_transform(), fontsize=9)
    axis.axvline(100 * ALPHA, color="black", linestyle="--", linewidth=1)
    axis.set_yticks([])
    axis.set_xlim(left=0)
    axis.set_xlabel(f"missed among the new positives, % (dashed: the {100 * ALPHA:g} % asked for; bar: mean)")
    axis.spines[["top", "right", "left"]].set_visible(False)
    picture.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--work", type=Path, required=True, help="scratch folder; emptied after each seed")
    arguments = parser.parse_args()
    files = [RESULTS / f"seed_{seed:02d}.json" for seed in range(arguments.seeds)]
    for seed, path in enumerate(files):
        if not path.exists():
            folder = arguments.work / f"seed_{seed}"
            write_json(path, run_seed(seed, folder))
            shutil.rmtree(folder)
            print(path, flush=True)
    records = [read_json(path) for path in files]
    summary = summarise(records)
    figure(summary, FIGURE)
    print(f"{len(records)} seeds, {sum(record['cpu_seconds'] for record in records) / 60:.1f} CPU minutes")
    aucs = [auc(*arrays(record["new"])) for record in records]
    print(f"AUC of new patients {np.mean(aucs):.3f}, {min(aucs):.3f} to {max(aucs):.3f}")
    print("| threshold | rank | seeds above 10 % | share by theory | mean | largest | negatives spared |")
    print("|---|---|---|---|---|---|---|")
    for name, row in summary.items():
        print(
            f"| {name} | {', '.join(row['ranks'])} | {row['exceeded']} of {len(records)} | "
            f"{100 * row['expected_share']:.0f} % | {100 * row['mean']:.1f} % | {100 * row['largest']:.1f} % | "
            f"{100 * row['negatives_spared']:.0f} % |"
        )


if __name__ == "__main__":
    main()
