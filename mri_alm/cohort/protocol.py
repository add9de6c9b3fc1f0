"""What an exam's protocol is worth, and whether a model was trained on its like: by headers and image geometry alone.

Criteria and their reasons are data (``protocol.yaml``). Nothing here names an exam.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mri_alm.errors import InputError

SYNTHETIC_VENDOR = "mri-alm"
"""The make that phantoms carry in place of a scanner's."""
MEETS, BELOW_ASKED, BELOW_GATE, NOT_KNOWN = "meets", "below recommendation", "below gate", "not known"
"""Levels of :class:`Quality`; the column ``quality`` begins with one of them."""
UNLIKE = "Unlike what the model was trained on"
"""How the warning of :func:`unlike` begins."""
FACT_COLUMNS = {  # columns of a manifest that tell of a protocol -> count of numbers; None: a word, 0: any count
    "vendor": None, "model": None, "field_strength": 1, "b_values": 0, "hbv_b": 1,
    "t2_spacing_mm": 3, "t2_size": 3, "adc_spacing_mm": 3, "adc_size": 3, "crop_about": None,
}  # fmt: skip
_RULES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_ROUNDED = 1.01  # headers round: 3.0000004 mm is 3 mm
_ROUNDED_MM = 0.05  # of a gap that must be none
_FIELDS = (0.35, 0.55, 1.0, 1.2, 1.5, 3.0, 5.0, 7.0)  # T, as scanners are sold; their headers say 1.494 or 2.89
_GAUSS = 100.0  # a field strength above it is no tesla: some headers say 15000
_MIDDLE_B = 1000.0  # s/mm2; the highest b that PI-RADS wants an ADC to be computed from
_SHOWN = 6  # words named in one sentence


@dataclass(frozen=True)
class Quality:
    """What the technical criteria say of an exam.

    Attributes:
        level: :data:`MEETS`, :data:`BELOW_ASKED`, :data:`BELOW_GATE`, or :data:`NOT_KNOWN` where nothing can be judged.
        reasons: What fails, with the value and the limit; what fails the gate stands first.
        unknown: Criteria that nothing in the exam tells of.
    """

    level: str
    reasons: tuple[str, ...]
    unknown: tuple[str, ...]

    def __str__(self) -> str:
        """As the column ``quality`` holds it."""
        text = self.level + (": " + "; ".join(self.reasons) if self.reasons else "")
        if not self.unknown or self.level == NOT_KNOWN:
            return text
        return text + (", as far as known" if self.level == MEETS else "") + f" (not known: {', '.join(self.unknown)})"

    @property
    def warnings(self) -> list[str]:
        """A sentence where something fails."""
        if not self.reasons:
            return []
        consequence = " DCE is asked for whatever the score." if self.level == BELOW_GATE else ""
        return [f"Quality {self.level}: {'; '.join(self.reasons)}.{consequence}"]


def quality_of(report: Mapping[str, Any]) -> Quality:
    """Judge an exam by the technical criteria of ``protocol.yaml``.

    Args:
        report: Facts of the exam, as :func:`mri_alm.imaging.exam.load_images` gives them or ``study.json`` holds them.
    """
    known = measures(report)
    rules = [rule for rule in _RULES["quality"] if rule["fact"] in known]
    failed: dict[str, list[str]] = {"gate": [], "asked": []}
    for rule in rules:
        value = known[rule["fact"]]
        for kind in ("gate", "asked"):
            if text := _beyond(value, rule.get(kind, {})):
                failed[kind].append(f"{rule['name']} {_with_unit(value, rule)} ({text})")
                break
    unknown = [rule["name"] for rule in _RULES["quality"] if rule.get("always") and rule["fact"] not in known]
    level = BELOW_GATE if failed["gate"] else BELOW_ASKED if failed["asked"] else MEETS if rules else NOT_KNOWN
    return Quality(level, (*failed["gate"], *failed["asked"]), tuple(unknown))


def _beyond(value: float, limits: Mapping[str, float]) -> str:
    """Which limit a value fails, in words."""
    if "most" in limits and value > limits["most"] * _ROUNDED + _ROUNDED_MM * (limits["most"] == 0):
        return f"at most {_number(limits['most'])}"
    if "least" in limits and value * _ROUNDED < limits["least"]:
        return f"at least {_number(limits['least'])}"
    return ""


