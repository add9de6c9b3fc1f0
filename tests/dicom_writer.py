"""Small DICOM series for tests: a classic MR series of a written array, with any header element changed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import EnhancedMRImageStorage, ExplicitVRLittleEndian, MRImageStorage

# Who owns the private groups that tests write elements of: without its creator an element says nothing.
CREATORS = {
    0x0019: "SIEMENS MR HEADER", 0x2001: "Philips Imaging DD 001", 0x2005: "Philips MR Imaging DD 001",
    0x0043: "GEMS_PARM_01", 0x0065: "Image Private Header",
}  # fmt: skip
OBLIQUE = (1.0, 0.0, 0.0, 0.0, 0.8, -0.6)


@dataclass(frozen=True)
class Scan:
    """One series: ``pixels`` (slices, rows, columns), geometry in mm, and what its header says."""

    pixels: NDArray[np.uint16]
    number: int
    description: str
    image_type: tuple[str, ...] = ("ORIGINAL", "PRIMARY", "M")
    orientation: tuple[float, ...] = OBLIQUE
    origin: tuple[float, float, float] = (-10.0, -20.0, 30.0)
    spacing: tuple[float, float, float] = (2.0, 1.5, 3.0)  # rows, columns, slices
    elements: dict[Any, Any] = field(default_factory=dict)
    edit: Callable[[Dataset, int], None] | None = None

    def but(self, **changes: Any) -> "Scan":
        return replace(self, **changes)


def header(scan: Scan, index: int, study: str) -> Dataset:
    """Header of one slice."""
    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds.file_meta.MediaStorageSOPClassUID = ds.SOPClassUID = MRImageStorage
    tail = str(scan.elements.get("series_tail", scan.number))
    ds.StudyInstanceUID, ds.SeriesInstanceUID = f"1.2.{study}", f"1.2.{study}.{tail}"
    ds.SOPInstanceUID = f"1.2.{study}.{tail}.{index + 1}"
    ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID
    ds.FrameOfReferenceUID = f"1.2.{study}.999"
    ds.SeriesNumber, ds.SeriesDescription, ds.ImageType = scan.number, scan.description, list(scan.image_type)
    ds.AcquisitionTime = f"12{scan.number:02d}00.000000"
    ds.Manufacturer, ds.MagneticFieldStrength, ds.PatientIdentityRemoved = "SIEMENS", 3.0, "YES"
    row, column = np.array(scan.orientation[:3]), np.array(scan.orientation[3:])
    position = np.array(scan.origin) + index * scan.spacing[2] * np.cross(row, column)
    ds.ImageOrientationPatient, ds.ImagePositionPatient = list(scan.orientation), [round(float(v), 6) for v in position]
    ds.PixelSpacing, ds.SliceThickness = list(scan.spacing[:2]), 1.0
    _, ds.Rows, ds.Columns = scan.pixels.shape
    ds.SamplesPerPixel, ds.PhotometricInterpretation = 1, "MONOCHROME2"
    ds.BitsAllocated, ds.BitsStored, ds.HighBit, ds.PixelRepresentation = 16, 16, 15, 0
    ds.PixelData = scan.pixels[index].astype("<u2").tobytes()
    for key, value in scan.elements.items():
        if isinstance(key, tuple):
            add_private(ds, key, *value)
        elif key != "series_tail":
            setattr(ds, key, value)
    if scan.edit is not None:
        scan.edit(ds, index)
    return ds


def add_private(ds: Dataset, tag: tuple[int, int], vr: str, value: Any) -> Dataset:
    """Add an element; of a private group with its creator, where none owns the block."""
    group, element = tag
    if group % 2 and element >> 8 and (group, element >> 8) not in ds:
        creator = "GEMS_ACQU_01" if group == 0x0019 and element & 0xFF > 0xA0 else CREATORS[group]
        ds.add_new((group, element >> 8), "LO", creator)
    ds.add_new(tag, vr, value)
    return ds


def write(folder: Path, *scans: Scan, study: str = "7", skip: tuple[int, ...] = ()) -> Path:
    """Write every slice of every scan but the skipped ones; file names tell nothing of the order."""
    folder.mkdir(parents=True, exist_ok=True)
    for scan in scans:
        tail = scan.elements.get("series_tail", scan.number)
        for index in range(len(scan.pixels)):
            if index not in skip:
                name = folder / f"x{tail}_{index * 7 % 11:02d}_{index}.dcm"
                header(scan, index, study).save_as(name, enforce_file_format=True)
    return folder


def write_enhanced(path: Path, *scans: Scan, order: Iterable[int] | None = None, study: str = "7") -> Path:
    """Write all slices of all scans as frames of one enhanced multi-frame file, in a given order of all frames."""
    slices = [header(scan, index, study) for scan in scans for index in range(len(scan.pixels))]
    slices = [slices[number] for number in (range(len(slices)) if order is None else order)]
    return save_enhanced(path, header(scans[0], 0, study), slices)


def save_enhanced(path: Path, ds: Dataset, slices: list[Dataset]) -> Path:
    """Write classic slices as frames of one enhanced file with the general header ``ds``, which is changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    groups = [_groups(one) for one in slices]
    ds.file_meta.MediaStorageSOPClassUID = ds.SOPClassUID = EnhancedMRImageStorage
    for name in ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "EchoTime", "DiffusionBValue"):
        ds.pop(name, None)
    pixels = b"".join(one.PixelData for one in slices)
    ds.SharedFunctionalGroupsSequence = Sequence([Dataset()])
    ds.PerFrameFunctionalGroupsSequence = Sequence(groups)
    ds.NumberOfFrames, ds.PixelData = len(slices), pixels
    ds.save_as(path, enforce_file_format=True)
    return path


def _groups(one: Dataset) -> Dataset:
    """The functional groups of one frame, from the header of a classic slice."""
    places = {
        "PlanePositionSequence": ("ImagePositionPatient",),
        "PlaneOrientationSequence": ("ImageOrientationPatient",),
        "PixelMeasuresSequence": ("PixelSpacing", "SliceThickness"),
        "PixelValueTransformationSequence": ("RescaleSlope", "RescaleIntercept"),
        "MRDiffusionSequence": ("DiffusionBValue", "DiffusionGradientDirectionSequence"),
        "MREchoSequence": ("EffectiveEchoTime",),
    }
    groups = Dataset()
    for name, elements in places.items():
        inner = Dataset()
        for element in elements:
            if element in one:
                inner[element] = one[element]
        if len(inner):
            setattr(groups, name, Sequence([inner]))
    return groups


def compress(folder: Path) -> Path:
    """Turn every file of a folder into lossless JPEG 2000, in place."""
    gdcm = pytest.importorskip("gdcm", reason="needs python-gdcm, the extra dicom-compressed")
    for file in sorted(folder.iterdir()):
        reader, change, writer = gdcm.ImageReader(), gdcm.ImageChangeTransferSyntax(), gdcm.ImageWriter()
        reader.SetFileName(str(file))
        if not reader.Read():
            raise OSError(file)
        change.SetTransferSyntax(gdcm.TransferSyntax(gdcm.TransferSyntax.JPEG2000Lossless))
        change.SetInput(reader.GetImage())
        change.Change()
        writer.SetFileName(str(file))
        writer.SetFile(reader.GetFile())
        writer.SetImage(change.GetOutput())
        writer.Write()
    return folder
