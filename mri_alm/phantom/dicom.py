"""A phantom as a DICOM study: MR Image Storage, one file per slice, headers as a scanner writes them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage

from mri_alm.imaging.registration import empty_image, image_centre
from mri_alm.phantom.study import DWI_ECHO_MS, HIGH_B, T2_ECHO_MS, PhantomStudy

_COMMON: dict[str, Any] = {
    "SOPClassUID": MRImageStorage,
    "PatientName": "PHANTOM",
    "PatientBirthDate": "",
    "PatientSex": "M",
    "PatientIdentityRemoved": "YES",
    "DeidentificationMethod": "synthetic, no person",
    "StudyDate": "20000101",
    "StudyTime": "120000",
    "SeriesDate": "20000101",
    "AccessionNumber": "",
    "ReferringPhysicianName": "",
    "StudyID": "",
    "Modality": "MR",
    "Manufacturer": "mri-alm",
    "ManufacturerModelName": "phantom",
    "MagneticFieldStrength": 3.0,
    "BodyPartExamined": "PROSTATE",
    "PatientPosition": "HFS",
    "PositionReferenceIndicator": "",
    "ScanningSequence": "SE",
    "SequenceVariant": "SK",
    "ScanOptions": "",
    "MRAcquisitionType": "2D",
    "RepetitionTime": 5000.0,
    "EchoTrainLength": 1,
    "SamplesPerPixel": 1,
    "PhotometricInterpretation": "MONOCHROME2",
    "BitsAllocated": 16,
    "BitsStored": 16,
    "HighBit": 15,
    "PixelRepresentation": 1,
    "RescaleSlope": "1",
    "RescaleIntercept": "0",
    "RescaleType": "US",
}
_PLANES = {"sagittal": (0, 1, 0, 0, 0, -1), "coronal": (1, 0, 0, 0, 0, -1), "axial": (1, 0, 0, 0, 1, 0)}


@dataclass(frozen=True)
class _Series:
    number: int
    description: str
    image_type: tuple[str, ...]
    echo_ms: float
    images: tuple[tuple[sitk.Image, float | None], ...]  # with b in s/mm2, None where it has no meaning


def write_dicom_study(study: PhantomStudy, folder: Path) -> None:
    """Write a study as five series: localizer, T2, diffusion (all b-values in one series), ADC, calculated b.

    UIDs are derived from the study's seed, number and label, so equal studies give equal files.

    Args:
        study: From :func:`mri_alm.phantom.make_study`.
        folder: Where one sub-folder per series is made; may exist.
    """
    key = "{seed}/{index}/{label}".format(**study.info)
    for series in _series(study):
        place = folder / f"s{series.number:02d}_{series.description}"
        place.mkdir(parents=True, exist_ok=True)
        ds = _header(series, key)
        slices = [(image, b, number) for image, b in series.images for number in range(image.GetSize()[2])]
        for count, (image, b, number) in enumerate(slices, 1):
            ds.InstanceNumber, ds.SOPInstanceUID = count, _uid(key, series.number, count)
            ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID
            _place(ds, image, number)
            if b is not None:
                ds.DiffusionBValue = b
            ds.save_as(place / f"{count:04d}.dcm", enforce_file_format=True)


def _series(study: PhantomStudy) -> Iterator[_Series]:
    planes = tuple((image, None) for image in _localizer(study.t2))
    yield _Series(1, "localizer", ("ORIGINAL", "PRIMARY", "M"), 80.0, planes)
    yield _Series(2, "t2_tse_tra", ("ORIGINAL", "PRIMARY", "M"), T2_ECHO_MS, ((study.t2, None),))
    acquired = tuple((image, b) for b, image in study.dwi.items())
    diffusion = ("DERIVED", "PRIMARY", "DIFFUSION")
    yield _Series(3, "ep2d_diff_tra", (*diffusion, "TRACEW"), DWI_ECHO_MS, acquired)
    yield _Series(4, "ep2d_diff_tra_ADC", (*diffusion, "ADC"), DWI_ECHO_MS, ((study.adc, None),))
    yield _Series(5, "ep2d_diff_tra_CALC_BVAL", (*diffusion, "TRACEW"), DWI_ECHO_MS, ((study.hbv, HIGH_B),))


def _localizer(t2: sitk.Image) -> Iterator[sitk.Image]:
    """Three slices in each body plane, 1.5 mm pixels, cut from T2."""
    for cosines in _PLANES.values():
        row, column = np.array(cosines[:3], float), np.array(cosines[3:], float)
        direction = np.stack([row, column, np.cross(row, column)], axis=1).ravel().tolist()
        plane = empty_image((96, 96, 3), (1.5, 1.5, 10.0), direction, image_centre(t2))
        yield sitk.Resample(t2, plane, sitk.Transform(), sitk.sitkLinear, 0.0, sitk.sitkInt16)


def _uid(*parts: object) -> str:
    """A UUID-derived UID (DICOM PS3.5 B.2) that depends on ``parts`` only."""
    digest = hashlib.sha256("/".join(map(str, ("mri-alm phantom", *parts))).encode()).digest()[:16]
    return f"2.25.{int.from_bytes(digest, 'big')}"


def _header(series: _Series, key: str) -> Dataset:
    """Everything that the slices of a series share."""
    ds = Dataset()
    for keyword, value in _COMMON.items():
        setattr(ds, keyword, value)
    ds.StudyInstanceUID, ds.SeriesInstanceUID = _uid(key), _uid(key, series.number)
    ds.FrameOfReferenceUID = _uid(key, "frame")
    ds.PatientID = _uid(key)[5:21]
    ds.SeriesTime = ds.AcquisitionTime = ds.ContentTime = f"12{5 * series.number:02d}00"
    ds.SeriesNumber, ds.SeriesDescription = series.number, series.description
    ds.ImageType, ds.EchoTime = list(series.image_type), series.echo_ms
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds.file_meta.MediaStorageSOPClassUID = ds.SOPClassUID
    return ds


def _place(ds: Dataset, image: sitk.Image, number: int) -> None:
    """Geometry and pixels of one slice."""
    axes = np.array(image.GetDirection()).reshape(3, 3)
    width, height, gap = image.GetSpacing()
    ds.PixelSpacing = [f"{height:.6g}", f"{width:.6g}"]
    ds.SliceThickness = ds.SpacingBetweenSlices = f"{gap:.6g}"
    # A decimal string has at most 16 characters.
    ds.ImageOrientationPatient = [f"{c:.12f}"[:16] for c in (*axes[:, 0], *axes[:, 1])]
    ds.ImagePositionPatient = [f"{p:.8f}"[:16] for p in image.TransformIndexToPhysicalPoint((0, 0, number))]
    pixels = sitk.GetArrayViewFromImage(image)[number]
    ds.Rows, ds.Columns = pixels.shape
    ds.PixelData = pixels.astype("<i2").tobytes()
