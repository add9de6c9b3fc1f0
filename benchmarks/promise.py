"""Does the promise of each rule hold over the whole job? Simulated cohorts of features, split, trained, decided.

python benchmarks/promise.py                                      # writes results and figure; kept parts are not redone
python benchmarks/promise.py --medmnist ../shared/data/medmnist   # cohorts drawn from real images, official test sets

One job is a cohort (n positive patients, eight negatives each), its folds, one member a fold, a threshold, and new
patients. Splits, thresholds and decisions are the project's own functions; only the networks are replaced, by a
shrunken linear discriminant, a forest, or a small network with the constraint, on 20 features. Results:
benchmarks/results/promise/.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import ExtraTreesClassifier

from mri_alm.alm import AugmentedLagrangian, MuSchedule
from mri_alm.bundle.trained_run import ensemble_logit
from mri_alm.cohort.manifest import ManifestRow, partition_splits, stratified_splits
from mri_alm.metrics import (
    OperatingPoint,
    conformal_rank,
    fixed_fn_threshold,
    mean_miss_rate_threshold,
    minmax_bound,
    minmax_threshold,
    neyman_pearson_threshold,
    one_score_per_patient,
)
from mri_alm.runtime.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "promise"
FIGURE = ROOT / "docs" / "promise.png"
ALPHA, EPS, RATIO, COHORTS = 0.1, 0.1, 8, 200
NEW = (300, 300)  # positive and negative new patients of a cohort
SIZES = (13, 20, 30, 60)
Floats = NDArray[np.float64]
Splits = list[tuple[list[ManifestRow], list[ManifestRow]]]


@dataclass(frozen=True)
class Patients:
    """Exams ``(B, 20)``, a row of ``rows`` each."""

    exams: Floats
    rows: list[ManifestRow]

    @property
    def label(self) -> NDArray[np.int64]:
        return np.array([row.label for row in self.rows], dtype=np.int64)

    @property
    def patient(self) -> list[str]:
        return [row.patient for row in self.rows]


@dataclass(frozen=True)
class World:
    """What the exams and the training are like.

    Attributes:
        distance: Of the class means, in standard deviations.
        exams: Of each patient; those of one patient resemble each other.
        levels: Scores are rounded to a multiple of this, so that many tie; 0: as they are.
        learner: What members are: ``"line"``, linear discriminants; ``"forest"`` and ``"network"``, each with a seed
            of its own.
    """

    distance: float = 2.8
    exams: int = 1
    levels: float = 0.0
    learner: str = "line"

    def draw(self, rng: np.random.Generator, positives: int, negatives: int) -> Patients:
        label = np.repeat([1, 0], [positives, negatives])
        mean = np.zeros((2, 20))
        mean[1, :4] = self.distance / 2  # four features know something
        own = rng.normal(0, 0.7, (label.size, 1, 20)) + rng.normal(0, 0.51**0.5, (label.size, self.exams, 20))
        return patients_of((mean[label][:, None] + own).reshape(-1, 20), np.repeat(label, self.exams), self.exams)

    def member(self, patients: Patients, chosen: list[ManifestRow], seed: int) -> Callable[[Floats], Floats]:
        """A model trained on some exams: from exams to logits, or to shares of trees."""
        index = [row.index for row in chosen]
        features, label = patients.exams[index], patients.label[index]
        if self.learner == "network":
            return trained_network(features, label, seed)
        if self.learner == "forest":
            trees = ExtraTreesClassifier(10, min_samples_leaf=3, class_weight="balanced", random_state=seed)
            trees.fit(features, label)
            return lambda exams: np.asarray(trees.predict_proba(exams)[:, 1])
        line = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(features, label)
        return lambda exams: self._rounded(np.asarray(line.decision_function(exams)))

    def _rounded(self, score: Floats) -> Floats:
        return np.floor(score / self.levels) * self.levels if self.levels else score


def trained_network(features: Floats, label: NDArray[np.int64], seed: int) -> Callable[[Floats], Floats]:
    """BCE and the constraint, batches of 16 as they come, 20 epochs, last weights; the seed is of weights and order."""
    torch.manual_seed(seed)
    network = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    objective = AugmentedLagrangian(torch.nn.BCEWithLogitsLoss(), label.size, mu="auto", schedule=MuSchedule(cap=1))
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    image, truth = torch.from_numpy(features).float(), torch.from_numpy(label)
    for _ in range(20):
        order = torch.randperm(label.size)
        for batch in (order[start : start + 16] for start in range(0, label.size, 16)):
            loss = objective(network(image[batch])[:, 0], truth[batch], batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            objective.dual_step()
        objective.end_epoch(0.0)

    def logits(exams: Floats) -> Floats:
        with torch.inference_mode():
            return np.asarray(network(torch.from_numpy(exams).float())[:, 0].double().numpy())

    return logits


def patients_of(exams: Floats, label: NDArray[np.int64], each: int = 1) -> Patients:
    rows = [ManifestRow(i, f"S{i}", f"P{i // each}", int(one), "train", {}) for i, one in enumerate(label)]
    return Patients(exams, rows)


@dataclass(frozen=True)
class Job:
    """One cohort and its new patients, with the members of any splits trained once."""

    world: World
    old: Patients
    new: Patients
    seed: int

    def trained(self, splits: Splits) -> tuple[Floats, NDArray[np.int64], Floats]:
        """Held-out scores ``(B,)`` (mean over the members that did not see an exam), how many members, and new scores.

        Where nobody held an exam out its score is 0 and it has no member.
        """
        total, members = np.zeros(len(self.old.rows)), np.zeros(len(self.old.rows), dtype=np.int64)
        new = []
        for k, (training, held_out) in enumerate(splits):
            member = self.world.member(self.old, training, seed=1000 * self.seed + k)
            index = [row.index for row in held_out]
            total[index] += member(self.old.exams[index])
            members[index] += 1
            new.append(member(self.new.exams))
        return total / np.maximum(members, 1), members, np.stack(new, axis=1)

    def held_out(self, score: Floats, members: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats]:
        """One label and score per patient that somebody held out."""
        kept = np.flatnonzero(members)
        return one_score_per_patient([self.old.patient[i] for i in kept], self.old.label[kept], score[kept])

    def outcome(self, point: OperatingPoint, score: Floats) -> dict[str, float]:
        """Shares of new positive patients missed (one exam is enough) and of new negative exams spared."""
        needed = point.decide(score)
        label, seen = one_score_per_patient(self.new.patient, self.new.label, needed.astype(np.float64))
        return {
            "missed": float((seen[label == 1] == 0).mean()),
            "spared": float(1 - needed[self.new.label == 0].mean()),
            "bound": point.expected_miss_rate,
            "rank": point.rank,
        }


def trained_minmax(job: Job, folds: int, rank: int) -> tuple[OperatingPoint, Floats]:
    """The threshold, and what every member says of the new exams."""
    score, members, new = job.trained(partition_splits(job.old.rows, folds=folds, seed=job.seed))
    label, held_out = job.held_out(score, members)
    return minmax_threshold(label, held_out, rank - 1, folds=folds), new


def minmax(job: Job, folds: int, rank: int) -> dict[str, float]:
    """The rule: the largest score decides."""
    point, new = trained_minmax(job, folds, rank)
    return job.outcome(point, ensemble_logit(new, largest=True))


def halves(job: Job) -> dict[str, dict[str, float]]:
    """A cohort cut in two: one half trains, the other one calibrates."""
    score, members, new = job.trained(partition_splits(job.old.rows, folds=2, seed=job.seed)[:1])
    label, held_out = job.held_out(score, members)
    strict = neyman_pearson_threshold(label, held_out, ALPHA, EPS, source="calibration")
    mean = mean_miss_rate_threshold(label, held_out, ALPHA, source="calibration")
    return {
        "half, Neyman-Pearson": job.outcome(strict, new[:, 0]) | {"bound": ALPHA if strict.rank else 0.0},
        "half, mean": job.outcome(mean, new[:, 0]),
    }


def pooled(job: Job) -> dict[str, float]:
    """The paper's ten random splits: a rank of the pooled held-out scores, on the members' mean."""
    score, members, new = job.trained(stratified_splits(job.old.rows, seed=job.seed))
    label, held_out = job.held_out(score, members)
    point = fixed_fn_threshold(label, held_out, max(conformal_rank(int(label.sum()), ALPHA) - 1, 0))
    return job.outcome(point, ensemble_logit(new, largest=False))


def rank_for(n: int, folds: int) -> int:
    """The largest rank whose bound is ALPHA at most; 1 where none is."""
    return max([r for r in range(1, n + 1) if minmax_bound(n, folds, r) <= ALPHA], default=1)


def jobs(world: World, n: int, cohorts: int) -> Iterator[Job]:
    for seed in range(cohorts):
        rng = np.random.default_rng([seed, n])
        yield Job(world, world.draw(rng, n, RATIO * n), world.draw(rng, *NEW), seed)


def summary(found: list[dict[str, float]]) -> dict[str, Any]:
    """Means over cohorts with their standard errors."""
    missed, spared = (np.array([one[name] for one in found]) for name in ("missed", "spared"))
    error = missed.std(ddof=1) / missed.size**0.5
    return {
        "bound": max(one["bound"] for one in found), "ranks": sorted({int(one["rank"]) for one in found}),
        "missed": round(float(missed.mean()), 4), "error": round(float(error), 4),
        "above_10_percent": int((missed > ALPHA).sum()), "worst": round(float(missed.max()), 4),
        "spared": round(float(spared.mean()), 4), "missed_by_cohort": missed.round(3).tolist(),
    }  # fmt: skip


def of_rules(n: int, cohorts: int) -> dict[str, dict[str, Any]]:
    """Every rule on the same cohorts of n positives."""
    found: dict[str, list[dict[str, float]]] = {}
    for job in jobs(World(), n, cohorts):
        once = {"minmax, one out": minmax(job, n, rank_for(n, n)), "minmax, 10 folds": minmax(job, 10, rank_for(n, 10))}
        everyone = {"examine everyone": {"missed": 0.0, "spared": 0.0, "bound": 0.0, "rank": 0}}
        for name, one in (once | halves(job) | {"pooled on the mean": pooled(job)} | everyone).items():
            found.setdefault(name, []).append(one)
    return {name: summary(rows) for name, rows in found.items()}


HARD = {  # name: world, positives, folds
    "ties": (World(levels=1.0), 13, 13), "ties, folds of two": (World(levels=1.0), 20, 10),
    "two exams a patient": (World(exams=2), 13, 13), "two exams, folds of two": (World(exams=2), 20, 10),
    "two exams and ties": (World(exams=2, levels=1.0), 13, 13),
    "a seed a fold (forests)": (World(learner="forest"), 13, 13),
    "a seed a fold, folds of two": (World(learner="forest"), 20, 10),
    "a seed a fold (networks)": (World(learner="network"), 13, 13),
    "a seed a fold (networks), folds of two": (World(learner="network"), 20, 10),
    "unequal folds": (World(), 30, 7), "unequal folds, two exams": (World(exams=2), 13, 10),
    "scores that know nothing": (World(distance=0.0), 13, 13), "easy exams": (World(distance=4.0), 13, 13),
}  # fmt: skip


def of_hard_cases(cohorts: int) -> dict[str, dict[str, Any]]:
    """The minmax rule where it could break."""
    found = {}
    for name, (world, n, folds) in HARD.items():
        fewer = cohorts // 4 if world.learner == "network" else cohorts  # they take seconds each
        rows = [minmax(job, folds, rank_for(n, folds)) for job in jobs(world, n, fewer)]
        found[name] = {"positives": n, "folds": folds} | summary(rows)
    return found


def of_images(folder: Path, cohorts: int) -> dict[str, dict[str, Any]]:
    """Cohorts drawn from a set's training part, promised against found on its official test part.

    The features are 20 principal components of the training images, which use no label.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, n in ((name, n) for name in ("vessel", "adrenal") for n in (13, 20, 30)):
        with np.load(folder / f"{name}mnist3d.npz") as arrays:
            images = {part: arrays[f"{part}_images"].reshape(len(arrays[f"{part}_images"]), -1) / 255.0
                      for part in ("train", "test")}  # fmt: skip
            label = {part: arrays[f"{part}_labels"][:, 0].astype(np.int64) for part in images}
        parts = PCA(20, random_state=0).fit(images["train"])
        exams = {part: parts.transform(one) for part, one in images.items()}
        new, rows, world = patients_of(exams["test"], label["test"]), [], World()
        ratio = {"vessel": RATIO, "adrenal": 3}[name]  # as the sets have them
        for seed in range(cohorts):
            rng = np.random.default_rng([seed, n])
            index = np.concatenate([rng.choice(np.flatnonzero(label["train"] == c), m, replace=False)
                                    for c, m in ((1, n), (0, ratio * n))])  # fmt: skip
            job = Job(world, patients_of(exams["train"][index], label["train"][index]), new, seed)
            rows.append(minmax(job, n, rank_for(n, n)))
        positives = int(label["test"].sum())
        found[f"{name}, {n} positives"] = {"test_positives": positives} | summary(rows)
    return found


