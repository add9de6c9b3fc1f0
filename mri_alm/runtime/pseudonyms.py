"""Keyed hashes that stand for studies, patients and UIDs, and the secret they are made with."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from mri_alm.runtime.atomic import explain_os_errors, write_atomically
from mri_alm.runtime.locks import exclusive_lock


def secret_of(folder: Path) -> str:
    """A folder's secret for study keys (file ``salt``): made once, readable by its owner only."""
    path = folder / "salt"
    if not path.exists():
        with exclusive_lock(folder / ".salt.lock", wait=True):
            if not path.exists():  # another process may just have made it
                with explain_os_errors(path), write_atomically(path) as part:
                    part.write_bytes(secrets.token_hex(16).encode())
                    part.chmod(0o600)
    return path.read_text()


def study_key(uid: str, salt: str) -> str:
    """Pseudonym of a study: 16 hexadecimal digits that only the holder of ``salt`` can recompute from the UID."""
    return hmac.new(salt.encode(), os.fsencode(uid), hashlib.sha256).hexdigest()[:16]


def pseudonymous_uid(uid: str, salt: str) -> str:
    """A UID (DICOM PS3.5 B.2) that only the holder of ``salt`` can compute from another one."""
    digest = hmac.new(salt.encode(), uid.encode(), hashlib.sha256).digest()[:16]
    return f"2.25.{int.from_bytes(digest, 'big')}"
