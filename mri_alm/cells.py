"""Text cells of the CSV files that people open in a spreadsheet: never a formula, and read back as they were."""

import re
from typing import Any

_FORMULA = re.compile(r"'*(?:\s*[=+\-@]|[\t\n])")  # apostrophes count, or one that was there could not be told


def neutral(value: Any) -> Any:
    """A text with an apostrophe before what a spreadsheet would run as a formula; numbers and the rest as they are.

    A text of numbers alone, such as a point in millimetres, is no formula and stays too. Carriage returns, which Python
    writes without quotes, become line feeds.
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if _FORMULA.match(text) and not _numbers(text) else text


def plain(cell: str) -> str:
    """The inverse of :func:`neutral`, for a cell read back."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _numbers(text: str) -> bool:
    try:
        return bool([float(word) for word in text.split()])
    except ValueError:
        return False
