"""An entry of the cache is taken for the exam it was made of, and for no other; weights are those that were checked."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.data.utils import json_hashing, pickle_hashing
from monai.transforms import Lambda

from mri_alm.bundle.checkpoints import load_tensors, save_tensors
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.bundle.transforms import CheckedCache
from mri_alm.errors import InputError
from mri_alm.runtime.files import read_file


class Made:
    """Prepares an exam and counts how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        return {"image": torch.full((2,), float(item["index"])), "study": item["study"], "index": item["index"]}


def cache(folder: Path, made: Made, names: str = "AB", version: str = "1") -> CheckedCache:
    items = [{"study": name, "index": index} for index, name in enumerate(names)]
    found = CheckedCache(
        items, Lambda(made), folder, hash_func=json_hashing, hash_transform=lambda _: pickle_hashing(version)
    )
    assert len(found) == len(names)
    return found


def entries(folder: Path, made: Made) -> list[Path]:
    """The file of A's entry, then that of B's."""
    found = {load_tensors(path)["study"]: path for path in folder.glob("*.pt")}
    assert made.count == 2
    return [found["A"], found["B"]]


def test_an_entry_copied_to_another_exam_is_made_again_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Made()
    dataset = cache(tmp_path, made)
    before = [dataset[n] for n in (0, 1)]
    a, b = entries(tmp_path, made)
    kept = b.read_bytes()
    shutil.copyfile(a, b)  # whole, with a digest that fits
    with caplog.at_level(logging.WARNING):
        again = cache(tmp_path, made)[1]
    assert (again["study"], again["image"].tolist(), made.count) == ("B", before[1]["image"].tolist(), 3)
    (text,) = caplog.messages
    assert text == f"Cache: the entry {b} is of another exam or other settings. The exam is prepared again."
    assert b.read_bytes() == kept


def test_an_entry_of_other_transforms_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Made()
    cache(tmp_path, made, "A", "1")[0]
    (old,) = tmp_path.glob("*.pt")
    cache(tmp_path, made, "A", "2")[0]
    (new,) = {*tmp_path.glob("*.pt")} - {old}
    shutil.copyfile(old, new)
    cache(tmp_path, made, "A", "2")[0]
    assert made.count == 3
    assert "is of another exam or other settings" in caplog.text


def test_a_right_entry_is_read_and_holds_what_was_prepared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Made()
    first = cache(tmp_path, made)[1]
    second = cache(tmp_path, made)[1]
    assert made.count == 1
    assert (second.keys(), second["image"].tolist()) == (first.keys(), first["image"].tolist())
    assert caplog.text == ""


def test_an_entry_of_before_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It does not say whose it is."""
    made = Made()
    expected = cache(tmp_path, made)[0]
    (path,) = tmp_path.glob("*.pt")
    save_tensors(path, {"image": torch.full((2,), 7.0), "study": "A", "index": 0})
    assert cache(tmp_path, made)[0]["image"].tolist() == expected["image"].tolist()
    assert "of an earlier version, which wrote no owner. The exam is prepared again." in caplog.text
    cache(tmp_path, made)[0]
    assert made.count == 2  # once


def test_the_weights_that_were_checked_are_those_that_are_loaded(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is read once: another one put in its place between two readings would be loaded unchecked."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    weights = [run / name / "model.pt" for name in json.loads((run / "threshold.json").read_text())["checkpoints"]]
    read: list[Path] = []

    def counted(path: Path, most: int) -> bytes:
        content = read_file(path, most)
        if path in weights:
            read.append(path)
            path.write_bytes(b"another model")
        return content

    expected = TrainedRun(trained).ensemble().state_dict()
    monkeypatch.setattr("mri_alm.bundle.trained_run.read_file", counted)
    found = TrainedRun(run).ensemble().state_dict()
    assert read == weights
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(InputError, match="is not the checkpoint that the threshold was set for"):
        TrainedRun(run).ensemble()
