"""Do the largest multipliers find wrong labels? MedMNIST's vessel set or a cohort, 5 % of the training labels turned.

python benchmarks/hardest.py --data data/medmnist --seeds 10   # the same command again goes on with the next seed
python benchmarks/hardest.py --cohort data/phantom360/manifest.csv --epochs 30 --seeds 10   # exams, the main config

Per seed the labels of a random 5 % of the training images are turned; the positives that are wrong are then negatives
by nature, far more often than chance has it, as negatives are many. Two trainings on these labels, eight positives in
every batch of 32 (of exams: two in every eight): with the constraint, and BCE alone. Lists of the labelled positives,
the most suspect first:

  lambda        the multiplier at the end of the constrained training (what hardest.csv has)
  loss          -log p of the label at the end of the BCE training, images not augmented
  mean loss     the mean of that over all epochs, the usual measure of wrong labels
  loss (alm)    as loss, of the constrained training

The precision of a list is the share of wrong labels among its first K, where K is how many are wrong. Results are kept
(benchmarks/results/hardest/), one file per seed. With --epochs 1 --limit 200 it shows that it runs, and nothing else.
"""

import argparse
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.bundle import ConfigParser
from numpy.typing import NDArray
from scipy.stats import t as student

from mri_alm.cifar.medmnist import shape_set
from mri_alm.cifar.sets import Draw, ImageSet
from mri_alm.cohort.manifest import Cohort
from mri_alm.runtime.files import read_json, write_json
from mri_alm.training.member import Member

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "hardest"
SHARE = 0.05
LISTS = ("lambda", "loss", "mean loss", "loss (alm)")


@dataclass(frozen=True)
class Task:
    """What is trained on: a set or a cohort with turned labels, and the settings that it asks for."""

    config: str
    data: ImageSet | Cohort
    index: NDArray[np.int64]  # of the training samples, in their order
    wrong: NDArray[np.bool_]  # which of them
    settings: dict[str, Any]

    @property
    def label(self) -> NDArray[np.int64]:
        return np.array(self.data.labels(0))


def turned_set(images: ImageSet, limit: int | None, settings: dict[str, Any]) -> Task:
    """Vessel with some training labels turned."""
    seed = settings["seed"]
    draw, rng = images.splits[0], np.random.default_rng(seed)
    training = draw.training if limit is None else rng.permutation(draw.training)[:limit]
    wrong = np.zeros(images.size, dtype=bool)
    wrong[rng.choice(training, round(SHARE * len(training)), replace=False)] = True
    label, training = np.where(wrong, 1 - images.label, images.label), np.sort(training)
    folder, record = images.manifest.parent, images.record | {"turned": seed}
    splits = [Draw(training, draw.validation)]
    data = ImageSet(images.image, label, images.tests, folder=folder, splits=splits, record=record)
    return Task("medmnist3d", data, training, wrong[training], settings | {"positives_per_batch": 8})


def turned_cohort(manifest: Path, settings: dict[str, Any]) -> Task:
    """The training exams of a cohort's first split with some labels turned."""
    cohort = Cohort(manifest, splits=1, seed=settings["seed"])
    training, validation = cohort.splits[0]
    wrong = np.zeros(len(training), dtype=bool)
    draw = np.random.default_rng(settings["seed"])
    wrong[draw.choice(len(training), round(SHARE * len(training)), replace=False)] = True
    turned = [replace(s, label=1 - (s.label or 0)) if w else s for s, w in zip(training, wrong, strict=True)]
    cohort.splits = [(turned, validation)]
    index = np.array([study.index for study in training])
    return Task("prostate_alm", cohort, index, wrong, settings | {"cohort": str(manifest), "positives_per_batch": 2})


def train(task: Task, work: Path, **settings: Any) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Multipliers of the training samples at the end, and after each epoch -log p of the label of each of them."""
    parser = ConfigParser()
    parser.read_config(str(ROOT / "configs" / f"{task.config}.json"))
    parser.update(task.settings | settings | {"run_dir": str(work), "splits": 1})
    parser.parse()
    shutil.rmtree(work, ignore_errors=True)  # a training that was cut off begins again: its losses are not kept
    member, losses = Member(parser.get(), 0, task.data), []
    label = torch.from_numpy(task.label).double()

    def watch(history: list[dict[str, float]]) -> None:
        if history:
            _, logits = member.predict(member.parser.get_parsed_content("network"), "training")
            z = torch.from_numpy(logits[:, 0])
            losses.append(torch.nn.functional.softplus(torch.where(label == 1, -z, z)).numpy())

    end = member.train(watch)
    shutil.rmtree(work, ignore_errors=True)
    return end.parts["objective"].multipliers.cpu().numpy()[task.index], losses


def precisions(task: Task, work: Path) -> dict[str, Any]:
    """Of each list, with the number of labelled positives and of wrong ones among them."""
    multipliers, constrained = train(task, work / "alm", mu0="auto")
    _, plain = train(task, work / "bce", mu0=0)
    positive = task.label == 1
    suspects = {
        "lambda": multipliers, "loss": plain[-1], "mean loss": np.mean(plain, 0), "loss (alm)": constrained[-1],
    }  # fmt: skip
    truth = task.wrong[positive]
    count = int(truth.sum())
    order = {name: np.argsort(-value[positive], kind="stable") for name, value in suspects.items()}
    found = {name: float(truth[rows][:count].mean()) for name, rows in order.items()}
    return {"positives": int(positive.sum()), "wrong": count, "precision": found}


def main() -> int:
    """Train the seeds that are missing, print what all of them say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/medmnist"))
    parser.add_argument("--cohort", type=Path, help="a manifest: its exams in place of vessel")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--limit", type=int, help="training images, for a trial")
    parser.add_argument("--narrow", action="store_true", help="8, 16 and 32 channels, in a third of the time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path("runs/hardest"))
    arguments = parser.parse_args()
    whole = None if arguments.cohort else shape_set(arguments.data, "vessel", splits=1)
    kept = []
    for seed in range(arguments.seeds):
        size = f"epochs_{arguments.epochs}_limit_{arguments.limit}{'_narrow' * arguments.narrow}"
        if arguments.cohort:
            size = f"{arguments.cohort.parent.name}_{arguments.cohort.stem}_epochs_{arguments.epochs}"
        path = arguments.results / f"{size}_seed_{seed}.json"
        if not path.exists():
            settings: dict[str, Any] = {"seed": seed, "max_epochs": arguments.epochs}
            settings |= {"features": [8, 16, 32]} if arguments.narrow else {}
            task = turned_set(whole, arguments.limit, settings) if whole else turned_cohort(arguments.cohort, settings)
            write_json(path, precisions(task, arguments.work / f"seed_{seed}"))
        kept.append(read_json(path))
        print(f"seed {seed}: {kept[-1]}", flush=True)
    base = np.mean([one["wrong"] / one["positives"] for one in kept])
    print(f"wrong labels among the labelled positives, which a random list finds: {100 * base:.1f} %")
    for name in LISTS:
        values = 100 * np.array([one["precision"][name] for one in kept])
        gain = values - 100 * np.array([one["precision"]["mean loss"] for one in kept])
        half = student.ppf(0.975, max(len(gain) - 1, 1)) * gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else 0.0
        against = f"; against mean loss {gain.mean():+.1f} [{gain.mean() - half:+.1f}, {gain.mean() + half:+.1f}]"
        print(f"{name:10s} {values.mean():5.1f} %{against if len(gain) > 1 else ''}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
