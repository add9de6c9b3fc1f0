"""Terminals that cannot print every letter."""

import contextlib
import io
import sys


def tolerate_any_letter() -> None:
    """Print letters that the terminal's code lacks (ASCII, Windows-1252) as escapes, as stderr does by itself.

    The first line of every program: a job that is done must not fail because its last line names a folder with an
    umlaut. Doing it twice does no harm.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not what a notebook or a test puts in its place
            with contextlib.suppress(ValueError, OSError):  # closed, or a pipe in place of a file
                stream.reconfigure(errors="backslashreplace")
