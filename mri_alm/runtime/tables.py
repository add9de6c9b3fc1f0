"""CSV tables, ours and other people's; a text that a spreadsheet would run as a formula is neutralised."""

import codecs
import csv
import io
import logging
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from mri_alm.errors import InputError, refuse_all
from mri_alm.runtime.files import read_file, write_bytes

logger = logging.getLogger("mri_alm")

_FORMULA = re.compile(r"'*(?:\s*[=+\-@]|[\t\n])")  # apostrophes count, or one that was there could not be told
LARGEST_TABLE = 256 << 20  # bytes; a row of every exam that a hospital has is shorter
_SEPARATORS = ",;\t|"
_TRIED_ROWS = 1000  # enough to tell the separator
_HINT = re.compile(r'"?sep=([^\w"\s]|\t)"?[,;\t]*(?:\r\n|\r|\n)', re.IGNORECASE)  # a first line for Excel alone
_LINE_END = re.compile(r"\r\n|\r|\n")
_HIDDEN = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff"  # soft hyphen, zero width, direction, byte order
_OUTER = re.compile(rf"^[\s{_HIDDEN}]+|[\s{_HIDDEN}]+$")
# First bytes of what people take for a table.
_NO_TEXT = {
    b"PK\x03\x04": "an Excel workbook (.xlsx), or one of another spreadsheet (.ods, .numbers)",
    b"\xd0\xcf\x11\xe0": "an Excel workbook (.xls)",
    b"<": "a web page or XML, as some systems name .xls",
    b"%PDF": "a PDF",
    b"{\\rtf": "a document of a word processor",
    b"\x1f\x8b": "packed by gzip",
    b"version https://git-lfs": "a pointer of Git LFS instead of the file",
}
_MARKS = {  # of the longest first: UTF-32's begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file with these columns, in this order; floats are written so that they read back equal.

    Texts that a spreadsheet would run as a formula get an apostrophe, see :func:`escape_formula`.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: escape_formula(cell) for column, cell in row.items()} for row in rows)
    write_bytes(path, text.getvalue().encode())


def csv_line(cells: Iterable[Any]) -> str:
    """One row of such a file without its line end, for a table that grows."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([escape_formula(cell) for cell in cells])
    return text.getvalue()


def read_table(
    path: Path,
    required: Collection[str] = (),
    *,
    renamed: Mapping[str, str] | None = None,
    as_numbered: bool = False,
) -> list[dict[str, str]]:
    """Rows of a CSV file that :func:`write_csv` or a person wrote; the one reader of every table.

    Cells lie between commas, semicolons, tabs or bars, as a first line ``sep=`` says or as fits the rows best, in
    UTF-8, UTF-16 or Windows' code page. They are stripped, also of characters that nobody sees, and texts are as they
    were before :func:`escape_formula`. Columns go by :func:`column_name`; those without a name are left out.

    Args:
        path: The file.
        required: Columns it must have; it may have others.
        renamed: Old names of columns to the new ones, under which they are given.
        as_numbered: Keep rows without content, so that the n-th row is row n + 1 of the file.

    Raises:
        InputError: If it cannot be read, is no CSV text, lacks a column, names one twice, has a row longer than its
            header, or none below it.
    """
    try:
        content = read_file(path, LARGEST_TABLE)
    except OSError as error:
        named = f" with {', '.join(required)}" if required else ""
        raise InputError(f"{path}: cannot be read ({error.strerror}). Give the path of a CSV file{named}.") from None
    lines = _lines(path, _decoded(path, content))
    header = [column_name(name) for name in (lines[0] if lines else ())]
    if lines and not any(header):
        raise InputError(f"{path}: its first row is empty. The names of the columns must be the first row.")
    if twice := sorted({name for name in header if name and header.count(name) > 1}):
        raise InputError(f'{path}: column "{twice[0]}" stands twice in its header. Rename one.')
    for old, new in (renamed or {}).items():
        if old in header and new not in header:
            logger.info("%s: column %s is called %s now; it is understood.", path, old, new)
            header[header.index(old)] = new
    if missing := [name for name in required if name not in header]:
        found = ", ".join(filter(None, header)) or "none"
        raise InputError(f"{path}: no column {', '.join(missing)}. Its columns are: {found}.")
    _refuse_longer_rows(path, header, lines)
    rows = [_cells(header, line) for line in lines[1:]]
    while rows and not any(rows[-1].values()):
        rows.pop()
    if not rows:
        raise InputError(f"{path} has {'a header but ' if lines else ''}no row below {'it' if lines else 'a header'}.")
    return rows if as_numbered else [row for row in rows if any(row.values())]


def column_name(text: str) -> str:
    """A column's name as it is compared: lower case, ``_`` for blanks and hyphens, one Unicode form."""
    return re.sub(r"[\s-]+", "_", unicodedata.normalize("NFKC", _OUTER.sub("", text)).lower())


