import json
import logging
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from monai.bundle import ConfigParser
from scipy.stats import sem, t
from small_cifar import SETTINGS, write_cifar10

from mri_alm.bundle.config import write_run_config
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.cifar.job import scores_to_keep
from mri_alm.cifar.long_tail_report import to_rows, training_figures_of, write_multiclass_report
from mri_alm.cifar.report import make_report, to_markdown, write_both, write_table_report
from mri_alm.cifar.table import TABLES, BenchmarkTable, read_results
from mri_alm.cifar.training import duration, train_missing
from mri_alm.errors import InputError
from mri_alm.programs import benchmark as program
from mri_alm.runtime.locks import exclusive_lock
from mri_alm.runtime.tasks import Pool

ALL = json.loads(TABLES.read_text())
PAPER = [name for name, table in ALL["tables"].items() if table["paper"]]  # tests/cifar/test_medmnist.py has the others


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cifar10(tmp_path_factory.mktemp("cifar"))


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """The tables with a protocol that trains in a second."""
    content = json.loads(TABLES.read_text())
    content["protocols"]["tiny"] = {"splits": 2, "binary": SETTINGS | {"max_epochs": 1}}
    del content["protocols"]["tiny"]["binary"]["splits"]
    content["tables"]["cifar10_binary_100"]["settings"] = {"ratio": 5}
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(content))
    return path


def made_up(
    table: BenchmarkTable, results: Path, keys: list[str], splits: int
) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Result files as trainings would write them, of scores drawn at random."""
    label = np.repeat([0, 1], 40)
    for job in table.trainings(keys, splits):
        rng = np.random.default_rng([len(job.method.key), job.seed, job.split])
        strength = 1.5 if job.method.constrained else 1.0
        score = np.random.default_rng(5).normal(size=80) + strength * label + rng.normal(size=80)
        epochs = [{"mu": mu, "gradient_ratio": mu / 10, "lambda_max": 2 * mu} for mu in (0.0, 0.5, 1.0)]
        content = {"table": table.name, "protocol": table.protocol, "settings": table.settings | job.method.settings}
        path = table.result(results, job)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(content | {"epochs": epochs, "test": {"label": label.tolist(), "score": score.tolist()}})
        )
    return read_results(table, results, table.trainings(keys, splits))


# --- The tables' file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAPER)
def test_every_row_of_every_table_is_a_method_with_all_its_numbers(name: str) -> None:
    table = BenchmarkTable(TABLES, name, "paper")
    columns = len(table.tpr) + 1 if table.tpr else 3
    for key in table.methods():
        method = table.method(key)
        assert len(method.printed) in (columns, columns + 2)
        assert method.constrained == key.startswith("alm")
    assert len(PAPER) == 13
    rows = 17 if table.tpr else 21 if name.startswith("cifar10_long") else 12
    assert len(table.methods()) == rows


def test_a_folder_s_name_is_no_expression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MONAI evaluates texts that begin with $ and replaces those that begin with @ or %."""
    monkeypatch.chdir(tmp_path)
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "quick")
    training = table.trainings(["bce"], 1)[0]
    code = "$__import__('pathlib').Path('ran').touch()"
    settings = table.overrides(training, Path(code), Path("@runs"))
    assert ConfigParser(settings).get_parsed_content("data") == Path(code)
    assert ConfigParser(settings).get_parsed_content("run_dir").parts[0] == "@runs"
    assert not Path("ran").exists()
    folder = RunFolder(tmp_path / "run")
    write_run_config(folder, settings | {"cache_dir": Path("runs/a#b")})
    assert folder.record["config"]["data"] == f"./{code}"  # nor is it one when the record is read
    assert folder.record["config"]["cache_dir"] == "runs/a#b"