def figure(by_size: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Missed (with two standard errors) and spared, by rule and number of positives; a bar is what was promised."""
    picture = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(picture)
    left, right = picture.subplots(1, 2)
    rules = [name for name in next(iter(by_size.values())) if name != "examine everyone"]
    looks = zip(rules, ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#555555"), "osD^v", strict=True)
    for shift, (rule, colour, mark) in enumerate(looks):
        for place, rows in enumerate(by_size.values()):
            x, row = place + 0.15 * (shift - 2), rows[rule]
            named = rule if place == 0 else None
            left.errorbar(x, 100 * row["missed"], 200 * row["error"], color=colour, marker=mark, markersize=5)
            if rule != "pooled on the mean" and row["bound"]:
                left.plot([x - 0.07, x + 0.07], [100 * row["bound"]] * 2, color=colour, linewidth=2.5)
            right.plot(x, 100 * row["spared"], color=colour, marker=mark, linestyle="none", label=named)
    for axis, title in ((left, "new positives missed, %"), (right, "new negatives spared, %")):
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(by_size)), [f"{n}" for n in by_size])
        axis.set_xlabel("positive patients in the cohort")
        axis.set_ylim(bottom=-0.4)
        axis.spines[["top", "right"]].set_visible(False)
    right.legend(fontsize=8, frameon=False)
    picture.savefig(path, dpi=110, metadata={"Software": None})


def as_rows(found: dict[str, dict[str, Any]], label: str = "") -> Iterator[str]:
    for name, row in found.items():
        held = "yes" if row["missed"] <= row["bound"] + 3 * row["error"] else "NO"
        kind = f"{row['positives']} in {row['folds']} folds" if "positives" in row else label
        above = binomtest(row["above_10_percent"], len(row["missed_by_cohort"])).proportion_ci(0.95, "exact")
        yield (
            f"| {kind} | {name} | {row['ranks']} | {100 * row['bound']:.1f} | {100 * row['missed']:.1f} "
            f"+- {100 * row['error']:.1f} | {held} | {row['above_10_percent']} ({100 * above.low:.0f} to "
            f"{100 * above.high:.0f} %) | {100 * row['spared']:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohorts", type=int, default=COHORTS)
    parser.add_argument("--medmnist", type=Path, help="folder with the .npz files: cohorts drawn from real images")
    parser.add_argument("--again", action="store_true", help="compute what is kept already")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {f"n_{n}": lambda n=n: of_rules(n, arguments.cohorts) for n in SIZES}  # type: ignore[misc]
    parts["hard"] = lambda: of_hard_cases(arguments.cohorts)
    if arguments.medmnist:
        parts = {"medmnist": lambda: of_images(arguments.medmnist, arguments.cohorts)}
    for name, compute in parts.items():
        path, start = RESULTS / f"{name}.json", time.process_time()
        if arguments.again or not path.exists():
            rows = compute()
            write_json(path, {"cpu_seconds": round(time.process_time() - start, 1), "rows": rows})
    print("| cohort | rule or case | rank | bound % | missed % | holds | cohorts above 10 % | spared % |")
    print("|---|---|---|---|---|---|---|---|")
    kept = {name: read_json(RESULTS / f"{name}.json")["rows"] for name in parts}
    for name, rows in kept.items():
        print(*as_rows(rows, name), sep="\n")
    if not arguments.medmnist:
        figure({str(n): kept[f"n_{n}"] for n in SIZES}, FIGURE)


if __name__ == "__main__":
    main()
