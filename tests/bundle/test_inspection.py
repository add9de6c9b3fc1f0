"""What a config would run is found, and refused where it is not in the allow-list, without anything being run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from monai.bundle import ConfigParser
from programs import load_program

from mri_alm.bundle.inspection import Finding, inspect_bundle, inspect_config, refuse
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.errors import InputError

BOOM: list[str] = []  # a config that is evaluated fills it
OWN = sorted((ROOT / "configs").rglob("*.json"))


def problems(config: Any) -> list[str]:
    return [f"{f.id}: {f.problem}" for f in inspect_config(config, "c.json") if f.problem]


def program(*words: Any) -> int:
    status: int = load_program("inspect_bundle").main([str(word) for word in words])
    return status


# --- What must pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_every_committed_config_passes(path: Path) -> None:
    found = inspect_bundle(path)
    assert [finding for finding in found if finding.problem] == []
    text = path.read_text()
    assert (len(found) > 0) == any(mark in text for mark in ("_target_", '"$', '"%'))


def test_the_folder_of_configs_is_wholly_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Macros of our configs start at the repository, so the folder is taken as part of it."""
    found = [finding for path in OWN for finding in inspect_bundle(path)]
    targets = [text for path in OWN for text in strings_under(json.loads(path.read_text()), "_target_")]
    seen = [finding.text for finding in found if finding.kind == "target"]
    assert set(targets) == set(seen)
    expressions = {text for path in OWN for text in all_strings(json.loads(path.read_text())) if text[:1] == "$"}
    judged = {f.text.replace("::", "#") for f in found if f.kind == "expression"}
    judged |= {f"${f.text}" for f in found if f.kind == "import"}
    assert {text.replace("::", "#") for text in expressions} == judged


