"""Small sound exams whose truth is known at every point, as vendors write them; see tests/fuzz_structure.py."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from dicom_writer import Scan, header, save_enhanced
from numpy.typing import NDArray
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

Array = NDArray[np.float64]
Values = Callable[[Array], Array]
SYNTAXES = {
    "explicit": ExplicitVRLittleEndian,
    "implicit": ImplicitVRLittleEndian,
    "deflated": DeflatedExplicitVRLittleEndian,
}
VENDORS = {  # manufacturer, names of T2, diffusion, ADC map, T1
    "siemens": ("SIEMENS", "t2_tse_tra", "ep2d_diff_tra", "ep2d_diff_tra_ADC", "t1_tse_tra"),
    "ge": ("GE MEDICAL SYSTEMS", "Ax T2 FRFSE", "Ax DWI", "Apparent Diffusion Coefficient (mm2/s)", "Ax T1 FSE"),
    "philips": ("Philips Medical Systems", "T2W_TSE_ax", "DWI_3b", "dADC", "T1W_TSE_ax"),
    "uih": ("UIH", "t2_fse_tra", "epi_dwi_tra", "epi_dwi_tra_ADC", "t1_fse_tra"),
    "public": ("SIEMENS", "t2_tse_tra", "ep2d_diff_tra", "ep2d_diff_tra_ADC", "t1_tse_tra"),
    "name": ("SIEMENS", "t2_tse_tra", "ep2d_diff_tra", "ep2d_diff_tra_ADC", "t1_tse_tra"),  # b in SequenceName alone
}
B_VALUES = ((0, 800), (50, 800), (0, 1000), (0, 50, 400, 800), (0, 100, 500, 1400), (50, 400, 1000))
DIRECTIONS = (("1", (1.0, 0.0, 0.0), -0.2), ("2", (0.0, 1.0, 0.0), 0.05), ("3", (0.0, 0.0, 1.0), 0.15))
NOISE = 0.003  # of the signal at b = 0: an ADC fitted to b = 0 and 800 is 1 % off, one standard deviation


class Anatomy:
    """Smooth tissue: a function of the point (..., 3) in LPS millimetres for each kind of image."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([99, seed])
        length = rng.uniform(35, 60, (4, 3, 1))
        wave = rng.normal(size=(4, 3, 3))
        self._wave = 2 * np.pi * wave / np.linalg.norm(wave, axis=-1, keepdims=True) / length
        self._phase = rng.uniform(0, 2 * np.pi, (4, 3))

    def _unit(self, kind: int, points: Array) -> Array:
        return np.asarray(0.5 + np.sin(points @ self._wave[kind].T + self._phase[kind]).mean(axis=-1) / 2)

    def t2(self, points: Array) -> Array:
        """Relaxation-weighted signal."""
        return np.asarray(150 + 500 * self._unit(0, points))

    def other(self, points: Array) -> Array:
        """What any other contrast shows, T1 or a damaged T2."""
        return 100 + 600 * self._unit(3, points)

    def adc(self, points: Array) -> Array:
        """Mean diffusivity in 1e-6 mm2/s."""
        return 750 + 800 * self._unit(2, points)

    def signal(self, points: Array, b: float, off: float = 0.0) -> Array:
        """Diffusion-weighted signal; ``off``: how far the direction's diffusivity is from the mean.

        Tissue has texture, which a quotient of signals has not.
        """
        texture = 1 + 0.12 * np.sin(points @ np.array([12.07, 9.01, 11.39]))
        decay = np.exp(-b * 1e-6 * self.adc(points) * (1 + off))
        return np.asarray((1500 + 800 * self._unit(1, points)) * texture * decay)


@dataclass(frozen=True)
class Grid:
    """Where the pixels of a series lie; ``spacing`` of rows, columns and slices."""

    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]
    orientation: tuple[float, ...]
    centre: tuple[float, float, float]

    @property
    def axes(self) -> Array:
        """Steps in mm to the next slice, row and column, as rows."""
        along, down = np.array(self.orientation[:3]), np.array(self.orientation[3:])
        rows, columns, slices = self.spacing
        return np.stack([slices * np.cross(along, down), rows * down, columns * along])

    @property
    def origin(self) -> tuple[float, float, float]:
        x, y, z = np.array(self.centre) - (np.array(self.shape) - 1) / 2 @ self.axes
        return float(x), float(y), float(z)

    @property
    def points(self) -> Array:
        """Centre of every pixel (slices, rows, columns, 3)."""
        return np.asarray(self.origin + np.moveaxis(np.indices(self.shape), 0, -1) @ self.axes)


