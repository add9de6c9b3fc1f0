"""Locks held by other processes, one of them killed."""

import errno
import fcntl
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from locking import holder

from mri_alm.errors import InputError
from mri_alm.runtime.locks import exclusive_lock


def test_a_second_user_is_refused_with_who_and_since_when(tmp_path: Path) -> None:
    lock = tmp_path / "run" / ".lock"
    with holder(lock) as other:
        who = f"{lock.parent} is in use by process {other.pid} on {socket.gethostname()} since "
        with pytest.raises(InputError, match=re.escape(who) + r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d "):
            exclusive_lock(lock).__enter__()
        with exclusive_lock(tmp_path / "run" / ".other"):
            pass
        other.communicate("")
        assert other.returncode == 0
    assert not lock.parent.exists()  # it was made for the lock


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "run" / ".lock"
    with holder(lock) as other:
        other.send_signal(signal.SIGKILL)
        assert other.wait() == -signal.SIGKILL
    assert f"process {other.pid} on" in lock.read_text()
    with exclusive_lock(lock):
        assert lock.read_text().startswith(f"process {os.getpid()} on")
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_a_lock_can_be_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = tmp_path / ".lock"
    with caplog.at_level("INFO"), holder(lock) as other:
        assert other.stdin is not None
        threading.Timer(0.3, other.stdin.close).start()
        with exclusive_lock(lock, wait=True):
            assert lock.read_text().startswith(f"process {os.getpid()} on")
    assert f"Waiting for process {other.pid} on" in caplog.text
    assert not lock.exists()


def test_many_who_wait_come_one_after_another(tmp_path: Path) -> None:
    """Every holder takes the file away, so the next ones must find the new one."""
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            with exclusive_lock(tmp_path / "folder" / ".lock", wait=True):
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 30
    assert list(tmp_path.rglob(".lock")) == []


@pytest.mark.parametrize("error", [FileNotFoundError, FileExistsError])
def test_a_folder_that_comes_and_goes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """Its maker takes the empty folder away at any moment: also after it was found, and before it is looked at."""
    make, failures = Path.mkdir, iter([error(errno.EEXIST, "as if")])

    def mkdir(folder: Path, **kwargs: bool) -> None:
        for failure in failures:
            make(folder, **kwargs)  # another one made it again
            raise failure
        make(folder, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with exclusive_lock(tmp_path / "folder" / ".lock"):
        assert (tmp_path / "folder" / ".lock").exists()


def test_what_was_written_into_a_new_folder_stays(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path / "new" / ".lock"):
        (tmp_path / "new" / "file").write_text("")
    (tmp_path / "mine").mkdir()
    with exclusive_lock(tmp_path / "mine" / ".lock"):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine", "new"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"Cannot write .*file/\.lock: .*\. Choose another folder"):
        exclusive_lock(tmp_path / "file" / ".lock").__enter__()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a working directory that was deleted, and where the system says that there is no such folder."""
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    for folder in (Path("run"), Path("/proc/run")):
        with pytest.raises(InputError, match=r"Cannot write .*run/\.lock: No such file or directory\. Choose another"):
            exclusive_lock(folder / ".lock").__enter__()


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with exclusive_lock(tmp_path / ".lock"):
        pass
    assert f"{tmp_path} is on a file system without locks: see to it that one process uses it." in caplog.text


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_what_only_has_a_locks_name_is_refused_and_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    """A sender's folder could name a file of the user, which the lock would overwrite."""
    lock, precious = tmp_path / "run" / ".lock", tmp_path / "precious"
    precious.write_text("precious")
    lock.parent.mkdir()
    make = {"link": lambda: lock.symlink_to(precious), "hard link": lambda: lock.hardlink_to(precious)}
    make |= {"pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir}
    make[kind]()
    reason = "Is a directory" if kind == "folder" else "it is a link, or no plain file"
    with pytest.raises(InputError, match=rf"^Cannot write {re.escape(str(lock))}: {reason}\. Choose another folder\.$"):
        exclusive_lock(lock).__enter__()
    assert precious.read_text() == "precious"
    assert os.path.lexists(lock)
