"""One factor at a time: what makes the main command's model better? On phantoms, judged by exams it never saw.

python pipelines/make_phantom.py data/phantom360 --train 144 --test 360
python benchmarks/recipe.py --cohort data/phantom360/manifest.csv --negatives 120   # the same again goes on
python benchmarks/recipe.py --show   # the table of what is kept

Each variant changes the reference in the settings named, with the same splits and seeds. The test scores of every
member are kept (benchmarks/results/recipe/); figures are computed from them again at every start. Where a variant
keeps the best epoch, the weights of its last one are scored too: "VARIANT, last". "..., mirrored": the mean logit of
each exam and its mirror image, left to right. Kept are the positives of the test part, then its negatives, each in the
order of the manifest; --negatives keeps the first of them alone, to save time. No setting, epoch or weight is chosen on
test exams.
"""

import argparse
import subprocess
import sys
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.bundle import ConfigParser

from mri_alm.bundle.checkpoints import load_tensors
from mri_alm.bundle.trained_run import Ensemble, TrainedRun
from mri_alm.cifar.job import brief
from mri_alm.metrics.ranking import auc, fpr_at_fn
from mri_alm.runtime.files import read_json, write_json
from mri_alm.runtime.tables import read_table, write_csv

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipe"
REFERENCE: dict[str, Any] = {"mu0": 0, "max_epochs": 30, "preset": "default"}
TWO = REFERENCE | {"positives_per_batch": 2}
CONSTRAINT: dict[str, Any] = {"mu0": "auto"}
COSINE: dict[str, Any] = {"optimiser": "adamw", "weight_decay": 0.01, "schedule": "cosine", "warmup": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "reference": REFERENCE,
    "reference, other seed": REFERENCE | {"seed": 1},
    "two positives": TWO,
    "two positives, other seed": TWO | {"seed": 1},
    "spatial": REFERENCE | {"fusion": "spatial"},
    "spatial, no registration": REFERENCE | {"fusion": "spatial", "register": False},
    "no registration": REFERENCE | {"register": False},
    "together": TWO | {"fusion": "spatial", "checkpoint_rule": "last"} | COSINE,
    "constraint": REFERENCE | CONSTRAINT,
    "two positives, constraint": TWO | CONSTRAINT,
    "two positives, held": TWO | {"mu0": "auto_run"},
    "two positives, decayed": TWO | CONSTRAINT | {"mu_cap": 1, "dual_decay": 0.2},
    "two positives, tolerant": TWO | CONSTRAINT | {"mu_cap": 1, "tolerance": 0.05},
    "two positives, penalty": TWO | CONSTRAINT | {"mu_cap": 1, "dual_rate": 0},
    "two positives, AUC margin": TWO | {"loss": "aucm"},
    "two positives, partial AUC": TWO | {"loss": "pauc"},
    "two positives, logit adjustment": TWO | {"loss": "la"},
    "two positives, vector scaling": TWO | {"loss": "vs"},
    "two positives, loss-conditional": TWO | {"loss": "lct", "tau": 3},
    "two positives, smoothed": TWO | {"loss": "ls"},
    "two positives, SAM": TWO | {"sam_radius": 0.05},
    "two positives, EMA": TWO | {"ema": 0.99, "checkpoint_rule": "last"},
    "two positives, cosine": TWO | COSINE,
    "two positives, field": TWO | {"augmentation": "field"},
    "two positives, 16-32-64": TWO | {"features": [16, 32, 64]},
}


def kept_at(name: str) -> Path:
    return RESULTS / f"{name.replace(', ', '_').replace(' ', '_')}.json"