@dataclass(eq=False)
class Picture:
    """One slice: its header, and what it is in truth."""

    ds: Dataset
    part: str  # t2, dwi, calculated, adc, sagittal, t1, wide, localizer
    index: int
    b: float | None = None
    direction: str = ""

    @property
    def pixels(self) -> Array:
        kind = "<i2" if self.ds.PixelRepresentation else "<u2"
        return np.frombuffer(self.ds.PixelData, kind).reshape(self.ds.Rows, self.ds.Columns).astype(np.float64)

    @pixels.setter
    def pixels(self, values: Array) -> None:
        self.ds.Rows, self.ds.Columns = values.shape
        kind = "<i2" if self.ds.PixelRepresentation else "<u2"
        self.ds.PixelData = np.round(values).astype(kind).tobytes()


@dataclass(eq=False)
class Exam:
    """A sound exam in memory, to be damaged and written.

    Args:
        anatomies: The patients; a study's images must all be of one of them.
        clipped: Whether a calculated image is zero where its signal is low.
        hole: Centre of a ball of ``radius`` mm in which no image need be right, but must not be called valid.
        enhanced: Parts written as enhanced multi-frame files.
        raw: Further files, by name.
    """

    vendor: str
    b_values: tuple[int, ...]
    anatomies: list[Anatomy]
    pictures: list[Picture] = field(default_factory=list)
    syntax: str = "explicit"
    enhanced: frozenset[str] = frozenset()
    raw: dict[str, bytes] = field(default_factory=dict)
    hole: Array | None = None
    radius: float = 12.0
    clipped: bool = False

    @property
    def known(self) -> list[float]:
        """The b-values above 0 that there are images of."""
        return sorted({float(one.b) for one in self.pictures if one.b and one.part in ("dwi", "calculated")})

    def parts(self) -> set[str]:
        return {one.part for one in self.pictures}

    def of(self, part: str, b: float | None = None) -> list[Picture]:
        return [one for one in self.pictures if one.part == part and b in (None, one.b)]

    def remove(self, *gone: Picture) -> None:
        self.pictures = [one for one in self.pictures if one not in gone]

    def slices(self, part: str) -> list[int]:
        return sorted({one.index for one in self.of(part)})


@dataclass
class Builder:
    """Writes the parts of one exam; series are numbered as they are added."""

    exam: Exam
    rng: np.random.Generator
    study: str
    patient: str
    orientation: tuple[float, ...]
    centre: tuple[float, float, float]
    number: int = 2

    def add(self, part: str, name: str, kind: str, values: Values, grid: Grid, **more: Any) -> list[Picture]:
        """One series of one volume; ``series`` joins it to an earlier one, ``noise`` is in units of the values."""
        noise, number = more.pop("noise", 0.0), more.pop("series", None)
        b, direction = more.pop("b", None), more.pop("direction", "")
        if number is None:
            self.number += 1
            number = self.number
        array = values(grid.points) / more.get("RescaleSlope", 1)
        array = np.maximum(np.round(array + self.rng.normal(size=array.shape) * noise), 0)
        maker = VENDORS[self.exam.vendor][0]
        elements = {"Modality": "MR", "Manufacturer": maker, "PatientID": self.patient, "StudyDate": "20240305"}
        elements |= {"AcquisitionDate": "20240305", "SeriesTime": f"12{number:02d}00.000000", **more}
        scan = Scan(array, number, name, tuple(kind.split("\\")), grid.orientation, grid.origin, grid.spacing, elements)
        added = [Picture(header(scan, n, self.study), part, n, b, direction) for n in range(len(array))]
        normal = np.cross(grid.orientation[:3], grid.orientation[3:])
        for one in added:
            count = len([other for other in self.exam.pictures if other.ds.SeriesNumber == number])
            one.ds.InstanceNumber, one.ds.SliceThickness = count + 1, grid.spacing[2]
            one.ds.SliceLocation = round(float(np.array(one.ds.ImagePositionPatient, float) @ normal), 6)
            one.ds.SOPInstanceUID = f"{one.ds.SeriesInstanceUID}.{count + 1}"
            self.exam.pictures.append(one)
        return added

    def grid(self, rows: int, pixel: float, slices: int, off: float = 0.0, gap: float = 3.0) -> Grid:
        normal = np.cross(self.orientation[:3], self.orientation[3:])
        x, y, z = np.array(self.centre) + off * normal
        return Grid((slices, rows, rows), (pixel, pixel, gap), self.orientation, (float(x), float(y), float(z)))


SPIN_ECHO = {"ScanningSequence": "SE", "EchoTime": 101.0, "RepetitionTime": 5200.0, "SequenceName": "*tse2d1_15"}
PLANES = {"sagittal": (0.0, 1.0, 0.0, 0.0, 0.0, -1.0), "coronal": (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)}


