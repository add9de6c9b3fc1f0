"""The table of settings against the configs and the page, and settings by their old names."""

import json
from pathlib import Path
from typing import Any

import pytest
from monai.bundle import ConfigParser
from programs import load_program
from shell import WarmPython

from mri_alm.bundle.config import rename_settings
from mri_alm.bundle.settings import (
    FREE_SETTINGS,
    PRIVATE_SETTINGS,
    RENAMED_SETTINGS,
    SETTINGS,
    TABLE,
    check_values,
)
from mri_alm.errors import InputError

ROOT = Path(__file__).parents[2]


def settings_of(entry: str) -> dict[str, Any]:
    """The lines above the wiring, which begins with ``imports``."""
    config = json.loads((ROOT / "configs" / f"{entry}.json").read_text("utf-8"))
    return {name: config[name] for name in list(config)[: list(config).index("imports")]}


@pytest.mark.parametrize("rule", ["disjoint", "overlapping", "random"])
def test_one_left_out_at_a_time_is_for_a_partition(rule: str) -> None:
    with pytest.raises(InputError, match=r"^splits loo leaves one positive patient out .* needs --split_rule part"):
        check_values({"splits": "loo", "split_rule": rule})
    check_values({"splits": "loo", "split_rule": "partition", "only_split": 3})
    with pytest.raises(InputError, match=r'^splits must be a whole number from 1 to 1000 or "loo", got "two"\.$'):
        check_values({"splits": "two"})


@pytest.mark.parametrize("entry", ["prostate_alm", "inference"])
def test_the_table_holds_every_setting_of_the_config_with_its_default(entry: str) -> None:
    assert {name: setting.default for name, setting in TABLE[entry].items()} == settings_of(entry)


def test_the_table_holds_the_settings_that_only_cifar_configs_have() -> None:
    binary, long_tail = settings_of("cifar10_binary"), settings_of("cifar10_longtail")
    own = (long_tail | binary).keys() - TABLE["prostate_alm"].keys()
    assert {name: setting.default for name, setting in TABLE["cifar"].items()} == {
        name: (long_tail | binary)[name] for name in own
    }


def test_the_table_holds_the_settings_that_only_the_medmnist_config_has() -> None:
    mine = settings_of("medmnist3d")
    own = mine.keys() - TABLE["prostate_alm"].keys()
    assert {name: setting.default for name, setting in TABLE["medmnist3d"].items()} == {n: mine[n] for n in own}


@pytest.mark.parametrize("name", ["cifar10_binary", "cifar10_longtail", "inference", "medmnist3d", "prostate_alm"])
def test_what_a_config_ships_is_allowed(name: str) -> None:
    check_values({"splits": 10} | settings_of(name))


def test_the_page_is_that_of_the_table() -> None:
    written = load_program("docs/write_settings").page()
    assert (ROOT / "docs" / "settings.md").read_text("utf-8") == written, "run: make settings"


def test_free_and_private_settings() -> None:
    """A free setting changes no result; a private one names a place, a person or a machine."""
    assert {"run_dir", "cache_dir", "threads", "only_split", "workers"} <= FREE_SETTINGS
    assert not FREE_SETTINGS & {"seed", "loss", "delta", "size", "spacing", "cohort", "max_epochs"}
    assert {"cohort", "run_dir", "cache_dir", "exclude", "tracking_uri", "ray_address", "address"} <= PRIVATE_SETTINGS
    assert not PRIVATE_SETTINGS & {"seed", "loss", "delta", "size"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("splits", 0, "splits must be a whole number from 1 to"),
        ("splits", True, "splits must be a whole number"),
        ("delta", -0.1, "delta must be a number, 0 or more, got -0.1"),
        ("register", 1, "register must be True or False, got 1"),
        ("size", [40, 40], "size must be three numbers greater than 0"),
        ("cohort", 3, "cohort must be a text, got 3"),
        ("resolution", 27, "resolution must be a whole number from 28 to 64, got 27"),
        ("bfloat16", "True", 'bfloat16 is the text "True". Write True.'),
    ],
)
def test_a_value_that_no_setting_can_have_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_values({name: value, "splits": 10} | {name: value})


def test_an_old_name_is_understood_and_the_new_one_said(caplog: pytest.LogCaptureFixture) -> None:
    parser = ConfigParser({"negative_bank": 0, "of": "$2 * @negative_bank", "bank": 8})
    rename_settings(parser.get())
    assert parser.get() == {"negative_bank": 8, "of": "$2 * @negative_bank"}
    assert "Setting bank is called negative_bank now; it is understood." in caplog.text
    mine = {"bank": 8, "of": "$@bank"}  # a config of one's own that has such a setting itself
    rename_settings(mine)
    assert mine["bank"] == 8


@pytest.mark.parametrize("old", sorted(RENAMED_SETTINGS))
def test_an_old_name_stands_for_a_setting_of_the_table(old: str) -> None:
    assert RENAMED_SETTINGS[old] in SETTINGS
    assert old not in SETTINGS


@pytest.mark.slow
def test_the_command_takes_an_old_name(tmp_path: Path, python: WarmPython) -> None:
    """A value that is refused shows that it arrived: nothing is trained."""
    words = ["--config_file", str(ROOT / "configs" / "prostate_alm.json"), "--run_dir", str(tmp_path / "run")]
    done = python.run("-m", "monai.bundle", "run", *words, "--bank", "-3")
    assert done.returncode == 2
    assert "Setting bank is called negative_bank now" in done.stdout + done.stderr
    assert "negative_bank must be a whole number from 0" in done.stderr