def test_printed_numbers_are_those_of_the_latex_source() -> None:
    source = Path(__file__).parents[3] / "shared" / "paper" / "alm_neurips2021.tex"
    if not source.is_file():
        pytest.skip("the paper's LaTeX is not here")
    text = source.read_text().replace(r"\textbf{", "").replace(r"\underline{", "").replace("}", "")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "paper")
    for key in ("bce", "alm_bce", "mbauc", "alm_ldam"):
        method = table.method(key)
        start = f"{method.name} & " + " & ".join(f"{value:.1f}" for value in method.printed[:4])
        assert any(line.startswith(start) for line in lines)
    long_tail = BenchmarkTable(TABLES, "cifar10_longtail_100", "paper").method("alm2_ldam")
    assert long_tail.printed == (24.76, 28.91, 73.32)


def test_quick_is_smaller_and_says_by_what() -> None:
    quick, paper = (BenchmarkTable(TABLES, "cifar10_binary_100", protocol) for protocol in ("quick", "paper"))
    assert quick.settings == {"width": 0.125, "max_epochs": 20, "ratio": 100}
    assert paper.settings == {"ratio": 100}
    assert (quick.splits, paper.splits) == (5, 10)
    assert quick.folder(Path("r")) != paper.folder(Path("r"))


# --- Methods and plans ----------------------------------------------------------------------------------------------


def test_settings_of_methods() -> None:
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "quick")
    assert table.method("a_fl").settings == {"loss": "a_fl", "gamma": 1.0, "mu0": 0}
    assert table.method("alm_a_fl").settings == {"loss": "a_fl", "gamma": 1.0, "mu0": "auto"}
    published = table.method("published_a_fl")
    assert published.settings["mu0"] == 1e-5
    assert published.settings["delta"] == 0.25
    assert published.settings["score"] == "logit"
    assert published.printed == table.method("alm_a_fl").printed != ()
    assert table.method("mu1e-3_bce").settings == {"loss": "bce", "mu0": 1e-3}
    assert table.method("mu1e-3_bce").printed == ()
    assert table.method("mu1e-3_bce").name == "ALM (mu0 1e-3) + BCE"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("alm_bec", r'^There is no method "alm_bec"\. Did you mean "alm_bce"\?'),
        ("_bce", r'^There is no method "_bce"\.'),
        ("published_ldam", r"^cifar10_binary_100: no published mu0 and delta for ldam\.$"),
    ],
)
def test_unknown_methods_are_refused(key: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BenchmarkTable(TABLES, "cifar10_binary_100", "quick").method(key)


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(InputError, match=r'^There is no table "x"\. Choose one of: cifar10_binary_100, '):
        BenchmarkTable(TABLES, "x", "quick")
    with pytest.raises(InputError, match=r'^There is no protocol "x"\. Choose one of: paper, paper_bfloat16, quick\.$'):
        BenchmarkTable(TABLES, "cifar10_binary_100", "x")


def test_the_plan_trains_the_baseline_twice_and_every_base_loss() -> None:
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "quick")
    plan = [(job.method.key, job.seed, job.split) for job in table.trainings(["alm_a_fl"], 2)]
    assert plan == [
        ("bce", 0, 0), ("bce", 0, 1), ("bce", 1, 0), ("bce", 1, 1),
        ("a_fl", 0, 0), ("a_fl", 0, 1), ("alm_a_fl", 0, 0), ("alm_a_fl", 0, 1), ("a_fl", 1, 0), ("a_fl", 1, 1),
    ]  # fmt: skip
    assert len(table.trainings(["alm_bce"], 2, seeds=3)) == 2 * 3 * 2
    assert table.baselines(["a_fl", "alm_a_fl", "mu1e-3_bce", "s_fl"]) == ["bce", "a_fl"]


# --- Training -------------------------------------------------------------------------------------------------------


