"""What is typed is what is meant: words that a parser takes for numbers, comments or code; devices; other folders."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fire
import monai.bundle
import pytest
import torch
from monai.bundle import ConfigParser
from monai.bundle.scripts import create_workflow
from programs import load_program
from small_cohort import CONFIG, SETTINGS, workflow

from mri_alm.bundle.config import check_device, typed_words
from mri_alm.bundle.settings import check_values, read_words, settle
from mri_alm.errors import InputError

DECOMPOSED = "Zu\u0308rich"  # Python's parser composes it: another folder


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The main config's workflow as `python -m monai.bundle run` makes it of typed words."""

    def start(**settings: Any) -> Any:
        words = [word for name, value in (SETTINGS | settings).items() for word in (f"--{name}", str(value))]
        words = ["--config_file", CONFIG, "--logging_file", "False", *words]
        monkeypatch.setattr("sys.argv", [str(Path(monai.bundle.__file__).with_name("__main__.py")), "run", *words])
        return fire.Fire(create_workflow, command=words)

    return start


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("run_dir", "20240101", "20240101"),
        ("run_dir", "1_3", "1_3"),
        ("cohort", "1e3", "1e3"),
        ("cache_dir", "0x10", "0x10"),
        ("input", "[1]", "[1]"),
        ("data", "a#b", Path("a#b")),
        ("output", "a::b/c", Path("a::b/c")),
        ("labels", DECOMPOSED, DECOMPOSED),
        ("run_dir", '"20240101"', "20240101"),
        ("run_dir", "True", "True"),
        ("salt", "007", "007"),
        ("ray_address", "[::1]:6379", "[::1]:6379"),
        ("exclude", "10000_10003", ("10000_10003",)),
        ("exclude", "0012", ("0012",)),
        ("exclude", "[10000_10003, 0012, a#b]", ("10000_10003", "0012", "a#b")),
        ("exclude", "1e3,P-1", ("1e3", "P-1")),
        ("exclude", "['S04', \"a, b\"]", ("S04", "a, b")),
        ("exclude", "[]", ()),
        ("address", "1_3", "1_3"),  # the old name of ray_address
        ("max_epochs", "1e3", 1000.0),
        ("size", "[8, 8, 8]", [8, 8, 8]),
        ("loss", "a_fl", "a_fl"),
    ],
)
def test_a_setting_is_read_as_it_was_typed(name: str, word: str, value: Any) -> None:
    for words in ([f"--{name}", word], [f"--{name}={word}"], [f"-{name}", word]):
        assert read_words(typed_words(["run", *words, "--of_no_setting", "3"])) == {name: value}
    assert load_program("train_ensemble").overrides([f"--{name}", word]) == {name: value}


@pytest.mark.filterwarnings("ignore:parsing config_file")
def test_typed_words_reach_the_config(typed: Callable[..., Any]) -> None:
    config = typed(run_dir="20240101", exclude="10000_10003", max_epochs="1e1", cohort="a#b/manifest.csv").parser.get()
    assert (config["run_dir"], config["exclude"], config["max_epochs"]) == ("20240101", ("10000_10003",), 10)
    assert config["cohort"] == Path("a#b/manifest.csv")


@pytest.mark.filterwarnings("ignore:parsing config_file")
def test_a_folder_with_a_hash_trains(typed: Callable[..., Any], manifest: Path, tmp_path: Path) -> None:
    run = tmp_path / "a#b"
    places = {"cohort": manifest, "cache_dir": manifest.parent / "cache", "run_dir": run}
    typed(**places, splits=1, max_epochs=1, exclude="S07").run()
    assert (run / "scores.csv").is_file()
    settings = json.loads((run / "config.json").read_text())["settings"]
    assert (settings["run_dir"], settings["exclude"]) == (str(run), ["S07"])
    assert "S07" not in (run / "splits.csv").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--norm", "None"], r"^MONAI ignores --norm None\. Write --norm '\$None' instead\.$"),
        (["--only_split", "1", "--norm=None"], r"^MONAI ignores --norm None"),
        (["--run_dir", "$HOME/x"], r"^--run_dir begins with \$, which MONAI takes for code, and .* as \./\$HOME/x\.$"),
        (["--cohort=@run_dir"], r"^--cohort begins with @, which MONAI takes for a reference"),
        (["--salt", "%a"], r"^--salt begins with %, which MONAI takes for a file"),
        (["--outside", "$1"], r"^--outside begins with \$"),
        (["--salt", "a#b"], r"^--salt holds #, which MONAI changes into ::\. Choose a value without it\.$"),
    ],
)
def test_a_word_that_monai_takes_for_something_else_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_words(typed_words(["run", *words]))
    with pytest.raises(InputError, match=message):
        load_program("train_ensemble").overrides(words)


