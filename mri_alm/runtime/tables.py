"""CSV tables, ours and other people's; a text that a spreadsheet would run as a formula is neutralised."""

import csv
import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError
from mri_alm.runtime.files import write_bytes


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file with these columns, in this order; floats are written so that they read back equal.

    Texts that a spreadsheet would run as a formula get an apostrophe, see :mod:`mri_alm.runtime.tables`.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: neutral(cell) for column, cell in row.items()} for row in rows)
    write_bytes(path, text.getvalue().encode())


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV that :func:`write_csv` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {key: plain(cell) for key, cell in row.items() if isinstance(cell, str)} for row in csv.DictReader(file)
        ]


def read_table(path: Path, required: Collection[str]) -> list[dict[str, str]]:
    """Rows of a CSV file that a person made, in UTF-8, cells stripped.

    Args:
        path: The file.
        required: Columns it must have; it may have others.

    Raises:
        InputError: If it cannot be read, lacks a column, or has no row below the header.
    """
    try:
        reader = csv.DictReader(io.StringIO(path.read_text("utf-8-sig"), newline=""))
        rows = [{key: plain((value or "").strip()) for key, value in row.items() if key} for row in reader]
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}). Give the path of a CSV file with {', '.join(required)}."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no CSV text in UTF-8 ({error}). Save it as such.") from None
    columns = reader.fieldnames or ()
    if missing := [name for name in required if name not in columns]:
        raise InputError(f"{path}: no column {', '.join(missing)}. Its columns are: {', '.join(columns) or 'none'}.")
    if not rows:
        raise InputError(f"{path} has a header but no study.")
    return rows


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


def read_label_table(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file with comma, semicolon or tab, in UTF-8 or Windows' code page; column names in lower case.

    Empty rows between others are kept, so that rows can be counted; columns without a name are not.

    Raises:
        InputError: If the file is absent, has no row, or names a column twice.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Give the path of a CSV file.") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("cp1252", errors="replace")
    lines = text.splitlines()
    separator = max(",;\t", key=lines[0].count) if lines else ","
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=separator)]
    header = [name.lower() for name in rows[0]] if rows else []
    if twice := sorted({name for name in header if name and header.count(name) > 1}):
        raise InputError(f'{path}: column "{twice[0]}" stands twice in its header. Rename one.')
    found = [{name: cell for name, cell in zip(header, row, strict=False) if name} for row in rows[1:]]
    while found and not any(found[-1].values()):
        found.pop()
    if not found:
        raise InputError(f"{path}: no row below the header.")
    return found
