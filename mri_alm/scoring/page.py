"""``index.html`` of scored exams: every decision with its pictures, for a person to look at, without network.

The template and its script show what this module gives them ready; the script computes nothing but places of slices.
"""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment
from matplotlib import colormaps
from scipy.special import expit, logit

from mri_alm.imaging.pictures import HIGH_B_TOP, T2_TOP, SliceSheet
from mri_alm.runtime.files import write_bytes

PAGE, PICTURES = "index.html", "index_pictures"
MOST_EMBEDDED = 40  # exams whose slices lie in the page itself; of more they lie beside it
_TEMPLATE = Path(__file__).with_name("page.html.j2")
_CLOSEST = 1e-6  # of a score to 0 or 1, on the bar
_COLOURS = 17  # of ADC's colours, between which a browser goes evenly
_ORDER = ("failed", "needed", "undecided", "spared")


def write_scores_page(
    output: Path,
    rows: Sequence[Mapping[str, Any]],
    sheets: Mapping[str, SliceSheet],
    *,
    threshold: str,
    notices: Sequence[str] = (),
    keyed: bool = False,
) -> None:
    """Write ``index.html``, and with more than 40 exams a folder of pictures beside it.

    No name is in it but those of ``scores.csv``. Which folder a key stands for is read in the reader's browser, from a
    key file that is chosen there, and stays there.

    Args:
        output: Folder of ``scores.csv``.
        rows: Its rows; those without a score have the reason among their warnings.
        sheets: Slices by study, of those that have any.
        threshold: What the decisions rest on, in lines.
        notices: Sentences that must be read first.
        keyed: Whether the studies are keys that a key file leads back from.

    Raises:
        InputError: If the disk is full or the place cannot be written.
    """
    apart = len(sheets) > MOST_EMBEDDED
    if apart:
        for name, sheet in sheets.items():
            write_bytes(output / PICTURES / f"{name}.jpg", sheet.picture)
    axis = _axis(rows)
    exams = [_exam(row, axis, sheets.get(row["study"]), output) for row in rows]
    exams.sort(key=lambda one: (_ORDER.index(one["state"]), -one["score"], one["study"]))
    content = {
        "exams": exams,
        "counts": Counter(kind for one in exams for kind in (one["state"], *(["warned"] if one["warnings"] else []))),
        "threshold": threshold.splitlines(),
        "notices": notices,
        "keyed": keyed,
        "ends": [_number(expit(end)) for end in axis],
        "tops": (T2_TOP, HIGH_B_TOP),
        "colours": [" ".join(f"{one:.3f}" for one in row) for row in _colours()],
        "sheets": {name: _viewed(name, sheet, apart) for name, sheet in sheets.items()},
    }
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_TEMPLATE.read_text("utf-8")).render(content)
    write_bytes(output / PAGE, page.encode())


def _colours() -> Any:
    """ADC's colours, as in the pictures beside the page: red, green and blue, each from dark to bright."""
    return colormaps["inferno"](np.linspace(0, 1, _COLOURS))[:, :3].T


def _viewed(name: str, sheet: SliceSheet, apart: bool) -> dict[str, Any]:
    """What the viewer needs to show an exam's slices."""
    source = f"{PICTURES}/{quote(name)}.jpg" if apart else f"data:image/jpeg;base64,{_text(sheet.picture)}"
    return {name: value for name, value in asdict(sheet).items() if not isinstance(value, bytes)} | {"src": source}


def _text(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def _axis(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Logits at both ends of the bars: all scores with their spread and the threshold lie between them."""
    scored = [row for row in rows if row["score"] != ""]
    reach = [_logit(row["score"]) + side * _spread(row) for row in scored for side in (-1, 1)]
    reach += [_logit(row["threshold"]) for row in scored if row["threshold"] != ""]
    low, high = min(reach, default=-1.0), max(reach, default=1.0)
    margin = max(0.06 * (high - low), 0.25)
    return low - margin, high + margin


def _logit(score: float) -> float:
    return float(logit(np.clip(score, _CLOSEST, 1 - _CLOSEST)))


def _spread(row: Mapping[str, Any]) -> float:
    return float(row["spread"]) if np.isfinite(row["spread"]) else 0.0


def _exam(row: Mapping[str, Any], axis: tuple[float, float], sheet: SliceSheet | None, output: Path) -> dict[str, Any]:
    """A row in words and places."""
    state, decision = _decision(row)
    exam: dict[str, Any] = {"study": row["study"], "state": state, "decision": decision, "score": -1.0, "away": 99.0}
    quality = str(row["quality"])
    quality = quality.partition(":")[0] if quality.startswith("below") else quality  # a warning says why
    exam |= {"warnings": [text for text in str(row["warnings"]).split(" | ") if text], "quality": quality}
    exam |= {"thumbnail": _text(sheet.thumbnail) if sheet else "", "spread": -1.0}
    exam["files"] = [(f.name, quote(f.name)) for f in (_beside(output, row["study"])) if f.is_file()]
    if row["score"] == "":
        exam["warnings"] = exam["warnings"][1:]  # the first one is the reason
        return exam
    middle, spread = _logit(row["score"]), _spread(row)
    exam |= {"score": row["score"], "spread": row["spread"], "shown": _number(row["score"])}
    exam["places"] = {"score": middle, "low": middle - spread, "high": middle + spread}
    if row["threshold"] != "":
        exam["places"]["threshold"] = _logit(row["threshold"])
        exam |= {"threshold": _number(row["threshold"]), "away": abs(middle - _logit(row["threshold"]))}
    share = {name: 100 * (place - axis[0]) / (axis[1] - axis[0]) for name, place in exam["places"].items()}
    exam["places"] = {name: round(place, 2) for name, place in share.items()}
    return exam


def _decision(row: Mapping[str, Any]) -> tuple[str, str]:
    """The kind of an exam, and what was decided in words."""
    if row["score"] == "":
        return "failed", str(row["warnings"]).split(" | ")[0]
    if row["dce_needed"] == "":
        return "undecided", "No decision: the model has no threshold."
    if not row["dce_needed"]:
        return "spared", f"DCE not needed: the score is below the threshold of {_number(row['threshold'])}."
    if row["threshold"] == "":
        return "needed", "DCE needed: there is no threshold, so every exam needs it."
    if row["score"] >= row["threshold"]:
        return "needed", f"DCE needed: the score reaches the threshold of {_number(row['threshold'])}."
    return "needed", "DCE needed whatever the score: the quality is below the gate."


def _number(score: float) -> str:
    return f"{score:.6g}"  # fewer digits could put a score on the other side of its threshold


def _beside(output: Path, study: str) -> list[Path]:
    """Files of an exam that may stand beside the page."""
    names = (f"{study}.png", f"{study}_explanation.png", f"{study}_sr.dcm", f"{study}_bug_report.txt")
    return [output / name for name in names]