def tell_b(ds: Dataset, vendor: str, b: float, direction: tuple[float, ...] | None) -> None:
    """Write b and direction where the vendor writes them."""
    ds.ScanningSequence = "EP"
    three = direction or (0.0, 0.0, 0.0)
    elements: dict[str, list[tuple[int, int, str, Any]]] = {
        "siemens": [(0x0019, 0x0010, "LO", "SIEMENS MR HEADER"), (0x0019, 0x100C, "IS", str(b))]
        + ([(0x0019, 0x100E, "FD", list(direction))] if direction else []),
        "ge": [(0x0043, 0x0010, "LO", "GEMS_PARM_01"), (0x0043, 0x1039, "IS", [b, 8, 0, 0])]
        + [(0x0019, 0x0010, "LO", "GEMS_ACQU_01")]
        + [(0x0019, tag, "DS", str(part)) for tag, part in zip((0x10BB, 0x10BC, 0x10BD), three, strict=True)],
        "philips": [(0x2001, 0x0010, "LO", "Philips Imaging DD 001"), (0x2001, 0x1003, "FL", float(b))]
        + [(0x2005, 0x0010, "LO", "Philips MR Imaging DD 001")]
        + [(0x2005, tag, "FL", part) for tag, part in zip((0x10B0, 0x10B1, 0x10B2), three, strict=True)],
        "uih": [(0x0065, 0x0010, "LO", "Image Private Header"), (0x0065, 0x1009, "FD", b * 0.993)]
        + ([(0x0065, 0x1037, "FD", list(direction))] if direction else []),
    }
    for group, number, kind, value in elements.get(vendor, []):
        ds.add_new((group, number), kind, value)
    if vendor in ("siemens", "name"):
        ds.SequenceName = f"*ep_b{b}t" if b else "*ep_b0"
    if vendor == "public":
        ds.DiffusionBValue = float(b)
        if direction:
            ds.DiffusionGradientDirectionSequence = Sequence([Dataset()])
            ds.DiffusionGradientDirectionSequence[0].DiffusionGradientOrientation = list(direction)


def sound(rng: np.random.Generator, vendor: str | None = None) -> Exam:
    """A random sound exam."""
    vendor = vendor or str(rng.choice(list(VENDORS)))
    b_values = B_VALUES[rng.integers(len(B_VALUES))]
    exam = Exam(vendor, b_values, [Anatomy(int(rng.integers(1 << 30)))])
    fill(exam, rng, study=str(rng.integers(100, 10**6)), patient="P1")
    if vendor == "public" and rng.random() < 0.6:
        exam.enhanced = frozenset({"t2", "dwi", "adc"} if rng.random() < 0.5 else {"dwi"})
    elif rng.random() < 0.2:
        exam.syntax = "implicit"
    return exam


def fill(exam: Exam, rng: np.random.Generator, *, study: str, patient: str) -> None:
    """Put the series of one patient, the last of the exam's anatomies, into an exam."""
    tilt = float(rng.choice([0.0, 0.15]))
    orientation = (1.0, 0.0, 0.0, 0.0, round(float(np.cos(tilt)), 8), round(float(-np.sin(tilt)), 8))
    x, y, z = np.round(rng.uniform(-30, 30, 3), 2).tolist()
    builder = Builder(exam, rng, study, patient, orientation, (x, y, z))
    _, t2, _, _, t1 = VENDORS[exam.vendor]
    anatomy, kind = exam.anatomies[-1], "ORIGINAL\\PRIMARY\\M\\ND"
    if rng.random() < 0.3:
        scout = builder.grid(32, 6.0, 1, gap=10.0)
        for plane in (orientation, *PLANES.values()):
            turned = Grid(scout.shape, scout.spacing, plane, scout.centre)
            number = builder.number if plane != orientation else None
            builder.add("localizer", "localizer", kind, anatomy.other, turned, series=number, EchoTime=4.0)
    if rng.random() < 0.3:
        other = str(rng.choice(list(PLANES)))
        turned = Grid((5, 48, 48), (2.0, 2.0, 3.0), PLANES[other], builder.centre)
        builder.add("sagittal", re.sub("(?i)tra|ax", other[:3], t2), kind, anatomy.t2, turned, **SPIN_ECHO)
    slope = {"RescaleSlope": 1.2, "RescaleIntercept": 0.0} if exam.vendor == "philips" else {}
    slices = int(rng.choice([10, 12]))
    builder.add("t2", t2, kind, anatomy.t2, builder.grid(64, 1.5, slices), noise=1.0, **SPIN_ECHO, **slope)
    if rng.random() < 0.3:
        short = SPIN_ECHO | {"EchoTime": 11.0, "RepetitionTime": 600.0}
        builder.add("t1", t1, kind, anatomy.other, builder.grid(64, 1.5, slices), **short)
    diffusion(builder, rng)
    if rng.random() < 0.2:
        wide = builder.grid(48, 6.0, 16, gap=6.0)
        builder.add("wide", f"{t2}_pelvis", kind, anatomy.other, wide, **SPIN_ECHO)


