"""Damaged copies of small cases in every format, and how the programs read them; see benchmarks/fuzz_ingest.py."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import SimpleITK as sitk  # noqa: N813
from dicom_writer import Scan, compress, write, write_enhanced
from pydicom.dataset import Dataset

from mri_alm.errors import InputError, StudyError, itk_failed
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.exam import load_images, read_study, study_images
from mri_alm.imaging.registration import onto_grid

GRID: dict[str, Any] = {"spacing": (2.0, 2.0, 3.0), "size": (12, 12, 4)}
ABSURD = (0, 1, 3, 255, 256, 32767, 65535)
FORMATS = ("dicom", "enhanced", "jpeg2000", "nii", "nii.gz", "mha", "nrrd", "bval")


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    """Replace up to 20 bytes, half of the times in the first kilobyte, where headers are."""
    changed = bytearray(data)
    end = min(len(data), 1024) if rng.random() < 0.5 else len(data)
    for at in rng.integers(0, end, rng.integers(1, 21)).tolist():
        changed[at] = int(rng.integers(256))
    return bytes(changed)


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(0, len(data)))]


def grow(data: bytes, rng: np.random.Generator) -> bytes:
    """Put the same part in twice, or random bytes behind the end."""
    first, last = sorted(rng.integers(0, len(data), 2).tolist())
    return data[:last] + (data[first:last] if rng.random() < 0.5 else rng.bytes(200)) + data[last:]


def absurd_word(data: bytes, rng: np.random.Generator) -> bytes:
    """Write a huge, negative or odd number over two, four or eight bytes of the header."""
    at = int(rng.integers(0, max(1, min(len(data), 700) - 8)))
    number = rng.choice([b"\xff" * 8, b"\xff\xff\xff\x7f" * 2, b"\0" * 8, struct.pack("<d", 1e300), b"\xfe\xff" * 4])
    width = int(rng.choice([2, 4, 8]))
    return data[:at] + bytes(number)[:width] + data[at + width :]


def drop_elements(ds: Dataset, rng: np.random.Generator) -> None:
    for tag in rng.permutation([int(element.tag) for element in ds])[: rng.integers(1, 5)].tolist():
        del ds[tag]


def absurd_elements(ds: Dataset, rng: np.random.Generator) -> None:
    """Sizes no image has, numbers no scanner writes."""
    numbers = ["1e300", "-1e300", "nan", "1e-300", "0", "-1"]
    places: dict[str, Callable[[], Any]] = {
        "Rows": lambda: int(rng.choice(ABSURD)),
        "Columns": lambda: int(rng.choice(ABSURD)),
        "NumberOfFrames": lambda: str(rng.choice(["2147483647", "-1", "0", "100000"])),
        "BitsAllocated": lambda: int(rng.choice([0, 1, 7, 8, 32, 64, 65535])),
        "SamplesPerPixel": lambda: int(rng.choice([0, 3, 65535])),
        "PixelSpacing": lambda: [str(v) for v in rng.choice(numbers, 2)],
        "ImagePositionPatient": lambda: [str(v) for v in rng.choice(numbers, 3)],
        "ImageOrientationPatient": lambda: [str(v) for v in rng.choice(numbers, 6)],
        "RescaleSlope": lambda: str(rng.choice(numbers)),
        "EchoTime": lambda: str(rng.choice(numbers)),
        "SeriesNumber": lambda: str(rng.choice(["-5", "2147483647", "12.5"])),
    }
    for name in rng.choice(list(places), rng.integers(1, 4), replace=False).tolist():
        value = places[name]()
        vr = pydicom.datadict.dictionary_VR(name)
        text = "\\".join(value) if isinstance(value, list) else value
        raw = struct.pack("<H", text) if isinstance(text, int) else text.encode().ljust(len(text) + len(text) % 2)
        tag = pydicom.tag.Tag(name)
        ds[tag] = pydicom.dataelem.RawDataElement(tag, vr, len(raw), raw, 0, False, True)


DAMAGES: tuple[Callable[[bytes, np.random.Generator], bytes], ...] = (flip, cut, grow, absurd_word)
EDITS: tuple[Callable[[Dataset, np.random.Generator], None], ...] = (drop_elements, absurd_elements)


def damage(path: Path, rng: np.random.Generator) -> None:
    """Damage one file in place."""
    edits = EDITS if path.suffix == ".dcm" else ()
    number = int(rng.integers(len(DAMAGES) + len(edits)))
    if number < len(DAMAGES):
        path.write_bytes(DAMAGES[number](path.read_bytes(), rng))
        return
    ds = pydicom.dcmread(path)
    edits[number - len(DAMAGES)](ds, rng)
    ds.save_as(path)


def read(form: str, folder: Path) -> str:
    """Read and register a damaged case the way the programs do; what came of it in a word."""
    try:
        if form in FORMATS[:3]:
            for files in find_studies(folder):
                assert not (ours := [text for text in files.failed.values() if "nobody foresaw" in text]), ours[0]
                onto_grid(*study_images(read_study(files)), **GRID)
        else:
            suffix = {"bval": "nii.gz"}.get(form, form)
            item: dict[str, Any] = {"t2": folder / f"t2.{suffix}", "adc": folder / f"adc.{suffix}"}
            item |= {"dwi": folder / "dwi.nii.gz"} if form == "bval" else {"hbv": folder / f"hbv.{suffix}"}
            onto_grid(*load_images({key: str(path) for key, path in item.items()}), **GRID)
    except StudyError as error:
        return error.code
    except InputError:
        return "input"
    except RuntimeError as error:
        if failure := itk_failed(error):
            return failure.code
        raise
    return "read"


def make(source: Path, folder: Path, rng: np.random.Generator) -> None:
    """Copy a case and damage one to three of its files."""
    folder.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        (folder / file.name).write_bytes(file.read_bytes())
    files = sorted(folder.iterdir())
    for number in rng.choice(len(files), min(len(files), int(rng.integers(1, 4))), replace=False).tolist():
        damage(files[number], rng)


def write_sources(folder: Path) -> dict[str, Path]:
    """One small undamaged case per format: 5 slices of 20 by 24 pixels."""
    rng = np.random.default_rng(0)
    shape = (5, 20, 24)
    t2, adc = rng.uniform(0, 600, shape).astype(np.uint16), rng.uniform(600, 2000, shape)
    dwi = {b: (900 * np.exp(-b * 1e-6 * adc)).astype(np.uint16) for b in (50.0, 800.0)}
    places = {form: folder / form for form in FORMATS}
    for place in places.values():
        place.mkdir(parents=True)
    whole = Scan(t2, 4, "t2_tse_tra")
    trace, mapped = ("DERIVED", "PRIMARY", "DIFFUSION", "TRACEW"), ("DERIVED", "PRIMARY", "DIFFUSION", "ADC")
    scans = [Scan(dwi[b], 5 + n, "ep2d", trace, elements={"DiffusionBValue": b}) for n, b in enumerate(dwi)]
    scans.append(Scan(adc.astype(np.uint16), 8, "ep2d_ADC", mapped))
    write(places["dicom"], whole, *scans)
    write(places["jpeg2000"], whole, *scans)
    compress(places["jpeg2000"])
    write_enhanced(places["enhanced"] / "4.dcm", whole)
    write_enhanced(places["enhanced"] / "5.dcm", *scans[:2])
    write_enhanced(places["enhanced"] / "8.dcm", scans[2])
    for form in FORMATS[3:]:
        suffix = "nii.gz" if form == "bval" else form
        for name, array in (("t2", t2), ("adc", adc), ("hbv", dwi[800.0])):
            image = _image(array.astype(np.int16))
            sitk.WriteImage(image, str(places[form] / f"{name}.{suffix}"), useCompression=suffix != "mha")
    (places["bval"] / "hbv.nii.gz").unlink()
    series = sitk.JoinSeries([_image(array.astype(np.int16)) for array in dwi.values()])
    sitk.WriteImage(series, str(places["bval"] / "dwi.nii.gz"))
    (places["bval"] / "dwi.bval").write_text("50 800\n")
    return places


def _image(array: Any) -> sitk.Image:
    image = sitk.GetImageFromArray(array)
    image.SetSpacing((2.0, 2.0, 3.0))
    return image
