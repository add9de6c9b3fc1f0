"""Keyed hashes that stand for studies, patients and UIDs, and the secret they are made with.

The secret is the user's, not a run's or a cohort's: one exam has one key in all programs, and nothing that is passed on
holds the secret.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from mri_alm.errors import InputError
from mri_alm.runtime.atomic import explain_os_errors, write_atomically
from mri_alm.runtime.files import read_file
from mri_alm.runtime.locks import exclusive_lock

_SHORTEST, _LONGEST = 8, 4096  # characters of a secret: what is shorter can be guessed, what is longer is another file
_REMEDY = "Name another folder for it by the variable MRI_ALM_STATE, or a file that holds a secret by --salt-file."


def state_folder() -> Path:
    """What a user keeps between runs: ``$MRI_ALM_STATE``, ``$XDG_STATE_HOME/mri-alm``, or ``~/.local/state/mri-alm``.

    Raises:
        InputError: If none of them says where.
    """
    if given := os.environ.get("MRI_ALM_STATE"):
        return Path(given)
    base = Path(os.environ.get("XDG_STATE_HOME", ""))  # as the standard says, a relative one does not count
    try:
        return (base if base.is_absolute() else Path.home() / ".local" / "state") / "mri-alm"
    except RuntimeError:
        raise InputError(f"The secret behind study keys has no place: this account has no home. {_REMEDY}") from None


def key_secret(file: Path | str | None = None) -> str:
    """The secret that keys are made with: the user's own, made once and readable by its owner only, or that of a file.

    Args:
        file: A file that holds another one, such as the ``salt`` in a cohort or run of an earlier version.

    Raises:
        InputError: If the file is none, or holds no secret; or the user's own cannot be written.
    """
    path = Path(file) if file is not None else state_folder() / "salt"
    if file is None and not path.exists():
        _make(path)
    try:
        secret = read_file(path, _LONGEST).decode().strip()
    except (OSError, UnicodeDecodeError):
        secret = ""
    if len(secret) < _SHORTEST:
        raise InputError(
            f"{path} holds no secret for study keys: a text file with {_SHORTEST} to {_LONGEST} characters is needed. "
            "Give the right file, or leave out --salt-file to take your own."
        )
    return secret


def _make(path: Path) -> None:
    try:
        with explain_os_errors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with exclusive_lock(path.with_name(".salt.lock"), wait=True):
            if not path.exists():  # another process may just have made it
                with write_atomically(path) as part:
                    part.write_bytes(secrets.token_hex(16).encode())
                    part.chmod(0o600)
    except InputError as error:
        raise InputError(f"{error} It is the secret behind study keys. {_REMEDY}") from error


def study_key(uid: str, salt: str) -> str:
    """Pseudonym of a study: 16 hexadecimal digits that only the holder of ``salt`` can recompute from the UID."""
    return hmac.new(salt.encode(), os.fsencode(uid), hashlib.sha256).hexdigest()[:16]


def pseudonymous_uid(uid: str, salt: str) -> str:
    """A UID (DICOM PS3.5 B.2) that only the holder of ``salt`` can compute from another one."""
    digest = hmac.new(salt.encode(), uid.encode(), hashlib.sha256).digest()[:16]
    return f"2.25.{int.from_bytes(digest, 'big')}"
