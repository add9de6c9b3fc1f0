"""A finished run as a bundle of the model zoo, and what MONAI's own programs make of it."""

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from monai.bundle import ckpt_export, load, onnx_export, verify_metadata, verify_net_in_out
from programs import load_program
from safetensors.torch import load_file, save_file
from shell import WarmPython
from small_cohort import read_rows, write_manifest
from torch import Tensor

import mri_alm
from mri_alm.bundle.inspection import inspect_bundle
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.errors import InputError
from mri_alm.runtime.files import sha256
from mri_alm.scoring.new_exams import operating_point

IMAGES = ("t2", "adc", "hbv")
TESTED, POSITIVE = 12, 4  # exams of the cohort that the run was trained on
TEXT, OBJECT = {"type": "string"}, {"type": "object"}
# What the schema of 2024-07-25 asks for, restated, and two things more: a changelog, as the zoo's own checks want it,
# and what the channels are.
TENSOR = {
    "type": TEXT,
    "format": TEXT,
    "dtype": TEXT,
    "num_channels": {"type": "integer"},
    "spatial_shape": {"type": "array", "items": {"type": ["string", "integer"]}},
    "value_range": {"type": "array", "items": {"type": "number"}},
    "is_patch_data": {"type": "boolean"},
    "channel_def": OBJECT,
}
WORDS = ("schema", "monai_version", "pytorch_version", "numpy_version", "task", "description", "authors", "copyright")
MORE_WORDS = ("data_source", "data_type", "image_classes", "label_classes", "pred_classes", "intended_use")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": [*WORDS, "version", "changelog", "required_packages_version", "network_data_format"],
    "properties": {
        **dict.fromkeys((*WORDS, *MORE_WORDS), TEXT),
        "version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "changelog": {"type": "object", "minProperties": 1, "additionalProperties": TEXT},
        "required_packages_version": {"type": "object", "additionalProperties": TEXT},
        "eval_metrics": OBJECT,
        "supported_apps": OBJECT,
        "references": {"type": "array", "items": TEXT},
        "network_data_format": {
            "type": "object",
            "required": ["inputs", "outputs"],
            "additionalProperties": {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {"type": "object", "required": [*TENSOR], "properties": TENSOR},
            },
        },
    },
}

ZOO_CHECKS = """
import sys
checkout, bundle, exported = sys.argv[1:]
for name in [name for name in sys.modules if name.partition(".")[0] == "mri_alm"]:
    del sys.modules[name]
sys.path = [bundle, *(path for path in sys.path if not path.startswith(checkout))]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
from monai.bundle import ckpt_export, verify_net_in_out
said = {"meta_file": f"{bundle}/configs/metadata.json", "config_file": f"{bundle}/configs/inference.json"}
verify_net_in_out(net_id="network_def", bundle_root=bundle, **said)
ckpt_export(net_id="network_def", bundle_root=bundle, filepath=exported, ckpt_file=f"{bundle}/models/model.pt", **said)
import mri_alm
print(mri_alm.__file__, mri_alm.__version__)
"""


def program(*words: Any) -> int:
    status: int = load_program("export_bundle").main([str(word) for word in words])
    return status


