"""An exam whose every header field says something unmistakable, and the search for it."""

from pathlib import Path

import SimpleITK as sitk  # noqa: N813
from pydicom.datadict import DicomDictionary, keyword_for_tag
from pydicom.dataset import Dataset

MARK = "XQZMUELLER"


DATE, TIME, NUMBER = "19770707", "070707", "7707707"


UID = "1.2.840.7707707"


# The reader must understand these; everything else may say anything.
KEPT = {
    "ImageType", "Rows", "Columns", "PixelSpacing", "ImagePositionPatient", "ImageOrientationPatient",
    "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation",
    "PixelData",
    "RescaleSlope", "RescaleIntercept", "SeriesNumber", "SOPClassUID", "Modality", "DiffusionBValue", "EchoTime",
    "SliceThickness", "MagneticFieldStrength", "SpecificCharacterSet", "NumberOfFrames", "PlanarConfiguration",
    "SmallestImagePixelValue", "LargestImagePixelValue", "PixelPaddingValue", "SeriesDescription",
}  # fmt: skip


TEXT = {"PN": f"{MARK}^HANS", "LO": MARK, "SH": MARK, "LT": MARK, "ST": MARK, "UT": MARK, "CS": MARK, "AS": "077Y",
        "DA": DATE, "TM": TIME, "DT": DATE + TIME, "IS": NUMBER, "AE": MARK, "UC": MARK}  # fmt: skip


def plant(ds: Dataset, index: int) -> None:
    """Every standard element of a text or date kind, invalid ones too, and a private one."""
    for tag, (vr, _, _, retired, _) in DicomDictionary.items():
        keyword = keyword_for_tag(tag)
        if vr in TEXT and not retired and keyword and keyword not in KEPT and 0x0008 <= tag >> 16 <= 0x0040:
            ds.add_new(tag, vr, TEXT[vr])
    ds.PatientName = f"{MARK}^HANS" * 8  # longer than allowed: readers quote it in a warning
    ds.PatientBirthDate = f"{MARK}"
    ds.SeriesDescription = f"{ds.SeriesDescription} {MARK}"
    for keyword in ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID"):
        setattr(ds, keyword, f"{UID}.{getattr(ds, keyword)[-20:]}")
    ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID
    ds.Manufacturer, ds.ManufacturerModelName = f"SIEMENS {MARK}", f"Skyra of {MARK}"
    ds.add_new((0x0019, 0x0010), "LO", "SIEMENS MR HEADER")
    ds.add_new((0x0009, 0x0010), "LO", MARK)
    ds.add_new((0x0009, 0x1001), "LO", MARK)


def leaks(place: Path) -> list[str]:
    """Files whose name or content holds anything planted."""
    words = [word.encode() for word in (MARK, MARK.lower(), DATE, NUMBER, UID, "077Y")]
    found = []
    for file in place.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        if file.suffix == ".gz":
            content = sitk.GetArrayFromImage(sitk.ReadImage(str(file))).tobytes()
            keys = sitk.ReadImage(str(file)).GetMetaDataKeys()
            content += " ".join(sitk.ReadImage(str(file)).GetMetaData(key) for key in keys).encode()
        found += [f"{file.name}: {word.decode()}" for word in words if word in str(file).encode() or word in content]
    return found
