import contextlib
import errno
import hashlib
import io
import os
import pickle
import re
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import SimpleITK as sitk  # noqa: N813
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import Bomb

from mri_alm.bundle.checkpoints import is_intact, load_tensors, save_tensors
from mri_alm.errors import InputError
from mri_alm.imaging.image_file import write_nifti
from mri_alm.runtime.atomic import write_atomically
from mri_alm.runtime.files import DamagedFileError, read_json, sha256, write_bytes, write_json
from mri_alm.runtime.tables import write_csv


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writes_and_makes_the_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_bytes(path, b"one")
    write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    full = failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(*((os, "fsync", full) if step == "fsync" else (Path, "replace", full)))
    message = f"Cannot write {path}: No space left on device. Free space or choose another place, then start the same"
    with pytest.raises(InputError, match=re.escape(message)):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_folder_is_replaced_whole(tmp_path: Path, interrupted: bool) -> None:
    place = tmp_path / "study"
    write_bytes(place / "old", b"1")
    with contextlib.suppress(KeyboardInterrupt), write_atomically(place) as part:
        part.mkdir()
        (part / "new").write_bytes(b"2")
        if interrupted:
            raise KeyboardInterrupt
    assert names(place) == (["old"] if interrupted else ["new"])
    assert names(tmp_path) == ["study"]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, rename = tmp_path / "study", Path.replace
    write_bytes(place / "old", b"1")

    def refuse(source: Path, target: Path) -> Path:
        if source.name == "study" and source.parent != tmp_path:  # the new one
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(InputError, match=r"Cannot write .*study: Input/output error"), write_atomically(place) as part:
        part.mkdir()
    assert names(place) == ["old"]
    assert names(tmp_path) == ["study"]


def test_an_interrupt_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    monkeypatch.setattr(os, "fsync", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_the_file_is_flushed_to_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen, fsync = tmp_path / "file", [], os.fsync

    def record(descriptor: int) -> None:
        status = os.fstat(descriptor)
        seen.append((path.exists(), status.st_ino, status.st_size if stat.S_ISREG(status.st_mode) else None))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_bytes(path, b"12345")
    assert seen == [(False, path.stat().st_ino, 5), (True, tmp_path.stat().st_ino, None)]


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("I am no folder")
    with pytest.raises(InputError, match=r"Cannot write .*file/config\.json: (File exists|Not a directory)"):
        write_bytes(tmp_path / "file" / "config.json", b"")


def test_json_refuses_what_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert names(tmp_path) == []


@given(value=st.floats(allow_nan=False))
def test_csv_floats_read_back_equal(value: float) -> None:
    text = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mri_alm.runtime.tables.write_bytes", lambda _, content: text.write(content))
        write_csv(Path("x.csv"), ["a", "b"], [{"b": value, "a": "ä,\n"}])
    head, cells = text.getvalue().decode().split("\n", 1)
    assert head == "a,b"
    assert cells.startswith('"ä,\n",')
    assert float(cells.rsplit(",", 1)[1]) == value


def test_csv_refuses_a_column_it_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dict contains fields not in fieldnames: 'b'"):
        write_csv(tmp_path / "x.csv", ["a"], [{"a": 1, "b": 2}])


def test_tensors_read_back_bit_for_bit(tmp_path: Path) -> None:
    state = {"weights": torch.randn(3, dtype=torch.float64), "nested": {"epoch": 3, "best": [0.1, "text", None]}}
    save_tensors(tmp_path / "x.pt", state)
    found = load_tensors(tmp_path / "x.pt")
    assert torch.equal(found["weights"], state["weights"])  # type: ignore[arg-type]
    assert found["nested"] == state["nested"]


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path, form: str) -> None:
    path, target = tmp_path / "x.pt", tmp_path / "exploded"
    if form == "torch":
        torch.save({"model": Bomb(target)}, path)
    else:
        path.write_bytes(pickle.dumps({"model": Bomb(target)}, protocol=2))
    said = "is no checkpoint of this project: its archive names" if form == "torch" else r"\(UnpicklingError\)"
    with pytest.raises(InputError, match=rf"x\.pt .*{said}"):
        load_tensors(path)
    assert not target.exists()


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind == "half":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("This is no checkpoint.")
    elif kind == "other zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("hello", "you")
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("kind", ["half", "empty", "text", "other zip", "folder"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.pt"
    save_tensors(path, {"weights": torch.randn(100)})
    damage(path, kind)
    with pytest.raises(InputError, match=re.escape(f"{path} is no checkpoint that can be read")):
        load_tensors(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, dict[str, Any]]:
    path = tmp_path_factory.mktemp("flips") / "x.pt"
    state = {"weights": torch.randn(60), "best": {"epoch": 3, "auc": 0.75}}
    save_tensors(path, state)
    return path, path.read_bytes(), state


def loads_wrong(path: Path, state: dict[str, Any]) -> bool:
    """False when the file is refused as damaged, or holds what was written all the same."""
    try:
        found = load_tensors(path)
    except DamagedFileError:
        return False
    return not torch.equal(found["weights"], state["weights"]) or found["best"] != state["best"]


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_never_goes_unnoticed(
    checkpoint: tuple[Path, bytes, dict[str, Any]], place: float, bit: int
) -> None:
    path, content, state = checkpoint
    flipped = bytearray(content)
    flipped[int(place * len(content))] ^= 1 << bit
    path.write_bytes(flipped)
    assert not loads_wrong(path, state)


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_cut_checkpoint_never_goes_unnoticed(checkpoint: tuple[Path, bytes, dict[str, Any]], share: float) -> None:
    path, content, state = checkpoint
    path.write_bytes(content[: int(share * len(content))])
    assert not loads_wrong(path, state)


def test_a_flip_that_torch_reads_as_another_weight_is_damage(checkpoint: tuple[Path, bytes, dict[str, Any]]) -> None:
    path, content, state = checkpoint
    place = content.index(state["weights"].numpy().tobytes()) + 5
    flipped = bytearray(content)
    flipped[place] ^= 1
    path.write_bytes(flipped)
    assert not torch.equal(torch.load(path, weights_only=True)["weights"], state["weights"])
    with pytest.raises(DamagedFileError, match=re.escape(f"{path} is damaged: its SHA-256 is not the one it was writ")):
        load_tensors(path)
    assert not is_intact(path)


def test_the_digest_is_a_zip_comment_and_others_can_read_the_file(
    checkpoint: tuple[Path, bytes, dict[str, Any]],
) -> None:
    path, content, state = checkpoint
    path.write_bytes(content)
    comment = zipfile.ZipFile(path).comment.decode()
    assert comment == f"sha256:{hashlib.sha256(content[: -len(comment)]).hexdigest()}"
    assert torch.equal(torch.load(path, weights_only=True)["weights"], state["weights"])
    torch.save(state, path)  # as any other program writes it
    assert torch.equal(load_tensors(path)["weights"], state["weights"])


def test_damaged_json_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [1, 2]})
    assert read_json(tmp_path / "x.json") == {"a": [1, 2]}
    content = (tmp_path / "x.json").read_bytes()
    for damaged in (content[:9], b"[1]", b"\xff\xfe" + content):
        (tmp_path / "x.json").write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=re.escape(f"{tmp_path / 'x.json'} is damaged (")):
            read_json(tmp_path / "x.json")
    with pytest.raises(FileNotFoundError, match=r"x\.yml"):
        read_json(tmp_path / "x.yml")


