"""Runs and bundles of version 0.1.0, kept in made_before/: they score and are gone on with to the results of then.

They were made by the code before the rooms (2026-11-29, torch 2.13.0, one thread, AMD EPYC): a run of two splits that
was stopped after epoch 2 of 3 of its second split, what it ended with where it was not stopped (``expected``), and the
bundle exported from that. Numbers are compared to the last bit where torch and its instruction set are those of then,
else closely: other processors round otherwise.
"""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from shell import WarmPython
from small_cohort import SETTINGS, read_rows, workflow, write_cohort

from mri_alm.bundle.checkpoints import load_tensors
from mri_alm.bundle.config import refuse_other_settings
from mri_alm.bundle.old_runs import OWN_PARTS, SAME_RESULTS, as_it_began, part_digest, same_part
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.settings import SETTINGS as TABLE
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.errors import InputError

ROOT = Path(__file__).parents[2]
BEFORE = Path(__file__).with_name("made_before")
THEN = {"torch": "2.13.0+cpu", "capability": "AVX2"}
SAME_MACHINE = {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability()} == THEN
pytestmark = pytest.mark.filterwarnings("ignore:mri_alm.* is now mri_alm:DeprecationWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory as the run had it: its cohort, and the configs of today."""
    folder = tmp_path_factory.mktemp("before")
    write_cohort(folder / "cohort", 18, 6)
    (folder / "configs").symlink_to(ROOT / "configs")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    torch.set_num_threads(threads)


def same(found: Any, expected: Any) -> bool:
    """Equal to the last bit on the machine of then, else nearly so."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, (torch.Tensor, float)):
        one, other = (np.asarray(value, dtype=np.float64) for value in (found, expected))
        if SAME_MACHINE:
            return np.array_equal(one, other, equal_nan=True)
        return np.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
    return bool(found == expected)


def cells(path: Path) -> list[dict[str, Any]]:
    """A table with its numbers as numbers."""

    def number(cell: str) -> Any:
        try:
            return float(cell)
        except ValueError:
            return cell

    return [{name: number(cell) for name, cell in row.items()} for row in read_rows(path)]


def same_cells(found: Path, expected: Path) -> bool:
    """Equal in the columns that there were then."""
    then = cells(expected)
    return same([{name: row[name] for name in then[0]} for row in cells(found)], then)


def resume(folder: Path, **overrides: Any) -> Path:
    run = Path(shutil.copytree(BEFORE / "run", folder))
    settings = {"splits": 2, "max_epochs": 3, "validation": 0.34, "threads": 1, "device": "$torch.device('cpu')"}
    settings |= {"cohort": "cohort/manifest.csv", "cache_dir": "cache"} | overrides
    workflow(Path("cohort/manifest.csv"), run, **settings).run()
    return run


def test_a_run_made_before_is_gone_on_with_to_the_results_of_then(place: Path) -> None:
    run, expected = resume(place / "run"), BEFORE / "expected"
    for k in (0, 1):
        for name in ("model.pt", "last.pt"):
            found, then = (load_tensors(folder / f"split_{k}" / name) for folder in (run, expected))
            assert same(found, then), (k, name)
        found, then = (json.loads((folder / f"split_{k}" / "split.json").read_text()) for folder in (run, expected))
        found["model_sha256"] = then["model_sha256"]  # of the file, in which torch writes names of storages
        assert same(found, then)
        assert same(cells(run / f"split_{k}" / "validation.csv"), cells(expected / f"split_{k}" / "validation.csv"))
    assert same_cells(run / "heldout.csv", expected / "heldout.csv")
    point = json.loads((expected / "threshold.json").read_text())["threshold"]
    held_out = sorted(1 / (1 + np.exp(-row["logit"])) for row in cells(expected / "heldout.csv"))
    now = (point + held_out[held_out.index(pytest.approx(point, rel=1e-12)) - 1]) / 2  # then it was the score itself
    scores = [row | {"threshold": now} for row in cells(expected / "scores.csv")]
    found_scores = [{name: row[name] for name in scores[0]} for row in cells(run / "scores.csv")]
    assert [row.pop("threshold") for row in found_scores] == pytest.approx([row.pop("threshold") for row in scores])
    assert same(found_scores, scores)
    for name in ("threshold.json", "metrics.json"):
        found, then = (json.loads((folder / name).read_text()) for folder in (run, expected))
        if name == "metrics.json":  # new in 0.5.0
            low, high = found["test"].pop("ensemble_auc_interval")
            assert low <= found["test"]["ensemble_auc"] <= high
        if name == "threshold.json":
            assert found.pop("threshold") == pytest.approx(now, rel=1e-9)
            assert then.pop("threshold") == point
        assert same(*(part | {"checkpoints": None} for part in (found, then))), name


def test_a_run_made_before_keeps_its_preprocessing_unless_another_is_asked_for(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(shutil.copytree(BEFORE / "run", tmp_path / "run"))
    record = json.loads(run.config.read_text())
    config = workflow(Path("cohort/manifest.csv"), run.path, **record_settings(record)).parser.get()
    with pytest.raises(InputError, match='other settings:\n  checkpoint_rule: "best" -> "last"\n  p'):
        refuse_other_settings(run, config)
    refuse_other_settings(run, as_it_began(config, record["config"]))
    said = capsys.readouterr().out
    assert "defaults of an earlier version and goes on as it began: positives_per_batch, preprocessing, preset." in said
    mine = config | {"preprocessing": config["preprocessing"][:-1]}
    with pytest.raises(InputError, match="holds a run with other settings:\n  preprocessing: "):
        refuse_other_settings(run, as_it_began(mine, record["config"]))


def test_a_run_of_voxels_as_they_are_stored_scores_as_it_was_trained_without_trust(
    trained: Path, tmp_path: Path
) -> None:
    run = RunFolder(shutil.copytree(trained, tmp_path / "run"))
    record = json.loads(run.config.read_text())
    assert record["config"]["preprocessing"][0].pop("lps") is True
    run.config.write_text(json.dumps(record))
    then, now = (TrainedRun(folder).preprocessing().transforms[0] for folder in (run.path, trained))
    assert (then.lps, now.lps) == (False, True)
    record["config"]["preprocessing"][0]["as_prepared"] = False  # no form that ever shipped
    run.config.write_text(json.dumps(record))
    with pytest.raises(InputError, match="differs from the shipped config in more than settings"):
        TrainedRun(run.path)


def test_a_setting_that_did_not_exist_then_counts_as_its_default(place: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(BEFORE / "run", tmp_path / "run"))
    record = json.loads(run.config.read_text())
    config = workflow(Path("cohort/manifest.csv"), run.path, **record_settings(record)).parser.get()
    config = as_it_began(config, record["config"])
    refuse_other_settings(run, config)
    del record["config"]["ratio_cap"]  # as a run of before ratio_cap
    run.config.write_text(json.dumps(record))
    refuse_other_settings(RunFolder(run.path), config)
    with pytest.raises(InputError, match=r"ratio_cap: null -> 1\.0"):
        refuse_other_settings(RunFolder(run.path), config | {"ratio_cap": 1.0})
    with pytest.raises(InputError, match="network_def: "):
        refuse_other_settings(RunFolder(run.path), config | {"network_def": {"_target_": "mine.Net"}})


def seeds_of(config: dict[str, Any], seed: int, split: int) -> tuple[int, range]:
    """What the network of a split is made with, and what its first 60 epochs are drawn with, by a config's text."""
    texts = config["seed_everything"].split("seed=")[1].removesuffix(")"), config["train"]["handlers"][0]["seed"][1:]
    filled = [text.replace("@seed", str(seed)).replace("@only_split", str(split)) for text in texts]
    made, drawn = (int(eval(text)) for text in filled)  # noqa: S307  expressions of the shipped config
    return made, range(drawn + 1, drawn + 61)


def test_runs_of_different_seeds_share_nothing_and_seed_0_is_as_it_was(place: Path, tmp_path: Path) -> None:
    theirs = json.loads((BEFORE / "run" / "config.json").read_text())["config"]
    now = workflow(Path("cohort/manifest.csv"), tmp_path / "run").parser.get()
    before = as_it_began(now, theirs)
    made_with: dict[int, tuple[int, int]] = {}
    drawn_with: dict[int, tuple[int, int]] = {}
    for seed, split in itertools.product(range(4), range(10)):
        made, drawn = seeds_of(now, seed, split)
        assert made_with.setdefault(made, (seed, split)) == (seed, split)
        assert all(drawn_with.setdefault(value, (seed, split)) == (seed, split) for value in drawn)
        then = seed + split, range(seed + 1000 * split + 1, seed + 1000 * split + 61)
        assert seeds_of(before, seed, split) == then
        assert seed or (made, drawn) == then
    for part in ("train", "seed_everything"):
        assert same_part(part, theirs[part], before[part])
        assert not same_part(part, theirs[part], now[part])


def test_a_run_of_another_seed_says_that_it_keeps_its_seeds(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((BEFORE / "run" / "config.json").read_text())
    config = workflow(Path("cohort/manifest.csv"), tmp_path / "run", seed=1).parser.get()
    as_it_began(config, record["config"])
    said = capsys.readouterr().out
    assert "goes on as it began: positives_per_batch, preprocessing, preset, seed_everything, train." in said


def test_a_clinical_run_of_before_keeps_the_rate_and_the_parts_that_it_began_with(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = workflow(Path("cohort/manifest.csv"), tmp_path / "run", profile="clinical").parser.get()
    then = {"learning_rate": 0.002, "micro_batch": 2}
    assert as_it_began(now, now | then) == now | then
    assert "goes on as it began: learning_rate, micro_batch." in capsys.readouterr().out
    assert as_it_began(now, now | {"learning_rate": 0.001}) == now, "somebody's own: refused where it differs"
    laptop = now | {"profile": "laptop"}
    assert as_it_began(laptop, laptop | {"learning_rate": 0.002}) == laptop, "the same as now"
    assert capsys.readouterr().out == ""


def record_settings(record: dict[str, Any]) -> dict[str, Any]:
    names = set(SETTINGS) | {"validation"}
    return {name: record["config"][name] for name in names if name in record["config"]}


@pytest.mark.parametrize("entry", sorted(path.stem for path in (BEFORE / "configs").glob("*.json")))
def test_every_part_that_ships_gives_the_results_of_then(entry: str) -> None:
    """Where a part changed its form and not its results: its digests belong into ``old_runs.SAME_RESULTS``."""
    then = json.loads((BEFORE / "configs" / f"{entry}.json").read_text())
    parser = ConfigParser()
    parser.read_config(NOW.get(entry, [f"configs/{entry}.json"]))
    parser.parse()
    now = json.loads(json.dumps({key: value for key, value in parser.get().items() if key != "_meta_"}))
    different = {}
    for name in sorted({*then, *now} - TABLE.keys() - {"acting", "bank", "blank", "outside", "address", "split"}):
        one, other = part_digest(then.get(name)), part_digest(now.get(name))
        earlier, ships, _ = OWN_PARTS.get(name, (frozenset(), "", ()))
        groups = [*SAME_RESULTS.get(name, ()), *(frozenset({before, ships}) for before in earlier)]
        if one != other and not any({one, other} <= group for group in groups):
            different[name] = (one, other)
    assert different == {}


NOW = {
    "cifar100_binary": ["configs/cifar10_binary.json", "configs/cifar100_binary.json"],
    "cifar100_longtail": ["configs/cifar10_longtail.json", "configs/cifar100_longtail.json"],
}


def test_a_bundle_exported_before_scores_as_then(place: Path, tmp_path: Path, python: WarmPython) -> None:
    """By its own configs, with MONAI's own command; with trust, as its preprocessing is another one than today's."""
    bundle = Path(shutil.copytree(BEFORE / "bundle", tmp_path / "bundle"))
    words = ["--config_file", "configs/inference.json", "--input", str(place / "cohort" / "manifest.csv")]

    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [python.program, "-m", "monai.bundle", "run", *words, "--output", str(tmp_path / "scores"), *more],
            check=False, cwd=bundle, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    refused = run()
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "config.json differs from the shipped config in more than settings:\n  preprocessing::0" in refused.stderr
    done = run("--trust", "True")
    assert done.returncode == 0, done.stderr
    assert same_cells(tmp_path / "scores" / "scores.csv", BEFORE / "expected" / "bundle_scores.csv")
