"""Write requirements-lock.txt and requirements-core.txt: what pip installs of this project, each with its hash.

    .venv/bin/python docker/lock.py requirements-lock.txt requirements-core.txt

The packages of `.[dev]`, and of the project alone, under constraints.txt. PyTorch and what only its CUDA builds need
are left out: they differ by machine, see docs/decisions.md (42). So are two packages for the format of an address,
which no code here asks for: MONAI imports jsonschema, jsonschema imports them where they are, and building their
grammar takes as long as importing PyTorch. The hashes are those of the files that pip chooses on this machine, so run
it where the locks are used: Linux x86-64 with Python 3.11.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = re.compile(r"mri-alm|torch|triton|(nvidia|cuda)-.*|rfc3987-syntax|lark")
Report = dict[str, list[dict[str, dict[str, dict[str, dict[str, str]]]]]]
HEAD = "# Written by docker/lock.py (make lock) for Linux x86-64 with Python 3.11. Not to be edited by hand.\n"


def canonical(name: str) -> str:
    """A package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock(report: Report) -> str:
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
    for place, wanted in zip(sys.argv[1:], (".[dev]", "."), strict=True):
        (ROOT / place).write_text(lock(installed(wanted)), encoding="utf-8")


def installed(wanted: str) -> Report:
    """Pip's report of what it would install."""
    words = [
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "-",
        "-c",
        "constraints.txt",
        wanted,
    ]
    found = subprocess.run([sys.executable, "-m", "pip", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True)  # noqa: S603
    report: Report = json.loads(found.stdout)
    return report


if __name__ == "__main__":
    main()