def test_an_absent_checkpoint_and_one_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.raises(InputError, match=re.escape(f"There is no checkpoint {path}.")):
        load_tensors(path)
    torch.save([torch.zeros(1)], path)
    with pytest.raises(InputError, match=re.escape(f"{path} holds a list, not a checkpoint of this project.")):
        load_tensors(path)


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()
    assert sha256(tmp_path / "x").startswith("ba7816bf")  # FIPS 180-2


def test_nifti_is_the_same_file_again_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    image = sitk.Image(4, 5, 6, sitk.sitkFloat32) + 1.5
    image.SetSpacing((0.5, 0.5, 3.0))
    write_nifti(tmp_path / "a.nii.gz", image)
    write_nifti(tmp_path / "b.nii.gz", image)
    assert sha256(tmp_path / "a.nii.gz") == sha256(tmp_path / "b.nii.gz")
    assert names(tmp_path) == ["a.nii.gz", "b.nii.gz"]
    back = sitk.ReadImage(str(tmp_path / "a.nii.gz"))
    assert (back.GetSize(), back.GetSpacing(), back[0, 0, 0]) == ((4, 5, 6), (0.5, 0.5, 3.0), 1.5)
    with pytest.raises(InputError, match=r"Cannot write .*a\.nii\.gz/c\.nii\.gz"):
        write_nifti(tmp_path / "a.nii.gz" / "c.nii.gz", image)


def test_a_nifti_file_that_itk_cut_short_in_silence_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sitk, "WriteImage", lambda _, path: Path(path).write_bytes(bytes(400)))
    with pytest.raises(InputError, match=r"Cannot write .*a\.nii\.gz: No space left on device"):
        write_nifti(tmp_path / "a.nii.gz", sitk.Image(4, 5, 6, sitk.sitkFloat32))
    assert names(tmp_path) == []
