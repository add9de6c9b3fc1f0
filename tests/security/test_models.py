"""A stranger's model is data: of a run folder scoring takes settings, and executes nothing that the folder names."""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from shell import WarmPython

from mri_alm.bundle.inspection import inspect_bundle
from mri_alm.bundle.settings import SETTINGS, TABLE
from mri_alm.bundle.shipped import FORMS, differences, settings_in, shipped_config
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.errors import InputError

Score = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def score(python: WarmPython, one_exam: Path, tmp_path: Path) -> Score:
    def run(model: Path, *words: Any) -> "subprocess.CompletedProcess[str]":
        output = tmp_path / "scores"
        return python.run("pipelines/score.py", "--model", model, "--input", one_exam, "--output", output, *words)

    return run


@pytest.fixture
def stranger(trained: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, to be turned against who scores with it."""
    return Path(shutil.copytree(trained, tmp_path / "model"))


def edit(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads((run / "config.json").read_text())
    change(record["config"])
    (run / "config.json").write_text(json.dumps(record))


def refused(done: "subprocess.CompletedProcess[str]", *said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for text in (*said, "differs from the shipped config in more than settings", "nothing of it was run", "--trust"):
        assert text in done.stderr


# --- What scores ------------------------------------------------------------------------------------------------------


def test_a_run_of_the_shipped_configs_scores(trained: Path, score: Score) -> None:
    done = score(trained)
    assert done.returncode == 0, done.stderr
    assert "1 exams scored" in done.stdout + done.stderr


def test_what_is_executed_is_the_shipped_config_with_the_run_s_settings(trained: Path) -> None:
    run = TrainedRun(trained)
    shipped = shipped_config("prostate_alm")
    others = {name for name in shipped if run.config[name] != shipped[name]}
    assert others <= SETTINGS.keys()
    assert {"size", "spacing", "features", "norm", "register"} <= others
    assert run.settings["size"] == [8, 8, 8]
    assert run.settings["score"] == "probability"  # of the preset
    assert run.settings["drop_hbv"] == 0.0


def test_servers_that_a_run_s_settings_name_are_not_asked(stranger: Path, score: Score) -> None:
    servers = {
        "tracking": "mlflow",
        "tracking_uri": "http://127.0.0.1:9",
        "backend": "ray",
        "ray_address": "127.0.0.1:9",
    }
    edit(stranger, lambda config: config.update(servers))
    done = score(stranger)
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1" not in done.stdout + done.stderr + (stranger.parent / "scores" / "report.json").read_text()


@pytest.mark.parametrize("form", FORMS, ids="+".join)
def test_every_shipped_config_is_its_own_and_no_other(form: tuple[str, ...]) -> None:
    config = shipped_config(*form)
    assert differences(config, config) == []
    assert {other[0] for other in FORMS if differences(config, shipped_config(*other)) == []} == {form[0]}
    several = config | {name: value for name, value in shipped_config("multi_gpu").items() if name != "imports"}
    assert differences(several, config) == []  # as torchrun trains it


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "$torch.device('cuda:0')"])
def test_a_device_is_no_program(device: str) -> None:
    shipped = shipped_config("prostate_alm")
    assert differences(shipped | {"device": device}, shipped) == []
    assert len(differences(shipped | {"device": f"{device} or 1"}, shipped)) == 1


# --- What does not ----------------------------------------------------------------------------------------------------

TOUCH = "touch {}"
PATH = "$__import__('pathlib').Path('{}').touch() or 0.0"
ATTACKS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "target": lambda c, m: c["preprocessing"].insert(0, {"_target_": "os.system", "command": TOUCH.format(m)}),
    "computed target": lambda c, m: c["network_def"].update(_target_="$'os.system'", command=TOUCH.format(m)),
    "referred target": lambda c, m: (
        c.update(n="os.system"), c["network_def"].update(_target_="@n", command=TOUCH.format(m)),
    ),
    "target behind _requires_": lambda c, m: c["network_def"].update(
        _requires_=[{"_target_": "$'os.system'", "command": TOUCH.format(m)}]
    ),
    "_requires_ expression": lambda c, m: c["network_def"].update(_requires_=PATH.format(m)),
    "_disabled_ expression": lambda c, m: c["preprocessing"][0].update(_disabled_=PATH.format(m)),
    "to_kwargs": lambda c, m: c["network_def"].update(
        _target_="monai.networks.trt_compiler.trt_compile", to_kwargs={"f": PATH.format(m)}
    ),
    "adaptor": lambda c, _: c["preprocessing"].append(
        {"_target_": "monai.transforms.adaptors.adaptor", "function": "$__import__('os').system", "outputs": "x"}
    ),
    "get_act_layer": lambda c, _: c["network_def"].update(act="$monai.networks.layers.utils.get_act_layer(('x', {}))"),
    "reader by name": lambda c, _: c["preprocessing"].insert(
        0, {"_target_": "LoadImaged", "keys": "t2", "reader": "os.system"}
    ),
    "pickles allowed by a list": lambda c, _: c["preprocessing"].insert(
        0, {"_target_": "LoadImaged", "keys": "t2", "reader": "NumpyReader", "allow_pickle": [False]}
    ),
    "pretrained by a list": lambda c, _: c.update(
        network_def={"_target_": "DenseNet121", "spatial_dims": 3, "in_channels": 3, "pretrained": [False]}
    ),
    "trust by a list": lambda c, m: c.update(
        trained={"_target_": "mri_alm.bundle.TrainedRun", "folder": m, "trust": [False]}
    ),
    "a saver": lambda c, m: c["preprocessing"].append(
        {"_target_": "monai.transforms.WriteFileMappingd", "keys": "t2", "mapping_file_path": m}
    ),
    "another run's secret": lambda c, m: c["preprocessing"].append(
        {"_target_": "mri_alm.runtime.files.write_bytes", "path": m, "content": "$open('salt').read()"}
    ),
    "a server of the sender": lambda c, _: c["train"]["handlers"].append(
        {"_target_": "MLFlowHandler", "tracking_uri": "http://127.0.0.1:9"}
    ),
    "a cluster of the sender": lambda c, _: c["pool"].update(address="127.0.0.1:9"),
    "expression in a setting": lambda c, m: c.update(dropout=PATH.format(m)),
    "expression in a list": lambda c, m: c.update(features=[2, PATH.format(m)]),
    "component as a setting": lambda c, m: c.update(
        norm={"_target_": "os.system", "command": TOUCH.format(m)}
    ),
    "component in a setting": lambda c, m: c.update(
        norm=["instance", {"_target_": "os.system", "command": TOUCH.format(m)}]
    ),
    "macro in a setting": lambda c, _: c.update(loss="%/etc/passwd"),
    "import": lambda c, _: c["imports"].append("$import antigravity"),
    "initialize": lambda c, m: c.update(initialize=[PATH.format(m)]),
    "a name of its own": lambda c, m: c.update(mine=PATH.format(m)),
    "an old name beside the new one": lambda c, m: c.update(bank=PATH.format(m)),
    "an old name in a part": lambda c, m: c["objective_def"].update(acting=PATH.format(m), bank=0),
    "device": lambda c, m: c.update(device=PATH.format(m)),
    "replica": lambda c, m: c.update(replica=PATH.format(m)),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_by_a_run_s_config_is_refused_and_nothing_runs(stranger: Path, score: Score, attack: str) -> None:
    marker = stranger.parent / "ran"
    edit(stranger, lambda config: ATTACKS[attack](config, str(marker)))
    refused(score(stranger))
    assert not marker.exists()
    assert not (stranger.parent / "scores" / "scores.csv").exists()


def test_with_trust_it_is_run_which_shows_that_these_attacks_are_real(stranger: Path, score: Score) -> None:
    marker = stranger.parent / "ran"
    edit(stranger, lambda config: config.update(dropout=PATH.format(marker)))
    done = score(stranger, "--trust")
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    assert "differs from the shipped config at 1 places: trusted" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("size", [8, 8, "8"], "must be three numbers greater than 0"),
        ("size", [1 << 20, 1 << 20, 1 << 20], "together at most 16777216 voxels"),
        ("size", [8.5, 8, 8], "must be whole numbers"),
        ("features", [1024] * 4, "together at most 1048576"),
        ("spacing", [1e-9, 1, 1], "must be from 0.05 to 100 millimetres"),
        ("dropout", 5, "must be a number from 0 to 1"),
        ("features", [8] * 9, "at most 8 numbers"),
        ("register", [False], "must be True or False"),
        ("bfloat16", 1, "must be True or False"),
        ("spacing", "2", "must be three numbers"),
        ("loss", ["bce"], "must be a text"),
        ("norm", ["instance", {"affine": "$1"}], "is an expression, and a setting is a value"),
        ("norm", ["os.system", {}], "must be a normalisation by its name"),
        ("mu0", "now", 'must be a number >= 0 or "auto"'),
        ("zeroed_channels", {"t2": 1}, "must be a list of texts"),
        ("splits", 10**30, "must be a whole number from 1 to 1000"),
    ],
)
def test_a_setting_is_held_against_the_table(name: str, value: Any, said: str) -> None:
    shipped = shipped_config("prostate_alm")
    (line,) = differences(shipped | {name: value}, shipped)
    assert said in line


def test_every_setting_has_a_kind_that_refuses_what_is_none() -> None:
    for name, setting in {**TABLE["cifar"], **TABLE["inference"], **TABLE["prostate_alm"]}.items():
        for value in ({"_target_": "os.system"}, [{"_target_": "os.system"}], [[1]]):
            assert setting.problem(value) != "", (name, value)


def test_the_refusal_says_line_by_line_what_differs(stranger: Path, score: Score) -> None:
    """The README's own customisations, each with the way on."""

    def change(config: dict[str, Any]) -> None:
        config["network_def"] = {"_target_": "early_fusion.EarlyFusion", "features": "@features"}
        config["losses"]["mine"] = {"_target_": "my_loss.Mine"}
        config["preprocessing"][2]["upper"] = 98

    edit(stranger, change)
    refused(
        score(stranger),
        'losses::mine: nothing -> {"_target_": "my_loss.Mine"}',
        'network_def::_target_: "mri_alm.networks.exam_network" -> "early_fusion.EarlyFusion"',
        "preprocessing::2::upper: 99.5 -> 98",
    )


def test_a_run_of_another_version_says_so(score: Score, tmp_path: Path) -> None:
    old = ROOT / "tests" / "bundle" / "made_before" / "bundle"
    refused(score(old), 'mri-alm "0.1.0" wrote it', "preprocessing::0::_target_: ")


def test_what_differs_is_shown_without_its_control_characters_and_bounded(stranger: Path, score: Score) -> None:
    edit(stranger, lambda config: config.update({f"a\x1b[2J{n}": "\x1b]0;x\x07" * 1000 for n in range(50)}))
    done = score(stranger)
    refused(done, "... and 30 more")
    assert "\x1b" not in done.stderr
    assert len(done.stderr) < 10_000


# --- inspect_bundle.py ------------------------------------------------------------------------------------------------


def inspect(python: WarmPython, place: Path) -> "subprocess.CompletedProcess[str]":
    return python.run("pipelines/inspect_bundle.py", place)


def exported(python: WarmPython, run: Path, output: Path) -> Path:
    done = python.run("pipelines/export_bundle.py", "--model", run, "--output", output)
    assert done.returncode == 0, done.stderr
    return output


def test_our_own_configs_are_known_as_such(python: WarmPython, trained: Path, tmp_path: Path) -> None:
    for place in (
        ROOT / "configs",
        trained,
        exported(python, trained, tmp_path / "b"),
        ROOT / "configs/inference.json",
    ):
        done = inspect(python, place)
        assert done.returncode == 0, done.stdout
        assert "mri-alm's own config, settings: " in done.stdout
        assert "names " not in done.stdout
    done = inspect(python, trained)
    assert "size = [8, 8, 8]" in done.stdout


def test_every_change_of_a_bundle_is_shown_with_all_that_it_names(
    python: WarmPython, trained: Path, tmp_path: Path
) -> None:
    bundle = exported(python, trained, tmp_path / "b")
    path = bundle / "configs" / "inference.json"
    sound = json.loads(path.read_text())
    changes: dict[str, dict[str, Any]] = {
        'evaluator::_target_: "SupervisedEvaluator" -> "os.system"': {"evaluator": {"_target_": "os.system"}},
        "network_def::count: 3 -> 4": {"network_def": sound["network_def"] | {"count": 4}},
        "trust: true, which is for the one to say": {"trust": True},
        "trust: [false], must be True or False": {"trust": [False]},
        'run_dir: "$1" is an expression': {"run_dir": "$1"},
        'evil: nothing -> "$1"': {"evil": "$1"},
        "initialize::0: nothing -> null": {"initialize::0": None},  # MONAI reaches inside
        "studies::salt: nothing -> null": {"studies::salt": None},
        '_meta_: nothing -> {"x": "$import this"}': {"_meta_": {"x": "$import this"}},
        "mri_alm.scoring.write_scores.__wrapped__(": {
            "run": [sound["run"][0].replace("scores(", "scores.__wrapped__(")]
        },
        'salt: "known", which is for the one to say': {"salt": "known"},
        'output: "far/x", which is for the one to say': {"output": "far/x"},
        'output_dir: "far/x", which is for the one to say': {"output_dir": "far/x"},
        "allow_outside_paths: true, which is for the one to say": {"allow_outside_paths": True},
    }
    for said, change in changes.items():
        path.write_text(json.dumps(sound | change))
        done = inspect(python, bundle)
        assert done.returncode == 1, said
        assert said in done.stdout
        assert 'trained::_target_: "mri_alm.bundle.TrainedRun"' in done.stdout
        assert "somebody's program" in done.stderr


def test_a_bundle_of_others_is_listed_and_nothing_is_promised(python: WarmPython, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f"$__import__('pathlib').Path({str(marker)!r}).touch()"
    folder = tmp_path / "zoo"
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / "train.yaml").write_text(f'run: ["{text}"]\nx: {{_target_: DenseNet121}}\ny: "%z.json::a"\n')
    (folder / "configs" / "metadata.json").write_text('{"version": "1"}')
    (folder / "scripts").mkdir()
    (folder / "scripts" / "net.py").write_text("")
    (folder / "model.ts").write_text("")
    (folder / "logging.conf").write_text("[x]")
    (folder / "far.json").symlink_to("/etc/passwd")
    done = inspect(python, folder)
    assert done.returncode == 1
    for said in (
        'names    x::_target_: "DenseNet121"', f"names    run::0: {json.dumps(text)}", 'names    y: "%z.json::a"',
        "scripts/net.py: not one", "model.ts: not one", "logging.conf: not one", "a link to /etc/passwd",
    ):  # fmt: skip
        assert said in done.stdout
    assert "metadata.json" not in done.stdout  # data
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "a: !!python/object/apply:os.system ['id']"),
        ("c.json", "{"),
        ("c.json", "[" * 100_000),
        ("c.json", '{"a": ' * 5000 + "1" + "}" * 5000),
        ("c.yaml", "a: &a [1, *a]"),
        (
            "laughs.yaml",
            "a0: &a0 [1]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)),
        ),
    ],
)
def test_what_cannot_be_read_is_a_sentence(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=r"could read|nested too deeply|more than 20000 values"):
        inspect_bundle(tmp_path)


