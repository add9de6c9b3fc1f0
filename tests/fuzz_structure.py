"""Sound exams with one or two named damages against the truth: right, refused, or named; never silently wrong.

The exams are in fuzz_exams.py (DICOM) and fuzz_tables.py (NIfTI, with its damages), the damages in fuzz_damages.py
(series, slices, identities) and fuzz_values.py (b-values, places, voxels); the long run is
`benchmarks/fuzz_ingest.py --structure`.

Some damages leave no trace that a reader could find, and are not drawn:

- two b-values, no map, and all images of one b-value times a factor, or the b-values themselves wrong: another tissue
  would look like that. The same of high b and ADC given as files without the acquired images.
- T2 as a whole moved, mirrored or of another pixel size: registration sees it, no header does.
- two patients with the same patient number, study and frame of reference.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fuzz_values  # noqa: F401  its damages enter the table
import numpy as np
import SimpleITK as sitk  # noqa: N813
from fuzz_damages import DAMAGES, Damage
from fuzz_exams import Anatomy, Array, Exam, sound, write_exam
from fuzz_tables import TABLE_DAMAGES, Table, sound_table, write_table

from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.exam import load_images
from mri_alm.imaging.registration import Facts, Images, onto_grid

NOTHING = Damage(lambda _exam, _rng: True, "$^")
EVERY: dict[str, Damage] = {"(nothing)": NOTHING, **DAMAGES, "nifti: (nothing)": NOTHING, **TABLE_DAMAGES}
WRONG = "SILENTLY WRONG"
ORDER = ("CRASH", WRONG, "named", "refused", "right, warned", "right")  # the worst first
SECOND = 0.2  # share of cases with a second damage
SHARE = 0.03  # of a slice's voxels that noise and edges may take out of the tolerance
CHOICE = re.compile("Several (?!.*cover)")  # says which candidate was taken, and names no cause
COARSE = "coarse|resolution"  # the T2 taken is one for an overview, as the fine one was not recognised
LEFT_OUT = re.compile(r"left out|took|left \d|b = ")


UNDECIDABLE = ({"all_b_halved_beside_the_map", "a_b_value_lost"},)  # one b is left, and nothing to hold it against


@dataclass(frozen=True)
class Outcome:
    """What came of one case: a word of ``ORDER``, and the code or the differences."""

    damage: str
    kind: str
    detail: str = ""


def structure_outcome(number: int, seed: int, folder: Path) -> Outcome:
    """Write, read and judge the case of a number; the damages take turns."""
    names, exam, items = make_case(number, seed, folder)
    named = "|".join([COARSE, *filter(None, (EVERY[name].named for name in names))])
    found = [_study(item, exam, named) for item in items or _studies(folder)]
    kind, detail = min(found, key=lambda one: ORDER.index(one[0]))
    return Outcome(" + ".join(names), kind, detail)


def make_case(number: int, seed: int, folder: Path) -> tuple[list[str], Exam | Table, list[Facts | InputError]]:
    """Write a case; gives its damages, the exam that they were done to, and of NIfTI the row of the table."""
    names = [list(EVERY)[number % len(EVERY)]]
    others = TABLE_DAMAGES if names[0].startswith("nifti") else DAMAGES
    rng = np.random.default_rng([seed, number])
    for _ in range(100):
        exam = sound_table(rng) if others is TABLE_DAMAGES else sound(rng)
        second = EVERY[names[0]] is not NOTHING and rng.random() < SECOND
        drawn = [*names, str(rng.choice([name for name in others if name not in names]))] if second else names
        drawn.sort(key=lambda name: name.endswith("_lost"))  # what is lost, the other damage may need
        if set(drawn) in UNDECIDABLE or not all(EVERY[name].change(exam, rng) for name in drawn):  # type: ignore[arg-type]
            continue
        if isinstance(exam, Exam):
            write_exam(exam, folder)
            return drawn, exam, []
        return drawn, exam, [dict(write_table(exam, folder))]
    raise ValueError(f"{names[0]} fits none of a hundred exams")


def _studies(folder: Path) -> list[Facts | InputError]:
    try:
        return [{"dicom": files} for files in find_studies(folder)]
    except InputError as error:
        return [error]


def _study(item: Facts | InputError, exam: Exam | Table, named: str) -> tuple[str, str]:
    """Kind and detail of one study of a case."""
    try:
        if isinstance(item, InputError):
            raise item
        images, facts = load_images(item)
        if "hbv" not in images:  # as every program refuses it, but for a model trained without
            raise StudyError("no_high_b", "")
        after, report = onto_grid(images, facts, spacing=(3.0, 3.0, 3.0), size=(20, 20, 8), register=False)
    except InputError as error:
        return "refused", error.code if isinstance(error, StudyError) else "input"
    warnings = report["warnings"]
    patients = [_differences(images, after, exam, one, report) for one in exam.anatomies]
    wrong = min(patients, key=len)
    if not wrong:
        return ("right, warned" if warnings else "right"), ""
    if any(re.search(named, text, re.IGNORECASE) for text in warnings if not CHOICE.match(text)):
        return "named", ""
    return WRONG, "; ".join(wrong) + (f" [{' | '.join(warnings)}]" if warnings else "")


def _differences(before: Images, after: Images, exam: Exam | Table, patient: Anatomy, report: Facts) -> list[str]:
    """Where what was read, and what stands on the grid, is not what this patient is; scales of signals do not count."""
    b = float(report.get("hbv_b") or max(exam.known))
    near = [value for value in exam.known if abs(value - b) <= 0.06 * value]
    valid = sitk.GetArrayFromImage(after["valid"]) > 0
    found = {
        "T2": _wrong(before["t2"], patient.t2, exam, 0.03, scaled=True),
        "ADC": _wrong(before["adc"], patient.adc, exam, 0.05),
        "ADC on the grid": _wrong(after["adc"], patient.adc, exam, 0.06, inside=valid),
    }
    if not near:
        found["high b"] = f"there is no b = {b:g}"
    elif not exam.clipped:
        signal = _Signal(patient, near[0])
        found[f"b = {b:g}"] = _wrong(before["hbv"], signal, exam, 0.08, scaled=True)
        found[f"b = {b:g} on the grid"] = _wrong(after["hbv"], signal, exam, 0.3, scaled=True, inside=valid)
    alone = len(exam.anatomies) == 1  # otherwise the highest b may be the other patient's
    if alone and near and near[0] < max(exam.known) and not any(LEFT_OUT.search(text) for text in report["warnings"]):
        found["high b "] = f"b = {b:g} is not the highest, b = {max(exam.known):g}"
    return [f"{name}: {text}" for name, text in found.items() if text]


@dataclass(frozen=True)
class _Signal:
    patient: Anatomy
    b: float

    def __call__(self, points: Array) -> Array:
        return self.patient.signal(points, self.b)


def _wrong(
    image: sitk.Image,
    truth: Callable[[Array], Array],
    exam: Exam | Table,
    tolerance: float,
    *,
    scaled: bool = False,
    inside: Array | None = None,
) -> str:
    """The slices of an image whose values are not the truth's at their points; empty where all are right."""
    values = sitk.GetArrayFromImage(image).astype(np.float64)
    points = _points(image)
    compared = np.ones(values.shape, bool) if inside is None else np.asarray(inside, bool)
    if exam.hole is not None:
        distance = np.linalg.norm(points - exam.hole, axis=-1)
        compared &= np.abs(distance - exam.radius) > 6  # across the rim, interpolation mixes both sides
        compared &= (distance > exam.radius) | ((inside is not None) & (values != 0))
    if not compared.any():
        return ""
    ratio = values / truth(points)
    ratio /= (np.median(ratio[compared]) or 1.0) if scaled else 1.0
    off = (~(np.abs(ratio - 1) <= tolerance)) & compared
    share = off.sum(axis=(1, 2)) / np.maximum(compared.sum(axis=(1, 2)), 1)
    bad = np.flatnonzero(share > SHARE)
    middle = np.median(ratio[compared])
    return f"{len(bad)} of {len(values)} slices ({bad[:3].tolist()}, median ratio {middle:.2f})" if len(bad) else ""


def _points(image: sitk.Image) -> Array:
    """Centre of every voxel (slices, rows, columns, 3), LPS mm."""
    index = np.moveaxis(np.indices(image.GetSize()[::-1]), 0, -1)[..., ::-1]
    steps = np.array(image.GetDirection()).reshape(3, 3) * np.array(image.GetSpacing())
    return np.asarray(np.array(image.GetOrigin()) + index @ steps.T)