def test_missing_models_are_trained_and_only_those(
    tables: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = BenchmarkTable(tables, "cifar10_binary_100", "tiny")
    folders = {"data": data, "runs": tmp_path / "runs", "results": tmp_path / "results"}
    caplog.set_level(logging.INFO, "mri_alm.cifar")
    assert train_missing(table, table.trainings(["alm_bce"], 1), **folders, pool=Pool()) == 0
    assert "alm_bce split 0 seed 0: kept epoch 1" in caplog.text
    assert "0 models left" in caplog.text
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("*.json")}
    assert len(before) == 3
    assert train_missing(table, table.trainings(["alm_bce"], 2), **folders, pool=Pool("loky", 2)) == 0
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    results = read_results(table, tmp_path / "results", table.trainings(["alm_bce"], 2))
    assert len(results) == 6
    assert results["bce", 0, 0]["guard"] == results["bce", 1, 0]["guard"] == results["alm_bce", 0, 0]["guard"]
    assert results["bce", 0, 0]["test"]["score"] != results["bce", 1, 0]["test"]["score"]


def test_processes_share_the_models_of_a_table(tables: Path, data: Path, tmp_path: Path) -> None:
    table = BenchmarkTable(tables, "cifar10_binary_100", "tiny")
    plan = table.trainings(["bce"], 1)
    results = tmp_path / "results"
    train_here = partial(train_missing, table, plan, data=data, results=results, pool=Pool())
    with exclusive_lock(table.result(results, plan[0]).with_suffix(".lock")):
        assert train_here(runs=tmp_path / "runs") == 1
    assert [table.result(results, job).exists() for job in plan] == [False, True]
    second = [
        get_context("spawn").Process(target=train_here, kwargs={"runs": tmp_path / f"runs_{k}"}) for k in range(2)
    ]
    for process in second:
        process.start()
    for process in second:
        process.join()
    assert [process.exitcode for process in second] == [0, 0]
    assert sum(len(list((tmp_path / f"runs_{k}").rglob("model.pt"))) for k in range(2)) == 1
    assert table.result(results, plan[0]).exists()


