"""The secret behind study keys: the user's own, in one place, or a file's."""

import re
from pathlib import Path

import pytest

from mri_alm.errors import InputError
from mri_alm.runtime.pseudonyms import key_secret, state_folder


def test_the_users_secret_is_made_once_and_hidden_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRI_ALM_STATE", str(tmp_path / "a" / "state"))
    first = key_secret()
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert key_secret() == first
    assert [path.name for path in (tmp_path / "a" / "state").iterdir()] == ["salt"]
    assert (tmp_path / "a" / "state" / "salt").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a" / "state").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("MRI_ALM_STATE", str(tmp_path / "b"))
    assert key_secret() != first
    assert key_secret(tmp_path / "a" / "state" / "salt") == first


@pytest.mark.parametrize(
    ("state", "xdg", "expected"),
    [
        ("/s", "/x", "/s"),
        ("", "/x", "/x/mri-alm"),
        ("", "", "/h/.local/state/mri-alm"),
        ("", "relative", "/h/.local/state/mri-alm"),
    ],
)
def test_where_it_lives(monkeypatch: pytest.MonkeyPatch, state: str, xdg: str, expected: str) -> None:
    for name, value in (("MRI_ALM_STATE", state), ("XDG_STATE_HOME", xdg), ("HOME", "/h")):
        monkeypatch.setenv(name, value)
    assert state_folder() == Path(expected)


def test_a_file_with_another_secret_is_taken_as_it_is_but_for_line_ends(tmp_path: Path) -> None:
    (tmp_path / "salt").write_text("a fixed secret\n")
    assert key_secret(tmp_path / "salt") == "a fixed secret"


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff" * 20, b"x" * 5000, None])
def test_a_file_without_a_secret_is_refused_without_its_content(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "salt").write_bytes(content)
    with pytest.raises(InputError, match=r"salt holds no secret for study keys: a text file with 8 to 4096") as error:
        key_secret(tmp_path / "salt")
    assert "short" not in str(error.value)


def test_a_place_that_cannot_be_written_says_how_to_name_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MRI_ALM_STATE", str(tmp_path / "file" / "state"))
    with pytest.raises(InputError, match=r"Cannot write .*the secret behind study keys\. .*MRI_ALM_STATE.*--salt-file"):
        key_secret()
