import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from mri_alm.errors import InputError
from mri_alm.runtime.atomic import explain_os_errors, private_files, sweep, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_takes_the_place_of_a_folder_whole(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with write_atomically(tmp_path / "deep" / "study") as part:
            part.mkdir()
            (part / content).mkdir()
            (part / content / "file").write_text(content)
            assert names(tmp_path / "deep") != ["study"]
    assert names(tmp_path / "deep") == ["study"]
    assert names(tmp_path / "deep" / "study") == ["two"]


def fail_within(path: Path, error: BaseException) -> None:
    with write_atomically(path) as part:
        part.write_text("new")
        raise error


def test_nothing_stays_of_a_block_that_failed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyError, match="a bug"):
        fail_within(tmp_path / "file", KeyError("a bug"))
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_nothing_stays_of_a_write_that_is_stopped_while_it_tidies_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, stops = shutil.rmtree, [KeyboardInterrupt()]

    def stopped(*place: Path, **options: bool) -> None:
        if stops:
            raise stops.pop()
        remove(*place, **options)

    monkeypatch.setattr(shutil, "rmtree", stopped)
    with pytest.raises(KeyboardInterrupt), write_atomically(tmp_path / "file") as part:
        part.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_within_the_block_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^Cannot write {tmp_path}/file: No space left on device\. Free space"):
        fail_within(tmp_path / "file", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert names(tmp_path) == []


def test_the_file_before_is_kept_under_another_name(tmp_path: Path) -> None:
    for content in ("one", "two", "three"):
        with write_atomically(tmp_path / "last", previous=tmp_path / "previous") as part:
            part.write_text(content)
    assert names(tmp_path) == ["last", "previous"]
    assert [(tmp_path / name).read_text() for name in ("last", "previous")] == ["three", "two"]


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".part-0abc").mkdir()
    (tmp_path / ".part-0abc" / "half").write_text("")
    (tmp_path / "file").write_text("whole")
    sweep(tmp_path)
    assert names(tmp_path) == ["file"]
    sweep(tmp_path / "absent")


def test_the_system_s_refusal_in_words(tmp_path: Path) -> None:
    message = f"Cannot write {tmp_path}: Is a directory. Free space or choose another place, then start the same"
    with pytest.raises(InputError, match=re.escape(message)), explain_os_errors(tmp_path):
        tmp_path.write_text("")


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A caller whose files everyone may read and write."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize(
    ("asked", "file", "folder"), [(None, 0o600, 0o700), ("027", 0o640, 0o750), ("7", 0o660, 0o770)]
)
def test_files_are_their_owner_s_unless_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, file: int, folder: int
) -> None:
    if asked:
        monkeypatch.setenv("MRI_ALM_UMASK", asked)

    @private_files()
    def write() -> None:
        with write_atomically(tmp_path / "a" / "b" / "study") as part:
            part.mkdir()
            (part / "file").write_text("")
        with write_atomically(tmp_path / "a" / "file") as part:
            part.write_text("")

    write()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {file}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_dir()} == {folder}
    assert os.umask(0) == 0  # the caller's is his again


@pytest.mark.parametrize("text", ["", "rw", "777", "-7", "177"])
def test_an_impossible_umask_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MRI_ALM_UMASK", text)
    with pytest.raises(InputError, match=rf'MRI_ALM_UMASK must be 077 .*, got "{text}"'), private_files():
        pass
