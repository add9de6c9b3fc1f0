"""Programs as a shell starts them, without the seconds in which each imports MONAI."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SERVER = Path(__file__).with_name("warm_python.py")


class WarmPython:
    """A folder with a ``python`` that has MONAI imported already.

    Args:
        folder: Where it is made; a path of few letters, as it holds a socket.
    """

    def __init__(self, folder: Path) -> None:
        self._socket, self.folder = folder / "python.socket", folder / "bin"
        self.folder.mkdir()
        self.program = self.folder / "python"
        words = (sys.executable, "-E", "-S", str(SERVER), "ask", str(self._socket))
        self.program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self.program.chmod(0o755)

    def warm(self) -> Iterator[None]:
        """Keep the server behind it while suspended."""
        with subprocess.Popen([sys.executable, str(SERVER), "serve", str(self._socket)]) as server:
            try:
                while not self._socket.exists():
                    if server.poll() is not None:
                        raise RuntimeError(f"{SERVER} ended with status {server.returncode}")
                    time.sleep(0.1)
                yield
            finally:
                server.terminate()

    def run(self, *words: Any, timeout: float = 120, **environment: str) -> "subprocess.CompletedProcess[str]":
        """``python WORDS`` in the repository; what it wrote to the terminal is text."""
        return subprocess.run(
            [self.program, *map(str, words)],
            check=False, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=timeout,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
