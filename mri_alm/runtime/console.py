"""What reaches a terminal: text that it can print, and nothing of it that acts."""

import contextlib
import io
import logging
import os
import re
import sys
from typing import Any, TextIO, cast

# Control characters but line feed and tab, and those that turn the direction of what follows.
_ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    r"""A text whose control characters and direction marks are written out, such as ``\x1b``; others are unchanged.

    Names of files, columns and series are anybody's: printed as they are, they could move the cursor over what was
    said before, hide it, change the window's title, or turn the order of letters.
    """
    return _ACTING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _HarmlessStream:
    """A stream to a terminal or a file that writes :func:`harmless` texts; in all else it is the stream, and equals it.

    Args:
        stream: What is written to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._wrapped = stream  # tqdm looks for this name, to tell whether two streams are one

    def write(self, text: str) -> int:
        """Write a text; the number of characters of it."""
        self._wrapped.write(harmless(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __eq__(self, other: object) -> bool:
        return self._wrapped is getattr(other, "_wrapped", other)

    def __hash__(self) -> int:
        return hash(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class _HarmlessRecord(logging.LogRecord):
    """What is logged, for handlers that write to no terminal but to a file that one day is shown on one."""

    def getMessage(self) -> str:  # noqa: N802 - the name that logging calls
        return harmless(super().getMessage())


def tolerate_any_letter() -> None:
    """From now on all that this process prints or logs is text that the terminal can show, and cannot act.

    What every program begins with. Letters that the terminal's code lacks (ASCII, Windows-1252) become escapes, as
    stderr does by itself: a job that is done must not fail because its last line names a folder with an umlaut. What
    would act becomes an escape too, see :func:`harmless`. Doing it twice does no harm.
    """
    os.environ.setdefault("PYTHON_COLORS", "0")  # those of Python 3.13 and later would be escaped as well
    logging.setLogRecordFactory(_HarmlessRecord)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # not what a notebook or a test puts in its place
            with contextlib.suppress(ValueError, OSError):  # closed, or a pipe in place of a file
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _HarmlessStream(stream))


def own_escapes(stream: TextIO) -> TextIO:
    """The stream below :func:`tolerate_any_letter`'s, for a progress bar that moves the cursor itself."""
    return cast(TextIO, getattr(stream, "_wrapped", stream))