def all_strings(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return [text for child in children for text in all_strings(child)]


def strings_under(node: Any, key: str) -> list[str]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    own = [node[key]] if isinstance(node, dict) and key in node else []
    return own + [text for child in children for text in strings_under(child, key)]


def test_a_run_of_our_own_passes_as_a_folder_and_as_a_model(trained: Path) -> None:
    assert [str(finding) for finding in inspect_bundle(trained) if finding.problem] == []
    assert TrainedRun(trained).settings["loss"] == "bce"


@pytest.mark.parametrize(
    "value",
    [
        "$torch.nn.Linear(3, 4)",
        "$monai.transforms.Compose([@a, @b])",
        "$@a if @b else {'k': -@c[0], **@d}",
        '$f"{len(@a)}_x"',
        "$min(max(1, @a), 3) + round(@b * 2.5)",
        "$torch.tensor([1, 2], dtype=@a.dtype)",
        "no expression: os.system",
        "$'plain text with eval(1) in it'",
    ],
)
def test_what_is_harmless_passes(value: str) -> None:
    assert problems({"a": 1, "x": value}) == []


def test_a_reader_that_is_named_passes() -> None:
    config = {"_target_": "LoadImaged", "keys": "image", "reader": "ITKReader"}
    assert problems({"x": config, "y": config | {"reader": ["NibabelReader", "ITKReader"]}}) == []


@pytest.mark.parametrize("value", [False, None])
def test_networks_without_downloads_pass(value: bool | None) -> None:
    assert problems({"x": {"_target_": "DenseNet121", "spatial_dims": 3, "pretrained": value}}) == []
    assert problems({"x": {"_target_": "EfficientNetBN", "model_name": "efficientnet-b0", "pretrained": value}}) == []
    assert problems({"x": {"_target_": "resnet50"}, "y": {"_target_": "HoVerNet", "pretrained_url": None}}) == []
    assert problems({"x": {"_target_": "PersistentDataset", "data": [], "transform": [], "cache_dir": "c"}}) == []


# --- What must not ---------------------------------------------------------------------------------------------------

EXPRESSIONS = [
    "__import__('os').system('id')",
    "eval('1')",
    "exec('1')",
    "compile('1', '', 'eval')",
    "open('/etc/passwd').read()",
    "getattr(torch, 'load')('x')",
    "setattr(torch, 'x', 1)",
    "globals()",
    "vars(torch)",
    "type('X', (), {})",
    "print(1)",
    "input()",
    "breakpoint()",
    "os.system('id')",
    "os.popen('id')",
    "os.path.os.system('id')",
    "os.environ",
    "subprocess.run('id')",
    "sys.modules",
    # through what is allowed
    "torch.load('x.pt')",
    "torch.hub.load('a/b', 'c')",
    "torch.jit.load('x.ts')",
    "torch.package.PackageImporter('x')",
    "torch.ops.load_library('x.so')",
    "torch.classes.load_library('x.so')",
    "torch.utils.cpp_extension.load('x', ['x.cpp'])",
    "torch.save(@a, '/root/.bashrc')",
    "torch.from_file('/etc/passwd', shared=True)",
    "torch.os.system('id')",
    "torch.serialization.pickle.loads(@a)",
    "torch.nn.modules.module.torch.load('x')",
    "torch.nn.modules.module.os.system('id')",
    "torch.utils.data.datapipes.iter.FileOpener(['/etc/passwd'])",
    "torch.utils.data.graph.pickle.loads(@a)",
    "torch.nn",
    "torch",
    "os",
    "monai.foo.os.system('id')",
    "monai.bundle.run(config_file='x')",
    "monai.bundle.load('x')",
    "monai.bundle.download('x')",
    "monai.bundle.ConfigParser({'a': '$1'})",
    "monai.bundle.scripts.os.system('id')",
    "monai.utils.optional_import('os')[0].system('id')",
    "monai.utils.instantiate('os.system', 'default', command='id')",
    "monai.utils.module.import_module('os')",
    "monai.transforms.utils.optional_import('os')",
    "monai.networks.nets.flexible_unet.locate('os.system')",
    "monai.networks.nets.flexible_unet.FLEXUNET_BACKBONE.register_class('os')",
    "monai.networks.nets.flexible_unet.FlexUNetEncoderRegister.register_class(@a, 'os')",
    "monai.networks.utils.convert_to_torchscript(@a, 'x')",
    "monai.transforms.LoadImage('os.system')",
    "monai.transforms.LoadImage",
    "monai.transforms.LoadImage(reader='subprocess.run')",
    "monai.transforms.TorchVision('functional')",
    "monai.networks.nets.resnet50(True)",
    "monai.networks.nets.resnet50('/root/x.pt')",
    "monai.networks.nets.resnet50(pretrained='/root/x.pt')",
    "monai.networks.nets.densenet121(3, 1, 2, True)",
    "monai.networks.nets.HoVerNet('fast', 3, 5, 'batch', pretrained_url='http://evil/x')",
    "monai.networks.nets.EfficientNetBN('efficientnet-b0')",
    "monai.networks.nets.resnet.get_pretrained_resnet_medicalnet(50)",
    "monai.data.CSVDataset('http://evil/x')",
    "@a(pretrained=True)",
    "monai.inferers.PatchInferer(@a, 'os.system')",
    "monai.losses.PerceptualLoss(3, 'radimagenet_resnet50')",
    "monai.apps.utils.extractall('x.zip', '/')",
    "monai.auto3dseg.algo_from_pickle('x.pkl')",
    "monai.data.LMDBDataset(@a)",
    "monai.data.NumpyReader(allow_pickle=True)",
    "monai.fl.client.MonaiAlgo()",
    "mri_alm.runtime.files.write_bytes(@a, @b)",
    "mri_alm.bundle.checkpoints.load_tensors('x')",
    "mri_alm.bundle.trained_run.TrainedRun('x', trust=True)",
    "mri_alm.bundle.config.sys.modules",
    "mri_alm.bundle.inspection.RULES",
    "np.load('x.npy', allow_pickle=True)",
    "numpy.lib.npyio.os.system('id')",
    "joblib.load('x')",
    # around names
    "().__class__.__bases__[0].__subclasses__()",
    "@a.__class__",
    "@a.__globals__['os']",
    "@a.forward.__func__.__globals__",
    "@a.parser.globals['monai']",
    "@a.system('id')",
    "@imports::0.system('id')",
    "@a.gi_frame.f_builtins",
    "(x for x in [1]).gi_frame.f_back.f_builtins['eval']",
    "[x for x in [1]]",
    "{x: 1 for x in [1]}",
    "(lambda: 1)()",
    "(lambda torch: torch.load)(@a)",
    "(x := torch).load",
    "[].append.__self__",
    "'{0.__class__}'.format(@a)",
    "'%s' % @a.__class__",
    "f'{@a.__class__}'",
    'f"{(lambda: 1)()}"',
    "str.format('{0}', @a)",
    "@a['x']('os.system')",
    "@a(*['os.system'])",
    "@a(**{'reader': 'os.system'})",
    "@a(reader='os.system')",
    "@a(reader=@b)",
    "@a(weights_only=False)",
    "@a(trust=1)",
    "__local_refs",
    "__local_refs.values()",
    "__builtins__",
    "ｅval('1')",
    "await @a",
    "(yield 1)",
    "b'bytes'",
    "1;os.system('id')",
    "1\nos.system('id')",
    "a b c",
    "(" * 300 + ")" * 300,
    "'@or' os.system('id') '@or'",
]


@pytest.mark.parametrize("text", EXPRESSIONS, ids=lambda text: text[:60])
def test_hostile_expressions_are_refused(text: str) -> None:
    config = {"imports": ["$import os"], "a": 1, "b": 2, "or": 3, "x": f"${text}"}
    assert [line.partition(":")[0] for line in problems(config)] == ["x"]


IMPORTS = [
    "import subprocess",
    "import sys",
    "import evil",
    "import evil as torch",
    "import numpy as np",
    "import monai.bundle",
    "from os import system",
    "from os import *",
    "from monai.utils import optional_import",
    "from monai.bundle import load as len",
    "from torch import hub",
    "from torch import load",
    "from . import evil",
    "import os, evil",
    "import os.path, subprocess",
    "import torch._C",
    "import mri_alm.runtime.files",
    "import builtins",
    "import os; os.system('id')" + "\nimport sys",
]


@pytest.mark.parametrize("text", IMPORTS)
def test_hostile_imports_are_refused(text: str) -> None:
    found = problems({"imports": [f"${text}"]})
    if text.startswith("import os; "):  # MONAI takes the first statement and drops the rest
        assert found == []
    else:
        assert len(found) >= 1


def test_an_alias_does_not_hide_what_it_stands_for() -> None:
    harmless = ["$import os as torch", "$from monai import utils as len", "$import torch as int"]
    assert problems({"imports": harmless}) == []
    for text in ("torch.system('id')", "len.optional_import('os')", "int.load('x')"):
        assert len(problems({"imports": harmless, "x": f"${text}"})) == 1, text
    assert problems({"imports": ["$from monai.transforms import Compose as C"], "x": "$C([])"}) == []


TARGETS: list[dict[str, Any]] = [
    {"_target_": "builtins.eval", "source": "1"},
    {"_target_": "eval"},
    {"_target_": "os.system", "command": "id"},
    {"_target_": "posix.system", "command": "id"},
    {"_target_": "subprocess.Popen", "args": "id"},
    {"_target_": "torch.load", "f": "x.pt"},
    {"_target_": "torch.hub.load", "repo_or_dir": "a/b"},
    {"_target_": "torch.utils.data.datapipes.iter.FileOpener"},
    {"_target_": "download"},
    {"_target_": "optional_import", "module": "os"},
    {"_target_": "monai.utils.module.optional_import", "module": "os"},
    {"_target_": "monai.bundle.ConfigWorkflow", "config_file": "x"},
    {"_target_": "monai.networks.nets.FlexibleUNet.x"},
    {"_target_": "LoadImaged", "reader": "os.system"},
    {"_target_": "LoadImaged", "reader": "$@a"},
    {"_target_": "LoadImaged", "reader": ["ITKReader", "pdb.set_trace"]},
    {"_target_": "LoadImage", "_mode_": "callable"},
    {"_target_": "SaveImaged", "writer": "os.system"},
    {"_target_": "PatchInferer", "merger_cls": "os.system"},
    {"_target_": "HoVerNet", "pretrained_url": "http://evil/x"},
    {"_target_": "HoVerNet", "_mode_": "callable"},
    {"_target_": "resnet50", "pretrained": "/root/x.pt"},
    {"_target_": "resnet50", "_mode_": "callable"},
    {"_target_": "DenseNet121", "pretrained": True},
    {"_target_": "EfficientNetBN", "model_name": "efficientnet-b0"},  # its default is to download
    {"_target_": "MILModel", "num_classes": 1},
    {"_target_": "TorchVisionFCModel", "weights": "DEFAULT"},
    {"_target_": "Transchex"},
    {"_target_": "CSVDataset", "src": "http://evil/x"},
    {"_target_": "LogfileHandler", "output_dir": "/etc"},
    {"_target_": "ClearMLHandler", "output_uri": "http://evil/x"},
    {"_target_": "PersistentDataset", "weights_only": False},
    {"_target_": "PersistentDataset", "_mode_": "callable"},
    {"_target_": "NumpyReader", "allow_pickle": True},
    {"_target_": "LMDBDataset"},
    {"_target_": "TorchVisiond", "name": "functional"},
    {"_target_": "PerceptualLoss"},
    {"_target_": "MLFlowHandler", "tracking_uri": "http://example.org"},
    {"_target_": "mri_alm.runtime.files.write_bytes"},
    {"_target_": "mri_alm.bundle.trained_run.TrainedRun", "folder": "x", "trust": True},
    {"_target_": "Compose", "_mode_": "debug"},
    {"_target_": "Compose", "_mode_": "$'debug'"},
    {"_target_": "%c.json::name"},
    {"_target_": "%name"},
    {"_target_": "$os.system", "command": "id"},
    {"_target_": " os.system"},
    {"_target_": ""},
    {"_target_": "../evil.f"},
    {"_target_": "Compose", "_requires_": "$os.system('id')"},
    {"_target_": "Compose", "_disabled_": "$os.system('id')"},
    {"_target_": "Compose", "_desc_": "$os.system('id')"},
    {"+_target_": "os.system"},
    {"a::_target_": "os.system"},
    {"a#_target_": "os.system"},
]


@pytest.mark.parametrize("node", TARGETS, ids=str)
def test_hostile_components_are_refused(node: dict[str, Any]) -> None:
    assert len(problems({"list": [{"deep": node}]})) >= 1
    assert len(problems({"_meta_": node})) >= 1


# --- Files and folders ----------------------------------------------------------------------------------------------


def bundle(folder: Path, text: str, name: str = "configs/inference.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


def refused(folder: Path) -> list[Finding]:
    return [finding for finding in inspect_bundle(folder) if finding.problem]


def test_macros_are_followed_and_may_not_leave_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text('{"a": "$1"}')
    inside = bundle(tmp_path / "b", '{"a": "%parts/p.yaml::x", "c": "%a"}')
    bundle(inside, "x:\n  y: $os.system('id')\n", "parts/p.yaml")
    (finding,) = refused(inside)
    assert (Path(finding.file).name, finding.id, finding.text) == ("p.yaml", "x::y", "$os.system('id')")
    bundle(inside, "x: 1\n", "parts/p.yaml")
    assert refused(inside) == []
    for macro in ("%../outside.json::a", f"%{outside}::a", "%parts/link.json", "%nowhere.json", "%####::a"):
        (inside / "parts" / "link.json").unlink(missing_ok=True)
        if "link" in macro:
            (inside / "parts" / "link.json").symlink_to(outside)
        bundle(inside, json.dumps({"a": macro}))
        assert any(finding.kind == "macro" and finding.text == macro for finding in refused(inside)), macro


def test_a_link_to_a_folder_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    inside = bundle(tmp_path / "b", "{}")
    (inside / "models").symlink_to(tmp_path / "far")
    assert [finding.problem for finding in refused(inside)] == ["is a link out of the folder"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("torch.py", "is code"),
        ("mri_alm/__init__.py", "is code"),
        ("scripts/net.pyc", "is code"),
        ("json.so", "is code"),
        ("models/x.pkl", "is a pickle"),
        ("configs/logging.conf", "configures logging"),
    ],
)
def test_code_pickles_and_logging_beside_the_configs_are_refused(tmp_path: Path, name: str, problem: str) -> None:
    (finding,) = refused(bundle(bundle(tmp_path, "{}"), "[x]", name))
    assert finding.problem.startswith(problem)


def test_our_own_logging_may_stand_there(tmp_path: Path) -> None:
    text = (ROOT / "configs" / "logging.conf").read_text()
    assert refused(bundle(bundle(tmp_path, "{}"), text, "configs/logging.conf")) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "a: !!python/object/apply:os.system ['id']"),
        ("c.yml", "a: !!python/name:os.system"),
        ("c.yaml", "? [1, 2]\n: 3"),
        ("c.json", '{"a": 1, "a": "$os.system(1)"}'),
        ("c.json", "{"),
        ("c.json", "[" * 100_000),
        ("c.json", '{"a": ' * 5000 + "1" + "}" * 5000),
        ("C.JSON", '{"x": "$os.system(1)"}'),
        ("c.yaml", "a: &a [1, *a]"),
        (
            "laughs.yaml",
            "a0: &a0 [1]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)),
        ),
    ],
)
def test_files_that_cannot_be_judged_are_refused(tmp_path: Path, name: str, text: str) -> None:
    assert len(refused(bundle(tmp_path, text, name))) >= 1


