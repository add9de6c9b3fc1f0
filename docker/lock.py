"""Write requirements-lock.txt: the packages of `pip install .[dev]` under constraints.txt, each with its hash.

    .venv/bin/python docker/lock.py requirements-lock.txt

PyTorch and what only its CUDA builds need are left out: they differ by machine, see docs/decisions.md (42). The
hashes are those of the files that pip chooses on this machine, so run it where the lock is used: Linux x86-64 with
Python 3.11.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = re.compile(r"mri-alm|torch|triton|(nvidia|cuda)-.*")
HEAD = "# Written by docker/lock.py (make lock) for Linux x86-64 with Python 3.11. Not to be edited by hand.\n"


def canonical(name: str) -> str:
    """A package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock(report: dict[str, list[dict[str, dict[str, dict[str, dict[str, str]]]]]]) -> str:
    """The text of the lock from pip's installation report."""
    lines = []
    for package in report["install"]:
        name = canonical(str(package["metadata"]["name"]))
        if not LEFT_OUT.fullmatch(name):
            digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{name}=={package['metadata']['version']} --hash=sha256:{digest}\n")
    return HEAD + "".join(sorted(lines))


def main() -> None:
    """Ask pip what it would install, and write it down."""
    words = [
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "-",
        "-c",
        "constraints.txt",
        ".[dev]",
    ]
    found = subprocess.run([sys.executable, "-m", "pip", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True)  # noqa: S603
    Path(sys.argv[1]).write_text(lock(json.loads(found.stdout)), encoding="utf-8")


if __name__ == "__main__":
    main()
