"""A table in every form people need: CSV and JSON with bare numbers, LaTeX with formatted ones."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mri_alm.files import write_bytes, write_csv, write_json

_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "\n": " ", "\r": " ",
})  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One table, as bare records and as text.

    Attributes:
        name: Stem of its files.
        caption: One sentence.
        columns: Keys of the records, in order.
        records: Numbers, texts, None.
        header: Column titles of the text form.
        cells: Rows of the text form, as many cells as ``header``.
    """

    name: str
    caption: str
    columns: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    header: Sequence[str]
    cells: Sequence[Sequence[str]]


def write_table(folder: Path, table: Table) -> None:
    """Write ``NAME.csv``, ``NAME.json`` and ``NAME.tex``.

    Raises:
        InputError: If the folder cannot be written.
    """
    rows = [{key: _line(value) for key, value in record.items()} for record in table.records]
    write_csv(folder / f"{table.name}.csv", table.columns, rows)
    write_json(folder / f"{table.name}.json", {"caption": table.caption, "rows": list(table.records)})
    write_bytes(folder / f"{table.name}.tex", latex(table).encode())


def _line(value: Any) -> Any:
    """A text on one line; :func:`mri_alm.files.write_csv` keeps it from being a formula."""
    return re.sub(r"[\r\n\t\v\f]", " ", value) if isinstance(value, str) else value


def latex(table: Table) -> str:
    """The text form as a ``tabular`` of package booktabs, every character of the cells escaped."""
    lines = [" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in (table.header, *table.cells)]
    body = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
    form = "l" + "r" * (len(table.header) - 1)
    caption = " ".join(table.caption.split())
    return f"% {caption}\n% Needs \\usepackage{{booktabs}}.\n\\begin{{tabular}}{{{form}}}\n{body}\n\\end{{tabular}}\n"