def train(name: str, arguments: argparse.Namespace) -> None:
    """One variant, by the main command, and the scores of its members on the test part."""
    run, cohort = arguments.runs / kept_at(name).stem, fewer_negatives(arguments.cohort, arguments.negatives)
    settings = VARIANTS[name] | {"cohort": cohort, "run_dir": run, "splits": arguments.splits, "threads": 1}
    command = [sys.executable, "-m", "monai.bundle", "run", "--config_file", "configs/prostate_alm.json"]
    for key, value in settings.items():
        command += [f"--{key}", str(value)]
    with run.with_suffix(".log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log)  # noqa: S603
    trained = TrainedRun(run)
    batches = ConfigParser(trained.config | {"part": "test"}).get_parsed_content("prepared_batches")
    truth = {row["study"]: int(row["label"]) for row in read_table(cohort)}
    found = [(name, trained.ensemble(), read_json(run / "metrics.json")["test"]["at_threshold"])]
    if "checkpoint_rule" not in VARIANTS[name]:
        found.append((f"{name}, last", last_epochs(trained), None))
    for variant, ensemble, at_threshold in found:
        names: list[str] = []
        logits: list[torch.Tensor] = []
        with torch.inference_mode():
            for batch in batches:
                two = [ensemble(image).double() for image in (batch["image"], batch["image"].flip(2))]
                logits.append(torch.stack(two))
                names += batch["study"]
        label = np.array([truth[study] for study in names])
        order = np.argsort(-label, kind="stable")
        straight, mirrored = torch.cat(logits, 1)[:, order]
        kept = {"settings": VARIANTS[name], "date": f"{date.today()}", "label": label[order].tolist()}
        both = (variant, straight, at_threshold), (f"{variant}, mirrored", (straight + mirrored) / 2, None)
        for scored, values, own in both:
            members = [[brief(value) for value in member] for member in values.T.tolist()]
            write_json(kept_at(scored), kept | {"at_threshold": own, "logit": members})


def fewer_negatives(manifest: Path, number: int | None) -> Path:
    """A manifest beside the given one with the first so many negatives of its test part; None: the given one."""
    if number is None:
        return manifest
    rows = read_table(manifest)
    negatives = [row["study"] for row in rows if row["side"] == "test" and row["label"] == "0"]
    chosen = [row for row in rows if row["study"] not in negatives[number:]]
    path = manifest.with_name(f"{manifest.stem}_{number}.csv")
    write_csv(path, list(rows[0]), chosen)
    return path


def last_epochs(trained: TrainedRun) -> Ensemble:
    """The members as they were after their last epoch."""
    members = [deepcopy(trained.network()) for _ in trained.checkpoints]  # it gives the same one every time
    for name, member in zip(trained.checkpoints, members, strict=True):
        member.load_state_dict(load_tensors(trained.run.split(name).last)["model"])
    return Ensemble(members).eval()


def row(name: str, record: dict[str, Any], reference: dict[str, Any]) -> str:
    """A row of the table, in percent; the gain is of single members' AUCs, paired by split, with its SE."""
    label, logit = np.array(record["label"]), np.array(record["logit"])
    aucs, others = ([auc(one["label"], member) for member in one["logit"]] for one in (record, reference))
    gain = 100 * np.subtract(aucs[: len(others)], others[: len(aucs)])
    error = gain.std(ddof=1) / len(gain) ** 0.5
    cells: list[Any] = [len(aucs), f"{100 * auc(label, logit.mean(0)):.1f}"]
    cells += [f"{100 * np.mean(aucs):.1f} ± {100 * np.std(aucs, ddof=1):.1f}", f"{gain.mean():+.1f} ± {error:.1f}"]
    cells += [f"{100 * fpr_at_fn(label, logit.mean(0), k):.0f}" for k in (0, 1, 2, 5)]
    own = record["at_threshold"]
    cells += [f"{own['false_negatives']}, {own['spared']}" if own else "-"]
    return f"| {' | '.join([name, *map(str, cells)])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohort", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/recipe"))
    parser.add_argument("--negatives", type=int)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    for name in [] if arguments.show else arguments.variants:
        if not kept_at(name).exists() or len(read_json(kept_at(name))["logit"]) < arguments.splits:
            train(name, arguments)
    every = [f"{name}{more}" for name in VARIANTS for more in ("", ", mirrored", ", last", ", last, mirrored")]
    records = {name: read_json(kept_at(name)) for name in every if kept_at(name).exists()}
    columns = ["variant", "members", "ensemble AUC", "member AUC", "gain of a member", "FPR at 0 FN", "1", "2", "5"]
    columns += ["missed, spared at its own threshold"]
    print("| " + " | ".join(columns) + " |\n|" + len(columns) * "---|")
    for name, record in records.items():
        print(row(name, record, records["reference"]))


if __name__ == "__main__":
    main()
