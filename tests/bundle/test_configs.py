import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.bundle import ConfigParser, ckpt_export, verify_net_in_out
from small_cohort import CONFIG, SETTINGS, inference, train, workflow, write_cohort

import mri_alm
from mri_alm.alm.schedule import preset
from mri_alm.bundle.checkpoints import load_tensors
from mri_alm.bundle.config import check_names, choose, with_choices
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.settings import PROFILES, check_values, profile
from mri_alm.errors import InputError
from mri_alm.training.run import phantom_cohort

CONFIGS = Path(__file__).parents[2] / "configs"
ENTRIES = [path for path in sorted(CONFIGS.glob("*.json")) if path.name not in ("metadata.json", "tuned.json")]
META = json.loads((CONFIGS / "metadata.json").read_text())
LOSSES = sorted(json.loads((CONFIGS / "parts" / "losses.json").read_text()))


OVERLAYS = {  # given after another config, whose keys they replace
    "multi_gpu.json": "prostate_alm.json",
    "cifar100_binary.json": "cifar10_binary.json",
    "cifar100_longtail.json": "cifar10_longtail.json",
}


def resolved(entry: Path) -> dict[str, Any]:
    """An entry config with its macros replaced, as MONAI sees it."""
    parser = ConfigParser()
    below = [str(CONFIGS / OVERLAYS[entry.name])] if entry.name in OVERLAYS else []
    parser.read_config([*below, str(entry)])
    parser.resolve_macro_and_relative_ids()
    config: dict[str, Any] = parser.get()
    return config


# --- The committed files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda path: path.name)
def test_no_setting_is_dead(entry: Path) -> None:
    config = resolved(entry)
    check_names(config)
    check_values(config)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda path: path.name)
def test_the_dead_key_test_can_fail(entry: Path) -> None:
    with pytest.raises(InputError, match=r'^There is no setting "learning_rates"'):
        check_names(resolved(entry) | {"learning_rates": 1})


@pytest.mark.parametrize("part", sorted((CONFIGS / "parts").glob("*.json")), ids=lambda path: path.name)
def test_every_entry_of_a_part_is_used_by_some_config(part: Path) -> None:
    text = "".join(path.read_text() for path in CONFIGS.rglob("*.json"))
    if f'"%configs/parts/{part.name}"' not in text:  # else the part is taken as a whole
        for name in json.loads(part.read_text()):
            assert f'"%configs/parts/{part.name}::{name}"' in text


def test_training_has_every_property_monai_asks_for(manifest: Path, tmp_path: Path) -> None:
    assert workflow(manifest, tmp_path).check_properties() == []


def test_inference_has_every_property_monai_asks_for(manifest: Path, trained: Path, tmp_path: Path) -> None:
    assert inference(trained, manifest, tmp_path).check_properties() == []


def test_metadata_has_the_keys_that_a_bundle_needs() -> None:
    required = {
        "version", "changelog", "monai_version", "pytorch_version", "numpy_version", "required_packages_version",
        "task", "description", "authors", "copyright", "network_data_format",
    }  # fmt: skip
    assert required <= META.keys()
    assert META["schema"].endswith("meta_schema_20240725.json")
    assert META["version"] in META["changelog"]
    assert META["version"] == mri_alm.__version__
    for side in ("inputs", "outputs"):
        for data in META["network_data_format"][side].values():
            assert len(data["channel_def"]) == data["num_channels"]


def test_metadata_describes_the_default_network_and_grid() -> None:
    config = resolved(Path(CONFIG))
    image = META["network_data_format"]["inputs"]["image"]
    assert image["spatial_shape"] == profile(config["profile"]).size
    network = config["network_def"]
    assert image["num_channels"] == network["diffusion_channels"] + network["t2_channels"]
    names = next(step["keys"] for step in config["preprocessing"] if step["_target_"] == "ConcatItemsd")
    assert names == ["adc", "hbv", "t2"]
    assert list(image["channel_def"].values()) == ["ADC", "high b-value", "T2"]


