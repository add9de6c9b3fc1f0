"""The documentation's code blocks, and a folder in which their commands run.

What a page cannot say to its reader stands in an HTML comment in front of the block, for this module:

    <!-- not run: REASON -->                one of those that tests/test_docs.py allows
    <!-- run with: NAME=VALUE --option 1 -->  put VALUE for the placeholder NAME, and add options to the last command
    <!-- run first: COMMANDS -->            shell commands that make what the block expects

A block that reads, placeholders filled, like one that has run before is not run again.

A block with a title, ```python title="../my_lab/loss.py", is a file that the page asks the reader to write.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shell import ROOT, WarmPython

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docker" / "README.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "cohorts").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]
_PROGRAMS = r"(python3?|pip|make|docker|torchrun|bash|sbatch|ray|mlflow|curl|nice|[\w/.-]+\.sh)"
COMMAND = re.compile(rf"^\s*(\$|{_PROGRAMS}) ", re.MULTILINE)
_BLOCK = re.compile(r"((?:^ *<!-- [^\n]+ -->\n+)*)^( *)```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins (path:line), language, title of a file, text, and the comments in front."""

    place: str
    language: str
    title: str
    text: str
    notes: dict[str, str]

    @property
    def script(self) -> str:
        """The text as it is run: placeholders filled, options added."""
        text = self.text.rstrip("\n")
        words = shlex.split(self.notes.get("run with", ""))
        options = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        for name, _, value in (word.partition("=") for word in words[:options]):
            text, count = re.subn(rf"(?<![\w/.-]){re.escape(name)}(?![\w.-])", lambda _, value=value: value, text)
            if not count:
                raise ValueError(f"{self.place}: there is no {name} to be replaced")
        return " ".join([text, *map(shlex.quote, words[options:])])


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text("utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        comments, indent, info, body = match.groups()
        notes = dict(re.findall(r"<!-- ([\w ]+): (.*?) -->", comments))
        language, _, rest = info.partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        line = text[: match.start(2)].count("\n") + 1
        lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
        place = f"{page.relative_to(ROOT)}:{line}"
        found.append(Block(place, language, title[1] if title else "", "".join(lines), notes))
    return found


class Checkout:
    """A folder that looks like the repository, where commands may write.

    Args:
        folder: An empty folder; the checkout becomes a sub-folder of it, so that ``../`` is free too.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "mri-alm"
        self.root.mkdir()
        for name in ("benchmarks", "cohorts", "configs", "docker", "docs", "mri_alm", "pipelines"):
            (self.root / name).symlink_to(ROOT / name)
        self.done: set[str] = set()
        self._python = WarmPython(folder)

    def warm(self) -> Iterator[None]:
        """Keep the server behind ``python`` while suspended."""
        return self._python.warm()

    def run(self, page: Path) -> str:
        """Write a page's files and run its blocks in one shell; what another page has run is not run again.

        Returns:
            All output, with a line in front of each block.

        Raises:
            AssertionError: With the end of the output, when a command fails.
        """
        lines = ["set -euo pipefail"]
        for block in blocks(page):
            if block.title:
                path = self.root / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
            elif (
                block.language in ("bash", "python") and "not run" not in block.notes and block.script not in self.done
            ):
                script = block.script
                self.done.add(script)
                if block.language == "python":
                    script = f"cat > block.py <<'END OF BLOCK'\n{script}\nEND OF BLOCK\npython block.py"
                lines += [f"echo '== {block.place}'", block.notes.get("run first", ":"), script]
        environment = os.environ | {"PATH": f"{self._python.folder}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)], cwd=self.root, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"status {done.returncode}:\n{done.stdout[-4000:]}"
        return done.stdout
