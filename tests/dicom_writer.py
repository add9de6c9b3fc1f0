"""Small DICOM series for tests: a classic MR series of a written array, with any header element changed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage

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
            ds.add_new(key, *value)
        elif key != "series_tail":
            setattr(ds, key, value)
    if scan.edit is not None:
        scan.edit(ds, index)
    return ds


def write(folder: Path, *scans: Scan, study: str = "7", skip: tuple[int, ...] = ()) -> Path:
    """Write every slice of every scan but the skipped ones; file names tell nothing of the order."""
    folder.mkdir(parents=True, exist_ok=True)
    for scan in scans:
        tail = scan.elements.get("series_tail", scan.number)
        for index in range(len(scan.pixels)):
            if index not in skip:
                name = folder / f"x{tail}_{index * 7 % 11:02d}_{index}"
                header(scan, index, study).save_as(name, enforce_file_format=True)
    return folder
