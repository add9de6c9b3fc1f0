"""What goes wrong with sound DICOM exams, one named damage each; see tests/fuzz_structure.py.

A damage changes an exam in place and gives False where it does not apply to it.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from fuzz_exams import Anatomy, Array, Exam, Picture, fill
from pydicom.uid import ComprehensiveSRStorage, SecondaryCaptureImageStorage, SegmentationStorage

Change = Callable[[Exam, np.random.Generator], bool]


@dataclass(frozen=True)
class Damage:
    """A damage, and what a warning must match where it lets the numbers differ from the truth."""

    change: Change
    named: str


DAMAGES: dict[str, Damage] = {}
_PLACE = r"slice|position|cover|grid|geometr"
NOTHING = "$^"  # excuses it: a wrong series is a wrong series, whatever a warning says
_LEFT = r"left out|took|left \d"


def damage(named: str) -> Callable[[Change], Change]:
    """Put a damage into the table."""

    def register(change: Change) -> Change:
        DAMAGES[change.__name__] = Damage(change, named)
        return change

    return register


def pick_part(exam: Exam, rng: np.random.Generator, *parts: str) -> str:
    """One of the parts that the exam has; T2 and diffusion always."""
    return str(rng.choice([part for part in parts or ("t2", "dwi", "adc") if part in exam.parts()]))


def pick_volume(exam: Exam, rng: np.random.Generator, *parts: str) -> list[Picture]:
    """The slices of one volume, in order."""
    part = pick_part(exam, rng, *parts)
    kinds = sorted({(one.b, one.direction) for one in exam.of(part)}, key=str)
    b, direction = kinds[rng.integers(len(kinds))]
    return sorted((one for one in exam.of(part, b) if one.direction == direction), key=lambda one: one.index)


def again(exam: Exam, pictures: list[Picture], number: int, part: str = "") -> list[Picture]:
    """A second series of the same slices."""
    added = []
    for count, one in enumerate(pictures, 1):
        ds = deepcopy(one.ds)
        ds.SeriesNumber, ds.InstanceNumber = number, count
        ds.SeriesInstanceUID = f"{ds.StudyInstanceUID}.{number}"
        ds.SOPInstanceUID, ds.SeriesTime = f"{ds.SeriesInstanceUID}.{count}", f"13{number % 60:02d}00.000000"
        ds.AcquisitionTime = ds.SeriesTime
        added.append(Picture(ds, part or one.part, one.index, one.b, one.direction))
    exam.pictures += added
    return added


def points_of(one: Picture) -> Array:
    """Where the pixels of a slice lie."""
    along, down = np.split(np.array(one.ds.ImageOrientationPatient, float), 2)
    rows, columns = np.indices((one.ds.Rows, one.ds.Columns))
    spacing = np.array(one.ds.PixelSpacing, float)
    steps = rows[..., None] * down * spacing[0] + columns[..., None] * along * spacing[1]
    return np.asarray(np.array(one.ds.ImagePositionPatient, float) + steps)


def show(pictures: list[Picture], values: Callable[[Array], Array]) -> None:
    for one in pictures:
        one.pixels = values(points_of(one))


def normal_of(one: Picture) -> Array:
    along, down = np.split(np.array(one.ds.ImageOrientationPatient, float), 2)
    return np.cross(along, down)


def move(one: Picture, by: Array) -> None:
    one.ds.ImagePositionPatient = [round(float(v), 6) for v in np.array(one.ds.ImagePositionPatient, float) + by]


# ---- slices


@damage(_PLACE)
def first_or_last_slice_lost(exam: Exam, rng: np.random.Generator) -> bool:
    part = pick_part(exam, rng)
    at = exam.slices(part)[-int(rng.integers(2))]
    exam.remove(*(one for one in exam.of(part) if one.index == at))
    return True


@damage(_PLACE)
def middle_slice_lost(exam: Exam, rng: np.random.Generator) -> bool:
    part = pick_part(exam, rng)
    exam.remove(*(one for one in exam.of(part) if one.index == 4))
    return True


@damage(_PLACE)
def slice_of_one_volume_lost(exam: Exam, rng: np.random.Generator) -> bool:
    exam.remove(pick_volume(exam, rng, "dwi")[int(rng.choice([0, 4, -1]))])
    return True


@damage(_PLACE)
def two_volumes_lose_different_slices(exam: Exam, rng: np.random.Generator) -> bool:
    low, high = exam.of("dwi", exam.b_values[0]), exam.of("dwi", exam.b_values[-1])
    exam.remove(*(one for one in low if one.index == 0), *(one for one in high if one.index == 7))
    return True


@damage(_PLACE)
def every_other_slice_of_one_volume_lost(exam: Exam, rng: np.random.Generator) -> bool:
    exam.remove(*pick_volume(exam, rng, "dwi", "adc")[::2])
    return True


@damage(_PLACE)
def half_a_volume_lost(exam: Exam, rng: np.random.Generator) -> bool:
    exam.remove(*pick_volume(exam, rng)[5:])
    return True


@damage(_LEFT + r"|b = ")
def a_b_value_lost(exam: Exam, rng: np.random.Generator) -> bool:
    b = int(rng.choice(exam.b_values))
    exam.remove(*exam.of("dwi", b))
    exam.b_values = tuple(value for value in exam.b_values if value != b)
    return True


@damage(_PLACE)
def slice_twice(exam: Exam, rng: np.random.Generator) -> bool:
    one = pick_volume(exam, rng)[3]
    ds = deepcopy(one.ds)
    if rng.random() < 0.5:
        ds.SOPInstanceUID += ".7"
    exam.pictures.append(Picture(ds, one.part, one.index, one.b, one.direction))
    return True


@damage(_PLACE + r"|repeat|differ")
def slice_twice_with_other_content(exam: Exam, rng: np.random.Generator) -> bool:
    one = pick_volume(exam, rng)[3]
    ds = deepcopy(one.ds)
    ds.SOPInstanceUID += ".7"
    other = Picture(ds, one.part, one.index, one.b, one.direction)
    show([other], exam.anatomies[0].other)
    exam.pictures.append(other)
    return True


@damage(_PLACE)
def two_slices_change_places(exam: Exam, rng: np.random.Generator) -> bool:
    """SliceLocation and InstanceNumber still say where they were."""
    volume = pick_volume(exam, rng)
    first, second = volume[2], volume[-1]
    one, other = first.ds.ImagePositionPatient, second.ds.ImagePositionPatient
    first.ds.ImagePositionPatient, second.ds.ImagePositionPatient = other, one
    return first.part not in exam.enhanced


@damage("empty|zero|slice")
def slice_without_signal(exam: Exam, rng: np.random.Generator) -> bool:
    one = pick_volume(exam, rng)[int(rng.choice([0, 5]))]
    one.pixels = np.zeros_like(one.pixels)
    return True


@damage(r"scout|orientation|odd|direction")
def scout_inside_a_series(exam: Exam, rng: np.random.Generator) -> bool:
    volume = pick_volume(exam, rng)
    for number in range(int(rng.integers(1, 4))):
        ds = deepcopy(volume[0].ds)
        ds.ImageOrientationPatient = [0.0, 1.0, 0.0, 0.0, 0.0, -1.0]
        ds.SOPInstanceUID += f".{number + 7}"
        ds.InstanceNumber = 90 + number
        move(other := Picture(ds, volume[0].part, 99, volume[0].b, volume[0].direction), np.array([9.0 * number, 0, 0]))
        exam.pictures.append(other)
    return True


@damage(r"size|shape|spacing|slice")
def slice_of_another_size(exam: Exam, rng: np.random.Generator) -> bool:
    one = pick_volume(exam, rng)[5]
    if one.part in exam.enhanced:
        return False
    one.pixels = one.pixels[2:-2]
    return True


# ---- copies, identities


@damage("cop")
def every_file_twice(exam: Exam, rng: np.random.Generator) -> bool:
    exam.pictures += [Picture(deepcopy(one.ds), one.part, one.index, one.b, one.direction) for one in exam.pictures]
    return not exam.enhanced


@damage("cop|several|took")
def a_series_sent_twice(exam: Exam, rng: np.random.Generator) -> bool:
    part = pick_part(exam, rng)
    again(exam, exam.of(part), 60)
    return True


def _lose(name: str, named: str) -> None:
    def change(exam: Exam, rng: np.random.Generator) -> bool:
        parts = exam.parts() if rng.random() < 0.5 else {pick_part(exam, rng)}
        for one in exam.pictures:
            if one.part in parts and name in one.ds:
                del one.ds[name]
        return True

    DAMAGES[f"{name}_lost"] = Damage(change, named)


for _name, _named in {
    "SeriesInstanceUID": "series", "StudyInstanceUID": "StudyInstanceUID", "FrameOfReferenceUID": "frame",
    "SOPInstanceUID": "SOPInstanceUID", "SeriesNumber": "series", "SeriesDescription": "name|description",
    "ImageType": "type", "AcquisitionTime": "time", "EchoTime": "echo", "SOPClassUID": "class", "Modality": "modality",
    "PatientID": "patient", "InstanceNumber": "number", "SequenceName": "b-value", "ImagePositionPatient": "position",
    "ImageOrientationPatient": "orientation", "PixelSpacing": "spacing",
}.items():  # fmt: skip
    _lose(_name, _named)


@damage("UID")
def instance_numbers_restart_in_every_series(exam: Exam, rng: np.random.Generator) -> bool:
    for one in exam.pictures:
        one.ds.SOPInstanceUID = f"{one.ds.StudyInstanceUID}.5.{one.ds.InstanceNumber}"
    return True


@damage("UID")
def one_instance_uid_for_a_series(exam: Exam, rng: np.random.Generator) -> bool:
    part = pick_part(exam, rng)
    for one in exam.of(part):
        one.ds.SOPInstanceUID = f"{one.ds.StudyInstanceUID}.5"
    return True


@damage("UID")
def one_series_uid_for_all(exam: Exam, rng: np.random.Generator) -> bool:
    for one in exam.pictures:
        one.ds.SeriesInstanceUID = f"{one.ds.StudyInstanceUID}.5"
    return not exam.enhanced


@damage("frame")
def frame_of_reference_for_each_series(exam: Exam, rng: np.random.Generator) -> bool:
    for one in exam.pictures:
        one.ds.FrameOfReferenceUID = f"{one.ds.SeriesInstanceUID}.9"
    return True


def _second_patient(exam: Exam, rng: np.random.Generator, patient: str) -> list[Picture]:
    """The images of a second exam of the same style, in a study of its own."""
    before = list(exam.pictures)
    exam.anatomies.append(Anatomy(int(rng.integers(1 << 30))))
    fill(exam, rng, study="88", patient=patient)
    return [one for one in exam.pictures if one not in before]


@damage("patient")
def two_patients_in_one_study(exam: Exam, rng: np.random.Generator) -> bool:
    """Whole exams, or the T2 of one and the diffusion of the other; apart by patient or by frame of reference."""
    study, frame = exam.pictures[0].ds.StudyInstanceUID, exam.pictures[0].ds.FrameOfReferenceUID
    first, second = list(exam.pictures), _second_patient(exam, rng, "P2")
    by_patient = rng.random() < 0.7
    for one in second:
        one.ds.StudyInstanceUID = study
        if by_patient:
            one.ds.FrameOfReferenceUID = frame
        else:
            one.ds.PatientID = "P1"
    if rng.random() < 0.5:
        gone = str(rng.choice(["t2", "dwi"]))
        keep = {"t2", "localizer", "sagittal", "wide", "t1"}
        exam.remove(*(one for one in first if (one.part in keep) == (gone == "t2")))
        exam.remove(*(one for one in second if (one.part in keep) != (gone == "t2")))
    return not exam.enhanced


@damage("date|study|patient")
def two_studies_in_one_folder(exam: Exam, rng: np.random.Generator) -> bool:
    _second_patient(exam, rng, "P1")
    return not exam.enhanced


@damage("ADC|contradicts|frame|patient|date")
def adc_map_of_another_exam(exam: Exam, rng: np.random.Generator) -> bool:
    """Its frame of reference may be its own; with the same one the fit contradicts it."""
    if "adc" not in exam.parts() or exam.enhanced:
        return False
    other = Anatomy(int(rng.integers(1 << 30)))
    factor = 1e-3 if exam.vendor == "philips" else 1.0
    for one in exam.of("adc"):
        one.pixels = other.adc(points_of(one)) * factor / float(one.ds.get("RescaleSlope", 1))
        if rng.random() < 0.3:
            one.ds.FrameOfReferenceUID += ".8"
            one.ds.StudyDate = one.ds.AcquisitionDate = "20210101"
    return True


# ---- what a series is called


@damage("number")
def series_numbers_change(exam: Exam, rng: np.random.Generator) -> bool:
    numbers = sorted({one.ds.SeriesNumber for one in exam.pictures})
    new = dict(zip(numbers, rng.permutation(numbers).tolist(), strict=True)) if rng.random() < 0.7 else {}
    for one in exam.pictures:
        one.ds.SeriesNumber = new.get(one.ds.SeriesNumber, 1)
    return True


@damage("name|description")
def descriptions_change_places(exam: Exam, rng: np.random.Generator) -> bool:
    parts = [part for part in ("t2", "dwi", "adc") if part in exam.parts()]
    first, second = rng.choice(parts, 2, replace=False).tolist()
    one, other = exam.of(first)[0].ds.SeriesDescription, exam.of(second)[0].ds.SeriesDescription
    for part, name in ((first, other), (second, one)):
        for picture in exam.of(part):
            picture.ds.SeriesDescription = name
    return True


@damage("name|description")
def descriptions_say_nothing(exam: Exam, rng: np.random.Generator) -> bool:
    for one in exam.pictures:
        one.ds.SeriesDescription = "Unnamed series"
    return True


@damage("time")
def times_change(exam: Exam, rng: np.random.Generator) -> bool:
    for one in exam.of(pick_part(exam, rng)):
        one.ds.AcquisitionTime = "000700.000000"
        one.ds.pop("AcquisitionDate", None)
    return True


@damage("modality|class")
def another_modality(exam: Exam, rng: np.random.Generator) -> bool:
    part = pick_part(exam, rng)
    for one in exam.of(part):
        one.ds.Modality = "CT"
    return True


# ---- what is no T2


def _decoy(name: str, named: str, **elements: object) -> None:
    """A later series of other content beside the T2; with ``extra`` more slices than it."""

    def change(exam: Exam, rng: np.random.Generator) -> bool:
        if "t2" in exam.enhanced:
            return False
        added = again(exam, exam.of("t2"), int(rng.choice([1, 61])), "decoy")
        for one in added:
            for element, value in elements.items():
                setattr(one.ds, element, deepcopy(value))
        show(added, exam.anatomies[0].other)
        if rng.random() < 0.5:
            for at, sign in ((0, -1.0), (-1, 1.0)):
                more = again(exam, [added[at]], added[0].ds.SeriesNumber, "decoy")[0]
                more.ds.SOPInstanceUID += ".99"
                move(more, sign * 3.0 * normal_of(more))
        return True

    DAMAGES[name] = Damage(change, named)


_decoy("t1_called_axt1_fse", NOTHING, SeriesDescription="AxT1 FSE", EchoTime=12.0, RepetitionTime=600.0)
_decoy("t1_called_t2", NOTHING, EchoTime=12.0, RepetitionTime=600.0)
_decoy(
    "t2_star", NOTHING, SeriesDescription="t2_fl2d_tra_hemo", ScanningSequence="GR", EchoTime=20.0, RepetitionTime=500.0
)
_decoy("t2_star_by_name", NOTHING, SeriesDescription="T2* tra")
_decoy("t2_map", NOTHING, SeriesDescription="t2_map_tra", ImageType=["DERIVED", "PRIMARY", "T2", "T2 MAP"])
_decoy(
    "t2_dixon_fat", NOTHING, SeriesDescription="t2_tse_dixon_tra_F", ImageType=["DERIVED", "PRIMARY", "DIXON", "FAT"]
)
_decoy(
    "t2_subtraction", NOTHING, SeriesDescription="t2_tse_tra_SUB", ImageType=["DERIVED", "PRIMARY", "M", "SUBTRACTION"]
)
_decoy("t2_reformat", "reformation", SeriesDescription="t2_tse_tra_MPR", ImageType=["DERIVED", "SECONDARY", "MPR"])
_decoy("t2_phase", NOTHING, ImageType=["ORIGINAL", "PRIMARY", "P", "ND"])
_decoy("seg_called_t2", NOTHING, SOPClassUID=SegmentationStorage, Modality="SEG", ImageType=["DERIVED", "PRIMARY"])
_decoy(
    "secondary_capture_called_t2", NOTHING, SOPClassUID=SecondaryCaptureImageStorage, ImageType=["DERIVED", "SECONDARY"]
)
_decoy("other_modality_called_t2", NOTHING, SOPClassUID="1.2.840.10008.5.1.4.1.1.2", Modality="CT")
_decoy("t1_with_contrast_called_fse", NOTHING, SeriesDescription="T1 FSE post Gd", EchoTime=11.0, RepetitionTime=550.0)
_decoy("sequence_of_gradient_echo_called_t2", NOTHING, ScanningSequence="GR", EchoTime=4.0, RepetitionTime=8.0)


@damage(NOTHING)
def t2_repeated_later(exam: Exam, rng: np.random.Generator) -> bool:
    """The patient moved in the first one; over midnight the later one has the smaller time of day."""
    if "t2" in exam.enhanced:
        return False
    first = exam.of("t2")
    later = again(exam, first, 62)
    for one in first:
        one.part = "decoy"
    show(first, exam.anatomies[0].other)
    if rng.random() < 0.5:
        for one in first:
            one.ds.AcquisitionTime, one.ds.AcquisitionDate = "235200.0", "20240305"
        for one in later:
            one.ds.AcquisitionTime, one.ds.AcquisitionDate = "000700.0", "20240306"
    return True


@damage(NOTHING)
def t2_coarser_and_later(exam: Exam, rng: np.random.Generator) -> bool:
    if "t2" in exam.enhanced:
        return False
    added = again(exam, exam.of("t2"), 63, "decoy")
    for one in added:
        one.ds.PixelSpacing = [6.0, 6.0]
        move(one, -(64 * 4.5 / 2) * np.array([*one.ds.ImageOrientationPatient[:3]], float))
        move(one, -(64 * 4.5 / 2) * np.array([*one.ds.ImageOrientationPatient[3:]], float))
    show(added, exam.anatomies[0].other)
    return True


@damage("report")
def structured_report_inside(exam: Exam, rng: np.random.Generator) -> bool:
    ds = deepcopy(exam.pictures[0].ds)
    for name in ("PixelData", "Rows", "Columns", "SamplesPerPixel", "ImagePositionPatient", "ImageOrientationPatient"):
        del ds[name]
    ds.SOPClassUID, ds.Modality, ds.SeriesInstanceUID = ComprehensiveSRStorage, "SR", f"{ds.StudyInstanceUID}.70"
    ds.SOPInstanceUID = f"{ds.SeriesInstanceUID}.1"
    exam.pictures.append(Picture(ds, "report", 0))
    return True


@damage("file")
def strangers_in_the_folder(exam: Exam, rng: np.random.Generator) -> bool:
    exam.raw |= {"._x0001.dcm": b"\0\5\x16\7" + bytes(200), "Thumbs.db": bytes(50), "a/report.pdf": b"%PDF-1.4 text"}
    exam.raw |= {"README.txt": b"viewer", "a/cut.dcm": bytes(128) + b"DICM"}
    return True
