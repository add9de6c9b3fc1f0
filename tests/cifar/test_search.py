import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_cifar import SETTINGS, write_cifar10

import pipelines.sweep as program
from mri_alm.cifar.search import COMMON, DELTA, MU0, RHO, Search, points, write_tuned
from mri_alm.cifar.table import TABLES, BenchmarkTable
from mri_alm.errors import InputError
from mri_alm.runtime.tasks import Pool

optuna = pytest.importorskip("optuna", reason="the search is an optional extra")
BEST = {"learning_rate": 1e-3, "weight_decay": 2e-4, "gamma": 2.0, "mu0": 1e-5, "rho": 3.0, "delta": 0.5, "beta": 0.999}


@pytest.fixture
def table() -> BenchmarkTable:
    return BenchmarkTable(TABLES, "cifar10_binary_100", "quick")


class Toy:
    """A validation metric that is best at BEST, and counts what was asked."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.asked: list[tuple[dict[str, Any], int]] = []
        self.fail_after = fail_after

    def __call__(self, settings: Mapping[str, Any], split: int) -> float:
        if self.fail_after is not None and len(self.asked) == self.fail_after:
            raise KeyboardInterrupt("cut off")
        self.asked.append((dict(settings), split))
        return 0.5 + 0.05 * sum(settings.get(name) == value for name, value in BEST.items()) + 0.001 * split


def search(table: BenchmarkTable, toy: Toy, folder: Path, runs: int = 1) -> Search:
    return Search(table, toy, storage=f"sqlite:///{folder / 'search.db'}", runs=runs, pool=Pool())


def test_stages_choose_the_best_and_keep_what_was_chosen(table: BenchmarkTable, tmp_path: Path) -> None:
    toy = Toy()
    found = search(table, toy, tmp_path)
    common = found.common()
    assert common == {"learning_rate": 1e-3, "weight_decay": 2e-4}
    assert all(settings["loss"] == "bce" and settings["mu0"] == 0 for settings, _ in toy.asked)
    assert len(toy.asked) == 6
    chosen = found.method("alm_a_fl", common)
    assert chosen == common | {"gamma": 2.0, "mu0": 1e-5, "rho": 3.0, "delta": 0.5}
    own, mu, delta = toy.asked[6:9], toy.asked[9:21], toy.asked[21:]
    assert all(s["mu0"] == 0 and s["learning_rate"] == 1e-3 for s, _ in own)
    assert {(s["mu0"], s["rho"]) for s, _ in mu} == {(m, r) for m in MU0 for r in RHO}
    assert all(s["gamma"] == 2.0 for s, _ in mu)
    assert sorted(s["delta"] for s, _ in delta) == sorted(DELTA["binary"])
    assert all((s["mu0"], s["rho"]) == (1e-5, 3.0) for s, _ in delta)
    assert len(toy.asked) == points(table, ["alm_a_fl"])


def test_a_loss_s_own_value_is_searched_once_for_all_its_methods(table: BenchmarkTable, tmp_path: Path) -> None:
    toy = Toy()
    found = search(table, toy, tmp_path)
    assert found.method("cb_bce", {}) == {"beta": 0.999}
    assert len(toy.asked) == 3
    found.method("alm_cb_bce", {})
    assert len(toy.asked) == 3 + len(MU0) * len(RHO) + len(DELTA["binary"])
    assert found.method("bce", {}) == {}


def test_weights_of_w_bce_are_thirds_of_the_class_ratio(table: BenchmarkTable, tmp_path: Path) -> None:
    toy = Toy()
    search(table, toy, tmp_path).method("w_bce", {})
    assert sorted(s["positive_weight"] for s, _ in toy.asked) == [33.333, 66.667, 100.0]


def test_a_search_that_is_cut_off_goes_on(table: BenchmarkTable, tmp_path: Path) -> None:
    first = Toy(fail_after=4)
    with pytest.raises(KeyboardInterrupt, match="cut off"):
        search(table, first, tmp_path).common()
    second = Toy()
    assert search(table, second, tmp_path).common() == {"learning_rate": 1e-3, "weight_decay": 2e-4}
    done = [tuple(settings.items()) for settings, _ in first.asked + second.asked]
    assert len(set(done)) == len(COMMON["learning_rate"]) * len(COMMON["weight_decay"])
    assert len(second.asked) <= 3
    third = Toy()
    search(table, third, tmp_path).common()
    assert third.asked == []


def test_hopeless_points_are_pruned(table: BenchmarkTable, tmp_path: Path) -> None:
    toy = Toy()
    found = search(table, toy, tmp_path, runs=3).common()
    assert found == {"learning_rate": 1e-3, "weight_decay": 2e-4}
    assert 8 < len(toy.asked) < 18


def metric(settings: Mapping[str, Any], split: int) -> float:
    """Best at BEST; the first split comes last."""
    time.sleep(0.02 * (split == 0))
    return 0.5 + 0.05 * sum(settings.get(name) == value for name, value in BEST.items()) + 0.001 * split


def test_trainings_side_by_side_choose_the_same(table: BenchmarkTable, tmp_path: Path) -> None:
    pool = Pool("loky", 2)
    found = Search(table, metric, storage=f"sqlite:///{tmp_path / 'search.db'}", runs=3, pool=pool)
    assert found.common() == {"learning_rate": 1e-3, "weight_decay": 2e-4}
    (study,) = optuna.get_all_study_names(found.storage)
    trials = optuna.load_study(study_name=study, storage=found.storage).trials
    means = {repr(t.params): t.value for t in trials if t.state.name == "COMPLETE"}
    wanted = {repr(t.params): sum(metric(t.params, k) for k in range(3)) / 3 for t in trials}
    assert means == {params: pytest.approx(wanted[params]) for params in means}
    assert all(t.last_step == 2 for t in trials if t.state.name == "COMPLETE")


def test_long_tails_keep_the_literature_s_common_settings(tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "cifar10_longtail_100", "quick")
    toy = Toy()
    found = search(table, toy, tmp_path)
    assert found.common() == {}
    found.method("alm2_ce", {})
    assert {s["delta"] for s, _ in toy.asked if "delta" in s} == set(DELTA["multiclass"])
    assert all(s["kind"] == 2 for s, _ in toy.asked)


def test_what_was_chosen_is_added_to_the_file_and_used_by_tables(table: BenchmarkTable, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    write_tuned(path, table, 3, {"alm_bce": {"mu0": 1e-4, "delta": 0.5}})
    write_tuned(path, table, 3, {"bce": {"learning_rate": 3e-3}})
    content = json.loads(path.read_text())["cifar10_binary_100"]["quick"]
    assert content == {"runs": 3, "methods": {"alm_bce": {"mu0": 1e-4, "delta": 0.5}, "bce": {"learning_rate": 3e-3}}}
    tuned = BenchmarkTable(TABLES, "cifar10_binary_100", "quick", path)
    assert tuned.protocol == "quick_tuned"
    assert tuned.method("alm_bce").settings == {"loss": "bce", "mu0": 1e-4, "delta": 0.5}
    with pytest.raises(InputError, match=r'^There is no tuned protocol "paper"\. Choose one of: quick\.$'):
        BenchmarkTable(TABLES, "cifar10_binary_100", "paper", path)


def test_no_runs_are_refused(table: BenchmarkTable, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^runs must be 1 or more trainings per point, got 0\.$"):
        search(table, Toy(), tmp_path, runs=0)


def test_the_program_searches_with_real_trainings_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads(TABLES.read_text())
    tiny = {name: value for name, value in SETTINGS.items() if name != "splits"} | {"max_epochs": 1}
    content["protocols"]["tiny"] = {"splits": 1, "binary": tiny}
    content["tables"]["cifar10_binary_100"]["settings"] = {"ratio": 5}
    (tmp_path / "tables.json").write_text(json.dumps(content))
    monkeypatch.setattr(program, "TABLES", tmp_path / "tables.json")
    words = [
        "--table",
        "cifar10_binary_100",
        "--protocol",
        "tiny",
        "--methods",
        "a_fl",
        "--runs",
        "1",
        "--workers",
        "2",
    ]
    words += ["--storage", f"sqlite:///{tmp_path / 'sweep.db'}", "--data", str(write_cifar10(tmp_path / "data"))]
    words += ["--runs-dir", str(tmp_path / "runs"), "--output", str(tmp_path / "tuned.json")]
    monkeypatch.setattr("sys.argv", ["sweep.py", *words])
    assert program.main() == 0
    found = json.loads((tmp_path / "tuned.json").read_text())["cifar10_binary_100"]["tiny"]["methods"]["a_fl"]
    assert set(found) == {"learning_rate", "weight_decay", "gamma"}
    results = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("result.json")}
    assert len(results) == 9
    assert program.main() == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("result.json")} == results
