"""What each step costs as the work grows: seconds and memory against size, the slope of a log-log line, a plot.

    nice -n 5 python benchmarks/scaling.py                    # what is not measured yet; stop it and start it again
    python benchmarks/scaling.py --only training scoring      # some steps
    python benchmarks/scaling.py --show                       # the table and the plot of what is there

Every step runs in a process of its own, one thread, sizes ascending, so that the peak memory is that of the size. Times
are processor time, which a shared machine changes little; waiting for a disk is left out. A slope of 1 is linear.
Results: benchmarks/results/scaling.json and docs/performance.png. Under 15 minutes on a quiet core.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

RESULTS = Path(__file__).with_name("results") / "scaling.json"
PLOT = Path(__file__).parents[1] / "docs" / "performance.png"
SIZES = {  # step: sizes, what is counted
    "sampler": ([10_000, 100_000, 1_000_000], "samples drawn by the stratified sampler in an epoch"),
    "multipliers": ([100_000, 1_000_000, 10_000_000], "samples in the store, a step of batch 64"),
    "multipliers_epoch": ([100_000, 1_000_000, 10_000_000], "samples in the store, the end of an epoch"),
    "figures": ([1000, 10_000, 100_000], "test exams: AUC with DeLong's interval, FPR at FN, threshold"),
    "manifest": ([300, 3000, 30_000], "rows read, checked, split ten times"),
    "cifar": ([32, 64, 128], "images in a batch of ResNet-10, one step"),
    "scoring": ([4, 8, 16], "prepared exams through ten members"),
    "preparation": ([2, 4, 8], "phantom exams read, registered, normalised"),
    "training": ([100, 1000, 10_000], "patients, one epoch with its validation"),
}


def median(action: Callable[[], object], repeats: int) -> float:
    """Median seconds after one call to warm up, of processor time: other programs on the machine do not count."""
    action()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return sorted(times)[repeats // 2]


def empty_cohort(folder: Path, patients: int) -> Path:
    """A manifest whose files exist and are empty; every ninth exam is positive, the last fifth is the test."""
    names = ("t2", "adc", "hbv")
    lines = ["study,patient,label,split,t2,adc,hbv"]
    for number in range(patients):
        files = [f"s{number}_{name}.nii" for name in names]
        for file in files:
            (folder / file).touch()
        lines.append(f"S{number},P{number},{int(number % 9 == 0)},train,{','.join(files)}")
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n")
    return folder / "manifest.csv"


def training(patients: int, folder: Path) -> float:
    """An epoch of the main config on 8 x 8 x 8 volumes that stand in the cache, the first epoch left out if small."""
    import torch
    from ignite.engine import Events
    from monai.bundle import ConfigWorkflow
    from monai.data import PersistentDataset

    def small(_: Any, item: dict[str, Any]) -> dict[str, Any]:
        image = torch.randn(3, 8, 8, 8, generator=torch.Generator().manual_seed(item["index"]))
        return {name: item[name] for name in ("label", "index", "study")} | {"image": image, "report": {}}

    epochs = 1 if patients > 1000 else 3
    settings = {"size": [8, 8, 8], "features": [2, 4], "splits": 1, "only_split": 0, "max_epochs": epochs}
    places = {
        "cohort": str(empty_cohort(folder, patients)),
        "cache_dir": str(folder / "c"),
        "run_dir": str(folder / "r"),
    }
    workflow = ConfigWorkflow(
        "configs/prostate_alm.json", logging_file=False, workflow_type="train", **settings, **places
    )
    workflow.initialize()
    parser = workflow.parser
    with patch.object(PersistentDataset, "_pre_transform", small), patch("os.fsync"):
        for part in ("train::dataset", "validate::dataset"):
            dataset = parser.get_parsed_content(part)
            for number in range(len(dataset)):
                dataset[number]
    trainer = parser.get_parsed_content("train#trainer")
    ends = [time.process_time()]
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: ends.append(time.process_time()))
    trainer.run()
    return ends[-1] - ends[-2]


def manifest(rows: int, folder: Path) -> float:
    from mri_alm.cohort.manifest import Cohort

    (folder / "small").mkdir()
    Cohort(empty_cohort(folder / "small", 100), splits=1)  # imports scikit-learn
    path = empty_cohort(folder, rows)
    start = time.process_time()
    Cohort(path, splits=10)
    return time.process_time() - start


def preparation(exams: int, folder: Path) -> float:
    from monai.bundle import ConfigParser
    from monai.transforms import Compose

    from mri_alm.cohort.manifest import read_manifest
    from mri_alm.phantom.cohort import make_cohort

    studies = read_manifest(make_cohort(folder / "phantom", train=exams, test=2))[:exams]
    parser = ConfigParser()
    parser.read_config("configs/prostate_alm.json")
    prepare = Compose(parser.get_parsed_content("preprocessing"))
    start = time.process_time()
    for study in studies:
        prepare(study.item())
    return time.process_time() - start


def scoring(exams: int, _: Path) -> float:
    import torch
    from monai.data import DataLoader, Dataset
    from monai.engines import SupervisedEvaluator

    from mri_alm.bundle.trained_run import Ensemble, collect
    from mri_alm.networks import TwoBranchCNN

    items = [{"image": torch.randn(3, 40, 40, 28), "label": 0.0, "study": f"S{k}"} for k in range(exams)]
    ensemble = Ensemble([TwoBranchCNN() for _ in range(10)]).eval()
    ensemble.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    loader = DataLoader(Dataset(items), batch_size=8)
    evaluator = SupervisedEvaluator(torch.device("cpu"), loader, ensemble, decollate=False)
    return median(lambda: collect(evaluator), 1)


def objective(samples: int) -> tuple[Any, Callable[[], object]]:
    """A store of that size and one step on a batch that lies anywhere in it."""
    import torch

    from mri_alm import AugmentedLagrangian

    alm = AugmentedLagrangian(torch.nn.BCEWithLogitsLoss(), samples, mu=1e-3)
    logits = torch.randn(64, requires_grad=True)
    label = (torch.arange(64) % 8 == 0).float()
    index = torch.randperm(samples)[:64]

    def step() -> None:
        alm(logits, label, index).backward()
        alm.dual_step()

    return alm, step


def multipliers(samples: int, _: Path) -> float:
    return median(objective(samples)[1], 51)


def multipliers_epoch(samples: int, _: Path) -> float:
    alm, step = objective(samples)

    def epoch() -> None:
        step()
        alm.end_epoch(0.5)

    return median(epoch, 5)


def sampler(samples: int, _: Path) -> float:
    from mri_alm.alm.batches import StratifiedBatchSampler

    labels = [float(number % 9 == 0) for number in range(samples)]
    batches = StratifiedBatchSampler(labels, 8, 1)
    start = time.process_time()
    for _batch in batches:
        pass
    return time.process_time() - start


def figures(exams: int, _: Path) -> float:
    import numpy as np

    from mri_alm.metrics.ranking import fpr_at_each_fn, fpr_at_tpr
    from mri_alm.metrics.threshold import fixed_fn_threshold, neyman_pearson_threshold
    from mri_alm.metrics.uncertainty import delong_auc

    label = np.arange(exams) % 9 == 0
    score = 1 / (1 + np.exp(-np.random.default_rng(0).normal(label, 1)))

    def all_of_them() -> None:
        delong_auc(label, score)
        fpr_at_each_fn(label, score, (0, 1, 2, 5))
        fpr_at_tpr(label, score, 0.95)
        fixed_fn_threshold(label, score, 1)
        neyman_pearson_threshold(label, score, 0.1, 0.1)

    return median(all_of_them, 3)


def cifar(batch: int, _: Path) -> float:
    import torch

    from mri_alm import AugmentedLagrangian
    from mri_alm.cifar.networks import resnet10

    network = resnet10()
    alm = AugmentedLagrangian(torch.nn.BCEWithLogitsLoss(), 10_000, mu=1e-3)
    image, index = torch.randn(batch, 3, 32, 32), torch.arange(batch)
    label = (index % 8 == 0).float()

    def step() -> None:
        alm(network(image).flatten(), label, index).backward()
        alm.dual_step()

    return median(step, 1 if batch > 64 else 3)


STEPS: dict[str, Callable[[int, Path], float]] = {
    one.__name__: one
    for one in (training, manifest, preparation, scoring, multipliers, multipliers_epoch, sampler, figures, cifar)
}


def measure(step: str, sizes: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Points of one step as they are ready, in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--points", step, *map(str, sizes)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        for line in process.stdout or ():
            if line.startswith("{"):
                point = json.loads(line)
                yield point.pop("size"), point | {"load": os.getloadavg()[0], "date": str(date.today())}
    if process.returncode:
        raise SystemExit(f"{step} failed.")


def print_points(step: str, sizes: Sequence[int]) -> None:
    """Measure in this process; a JSON object a line."""
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            seconds = STEPS[step](size, Path(folder))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"size": size, "seconds": seconds, "peak_mb": peak}), flush=True)


def slope(points: dict[str, Any]) -> float:
    """Of the least-squares line through the points on logarithmic axes."""
    import numpy as np

    sizes = [float(size) for size in points]
    return float(np.polyfit(np.log(sizes), np.log([one["seconds"] for one in points.values()]), 1)[0])


def show(results: dict[str, Any]) -> None:
    """Print the table of docs/performance.md and draw the plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="size", ylabel="seconds", xscale="log", yscale="log")
    print("| step | size: seconds (peak memory MB) | slope |\n|---|---|---|")
    for step, points in results["steps"].items():
        cells = ", ".join(f"{int(n):,}: {p['seconds']:.3g} ({p['peak_mb']:.0f})" for n, p in points.items())
        print(f"| {step}: {SIZES[step][1]} | {cells} | {slope(points):.2f} |")
        sizes, seconds = [int(n) for n in points], [p["seconds"] for p in points.values()]
        axes.plot(sizes, seconds, marker="o", label=f"{step}, slope {slope(points):.2f}")
    axes.plot([1e3, 1e6], [1e-4, 1e-1], color="grey", linestyle=":", label="linear")
    figure.legend(loc="outside right center")
    figure.savefig(PLOT, dpi=100)


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(SIZES))
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--points", nargs="+", help="internal: a step and sizes, measured in this process")
    options = parser.parse_args()
    if options.points:
        print_points(options.points[0], [int(size) for size in options.points[1:]])
        return
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"steps": {}}
    for step in [] if options.show else options.only:
        points = results["steps"].setdefault(step, {})
        for size, point in measure(step, [size for size in SIZES[step][0] if str(size) not in points]):
            print(step, size, point, flush=True)
            points[str(size)] = point
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()