def test_the_program_trains_and_prints_a_table(
    tables: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mri_alm.cifar.table.TABLES", tables)
    words = ["--table", "cifar10_binary_100", "--protocol", "tiny", "--methods", "alm_bce", "--data", str(data)]
    words += ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", ["benchmark.py", *words])
    assert program.main() == 0
    assert "| ALM + BCE |" in capsys.readouterr().out
    place = tmp_path / "results" / "cifar10_binary_100" / "tiny"
    assert {path.name for path in place.iterdir()} == {"bce", "alm_bce", "table.md", "table.csv", "figure.png"}
    monkeypatch.setattr("sys.argv", [*sys.argv, "--report-only", "--methods", "bce", "s_fl"])
    assert program.main() == 0
    text = capsys.readouterr().out  # the row that was not asked for stays in the table
    assert "| ALM + BCE |" in text
    assert "Not complete: s_fl 0 of" in text


def test_rows_that_are_kept_come_in_the_order_of_the_tables(tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "quick")
    assert table.kept(tmp_path) == []
    for key in ("s_ml", "decayed_bce8", "alm_bce8", "bce8", "published_bce", "bce", "no_method"):
        (table.folder(tmp_path) / key).mkdir(parents=True)
        (table.folder(tmp_path) / key / "split_0.json").write_text("{}")
    (table.folder(tmp_path) / "vs8").mkdir()  # begun, nothing kept
    assert table.kept(tmp_path) == ["bce", "published_bce", "bce8", "alm_bce8", "decayed_bce8", "s_ml"]


# --- Reports --------------------------------------------------------------------------------------------------------


def test_a_report_has_ours_the_paper_s_the_difference_and_the_null(tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "quick")
    results = made_up(table, tmp_path, ["alm_bce", "a_fl", "alm_a_fl", "mu1e-3_bce"], 3)
    report = make_report(table, results, ["bce", "alm_bce", "a_fl", "alm_a_fl", "mu1e-3_bce", "s_fl"], 3, draws=50)
    assert set(report.comparisons) == {"alm_bce", "a_fl", "alm_a_fl", "mu1e-3_bce", "null bce", "null a_fl"}
    assert report.missing == {"s_fl": 0}
    assert set(report.holm) == {"alm_bce", "a_fl", "alm_a_fl", "mu1e-3_bce"}
    acting = {"gradient ratio 10 %": 0.05, "median": 0.075, "90 %": 0.1, "lambda_max": 2, "mu": 1}
    assert report.acting["alm_bce"] == pytest.approx(acting)
    text = to_markdown(report)
    ours = 100 * report.summaries["alm_bce"].ensemble.value[1]
    row = next(line for line in text.splitlines() if line.startswith("| ALM + BCE | "))
    assert row.startswith(f"| ALM + BCE | {ours:.1f} [")
    assert f"] | 52 | {ours - 52:+.1f} | " in row
    assert row.endswith("| 83.6 ± 1.6 |")
    assert "| **null**: bce, other seeds | " in text
    assert "| **null**: a_fl, other seeds | " in text
    assert "Not complete: s_fl 0 of 3." in text
    assert "| ALM (mu0 1e-3) + BCE | " in text
    for paragraph in text.split("\n\n"):
        lines = paragraph.strip().splitlines()
        if lines[0].startswith("|"):
            assert len({line.count("|") for line in lines}) == 1
            assert set(lines[1]) == set("| -")


def test_a_table_of_single_models_says_so_and_has_no_deviations(tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "quick")
    results = made_up(table, tmp_path, ["alm_bce"], 2)
    one, two = (to_markdown(make_report(table, results, ["bce", "alm_bce"], splits, draws=20)) for splits in (1, 2))
    assert "Single models, all numbers in percent" in one
    assert "Ensembles of 2 models, all numbers in percent" in two
    assert "nan" not in one
    assert (one.count("±"), two.count("±")) == (2, 6)  # the paper's, and of two models and two differences


def test_a_report_is_written_as_text_table_and_picture(tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "quick")
    results = made_up(table, tmp_path, ["alm_bce"], 2)
    write_table_report(make_report(table, results, ["bce", "alm_bce"], 2, draws=20), tmp_path / "out")
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    header, bce, alm = (tmp_path / "out" / "table.csv").read_text().splitlines()
    assert header.startswith("method,name,models,mean_auc,sd_auc,auc,auc_low,auc_high,auc_paper,fpr_at_98,")
    assert bce.startswith("bce,BCE,2,")
    assert alm.startswith("alm_bce,ALM + BCE,2,")


def test_a_row_whose_base_loss_is_not_complete_stands_alone(tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "quick")
    results = made_up(table, tmp_path, ["alm_a_fl"], 2)
    kept = {key: content for key, content in results.items() if key != ("a_fl", 0, 1)}
    report = make_report(table, kept, ["bce", "a_fl", "alm_a_fl"], 2, draws=20)
    assert set(report.comparisons) == {"null bce"}
    assert "Not complete: a_fl 1 of 2." in write_table_report(report, tmp_path / "out")
    assert (tmp_path / "out" / "figure.png").exists()


def test_rows_that_lack_columns_of_others_have_empty_cells(tmp_path: Path) -> None:
    write_both(tmp_path, "page\n", [{"a": 1}, {"a": 2, "b": 3}])
    assert (tmp_path / "table.csv").read_text() == "a,b\n1,\n2,3\n"
    assert (tmp_path / "table.md").read_text() == "page\n"


def test_protocols_and_settings_are_not_mixed(tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "quick")
    made_up(table, tmp_path, ["alm_bce"], 1)
    path = tmp_path / "cifar10_binary_100" / "quick" / "alm_bce" / "split_0.json"
    for change in ({"protocol": "paper"}, {"settings": {"mu0": 1}}):
        whole = json.loads(path.read_text())
        path.write_text(json.dumps(whole | change))
        with pytest.raises(InputError, match=rf"split_0\.json has {next(iter(change))} .*not mixed"):
            read_results(table, tmp_path, table.trainings(["alm_bce"], 1))
        path.write_text(json.dumps(whole))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(InputError, match=r"split_0\.json is damaged"):
        read_results(table, tmp_path, table.trainings(["alm_bce"], 1))


def test_a_table_without_its_baseline_is_refused(tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "cifar10_binary_100", "quick")
    with pytest.raises(InputError, match=r"^cifar10_binary_100: bce has 0 of 3 models\. Train it first\.$"):
        make_report(table, {}, ["bce"], 3)


@pytest.mark.parametrize(("seconds", "text"), [(59.6, "60 s"), (150, "2 min"), (7100, "118 min"), (9000, "2.5 h")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- Long-tailed tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critical", [[4], [3, 4]])
def test_what_is_kept_of_the_logits_gives_the_figures_of_the_whole(critical: list[int]) -> None:
    rng = np.random.default_rng(0)
    label = np.arange(200) % 5
    logits = rng.normal(size=(200, 5)) + 2 * np.eye(5)[label]
    found = training_figures_of(scores_to_keep(logits, label, critical))
    right = logits.argmax(1) == label
    if len(critical) == 2:
        expected = [right[label == 4].mean(), right[label == 3].mean(), right[label < 3].mean()]
    else:
        threshold = [np.sort(logits[label == 4, 4])[k] for k in (8, 4)]  # 40 critical samples: 8 or 4 may be missed
        others = label != 4
        wrong = [(logits[others, 4] >= t) | (logits[others, :4].argmax(1) != label[others]) for t in threshold]
        expected = [wrong[0].mean(), wrong[1].mean(), right.mean()]
    np.testing.assert_allclose(found, 100 * np.array(expected))


def test_a_long_tailed_table(tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "cifar10_longtail_100", "quick")
    label = np.arange(100) % 5
    results = {}
    for key, seed, strength in (("ce", 0, 1.0), ("ce", 1, 1.0), ("alm1_ce", 0, 3.0)):
        for split in range(3):
            rng = np.random.default_rng([split, seed])
            logits = rng.normal(size=(100, 5)) + strength * np.eye(5)[label]
            results[key, seed, split] = {"test": scores_to_keep(logits, label, [4])}
    methods = [table.method(key) for key in ("ce", "alm1_ce")]
    rows = to_rows(table, results, methods, 3)
    assert [row["method"] for row in rows] == ["ce", "alm1_ce", "null ce"]
    accuracy = [
        np.array([training_figures_of(results[k, 0, s]["test"])[2] for s in range(3)]) for k in ("ce", "alm1_ce")
    ]
    gain = accuracy[1] - accuracy[0]
    assert rows[1]["overall accuracy, difference"] == pytest.approx(gain.mean())
    ends = [rows[1][f"overall accuracy, difference{end}"] for end in (" low", " high")]
    np.testing.assert_allclose(ends, t.interval(0.95, 2, gain.mean(), sem(gain)))
    assert rows[1]["overall accuracy, paper"] == 70.90
    text = write_multiclass_report(table, results, ["ce", "alm1_ce", "fl"], 3, tmp_path)
    assert f"| ALM 1 + CE | {rows[1]['error @ 80 % TPR']:.1f} ± " in text
    assert "| null: ce, other seeds | " in text
    assert text.endswith("\n\nNot complete: fl 0 of 3.\n")
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    assert (tmp_path / "table.md").read_text() == text
    assert (tmp_path / "table.csv").read_text().startswith("method,name,models,error @ 80 % TPR,")
    one = write_multiclass_report(table, results, ["ce", "alm1_ce"], 1, tmp_path)
    assert "one training each" in one
    assert "nan" not in one
    assert f"| {accuracy[1][0]:.1f} | 70.9 | {accuracy[1][0] - 70.9:+.1f} | {gain[0]:+.1f} |" in one


def test_a_long_tailed_table_without_its_baseline_is_refused() -> None:
    table = BenchmarkTable(TABLES, "cifar10_longtail_100", "quick")
    with pytest.raises(InputError, match=r"^cifar10_longtail_100: ce has 0 of 3 models\. Train it first\.$"):
        write_multiclass_report(table, {}, ["ce"], 3, Path("unused"))
