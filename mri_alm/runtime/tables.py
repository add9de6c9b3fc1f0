"""CSV tables, ours and other people's; a text that a spreadsheet would run as a formula is neutralised."""

import csv
import io
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError
from mri_alm.runtime.files import write_bytes

logger = logging.getLogger("mri_alm")

_FORMULA = re.compile(r"'*(?:\s*[=+\-@]|[\t\n])")  # apostrophes count, or one that was there could not be told


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file with these columns, in this order; floats are written so that they read back equal.

    Texts that a spreadsheet would run as a formula get an apostrophe, see :func:`escape_formula`.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: escape_formula(cell) for column, cell in row.items()} for row in rows)
    write_bytes(path, text.getvalue().encode())


def read_table(
    path: Path,
    required: Collection[str] = (),
    *,
    renamed: Mapping[str, str] | None = None,
    as_numbered: bool = False,
) -> list[dict[str, str]]:
    """Rows of a CSV file that :func:`write_csv` or a person wrote.

    Cells lie between commas, semicolons or tabs, in UTF-8 or Windows' code page. They are stripped, and texts are as
    they were before :func:`escape_formula`. Columns without a name are left out.

    Args:
        path: The file.
        required: Columns it must have; it may have others.
        renamed: Old names of columns to the new ones, under which they are given.
        as_numbered: Keep rows without content, so that the n-th row is row n + 1 of the file, and make column names
            lower case: for tables that are spoken of by row, whoever made them.

    Raises:
        InputError: If it cannot be read, lacks a column, names one twice, or has no row below the header.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        named = f" with {', '.join(required)}" if required else ""
        raise InputError(f"{path}: cannot be read ({error.strerror}). Give the path of a CSV file{named}.") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("cp1252", errors="replace")
    first = next(iter(text.splitlines()), "")
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count)))
    except csv.Error as error:
        raise InputError(f"{path} is no CSV text ({error}). Save it as such.") from None
    header = [name.strip().lower() if as_numbered else name.strip() for name in (lines[0] if lines else ())]
    if twice := sorted({name for name in header if name and header.count(name) > 1}):
        raise InputError(f'{path}: column "{twice[0]}" stands twice in its header. Rename one.')
    for old, new in (renamed or {}).items():
        if old in header and new not in header:
            logger.info("%s: column %s is called %s now; it is understood.", path, old, new)
            header[header.index(old)] = new
    if missing := [name for name in required if name not in header]:
        found = ", ".join(filter(None, header)) or "none"
        raise InputError(f"{path}: no column {', '.join(missing)}. Its columns are: {found}.")
    rows = [_cells(header, line) for line in lines[1:]]
    while rows and not any(rows[-1].values()):
        rows.pop()
    if not rows:
        raise InputError(f"{path} has a header but no row below it.")
    return rows if as_numbered else [row for row in rows if any(row.values())]


def _cells(header: Sequence[str], line: Sequence[str]) -> dict[str, str]:
    cells = [unescape_formula(cell.strip()) for cell in line] + [""] * (len(header) - len(line))
    return {name: cell for name, cell in zip(header, cells, strict=False) if name}


def escape_formula(value: Any) -> Any:
    """A text with an apostrophe before what a spreadsheet would run as a formula; numbers and the rest as they are.

    A text of numbers alone, such as a point in millimetres, is no formula and stays too. Carriage returns, which Python
    writes without quotes, become line feeds.
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if _FORMULA.match(text) and not _numbers(text) else text


def unescape_formula(cell: str) -> str:
    """The inverse of :func:`escape_formula`, for a cell read back."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _numbers(text: str) -> bool:
    try:
        return bool([float(word) for word in text.split()])
    except ValueError:
        return False
