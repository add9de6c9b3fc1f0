"""Files that never end, wait for ever or hold something else: a sentence that names the file, and no traceback."""

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from evaluation_inputs import labels, write_rows
from programs import load_program
from safetensors.torch import save
from shell import WarmPython
from torch import nn

from mri_alm.bundle.checkpoints import load_tensors, save_tensors
from mri_alm.bundle.inspection import inspect_bundle
from mri_alm.bundle.run_folder import read_run
from mri_alm.bundle.trained_run import TrainedRun, load_member
from mri_alm.cohort.layouts import find_sources
from mri_alm.cohort.rules import CohortRules, load_cohort_rules
from mri_alm.errors import InputError
from mri_alm.evaluation.data import refuse_another_model
from mri_alm.imaging.dicom_files import find_studies, read_dicom
from mri_alm.imaging.image_file import read_image
from mri_alm.runtime.files import DamagedFileError, no_files, read_file, read_json, sha256, unusable, walk
from mri_alm.runtime.pseudonyms import key_secret
from mri_alm.runtime.tables import read_table


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """What hangs fails after two minutes."""

    def late(*_: object) -> None:
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- What is no file ------------------------------------------------------------------------------------------------


def special(folder: Path, name: str, kind: str) -> Path:
    path = folder / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a pipe":
        os.mkfifo(folder / "pipe")
        path.symlink_to(folder / "pipe")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


WHAT = {"pipe": "a named pipe", "link to a pipe": "a named pipe", "device": "a device", "folder": "a folder"}
READERS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "json": ("x.json", read_json, "cannot be read (it is {}, no file)"),
    "rules": ("x.json", load_cohort_rules, "cannot be read (it is {}, no file)"),
    "table": ("x.csv", read_table, "cannot be read (it is {}, no file)"),
    "digest": ("x.csv", sha256, "it is {}, no file"),
    "checkpoint": ("x.pt", load_tensors, "is no checkpoint that can be read (it is {}, no file)"),
    "safetensors": (
        "x.safetensors",
        lambda p: load_member(nn.Linear(1, 1), p),
        "holds no weights that can be read (it is {}, no file)",
    ),
    "secret": ("salt", key_secret, "holds no secret for study keys"),
    "DICOM": ("x.dcm", read_dicom, "it is {}, no file"),
    "NIfTI": ("x.nii", lambda p: read_image(p, "t2"), "the .nii file is no image that can be read"),
    "MHA": ("x.mha", lambda p: read_image(p, "t2"), "the .mha file is no image that can be read"),
}


@pytest.mark.parametrize("kind", WHAT)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, reader: str, kind: str) -> None:
    name, read, message = READERS[reader]
    path = special(tmp_path, name, kind)
    with pytest.raises((InputError, OSError), match=re.escape(message.format(WHAT[kind]))):
        read(path)


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("x.json")
        with pytest.raises(InputError, match=r"x\.json: cannot be read \(No such device or address\)"):
            read_json(Path("x.json"))
        assert no_files(tmp_path) == {tmp_path / "x.json": "a socket, no file"}


def test_an_inspected_config_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x\.json cannot be read \(it is a named pipe, no file\)"):
        inspect_bundle(special(tmp_path, "x.json", "pipe"))
    (beside,) = inspect_bundle(tmp_path)
    assert beside.calls == (("file", "a pipe, socket or device, which may hang"),)
    assert not beside.own


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, and at most 4 are read"):
        read_file(path, 4)
    with pytest.raises(OSError, match="it grows while it is read"):
        read_file(Path("/proc/self/stat"), 1000)
    os.truncate(path, 1 << 40)  # a terabyte, of which the disk holds nothing
    for read in (read_json, read_table):
        with pytest.raises(InputError, match=r"cannot be read \(it has 1,099,511,627,776 bytes, and at most "):
            read(path)


def test_what_a_folder_holds_beside_files_is_named_where_it_would_be_missed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pipe = special(tmp_path / "in", "P_t2.nii", "pipe")
    (tmp_path / "in" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "in" / "1_1_t2w.mha").write_bytes(b"x")
    found = {pipe: "a named pipe, no file", pipe.with_name("gone"): "a link that leads nowhere, no file"}
    assert no_files(tmp_path / "in") == found
    assert list(walk(tmp_path / "in")) == [tmp_path / "in" / "1_1_t2w.mha"]
    assert "it is a named pipe" in unusable(pipe)
    assert found.items() <= find_sources(tmp_path / "in", CohortRules(layout="picai")).outside.items()


def test_a_lost_slice_of_a_dicom_exam_is_one_of_its_failed_files(tmp_path: Path) -> None:
    (tmp_path / "exam" / "series").mkdir(parents=True)
    pipe = special(tmp_path / "exam" / "series", "IM1", "pipe")
    (tmp_path / "exam" / "series" / "IM2").symlink_to(tmp_path / "nowhere")
    (study,) = find_studies(tmp_path)
    assert study.failed == {pipe: "a named pipe, no file", pipe.with_name("IM2"): "a link that leads nowhere, no file"}


