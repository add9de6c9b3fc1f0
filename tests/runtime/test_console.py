"""A terminal that lacks letters does not fail a job that is done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAY = """
from mri_alm.runtime.console import tolerate_any_letter
tolerate_any_letter(); tolerate_any_letter()
print("Z\\u00fcrich \\u65e5 \\udcff")
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [("ascii", rb"Z\xfcrich \u65e5 \udcff"), ("cp1252", b"Z\xfcrich \\u65e5 \\udcff"), ("utf-8", None)],
)
def test_letters_that_it_lacks_are_escaped(code: str, expected: bytes | None) -> None:
    environment = os.environ | {"PYTHONIOENCODING": code}
    done = subprocess.run([sys.executable, "-c", SAY], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert done.stdout.rstrip() == (expected or "Zürich 日 \\udcff".encode())


def test_what_stands_in_for_the_terminal_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mri_alm.runtime.console import tolerate_any_letter

    monkeypatch.setattr(sys, "stderr", None)  # as under Windows' pythonw
    tolerate_any_letter()
    assert capsys.readouterr().out == ""