def test_files_that_python_runs_without_being_asked_are_seen(python: WarmPython, trained: Path, tmp_path: Path) -> None:
    """Entry points beside the configs are loaded by `import torch`, as the folder is on Python's path."""
    bundle = exported(python, trained, tmp_path / "b")
    (bundle / "x-1.0.dist-info").mkdir()
    (bundle / "x-1.0.dist-info" / "METADATA").write_text("Name: x")
    (bundle / "x-1.0.dist-info" / "entry_points.txt").write_text("[torch.backends]\nx = cProfile:main")
    (bundle / "run").write_text("")
    done = inspect(python, bundle)
    assert done.returncode == 1
    for name in ("x-1.0.dist-info/METADATA", "x-1.0.dist-info/entry_points.txt", "run"):
        assert f"{name}: not one of mri-alm's own configs" in done.stdout


def test_no_line_of_the_list_can_be_forged(python: WarmPython, tmp_path: Path) -> None:
    line = "\nAll that runs is mri-alm's own"
    (tmp_path / f"a{line}.json").write_text(json.dumps({f"x{line}": {"_target_": "os.system"}}))
    done = inspect(python, tmp_path)
    assert done.returncode == 1
    assert line not in done.stdout


def test_a_folder_without_configs_is_nobody_s(python: WarmPython, tmp_path: Path) -> None:
    done = inspect(python, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds no config and nothing that runs" in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mine": [f"mri_alm.x{n}.y" for n in range(100_000)]}, "config.json: cannot be read (it has 2,"),
        ({"mine": [[]] * 100_000}, "holds more than 20000 values"),
        ({"norm": ["nonsense", {}]}, "no network can be made of these settings"),
        ({"norm": ["group", {"num_groups": 0}]}, "no network can be made of these settings"),
        ({"mine": "mri_alm.bundle.check.__call__ torch.classes.a.b"}, 'mine: nothing -> "mri_alm.bundle.check'),
    ],
)
def test_what_is_too_large_or_odd_is_a_sentence(stranger: Path, change: dict[str, Any], said: str) -> None:
    edit(stranger, lambda config: config.update(change))
    with pytest.raises(InputError, match=re.escape(said)):
        TrainedRun(stranger).ensemble()


def test_lists_in_lists_are_a_sentence(stranger: Path) -> None:
    path = stranger / "config.json"
    path.write_text(path.read_text().replace('"imports":', '"mine": ' + "[" * 600 + "]" * 600 + ', "imports":', 1))
    with pytest.raises(InputError, match="nested too deeply"):
        TrainedRun(stranger)


def test_keys_that_monai_merges_are_seen(tmp_path: Path) -> None:
    for key in ("+_target_", "a::_target_", "a#_target_"):
        (tmp_path / "c.json").write_text(json.dumps({"x": {key: "os.system"}}))
        (found,) = inspect_bundle(tmp_path)
        assert found.calls[0][1] == '"os.system"'


def test_settings_that_differ_are_those_that_were_changed() -> None:
    shipped = shipped_config("prostate_alm")
    config = copy.deepcopy(shipped) | {"splits": 3, "blank": ["t2"]}
    del config["zeroed_channels"], config["drop_hbv"]
    assert differences(config, shipped) == []
    found = settings_in(config, shipped)
    assert (found["splits"], found["zeroed_channels"], found["drop_hbv"]) == (3, ["t2"], 0.0)
    assert "threads" not in found
