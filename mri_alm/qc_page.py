"""The QC page of a prepared cohort: one HTML file with every picture inside, for a person to look through."""

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from mri_alm.files import write_bytes

TEMPLATE = Path(__file__).with_name("qc.html.j2")


def write_page(cohort: Path, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Write ``qc.html``: a row per study with its picture, figures, warnings or error; filters by status and text.

    Args:
        cohort: Folder with ``<study>/study.json`` and ``<study>/qc.jpg``.
        rows: Of the manifest.
        summary: Of the whole cohort, as in ``cohort.json``.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    page = template.render(summary=summary, studies=_studies(cohort, rows), total=len(rows))
    write_bytes(cohort / "qc.html", page.encode())


def _studies(cohort: Path, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    order = {"failed": 0, "warn": 1, "ok": 2}
    for row in sorted(rows, key=lambda row: (order[row["status"]], row["study"])):
        folder = cohort / row["study"]
        picture = folder / "qc.jpg"
        record = json.loads((folder / "study.json").read_text("utf-8"))
        image = base64.b64encode(picture.read_bytes()).decode() if picture.is_file() else ""
        warnings = [text for text in row["warnings"].split(" | ") if text]
        yield {"row": row, "record": record, "image": image, "warnings": warnings}
