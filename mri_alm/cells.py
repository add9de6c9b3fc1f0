"""Text cells of the CSV files that people open in a spreadsheet: never a formula, and read back as they were."""

import re
from typing import Any

_START = re.compile(r"^\s*[=+\-@]|^[\t\r\n]")
_ESCAPED = re.compile(r"^'(?=\s*[=+\-@]|[\t\r\n])")


def neutral(value: Any) -> Any:
    """A text with an apostrophe before what a spreadsheet would run as a formula; numbers and the rest as they are.

    A text of numbers alone, such as a point in millimetres, is no formula and stays too.
    """
    if not isinstance(value, str) or not _START.match(value) or _numbers(value):
        return value
    return f"'{value}"


def plain(cell: str) -> str:
    """The inverse of :func:`neutral`, for a cell read back."""
    return _ESCAPED.sub("", cell, count=1)


def _numbers(text: str) -> bool:
    try:
        return bool([float(word) for word in text.split()])
    except ValueError:
        return False