def test_an_expression_for_nothing_is_allowed() -> None:
    assert read_words(typed_words(["--norm", "$None", "--run_dir", "runs/None"])) == {
        "norm": "$None",
        "run_dir": "runs/None",
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"run_dir": 20240101}, "run_dir must be a text, got 20240101. Put it in quotes in its file"),
        ({"exclude": [1000010003]}, r"exclude must be a list of texts, got \[1000010003\]. Put it in quotes"),
        ({"exclude": 12}, "exclude must be a list of texts, got 12"),
        ({"run_dir": "a::b"}, "run_dir holds # or ::, which MONAI uses in configs"),  # what MONAI makes of a#b
        ({"max_epochs": 10.5}, "max_epochs must be a whole number from 1 to 100000, got 10.5"),
        ({"patience": 2.5}, "patience must be a whole number from 0 to 1000000, got 2.5"),
        ({"features": [2.5, 4]}, "features must be a list of whole numbers greater than 0"),
        ({"learning_rate": float("inf")}, "learning_rate must be a number, 0 or more, got inf"),
        ({"learning_rate": float("nan")}, "learning_rate must be a number, 0 or more, got nan"),
        ({"learning_rate": "inf"}, "learning_rate must be a number, 0 or more, got inf"),
        ({"sam_radius": 0.05, "gradient_cap": 0.5}, "sam_radius works with neither gradient_cap nor negative_bank"),
        ({"sam_radius": 0.05, "negative_bank": 8}, "sam_radius works with neither gradient_cap nor negative_bank"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_refused(config: dict[str, Any], message: str) -> None:
    settle(config)
    with pytest.raises(InputError, match=message):
        check_values({"splits": 10} | config)


def test_whole_numbers_and_names_are_settled() -> None:
    config: dict[str, Any] = {"splits": 2.0, "exclude": ["a#b"], "delta": 2.0, "threads": "$os.cpu_count()"}
    settle(config)
    assert config == {"splits": 2, "exclude": ("a#b",), "delta": 2.0, "threads": "$os.cpu_count()"}
    assert type(config["splits"]) is int


# --- Devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:0"}, "device is cuda:0, but PyTorch sees 0 GPUs .CUDA. here. Leave --device out"),
        ({"device": "cuda"}, "device is cuda, but PyTorch sees 0 GPUs"),
        ({"device": "$torch.device('cuda', 7)"}, "device is cuda:7, but PyTorch sees 0 GPUs"),
        ({"device": "xpu"}, "device is xpu, but PyTorch sees 0 GPUs"),
        ({"device": "gpu"}, "device must be cpu, cuda, or one GPU such as cuda:0, got gpu"),
        ({"device": 0}, "device must be cpu, cuda, or one GPU such as cuda:0, got 0"),
        ({"device": "cpu", "amp": True}, "amp needs a GPU .CUDA., and device is cpu. Leave --amp out"),
    ],
    ids=str,
)
def test_a_device_that_is_not_there_is_refused(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match=message):
        check_device(ConfigParser(settings))


def test_one_gpu_too_far_is_refused_and_a_text_becomes_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(InputError, match="device is cuda:2, but PyTorch sees 2 GPUs"):
        check_device(ConfigParser({"device": "cuda:2"}))
    parser = ConfigParser({"device": "cuda:1", "amp": True})
    check_device(parser)
    assert parser.get_parsed_content("device") == torch.device("cuda:1")


def test_a_device_is_refused_before_anything_is_written(
    manifest: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    assert "device must be cpu" in refusal(workflow, manifest, tmp_path / "run", device="gpu")
    assert not (tmp_path / "run").exists()


# --- Another folder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, str(Path(CONFIG).resolve())])
def test_a_start_in_another_folder_is_refused(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    program = load_program("train_ensemble")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_ensemble.py"])
    text = refusal(program.main, ["--config_file", config, "--run_dir", "x"])
    assert "in this folder. Start in the checkout, whose configs name their parts from there" in text
    assert list(tmp_path.iterdir()) == []