# --- JSON -----------------------------------------------------------------------------------------------------------

GOOD = b'{"a": [1, 2.5, "\\u00e4\\ud83d\\ude00", null, true]}'
DAMAGED = {
    "no UTF-8": b'{"a": "\xff"}',
    "zero bytes": b'{"a": 1}\0\0',
    "lone surrogate": b'{"a": "\\ud800"}',
    "nested": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long number": b'{"a": ' + b"7" * 5000 + b"}",
    "number of 20 digits": b'{"a": 12345678901234567890}',
    "empty": b"",
    "a list": b"[1]",
    "a key twice": b'{"a": 1, "a": 2}',
    "cut short": b'{"a": [1, 2',
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "NaN": b'{"a": NaN}',
    "beyond": b'{"a": 1e999}',
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_json_is_a_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(DAMAGED[kind])
    with pytest.raises(DamagedFileError, match=f"^{re.escape(str(path))} is damaged \\(") as error:
        read_json(path)
    assert len(str(error.value)) < len(str(path)) + 200
    assert "\n" not in str(error.value)


def test_good_json_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(GOOD)
    assert read_json(path) == {"a": [1, 2.5, "ä😀", None, True]}
    path.write_text(json.dumps({"a": [10**17, -(10**17), 1e308, "\udcff"]}))  # a name that is not in UTF-8
    assert read_json(path) == {"a": [10**17, -(10**17), 1e308, "\udcff"]}


FILES = ("config.json", "threshold.json", "protocol.json", "metrics.json", "split_0/split.json")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_run_with_damaged_json_is_refused_by_the_file_s_name(
    trained: Path, tmp_path: Path, file: str, kind: str
) -> None:
    run = copied(trained, tmp_path)
    (run / file).write_bytes(DAMAGED[kind])
    with pytest.raises(InputError, match=re.escape(f"{run / file} is damaged (")):
        read_run(run)
    if file in FILES[:3]:
        with pytest.raises(InputError, match=re.escape(f"{run / file} is damaged (")):
            TrainedRun(run)


def copied(run: Path, folder: Path) -> Path:
    """The files of a run but for its weights, which these tests do not read."""
    return Path(shutil.copytree(run, folder / "run", ignore=shutil.ignore_patterns("*.pt", "events*", "*.html")))


WRONG: tuple[Any, ...] = (None, [], {}, "text", True, [1], -1)