def test_network_takes_and_gives_what_the_metadata_says() -> None:
    verify_net_in_out(
        net_id="network_def",
        meta_file="configs/metadata.json",
        config_file=CONFIG,
        device="cpu",
        extra_forward_args={},
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # MONAI exports TorchScript
def test_a_trained_model_exports_to_torchscript(trained: Path, tmp_path: Path) -> None:
    settings = {name: SETTINGS[name] for name in ("features", "norm")}
    ckpt_export(
        net_id="network_def",
        filepath=str(tmp_path / "model.ts"),
        ckpt_file=str(trained / "split_0" / "model.pt"),
        meta_file="configs/metadata.json",
        config_file=CONFIG,
        key_in_ckpt="model",
        **settings,
    )
    network = workflow_network(settings)
    network.load_state_dict(torch.load(trained / "split_0" / "model.pt", weights_only=True)["model"])
    image = torch.randn(2, 3, 8, 8, 8)
    exported = torch.jit.load(tmp_path / "model.ts")  # type: ignore[no-untyped-call]
    torch.testing.assert_close(exported(image), network.eval()(image), rtol=1e-5, atol=1e-6)


def workflow_network(settings: dict[str, Any]) -> torch.nn.Module:
    parser = ConfigParser(resolved(Path(CONFIG)) | settings)
    network: torch.nn.Module = parser.get_parsed_content("network_def")
    return network


# --- Overrides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"max_epoch": 1}, 'There is no setting "max_epoch". Did you mean "max_epochs"?'),
        ({"los": "bce"}, 'There is no setting "los". Did you mean "loss"?'),
        ({"mu": 1}, 'There is no setting "mu". Did you mean "mu0"?'),
        ({"zzzzzz": 1}, 'There is no setting "zzzzzz".\n'),
        ({"register": "false"}, 'register is the text "false". Write False.'),
        ({"bfloat16": "TRUE"}, 'bfloat16 is the text "TRUE". Write True.'),
        ({"cohort": "none"}, "cohort is the text \"none\". Write '$None'."),
        ({"norm": "null"}, "norm is the text \"null\". Write '$None'."),
        ({"splits": 0}, 'splits must be a whole number from 1 to 1000 or "loo", got 0.'),
        ({"splits": 2.5}, 'splits must be a whole number from 1 to 1000 or "loo", got 2.5.'),
        ({"splits": True}, 'splits must be a whole number from 1 to 1000 or "loo", got True.'),
        ({"max_epochs": 0}, "max_epochs must be a whole number from 1 to 100000, got 0."),
        ({"max_epochs": "ten"}, "max_epochs must be a whole number from 1 to 100000, got ten."),
        ({"batch_size": -8}, "batch_size must be a whole number from 1 to 100000, got -8."),
        ({"threads": 0}, "threads must be a whole number from 1 to 1024, got 0."),
        ({"max_fn": -1}, "max_fn must be a whole number from 0 to 1000000, got -1."),
        ({"only_split": 3}, "only_split must be a whole number below splits = 3, got 3."),
        ({"only_split": -1}, "only_split must be a whole number from 0 to 999, got -1."),
        ({"only_split": False}, "only_split must be a whole number from 0 to 999, got False."),
        ({"delta": -0.5}, "delta must be a number, 0 or more, got -0.5."),
        ({"delta": "half"}, "delta must be a number, 0 or more, got half."),
        ({"learning_rate": -1}, "learning_rate must be a number, 0 or more, got -1."),
        ({"gamma": None}, "gamma must be a number, 0 or more, got None."),
        ({"size": 16}, 'size must be three numbers greater than 0, such as "[40, 40, 28]", got 16.'),
        ({"spacing": [2, 2, 0]}, "spacing must be three numbers greater than 0"),
        ({"profile": 3}, "profile must be a text, got 3."),
        ({"bfloat16": "cpu"}, 'bfloat16 must be True or False or "gpu", got "cpu".'),
        (
            {"profile": "clinical", "features": "$@profiled.features", "size": [32, 32, 8]},
            "size must be at least 16, as each of 4 stages halves it: [32, 32, 8].",
        ),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_meant_is_refused_at_once(
    manifest: Path, tmp_path: Path, refusal: Callable[..., str], override: dict[str, Any], message: str
) -> None:
    assert message in refusal(workflow, manifest, tmp_path / "run", **override)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            {"loss": "a_fll"},
            'There is no loss "a_fll". Did you mean "a_fl"? Choose one of: bce, w_bce, cb_bce, s_fl, a_fl',
        ),
        ({"loss": "hinge"}, 'There is no loss "hinge". Choose one of: bce'),
        ({"mu0": -1}, 'mu0 must be a number >= 0 or "auto" or "auto_run", got -1'),
        ({"mu0": "Auto"}, 'mu0 must be a number >= 0 or "auto" or "auto_run", got "Auto"'),
        ({"rho": 0.5}, "rho must be greater than 1 and finite, got 0.5"),
        ({"mu_cap": 0.5}, "mu_cap is a multiple of mu0 and must be 1 or more"),
        ({"dual_decay": 1.5}, "dual_decay must be a number from 0 to 1, got 1.5"),
        ({"growth": "loss"}, 'growth must be one of auc, violation, got "loss"'),
        ({"gradient_cap": 0}, "gradient_cap must be greater than 0 (or None for no cap), got 0"),
        ({"tolerance": -0.1}, "tolerance must be a number, 0 or more, got -0.1"),
        ({"mu0_ratio": 0}, "mu0_ratio must be greater than 0 and finite, got 0"),
        ({"score": "logits"}, 'score must be one of probability, logit, log_odds, got "logits"'),
        ({"normalisation": "none "}, 'normalisation must be one of paper, mean, got "none "'),
        ({"architecture": "vgg"}, 'architecture must be one of two_branch, residual, got "vgg"'),
        ({"profile": "desktop"}, 'There is no profile "desktop". Choose one of: laptop, clinical'),
        ({"preset": "code"}, 'There is no preset "code". Choose one of: default, recommended, last_epoch'),
        ({"checkpoint_rule": "latest"}, 'checkpoint_rule must be one of best, official, last, got "latest"'),
        ({"checkpoint_rule": "last", "patience": 3}, "patience 3 waits for a better epoch, and checkpoint_rule last"),
        ({"ema": 1}, "ema must be 0 (no average) or a decay below 1, such as 0.99, got 1."),
        ({"patience": 0}, "patience must be 1 or more epochs, or None to train them all, got 0"),
        ({"positives_per_batch": 8}, "positives_per_batch must lie between 1 and 7, got 8"),
        ({"constraint_per": "pair", "negative_bank": 3}, "negative_bank must be 0 or more, and 0 unless"),
        ({"micro_batch": 0}, "micro_batch must be 1 or more exams, or None for the whole batch, got 0"),
        ({"features": []}, "Each path needs a channel and a stage: got"),
        ({"fusion": "early"}, 'fusion must be one of late, spatial, got "early"'),
        ({"pooling": "max"}, 'pooling must be one of max_mean, lse, attention, got "max"'),
        ({"validation": 1.5}, "validation must lie between 0 and 1, got 1.5"),
        ({"validation": 0.05}, "splits that hold out 0.05 of each class need at least 20 of either"),
        ({"max_fn": 99}, "Cannot allow 99 false negatives"),
        ({"exclude": ["S99"]}, "exclude names S99, but"),
        ({"optimiser": "sgd"}, 'There is no optimiser "sgd". Choose one of: adam, adamw.'),
        ({"schedule": "cosin"}, 'schedule must be one of constant, cosine, got "cosin"'),
        (
            {"augmentation": "fields"},
            'There is no augmentation "fields". Did you mean "field"? Choose one of: unchanged',
        ),
        ({"warmup": 2}, "warmup must be less than max_epochs = 2, got 2."),
        ({"learning_rate": 0}, "learning_rate and rate_factor must be greater than 0, got 0"),
        (
            {"cohort": "nowhere.csv"},
            "nowhere.csv: cannot be read (No such file or directory). Give the path of a CSV file",
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_before_the_run_folder_is_taken(
    manifest: Path, tmp_path: Path, refusal: Callable[..., str], override: dict[str, Any], message: str
) -> None:
    """Else the corrected command would be refused, as the folder held a run with the wrong value."""
    assert message in refusal(train, manifest, tmp_path / "run", **override)
    assert not (tmp_path / "run").exists()


def test_none_as_an_expression_arrives(manifest: Path, tmp_path: Path) -> None:
    parser = workflow(manifest, tmp_path, mu_cap="$None", norm="$None").parser
    assert parser.get_parsed_content("objective_def").schedule.cap is None
    assert "Instance" not in str(parser.get_parsed_content("network_def"))


def test_choose_names_what_there_is() -> None:
    assert choose({"a": 1}, "a", "letter") == 1
    with pytest.raises(InputError, match=r'^There is no letter "b"\. Choose one of: a, c\.$'):
        choose({"a": 1, "c": 2}, "b", "letter")


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_an_epoch(manifest: Path, tmp_path: Path, loss: str) -> None:
    run = train(manifest, tmp_path / "run", loss=loss, splits=1, max_epochs=2, mu0=0.01, gamma=2.0)
    epochs = json.loads((run / "split_0" / "split.json").read_text())["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    assert epochs[0]["base_loss"] > 0
    assert epochs[0]["alm_term"] > 0
    assert epochs[0]["gradient_ratio"] > 0
    assert json.loads((run / "config.json").read_text())["settings"]["loss"] == loss


@pytest.mark.parametrize(
    "override",
    [
        {"score": "logit", "normalisation": "mean", "mu0": 0.1, "mu_cap": None},
        {"norm": ["instance", {"affine": True}], "dropout": 0.2, "batch_size": 7},
        {"bfloat16": True},
        {"zeroed_channels": ["t2"], "fusion": "spatial", "pooling": "attention"},
        {"preset": "paper", "mu0": 1e-3},
        {"preset": "official_2022", "mu0": 1e-3, "loss": "s_fl"},
        {"preset": "official_head", "mu0": 1e-3, "loss": "cb_bce", "score": "probability"},
        {"ratio_cap": 0.5, "loss": "a_ml"},
        {"mu0": "auto_run", "dual_decay": 0.1, "growth": "violation", "gradient_cap": 0.5},
        {
            "dual_update": "per_epoch",
            "negative_bank": 16,
            "positives_per_batch": 2,
            "micro_batch": 3,
            "preset": "default",
            "patience": 1,
        },
        {"checkpoint_rule": "last", "ema": 0.9},
        {"constraint_per": "negative", "mu0": 1e-3},
        {"constraint_per": "pair", "mu0": 1e-3},
    ],
    ids=str,
)
def test_other_settings_train(manifest: Path, tmp_path: Path, override: dict[str, Any]) -> None:
    run = train(manifest, tmp_path / "run", splits=1, max_epochs=1, **override)
    assert (run / "scores.csv").exists()
    name = override.get("preset", "recommended")
    settings = json.loads((run / "config.json").read_text())["settings"]
    assert settings["score"] == override.get("score", preset(name).score)  # also where the preset says it
    for record in (
        json.loads((run / "split_0" / "split.json").read_text()),
        load_tensors(run / "split_0" / "model.pt"),
    ):
        assert record["preset"] == settings["preset"] == name


def test_a_preset_reaches_everything_it_names(manifest: Path, tmp_path: Path) -> None:
    parser = workflow(manifest, tmp_path, preset="official_head", loss="a_fl", mu_margin=0.1).parser
    objective = parser.get_parsed_content("objective_def")
    assert objective.schedule == replace(preset("official_head"), mu_margin=0.1).schedule()
    assert (objective.constraint.score, objective.constraints_in_gradient, objective.base.log_offset) == (
        "logit",
        "last",
        1e-4,
    )
    assert parser.get_parsed_content("epoch_end").selection.rule == "official"


def test_settings_of_the_multipliers_arrive(manifest: Path, tmp_path: Path) -> None:
    values = {"dual_rate": 0.3, "dual_decay": 0.1, "gradient_cap": 0.5}
    parser = workflow(manifest, tmp_path, tolerance=0.05, growth="violation", mu0="auto_run", **values).parser
    objective = parser.get_parsed_content("objective_def")
    assert {name: getattr(objective.schedule, name) for name in values} == values
    assert (objective.constraint.tolerance, objective.schedule.growth, objective.held) == (0.05, "violation", True)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_value_of_a_profile_can_be_set_alone(name: str) -> None:
    config = resolved(Path(CONFIG)) | {"profile": name}
    shipped = {key: value for key, value in with_choices(config).items() if key in vars(profile(name))}
    assert shipped == vars(profile(name))
    assert with_choices(config | {"bfloat16": True})["bfloat16"] is True
    check_values(with_choices(config))


def test_an_epoch_of_the_clinical_profile_on_a_small_grid(tmp_path: Path) -> None:
    """Its network and its number format; the run records what they were, and is gone on with."""
    manifest = write_cohort(tmp_path / "cohort", 6, 0)
    of_profile = {f"{key}": f"$@profiled.{key}" for key in ("features", "norm")}
    options = {"profile": "clinical", "size": [32, 32, 16], "spacing": [3.0, 3.0, 3.0], "validation": 0.5}
    options |= {"splits": 1, "max_epochs": 1} | of_profile
    run = RunFolder(train(manifest, tmp_path / "run", **options))
    settings, chosen = run.settings, profile("clinical")
    names = ("architecture", "features", "norm", "bfloat16")
    assert {name: settings[name] for name in names} == {name: getattr(chosen, name) for name in names}
    assert (settings["size"], settings["spacing"]) == ([32, 32, 16], [3.0, 3.0, 3.0])
    weights = load_tensors(run.split(0).model)["model"]
    assert {name.partition(".")[0] for name in weights} == {"path", "head"}
    train(manifest, run.path, **options | {"features": chosen.features})  # the same values, given by hand
    with pytest.raises(SystemExit):
        train(manifest, run.path, **options | {"profile": "laptop"})


def test_blanking_a_sequence_leaves_nothing_of_it(manifest: Path, tmp_path: Path) -> None:
    for name, channel in (("adc", 0), ("hbv", 1), ("t2", 2)):
        item = workflow(manifest, tmp_path, zeroed_channels=[name]).parser.get_parsed_content("prepared")[0]
        zero = [item["image"][c].abs().max().item() == 0 for c in range(3)]
        assert zero == [c == channel for c in range(3)]


def test_without_a_cohort_the_phantom_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def make(folder: Path, *, train: int, test: int, difficulty: str, progress: Callable[[int, int], None]) -> Path:
        asked[folder] = (train, test, difficulty)
        progress(1, train + test)
        return folder / "manifest.csv"

    monkeypatch.setattr("mri_alm.training.run.make_cohort", make)
    assert phantom_cohort(20, 10) == Path("data/phantom_20_10/manifest.csv")
    assert phantom_cohort(20, 10, "real") == Path("data/phantom_20_10_real/manifest.csv")
    assert asked == {
        Path("data/phantom_20_10"): (20, 10, "plain"),
        Path("data/phantom_20_10_real"): (20, 10, "real"),
    }