def path_in_cell(folder: Path, cell: str) -> Path:
    """The file that a cell of a table in a folder names, also as Windows or a Mac writes it.

    Where there is no such file, the path as it is written. A path from the root of another machine is never searched
    by its last parts: it could end at another patient's image.
    """
    windows = PureWindowsPath(cell)
    written = [cell] if windows.anchor else [cell, str(PurePath(*windows.parts))]
    forms = [unicodedata.normalize(form, text) for text in written for form in ("NFC", "NFD")]
    return next((path for text in (*written, *forms) if path_exists(path := folder / text)), folder / cell)


def windows_hint(path: Path) -> str:
    """What to say, with a blank before it, of a path that :func:`path_in_cell` gave and that does not exist."""
    if PureWindowsPath(path.name).anchor or any(PureWindowsPath(part).drive for part in path.parts):
        return " It is one of a Windows machine: write it relative to the table's folder."
    return ""


def path_exists(path: Path) -> bool:
    """Whether there is such a file or folder; False for what no name can be."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, a zero byte
        return False


def _decoded(path: Path, content: bytes) -> str:
    """The text of a table's bytes; what is no text is named."""
    if what := next((what for start, what in _NO_TEXT.items() if content.lstrip().startswith(start)), ""):
        raise InputError(f"{path} is {what}, and no CSV text. Open it, save it as CSV, and give that file.")
    marked = next((encoding for mark, encoding in _MARKS.items() if content.startswith(mark)), "")
    encodings = (marked or _without_mark(content),) if marked or b"\0" in content else ("utf-8", "cp1252")
    text = None
    for encoding in encodings:
        try:
            text = content.decode(encoding)
            break
        except UnicodeDecodeError:
            continue
    if text is None:
        raise InputError(f"{path} is no text in UTF-8, UTF-16 or Windows-1252, or is damaged. Save it as CSV, UTF-8.")
    if "\0" in text:
        row = text[: text.index("\0")].count("\n") + 1
        raise InputError(f"{path}: line {row} holds zero bytes: the file is damaged. Restore it, or save it anew.")
    return text


def _without_mark(content: bytes) -> str:
    """UTF-16 without its mark, told by where its zero bytes stand: beside most letters, always on one side."""
    first, second = content[::2].count(0), content[1::2].count(0)
    if max(first, second) > len(content) / 8 and min(first, second) == 0:
        return "utf-16-be" if first else "utf-16-le"
    return "utf-8"


def _lines(path: Path, text: str) -> list[list[str]]:
    """Cells of every row, the header first."""
    hint = _HINT.match(text)
    mark = hint[1] if hint else _separator(text)
    lines: list[list[str]] = []
    try:
        for line in _reader(text[hint.end() :] if hint else text, mark, strict=True):
            lines.append(line)
            broken = [cell for cell in line if "\n" in cell or "\r" in cell]
            if any(part.count(mark) == len(lines[0]) - 1 for cell in broken for part in _LINE_END.split(cell)[1:]):
                raise csv.Error("a cell goes over several lines and holds what looks like rows")
    except csv.Error as error:
        raise InputError(
            f"{path}: row {len(lines) or 1} or the one after it cannot be read ({error}), most likely for a quotation "
            "mark that is not closed. Correct it."
        ) from None
    return lines


def _reader(text: str, mark: str, *, strict: bool) -> Iterator[list[str]]:
    return csv.reader(io.StringIO(text, newline=""), delimiter=mark, skipinitialspace=True, strict=strict)


def _separator(text: str) -> str:
    """What separates the cells: that by which most rows are as long as the header, then that of most columns."""
    ranks = {}
    for mark in _SEPARATORS:
        try:
            lengths = [len(line) for line in islice(_reader(text, mark, strict=False), _TRIED_ROWS) if line]
        except csv.Error:
            lengths = []
        if lengths and lengths[0] > 1:
            ranks[mark] = (lengths.count(lengths[0]) / len(lengths), lengths[0])
    return max(ranks, key=lambda mark: ranks[mark], default=_SEPARATORS[0])


def _refuse_longer_rows(path: Path, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Refuse rows with content beyond the last named column: a separator too many has shifted their cells."""
    named = max((number for number, name in enumerate(header, 1) if name), default=0)
    refuse_all(
        [
            f"{path}: row {number} has more cells than the header has names ({named}). If one of its cells holds the "
            "separator, such as a comma, put it between quotation marks; or name the further column."
            for number, line in enumerate(lines, 1)
            if number > 1 and any(_OUTER.sub("", cell) for cell in line[named:])
        ]
    )


def _cells(header: Sequence[str], line: Sequence[str]) -> dict[str, str]:
    cells = [_plain(cell) for cell in line] + [""] * (len(header) - len(line))
    return {name: cell for name, cell in zip(header, cells, strict=False) if name}


def _plain(cell: str) -> str:
    """A cell's text, also of ``="0012"``, by which people keep a spreadsheet from making a number of it."""
    text = _OUTER.sub("", cell)
    return text[2:-1] if text.startswith('="') and text.endswith('"') and len(text) > 2 else unescape_formula(text)


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