def test_nothing_is_evaluated(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f"$__import__('pathlib').Path({str(marker)!r}).touch()"
    folder = bundle(tmp_path / "b", json.dumps({"run": [text], "x": {"_target_": text}}))
    assert len(refused(folder)) >= 2
    assert not marker.exists()
    parser = ConfigParser({"run": text})  # the text would do it
    parser.get_parsed_content("run")
    assert marker.exists()


def test_a_strangers_run_is_refused_before_its_config_is_parsed(trained: Path, tmp_path: Path) -> None:
    marker, run = tmp_path / "ran", tmp_path / "run"
    run.mkdir()
    for name in ("config.json", "threshold.json"):
        (run / name).write_bytes((trained / name).read_bytes())
    record = json.loads((run / "config.json").read_text())
    record["config"]["network_def"]["dropout"] = f"$__import__('pathlib').Path({str(marker)!r}).touch() or 0.0"
    (run / "config.json").write_text(json.dumps(record))
    with pytest.raises(
        InputError, match=r"would run what is not in the allow-list; nothing was run:\nREFUSED .*dropout"
    ):
        TrainedRun(run)
    assert not marker.exists()
    TrainedRun(run, trust=True).network()
    assert marker.exists()


def test_the_program_lists_refuses_and_trusts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    assert program("configs/inference.json") == 0
    out = capsys.readouterr().out
    assert "configs/inference.json  trained  target  mri_alm.bundle.TrainedRun" in out
    assert out.splitlines()[-1].endswith(" 0 refused.")
    hostile = bundle(tmp_path, json.dumps({"a": "$os.system('\x1b[2J')", "b": {"_target_": "torch.load"}}))
    assert program(hostile) == 1
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out
    assert "REFUSED" in shown.out
    assert "b  target  torch.load  <- torch.load (torch.serialization.load) is not in the allow-list" in shown.out
    assert "--trust" in shown.err
    assert program(hostile, "--trust") == 0
    assert "There is no nowhere." in refusal(program, "nowhere")


def test_the_message_of_a_refusal_is_bounded() -> None:
    findings = [Finding("f", str(n), "target", "t", problem="bad") for n in range(50)]
    with pytest.raises(InputError, match=r"\n\.\.\. and 30 more\n"):
        refuse(findings, Path(os.devnull))
    refuse([Finding("f", "x", "target", "t")], Path(os.devnull))