def measures(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the criteria look at, of one exam; what is not known is left out."""
    found: dict[str, Any] = {"vendor": report.get("vendor") or None}
    model = str(report.get("model") or "").lower().removeprefix("magnetom ")  # some headers of one scanner leave it out
    found["model"] = model or None
    given = "a point or mask given" if report.get("crop_center_mm") else "T2's centre"
    found["crop_about"] = report.get("crop_about") or given
    found["field_strength"] = _tesla(report.get("field_strength"))
    acquired = sorted(report.get("b_values") or ())
    found["hbv_b"] = report.get("hbv_b") or max(acquired, default=None)
    if acquired:
        found |= {"b_lowest": acquired[0], "b_acquired": acquired[-1]}
        found["b_middle"] = max((b for b in acquired if b <= _MIDDLE_B), default=0.0)
    found.setdefault("b_acquired", found["hbv_b"])
    for name in ("t2", "adc"):
        found |= _lengths(name, report)
    return {name: value for name, value in found.items() if value is not None}


def _tesla(strength: float | None) -> float | None:
    """Field strength as scanners are sold by it."""
    if not strength:
        return None
    tesla = strength / (10_000 if strength > _GAUSS else 1)
    nearest = min(_FIELDS, key=lambda one: abs(one - tesla))
    return nearest if abs(nearest - tesla) < 0.05 * nearest else round(tesla, 2)


def _lengths(name: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """Pixels, slices and field of view of an image, in mm."""
    spacing, size = report.get(f"{name}_spacing_mm"), report.get(f"{name}_size")
    if not spacing:
        return {}
    thickness, matrix = report.get(f"{name}_thickness_mm"), report.get(f"{name}_acquired_mm")
    found = {
        "in_plane_mm": max(spacing[:2]),
        "slice_mm": spacing[2],
        "gap_mm": max(spacing[2] - thickness, 0.0) if thickness else None,
        "acquired_mm": max(matrix) if matrix else None,
    }
    if size:
        found |= {"field_mm": min(size[0] * spacing[0], size[1] * spacing[1]), "height_mm": size[2] * spacing[2]}
    return {f"{name}_{what}": value and round(value, 3) for what, value in found.items()}


def is_synthetic(report: Mapping[str, Any]) -> bool:
    """Whether an exam is one of the built-in phantoms."""
    return report.get("vendor") == SYNTHETIC_VENDOR


def training_protocol(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a model was trained on, as ``protocol.json`` holds it: counts, words and ranges over exams, none named.

    Args:
        reports: Facts of every training exam, see :func:`quality_of`.
    """
    known = [measures(report) for report in reports]

    def values(rule: Mapping[str, Any]) -> list[Any]:
        return [one[rule["fact"]] for one in known if rule["fact"] in one]

    domain = _RULES["domain"]
    return {
        "exams": len(reports),
        "synthetic": sum(map(is_synthetic, reports)),
        "words": {
            rule["fact"]: {"known": len(found), "values": sorted(set(found))}
            for rule in domain["words"]
            if (found := values(rule))
        },
        "ranges": {
            rule["fact"]: {"known": len(found), "least": min(found), "most": max(found)}
            for rule in domain["ranges"]
            if (found := values(rule))
        },
        "quality": dict(sorted(Counter(quality_of(report).level for report in reports).items())),
    }


def check_protocol(fields: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """The fields of a ``protocol.json``, which may be another's.

    Raises:
        InputError: If they are not what :func:`training_protocol` gives.
    """
    words, ranges = fields.get("words"), fields.get("ranges")
    fine = (
        all(type(fields.get(name)) is int and fields[name] >= 0 for name in ("exams", "synthetic"))
        and isinstance(words, dict)
        and isinstance(ranges, dict)
        and all(isinstance(one, dict) for one in (*words.values(), *ranges.values()))
        and all(_are_words(fact, one.get("values")) and "least" not in one for fact, one in words.items())
        and all(_finite(one.get("least"), one.get("most")) and "values" not in one for one in ranges.values())
        and all(_finite(one.get("known")) for one in (*words.values(), *ranges.values()))
    )
    if not fine:
        raise InputError(f"{place} is no record of what a model was trained on. Restore it, or delete it.")
    return dict(fields)


def _are_words(fact: str, values: Any) -> bool:
    """Whether a list holds what is shown of a fact: numbers where it has a unit, else printable texts."""
    numbers = any(rule["fact"] == fact and "unit" in rule for rule in _RULES["domain"]["words"])
    return isinstance(values, list) and all(
        _finite(word) if numbers else isinstance(word, str) and word.isprintable() for word in values
    )


def _finite(*values: Any) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)


def unlike(report: Mapping[str, Any], trained: Mapping[str, Any] | None) -> list[str]:
    """A sentence on what sets an exam apart from those that a model was trained on; none where nothing is known to.

    Args:
        report: Facts of the exam, see :func:`quality_of`.
        trained: From :func:`training_protocol`.
    """
    if trained is None:
        return []
    found, domain = measures(report), _RULES["domain"]
    apart = []
    for kind in ("words", "ranges"):
        for rule in domain[kind]:
            value, usual = found.get(rule["fact"]), trained[kind].get(rule["fact"])
            if value is None or not usual or usual["known"] < domain["least_known"] * trained["exams"]:
                continue
            if not _among(value, usual, rule):
                apart.append(f"{rule['name']} {_with_unit(value, rule)} (trained on {_saw(usual, rule)})")
    return [f"{UNLIKE}: {'; '.join(apart)}."] if apart else []


def _among(value: Any, usual: Mapping[str, Any], rule: Mapping[str, Any]) -> bool:
    """Whether training saw such a value, or one near."""
    if "values" in usual:
        return value in usual["values"]
    factor = rule["factor"] * _ROUNDED
    return bool(usual["least"] / factor <= value <= usual["most"] * factor)


def _saw(usual: Mapping[str, Any], rule: Mapping[str, Any]) -> str:
    """What training saw of one kind."""
    if "least" in usual:
        ends = sorted({usual["least"], usual["most"]})
        return f"{' to '.join(map(_number, ends))} {rule['unit']}"
    names = [_with_unit(value, rule) for value in usual["values"]]
    return ", ".join(names[:_SHOWN]) + (" and others" if len(names) > _SHOWN else "")


def _with_unit(value: Any, rule: Mapping[str, Any]) -> str:
    return f"{_number(value)} {rule['unit']}" if "unit" in rule else str(value)


def _number(value: float) -> str:
    return f"{value:.4g}"


def training_note(trained: Mapping[str, Any] | None) -> str:
    """What must stand beside every result of a model trained on phantoms; empty where it was trained on patients."""
    if not trained or not trained["synthetic"]:
        return ""
    if trained["synthetic"] >= trained["exams"]:
        return "trained on synthetic exams"
    return f"trained partly on synthetic exams ({trained['synthetic']} of {trained['exams']})"


def trained_in_words(trained: Mapping[str, Any] | None) -> str:
    """What a model was trained on, in a sentence for its card."""
    if trained is None:
        return "What this model was trained on is not recorded."
    parts = [
        f"{rule['name']} {_saw(usual, rule)}"
        for kind in ("words", "ranges")
        for rule in _RULES["domain"][kind]
        if (usual := trained[kind].get(rule["fact"]))
    ]
    note = training_note(trained)
    return f"{trained['exams']} exams{', ' + note if note else ''}" + (f": {'; '.join(parts)}." if parts else ".")


def told_facts(row: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """What a manifest's columns tell of an exam's protocol, and what is wrong with them.

    Args:
        row: Cells by column.
    """
    facts: dict[str, Any] = {}
    problems = []
    for column, count in FACT_COLUMNS.items():
        if not (cell := row.get(column, "")):
            continue
        numbers = None if count is None else _numbers(cell)
        if count is None:
            facts[column] = cell
        elif not numbers or (count and len(numbers) != count):
            what = "numbers" if count == 0 else "a number" if count == 1 else f"{count} numbers"
            problems.append(f"has a {column} that is not {what} of 0 or more. Correct it, or write nothing.")
        else:
            facts[column] = numbers[0] if count == 1 else numbers
    return facts, problems


def _numbers(cell: str) -> list[float]:
    """The numbers of a cell; none where one of the words is none."""
    try:
        numbers = [float(word) for word in cell.split()]
    except ValueError:
        return []
    return numbers if all(math.isfinite(number) and number >= 0 for number in numbers) else []


def quality_counts(qualities: Iterable[str]) -> str:
    """How many exams have which level, from cells of the column ``quality``."""
    levels = (MEETS, BELOW_ASKED, BELOW_GATE, NOT_KNOWN)
    counts = Counter(next((level for level in levels if text.startswith(level)), NOT_KNOWN) for text in qualities)
    return ", ".join(f"{counts[level]} {level}" for level in levels if counts[level])