def diffusion(builder: Builder, rng: np.random.Generator) -> None:
    """Diffusion in one series or one per b-value, traces or directions; with the scanner's map and a calculated b."""
    exam, anatomy = builder.exam, builder.exam.anatomies[-1]
    grid = builder.grid(32, 3.0, 8, off=float(rng.choice([0.0, 1.5])))
    _, _, name, map_name, _ = VENDORS[exam.vendor]
    ge, traces = exam.vendor == "ge", exam.vendor == "name" or rng.random() < 0.75
    base = "ORIGINAL\\PRIMARY\\OTHER" if ge else "ORIGINAL\\PRIMARY\\DIFFUSION\\NONE"
    kind = base if ge or not traces else "DERIVED\\PRIMARY\\DIFFUSION\\TRACEW"
    together = bool(not traces or rng.random() < 0.5)
    start = None
    for b in exam.b_values:
        for label, vector, off in (("", None, 0.0),) if traces or not b else DIRECTIONS:
            values = _Signal(anatomy, b, off)
            more = {"EchoTime": 70.0, "RepetitionTime": 4000.0, "b": b, "direction": label, "series": start}
            for one in builder.add("dwi", name, kind, values, grid, noise=NOISE * 1900, **more):
                tell_b(one.ds, exam.vendor, b, vector)
                if label and "SequenceName" in one.ds:
                    one.ds.SequenceName = f"*ep_b{b}#{label}"
            start = builder.number if together else None
    more = {"EchoTime": 70.0, "RepetitionTime": 4000.0}
    if rng.random() < 0.6:
        words = "DERIVED\\SECONDARY\\ADC" if ge else "DERIVED\\PRIMARY\\DIFFUSION\\ADC"
        if exam.vendor == "philips":  # in 1e-3 mm2/s
            scaled = more | {"RescaleSlope": 1e-3, "RescaleIntercept": 0.0}
            builder.add("adc", map_name, words, _Scaled(anatomy.adc, 1e-3), grid, noise=8.0, **scaled)
        else:
            builder.add("adc", map_name, words, anatomy.adc, grid, noise=8.0, **more)
    if exam.vendor in ("siemens", "philips", "public") and rng.random() < 0.25:
        b = int(rng.choice([1500, 2000]))
        called = str(rng.choice([f"{name}CALC_BVAL", f"cDWI b{b}", f"{name} synthetic b{b}", f"{name}_computed"]))
        words = "DERIVED\\PRIMARY\\DIFFUSION\\CALC_BVALUE"
        for one in builder.add("calculated", called, words, _Signal(anatomy, b, 0.0), grid, b=b, **more):
            tell_b(one.ds, exam.vendor, b, None)


@dataclass(frozen=True)
class _Signal:
    anatomy: Anatomy
    b: float
    off: float

    def __call__(self, points: Array) -> Array:
        return self.anatomy.signal(points, self.b, self.off)


@dataclass(frozen=True)
class _Scaled:
    values: Values
    factor: float

    def __call__(self, points: Array) -> Array:
        return self.values(points) * self.factor


def write_exam(exam: Exam, folder: Path) -> None:
    """Write every file; names tell nothing of the order."""
    folder.mkdir(parents=True)
    together: dict[tuple[str, str], list[Dataset]] = {}
    for number, one in enumerate(exam.pictures):
        ds = one.ds
        ds.file_meta.TransferSyntaxUID = SYNTAXES[exam.syntax]
        ds.file_meta.MediaStorageSOPClassUID = ds.get("SOPClassUID", "1.2.840.10008.5.1.4.1.1.4")
        ds.file_meta.MediaStorageSOPInstanceUID = ds.get("SOPInstanceUID") or "1.2.3"
        if one.part in exam.enhanced:
            ds.EffectiveEchoTime = ds.get("EchoTime")
            together.setdefault((one.part, str(ds.get("SeriesInstanceUID", ""))), []).append(ds)
        else:
            ds.save_as(folder / f"x{number * 37 % 1009:04d}.dcm", enforce_file_format=True)
    for number, slices in enumerate(together.values()):
        save_enhanced(folder / f"e{number}.dcm", slices[0], _shuffled(slices, number))
    for name, content in exam.raw.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _shuffled(slices: Iterable[Dataset], seed: int) -> list[Dataset]:
    every = list(slices)
    return [every[number] for number in np.random.default_rng(seed).permutation(len(every))]