def places(content: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every object, list and value, but of a list to the first alone."""
    inner = (
        content.items() if isinstance(content, dict) else enumerate(content[:1] if isinstance(content, list) else ())
    )
    for key, value in inner:
        yield (*way, key)
        yield from places(value, (*way, key))


@pytest.mark.parametrize("file", FILES)
def test_a_field_of_another_type_is_read_as_right_or_refused_in_a_sentence(
    trained: Path, tmp_path: Path, file: str
) -> None:
    """Every field in turn: nothing but an :class:`InputError` that names the file leaves either reader."""
    run = copied(trained, tmp_path)
    good = json.loads((run / file).read_text())
    refused: list[str] = []
    for way in places({key: value for key, value in good.items() if key != "config"} | {"config": {}}):
        for wrong in (*WRONG, ...):
            content = json.loads(json.dumps(good))
            place = content
            for key in way[:-1]:
                place = place[key]
            if way[-1] not in place or (way == ("config",) and wrong == good.get("config")):
                continue
            place[way[-1]] = wrong
            if wrong is ...:
                del place[way[-1]]
            (run / file).write_text(json.dumps(content))
            try:
                record = read_run(run)
                record.point.decide(0.5)
            except InputError as error:
                refused.append(str(error))
    assert len(refused) > 20
    assert [text for text in refused if str(run / file) not in text] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": []}, "config.json: settings must be an object, found []"),
        ({"versions": {"torch": 2}}, "config.json, versions: torch must be a text of 1 to 300 printable characters"),
        ({"versions": {"torch": "\x1b[2J"}}, "config.json, versions: torch must be a text"),
        ({"config": None}, "config.json: config must be an object, found null"),
    ],
)
def test_a_config_of_another_form_is_refused(
    trained: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run = copied(trained, tmp_path)
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(record | change))
    for read in (read_run, TrainedRun):
        with pytest.raises(InputError, match=re.escape(message)):
            read(run)


def test_settings_that_a_report_needs_must_be_there(trained: Path, tmp_path: Path) -> None:
    """Scoring takes them from the config itself."""
    run = copied(trained, tmp_path)
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(record | {"settings": {"spacing": [1, 1, 1]}}))
    with pytest.raises(InputError, match=r"config\.json, settings: size must be there, found no such field"):
        read_run(run)
    assert TrainedRun(run).settings["size"] == [8, 8, 8]


@pytest.mark.parametrize(("name", "value"), [("spacing", "1 1 1"), ("loss", "\x1b]0;x\x07"), ("validation", [1])])
def test_a_setting_that_no_training_has_is_refused(trained: Path, tmp_path: Path, name: str, value: object) -> None:
    run = copied(trained, tmp_path)
    record = json.loads((run / "config.json").read_text())
    record["settings"][name] = value
    (run / "config.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=rf"config\.json, settings: {name} must be "):
        read_run(run)


def test_the_report_beside_calibration_scores_is_read_by_its_fields(tmp_path: Path) -> None:
    for content in ({"model": [1]}, {"model": {"checkpoints_sha256": "x"}}, {}):
        (tmp_path / "report.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match=r"report\.json.*: (model|checkpoints_sha256) must be an object"):
            refuse_another_model(tmp_path / "scores.csv", tmp_path, {})


# --- Tables and weights ---------------------------------------------------------------------------------------------


def test_a_cell_longer_than_any_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("study,label\nS1," + "x" * 200_000 + "\n")
    message = f"{path}: row 1 or the one after it cannot be read (field larger than field limit (131072))"
    with pytest.raises(InputError, match=re.escape(message)):
        read_table(path)


class Net(nn.Module):
    """One layer, and a buffer with infinity that is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


RIGHT = Net().state_dict()
ODD: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "holds no weights: a list where they belong"),
    "nothing": (None, "holds no weights: a NoneType where they belong"),
    "a tensor": (torch.zeros(3), "holds no weights: a Tensor where they belong"),
    "keys that are no text": (RIGHT | {7: torch.zeros(1)}, "7 is none of its weights"),
    "one too many": (RIGHT | {"more": torch.zeros(1)}, "more is none of its weights"),
    "one missing": ({"mask": RIGHT["mask"]}, "layer.weight is missing"),
    "a text": (RIGHT | {"layer.bias": "x"}, "layer.bias is a str, no tensor"),
    "nested": (RIGHT | {"layer.bias": {"x": torch.zeros(1)}}, "layer.bias is a dict, no tensor"),
    "shape": (RIGHT | {"layer.bias": torch.zeros(2)}, "layer.bias is float32 (2,) instead of float32 (1,)"),
    "kind": (RIGHT | {"layer.bias": torch.zeros(1).double()}, "layer.bias is float64 (1,) instead of float32 (1,)"),
    "complex": (RIGHT | {"layer.bias": torch.zeros(1) * 1j}, "layer.bias is complex64 (1,) instead of float32 (1,)"),
    "sparse": (
        RIGHT | {"layer.bias": torch.zeros(1).to_sparse()},
        "its archive names torch._utils._rebuild_sparse_tensor",
    ),
    "no number": (RIGHT | {"layer.bias": torch.tensor([torch.nan])}, "layer.bias holds values that are no finite"),
    "infinite": (RIGHT | {"layer.bias": torch.tensor([torch.inf])}, "layer.bias holds values that are no finite"),
    "mask": (RIGHT | {"mask": torch.tensor([torch.nan, -torch.inf])}, "mask holds values that are no finite"),
}


@pytest.mark.parametrize("kind", ODD)
def test_weights_that_are_none_are_refused(tmp_path: Path, kind: str) -> None:
    state, message = ODD[kind]
    save_tensors(tmp_path / "model.pt", {"model": state})
    with pytest.raises(InputError, match=re.escape(message)) as error:
        load_member(Net(), tmp_path / "model.pt")
    assert str(error.value).startswith(str(tmp_path / "model.pt"))
    if isinstance(state, dict) and all(
        isinstance(name, str) and isinstance(one, torch.Tensor) and one.layout == torch.strided
        for name, one in state.items()
    ):
        (tmp_path / "x.safetensors").write_bytes(save(state))
        with pytest.raises(InputError, match=re.escape(message)):
            load_member(Net(), tmp_path / "x.safetensors")


def test_weights_that_are_right_are_taken(tmp_path: Path) -> None:
    save_tensors(tmp_path / "model.pt", {"model": RIGHT})
    (tmp_path / "x.safetensors").write_bytes(save(RIGHT))
    for name in ("model.pt", "x.safetensors"):
        found = load_member(Net(), tmp_path / name).state_dict()
        assert all(torch.equal(found[weight], value) for weight, value in RIGHT.items())


# --- From the shell -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_evaluating_what_is_no_table(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = special(tmp_path, "scores.csv", kind)
    truth = write_rows(tmp_path / "labels.csv", labels())
    words = ["--scores", str(path), "--labels", str(truth), "--output", str(tmp_path / "out")]
    assert load_program("evaluate").main(words) == 2
    assert f"error: {path}: cannot be read (it is {WHAT[kind]}, no file)." in capsys.readouterr().err


@pytest.mark.slow
def test_scoring_with_a_damaged_config(tmp_path: Path, python: WarmPython) -> None:
    run = copied(ROOT / "tests" / "bundle" / "made_before" / "bundle", tmp_path)
    (run / "config.json").write_bytes(DAMAGED["nested"])
    signal.alarm(0)
    done = python.run("pipelines/score.py", "--model", run, "--input", tmp_path, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert f"{run / 'config.json'} is damaged (it is nested too deeply). Restore it from a copy" in done.stderr
    assert "Traceback" not in done.stderr
