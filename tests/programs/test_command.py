"""Programs as a shell starts them: from a checkout, what they answer, and with which status."""

import pytest
from shell import ROOT, WarmPython


@pytest.mark.parametrize("path", sorted((ROOT / "pipelines").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_shows_its_help(python: WarmPython, path: object) -> None:
    done = python.run(path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {getattr(path, 'name', '')} [-h]")