@pytest.fixture(scope="module")
def bundle(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported run; not to be changed."""
    output = tmp_path_factory.mktemp("zoo") / "prostate_dce"
    assert program("--model", trained, "--output", output) == 0
    return output


@pytest.fixture(scope="module")
def expected(trained: Path) -> tuple[Tensor, Tensor]:
    """An image of the trained grid and the mean logit of the run's own members."""
    image = torch.randn(1, 3, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return image, TrainedRun(trained).ensemble()(image).mean(1, keepdim=True)


def options(bundle: Path) -> dict[str, Any]:
    return {
        "config_file": str(bundle / "configs" / "inference.json"),
        "meta_file": str(bundle / "configs" / "metadata.json"),
    }


def test_it_has_the_shape_of_the_zoo_and_passes_the_inspection(bundle: Path) -> None:
    assert sorted(str(p.relative_to(bundle)) for p in bundle.rglob("*") if p.is_file()) == [
        "LICENSE",
        "config.json",
        "configs/inference.json",
        "configs/logging.conf",
        "configs/metadata.json",
        "docs/README.md",
        "models/model.pt",
        *(f"models/split_{k}.safetensors" for k in range(3)),
        "protocol.json",
        "threshold.json",
    ]
    assert [file.name for file in inspect_bundle(bundle) if not file.own] == []


def test_its_card_has_the_sections_of_the_zoo_s_template(bundle: Path) -> None:
    card = (bundle / "docs" / "README.md").read_text()
    assert re.findall(r"^#+ \**(.*?)\**$", card, re.MULTILINE)[1:] == [
        "Authors", "Tags", "Model Description", "Data", "Preprocessing", "Training", "Performance",
        "Additional Usage Steps", "System Configuration", "Limitations", "References",
    ]  # fmt: skip
    assert re.search(
        rf"Test AUC: 0\.\d{{3}} \(95 % interval \d\.\d{{3}} to \d\.\d{{3}}\), {TESTED} exams, {POSITIVE} of them", card
    )
    assert f" are those of Python {sys.version_info.major}.{sys.version_info.minor};" in card


def test_who_shares_a_model_says_what_it_is(trained: Path, tmp_path: Path) -> None:
    terms = tmp_path / "terms.txt"
    terms.write_text("Ask us.")
    words = ["--name", "Prostate of X", "--authors", "A, B", "--version", "1.2.0", "--changelog", "More exams"]
    words += ["--license", terms, "--data-source", "Hospital X."]
    assert program("--model", trained, "--output", tmp_path / "b", *words) == 0
    found = json.loads((tmp_path / "b" / "configs" / "metadata.json").read_text())
    told = {key: found[key] for key in ("name", "authors", "version", "changelog", "data_source", "copyright")}
    assert told == {
        "name": "Prostate of X", "authors": "A, B", "version": "1.2.0", "changelog": {"1.2.0": "More exams"},
        "data_source": "Hospital X.", "copyright": "Copyright (c) A, B; the licence is in the file LICENSE",
    }  # fmt: skip
    assert (tmp_path / "b" / "LICENSE").read_text() == "Ask us."
    card = (tmp_path / "b" / "docs" / "README.md").read_text()
    assert card.startswith("# Prostate of X\n\n### **Authors**\n\nA, B\n")
    assert "\n\nHospital X.\n\nTraining: " in card


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--version", "1.0"], 'version must be three numbers such as 1.0.0, got "1.0"'),
        (["--changelog", "More"], "changelog tells of a version: give --version, too"),
        (["--license", "nowhere.txt"], "There is no licence nowhere.txt. Give a text file"),
    ],
)
def test_a_label_that_cannot_be_is_refused(
    trained: Path, tmp_path: Path, refusal: Callable[..., str], words: list[str], message: str
) -> None:
    assert message in refusal(program, "--model", trained, "--output", tmp_path / "b", *words)
    assert not (tmp_path / "b").exists()


def test_a_bundle_that_carries_the_package_passes_the_zoo_s_checks_without_it(
    trained: Path, tmp_path: Path, python: WarmPython
) -> None:
    """In a process that finds mri_alm in the bundle alone, as the zoo's own checks do: they put it on the path."""
    output, script, exported = tmp_path / "b", tmp_path / "check.py", tmp_path / "model.ts"
    assert program("--model", trained, "--output", output, "--carry-package") == 0
    assert [file.name for file in inspect_bundle(output) if not file.own] == []
    script.write_text(ZOO_CHECKS)
    done = python.run(script, ROOT, output, exported)
    assert done.returncode == 0, done.stderr
    assert exported.is_file()
    place, version = done.stdout.splitlines()[-1].split()
    assert Path(place).parent.samefile(output / "mri_alm")
    assert version == mri_alm.__version__
    assert (output / "mri_alm" / "configs" / "parts" / "prostate.json").is_file(), "where configs_folder() looks first"
    with (output / "mri_alm" / "errors.py").open("a") as file:
        file.write("print('hello')\n")
    (changed,) = [file for file in inspect_bundle(output) if not file.own]
    assert changed.name == "mri_alm/errors.py"


