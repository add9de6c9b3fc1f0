import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from small_cifar import SETTINGS, write_cifar10

from mri_alm.cifar.table import TABLES, BenchmarkTable, Training
from mri_alm.cifar.training import COMMON, DELTA, MU0_RHO, Search, points, write_tuned
from mri_alm.errors import InputError
from mri_alm.programs import sweep as program
from mri_alm.runtime.locks import exclusive_lock
from mri_alm.runtime.tasks import Pool

BEST = {"learning_rate": 1e-3, "weight_decay": 2e-4, "gamma": 2.0, "mu0": 1e-5, "rho": 3.0, "delta": 0.5, "beta": 0.999}
CHOSEN = {"learning_rate": 1e-3, "weight_decay": 2e-4}


@pytest.fixture
def table() -> BenchmarkTable:
    return BenchmarkTable(TABLES, "cifar10_binary_100", "quick")


class Toy:
    """Trains nothing: its validation metric is best at BEST; it knows what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], int]] = []
        self.fail_after: int | None = None

    def __call__(self, _table: BenchmarkTable, training: Training, _data: Path, _runs: Path) -> dict[str, Any]:
        settings, split = training.method.settings, training.split
        if len(self.asked) == self.fail_after:
            raise KeyboardInterrupt("cut off")
        self.asked.append((settings, split))
        right = sum(settings.get(name) == value for name, value in BEST.items())
        return {"best": {"epoch": 1, "auc": 0.5 + 0.05 * right + 0.001 * split}}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    toy = Toy()
    monkeypatch.setattr("mri_alm.cifar.training.train_one", toy)
    return toy


def search(table: BenchmarkTable, folder: Path, runs: int = 1, pool: Pool | None = None) -> Search:
    return Search(table, Path("data"), folder, runs, pool or Pool())


def test_stages_choose_the_best_and_keep_what_was_chosen(table: BenchmarkTable, toy: Toy, tmp_path: Path) -> None:
    found = search(table, tmp_path)
    common = found.common()
    assert common == CHOSEN
    assert all(settings["loss"] == "bce" and settings["mu0"] == 0 for settings, _ in toy.asked)
    assert len(toy.asked) == 6
    chosen = found.method("alm_a_fl", common)
    assert chosen == common | {"gamma": 2.0, "mu0": 1e-5, "rho": 3.0, "delta": 0.5}
    own, mu, delta = toy.asked[6:9], toy.asked[9:21], toy.asked[21:]
    assert all(s["mu0"] == 0 and s["learning_rate"] == 1e-3 for s, _ in own)
    assert {(s["mu0"], s["rho"]) for s, _ in mu} == {(m, r) for m in MU0_RHO["mu0"] for r in MU0_RHO["rho"]}
    assert all(s["gamma"] == 2.0 for s, _ in mu)
    assert [s["delta"] for s, _ in delta] == [*DELTA["binary"]["delta"]]
    assert all((s["mu0"], s["rho"]) == (1e-5, 3.0) for s, _ in delta)
    assert len(toy.asked) == points(table, ["alm_a_fl"])


def test_a_loss_s_own_value_is_searched_once_for_all_its_methods(
    table: BenchmarkTable, toy: Toy, tmp_path: Path
) -> None:
    found = search(table, tmp_path)
    assert found.method("cb_bce", {}) == {"beta": 0.999}
    assert len(toy.asked) == 3
    found.method("alm_cb_bce", {})
    assert len(toy.asked) == 3 + 12 + 4 == points(table, ["cb_bce", "alm_cb_bce"]) - 6
    assert found.method("bce", {}) == {}


def test_weights_of_w_bce_are_thirds_of_the_class_ratio(table: BenchmarkTable, toy: Toy, tmp_path: Path) -> None:
    search(table, tmp_path).method("w_bce", {})
    assert [s["positive_weight"] for s, _ in toy.asked] == [33.333, 66.667, 100.0]


def test_a_search_that_is_cut_off_goes_on(table: BenchmarkTable, toy: Toy, tmp_path: Path) -> None:
    toy.fail_after = 4
    with pytest.raises(KeyboardInterrupt, match="cut off"):
        search(table, tmp_path).common()
    toy.fail_after = None
    for _ in range(2):  # the second finds all done
        assert search(table, tmp_path).common() == CHOSEN
        assert len(toy.asked) == 6
    assert len({tuple(settings.items()) for settings, _ in toy.asked}) == 6


def test_a_point_is_the_mean_over_its_runs(
    table: BenchmarkTable, toy: Toy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mri_alm.cifar")
    assert search(table, tmp_path, runs=3, pool=Pool("threading", 2)).common() == CHOSEN
    assert sorted(split for _, split in toy.asked) == [0] * 6 + [1] * 6 + [2] * 6
    assert "validation 0.6010" in caplog.text  # 0.5 + 2 x 0.05, and the mean of 0, 0.001 and 0.002


def test_what_another_process_trains_is_waited_for(
    table: BenchmarkTable, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets go when the rest is done."""
    first = {"loss": "bce", "mu0": 0} | {name: values[0] for name, values in COMMON.items()}
    with ExitStack() as held:

        def train(*arguments: Any) -> dict[str, Any]:
            if len(toy.asked) == 4:
                held.close()
            return toy(*arguments)

        monkeypatch.setattr("mri_alm.cifar.training.train_one", train)
        held.enter_context(exclusive_lock(table.result(tmp_path, table.custom(first, 0)).with_suffix(".lock")))
        assert search(table, tmp_path).common() == CHOSEN
    assert len(toy.asked) == 6
    assert toy.asked[-1][0] == first


def test_long_tails_keep_the_literature_s_common_settings(toy: Toy, tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "cifar10_longtail_100", "quick")
    found = search(table, tmp_path)
    assert found.common() == {}
    found.method("alm2_ce", {})
    assert {s["delta"] for s, _ in toy.asked if "delta" in s} == set(DELTA["multiclass"]["delta"])
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
        search(table, tmp_path, runs=0)


def test_the_program_searches_with_real_trainings_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads(TABLES.read_text())
    tiny = {name: value for name, value in SETTINGS.items() if name != "splits"} | {"max_epochs": 1}
    content["protocols"]["tiny"] = {"splits": 1, "binary": tiny}
    content["tables"]["cifar10_binary_100"]["settings"] = {"ratio": 5}
    (tmp_path / "tables.json").write_text(json.dumps(content))
    monkeypatch.setattr("mri_alm.cifar.table.TABLES", tmp_path / "tables.json")
    words = ["--table", "cifar10_binary_100", "--protocol", "tiny", "--methods", "a_fl", "--runs", "1"]
    words += ["--workers", "2", "--data", str(write_cifar10(tmp_path / "data"))]
    words += ["--runs-dir", str(tmp_path / "runs"), "--output", str(tmp_path / "tuned.json")]
    monkeypatch.setattr("sys.argv", ["sweep.py", *words])
    assert program.main() == 0
    found = json.loads((tmp_path / "tuned.json").read_text())["cifar10_binary_100"]["tiny"]["methods"]["a_fl"]
    assert set(found) == {"learning_rate", "weight_decay", "gamma"}
    results = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("result.json")}
    assert len(results) == 9
    assert program.main() == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("result.json")} == results


def test_a_database_is_refused(monkeypatch: pytest.MonkeyPatch, refusal: Any) -> None:
    monkeypatch.setattr("sys.argv", ["sweep.py", "--table", "cifar10_binary_100", "--storage", "sqlite:///x.db"])
    assert "--storage is gone: results lie in --runs-dir" in refusal(program.main)