def test_nothing_of_the_cohort_or_the_machine_goes_with_it(bundle: Path, trained: Path, manifest: Path) -> None:
    places = {str(trained), str(manifest), str(manifest.parent), str(Path.home()), str(ROOT)}
    for path in bundle.rglob("*.*"):
        content = path.read_bytes()
        for word in places | {row["study"] for row in read_rows(manifest)} - {"S00"}:
            assert f'"{word}"'.encode() not in content, (path.name, word)
        assert not any(place.encode() in content for place in places), path.name


def test_members_are_the_run_s_own_bit_for_bit(bundle: Path, trained: Path) -> None:
    for k in range(3):
        stored = load_file(bundle / "models" / f"split_{k}.safetensors")
        own = torch.load(trained / f"split_{k}" / "model.pt", weights_only=True)["model"]
        assert stored.keys() == own.keys()
        assert all(torch.equal(stored[key], own[key]) for key in own)


def test_the_metadata_is_verified_by_monai(bundle: Path, tmp_path: Path) -> None:
    """MONAI downloads the schema unless the file is there already."""
    pytest.importorskip("jsonschema", reason="verify_metadata needs jsonschema: pip install -e '.[export]'")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    meta = bundle / "configs" / "metadata.json"
    local = {"filepath": str(tmp_path / "schema.json"), "hash_type": "sha256"}
    local["hash_val"] = sha256(tmp_path / "schema.json")
    verify_metadata(meta_file=str(meta), **local)
    found = json.loads(meta.read_text())
    assert found["network_data_format"]["inputs"]["image"]["spatial_shape"] == [8, 8, 8]
    metrics = found["eval_metrics"]
    low, high = metrics["test_auc_95"]
    assert 0 <= low <= metrics["test_auc"] <= high <= 1
    assert all(value == round(value, 3) for value in (low, high, metrics["test_auc"]))
    assert (metrics["test_exams"], metrics["test_positives"]) == (TESTED, POSITIVE)
    assert "mri-alm" not in found["required_packages_version"], "no index has it"
    assert {"safetensors", "pydicom", "SimpleITK"} <= found["required_packages_version"].keys()
    del found["task"]
    (tmp_path / "wrong.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="'task' is a required property"):
        verify_metadata(meta_file=str(tmp_path / "wrong.json"), **local)


def test_network_takes_and_gives_what_the_metadata_says(bundle: Path) -> None:
    verify_net_in_out(net_id="network_def", device="cpu", extra_forward_args={}, **options(bundle))


def test_monai_loads_it_from_a_folder(bundle: Path, expected: tuple[Tensor, Tensor]) -> None:
    with pytest.warns(
        UserWarning, match="Only proceed if this config is from a source you trust"
    ):  # hence inspect_bundle
        network: Any = load(
            bundle.name, bundle_dir=str(bundle.parent), workflow_type="inference", device="cpu", source="github"
        )
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(expected[0]), expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # MONAI exports TorchScript
def test_torchscript_gives_the_same_logit(bundle: Path, tmp_path: Path, expected: tuple[Tensor, Tensor]) -> None:
    path = str(tmp_path / "model.ts")
    ckpt_export(net_id="network_def", filepath=path, ckpt_file=str(bundle / "models" / "model.pt"), **options(bundle))
    exported = torch.jit.load(path)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(exported(expected[0]), expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # exporters'
def test_onnx_gives_the_same_logit(bundle: Path, tmp_path: Path, expected: tuple[Tensor, Tensor]) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="ONNX needs pip install -e '.[export]'")
    import onnxruntime

    path = str(tmp_path / "model.onnx")
    names = {"input_names": ["image"], "output_names": ["pred"]}  # as in the metadata, and as docs/zoo.md has it
    onnx_export(
        net_id="network_def", filepath=path, ckpt_file=str(bundle / "models" / "model.pt"), converter_kwargs=names,
        **options(bundle),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logit,) = session.run(["pred"], {"image": expected[0].numpy()})
    np.testing.assert_allclose(logit, expected[1].numpy(), rtol=1e-5, atol=1e-6)


def test_score_takes_it_as_a_model(
    bundle: Path, trained: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = load_program("score")
    monkeypatch.setattr("mri_alm.scoring.new_exams.study_picture", lambda *_: b"")
    few = read_rows(manifest)[-3:]
    table = write_manifest(
        tmp_path / "few.csv",
        [
            [
                row["study"],
                *(shutil.copy(manifest.parent / row[c], tmp_path / f"{row['study']}_{c}.nii").name for c in IMAGES),
            ]
            for row in few
        ],
        ("study", *IMAGES),
    )
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    for model, output in ((trained, "a"), (copy, "b")):
        words = ["--model", model, "--input", table, "--output", tmp_path / output, "--threads", 1]
        monkeypatch.setattr(sys, "argv", ["score.py", *map(str, words)])
        assert score.main() == 0
    assert (tmp_path / "a" / "scores.csv").read_bytes() == (tmp_path / "b" / "scores.csv").read_bytes()


def test_calibrating_a_bundle_says_that_nobody_can_check_the_patients(
    bundle: Path, trained: Path, manifest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    operating_point(TrainedRun(bundle), _scores(trained, bundle), manifest, alpha=0.5, eps=0.5)
    assert "does not name its training exams; that yours are others is yours to know" in caplog.text


def _scores(trained: Path, bundle: Path) -> Path:
    folder = bundle.parent / "scores"
    folder.mkdir()
    return Path(shutil.copy(trained / "scores.csv", folder / "scores.csv"))


# --- Refusals -------------------------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_refused(trained: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "old").write_text("")
    assert "is not empty. Give a new folder" in refusal(program, "--model", trained, "--output", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_an_export_that_was_cut_short_can_be_started_again(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "b"
    with monkeypatch.context() as broken:
        broken.setattr("mri_alm.bundle.export._metadata", lambda *_: pytest.fail("cut short"))
        with pytest.raises(pytest.fail.Exception):
            program("--model", trained, "--output", output)
    assert list(tmp_path.iterdir()) == []
    before = os.umask(0)
    try:
        assert program("--model", trained, "--output", output) == 0
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (output, *output.rglob("*"))}
    assert {path.name for path, mode in modes.items() if mode != (0o755 if path.is_dir() else 0o644)} == set()


@pytest.mark.parametrize("damage", ["changed", "cut", "header", "other network"])
def test_a_damaged_or_exchanged_member_is_refused(bundle: Path, tmp_path: Path, damage: str) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "b"))
    path, digests = copy / "models" / "split_0.safetensors", json.loads((copy / "threshold.json").read_text())
    content = path.read_bytes()
    if damage == "other network":
        save_file({"weight": torch.zeros(1)}, path)
    else:
        long = b"\xff" * 7 + b"\x7f" + content[8:]  # a header of 2^63 bytes
        path.write_bytes({"changed": content[:-1] + b"x", "cut": content[:100], "header": long}[damage])
    with pytest.raises(InputError, match="is not the checkpoint that the threshold was set for"):
        TrainedRun(copy).ensemble()
    if damage == "changed":
        return
    digests["checkpoints"]["split_0"] = sha256(path)  # the attacker knows how to compute it, too
    (copy / "threshold.json").write_text(json.dumps(digests))
    message = "weights of another network" if damage == "other network" else "cannot be read as safetensors"
    with pytest.raises(InputError, match=message):
        TrainedRun(copy).ensemble()


def test_a_checkpoint_outside_the_folder_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "b"))
    record = json.loads((copy / "threshold.json").read_text())
    record["checkpoints"] = {"../../other": "0"}
    (copy / "threshold.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"names a checkpoint outside the folder: \.\./\.\./other\."):
        TrainedRun(copy)
