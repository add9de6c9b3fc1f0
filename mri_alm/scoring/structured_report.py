"""A scored DICOM exam as a DICOM Structured Report (TID 1500) without the patient's identity.

Patient, study and all references appear under keyed hashes: the same secret and UID always give the same hash, so the
holder of the secret can lead a report back to its exam: see docs/decisions.md (21).
"""

import logging
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from pydicom.dataset import Dataset
from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code
from pydicom.uid import MRImageStorage, generate_uid

from mri_alm.bundle.run_folder import model_digest
from mri_alm.errors import InputError
from mri_alm.imaging.dicom_files import StudyFiles
from mri_alm.metrics.threshold import OperatingPoint
from mri_alm.runtime.pseudonyms import pseudonymous_uid

SCHEME = "99MRIALM"
SCORE = Code("SCORE", SCHEME, "Score that contrast is needed (0 to 1)")
SPREAD = Code("SPREAD", SCHEME, "Standard deviation of members' logits")
THRESHOLD = Code("THRESHOLD", SCHEME, "Contrast needed at or above this score")
NEEDED = Code("DCE_NEEDED", SCHEME, "Contrast-enhanced series needed")
USE = Code("USE", SCHEME, "Intended use")
RESEARCH = Code("RESEARCH", SCHEME, "Research use only, no decision on a patient")
MRI = Code("113091000", "SCT", "Magnetic resonance imaging")


def check_highdicom() -> None:
    """Refuse to begin without the library that writes structured reports.

    Raises:
        InputError: Saying how to install it.
    """
    if find_spec("highdicom") is None:
        raise InputError("Structured reports need the package highdicom: pip install -e '.[sr]'.")


def structured_report(
    study: StudyFiles,
    row: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    point: OperatingPoint,
    checkpoints: Mapping[str, str],
    salt: str,
) -> Dataset:
    """The report of one exam: score, threshold, decision, what they rest on, and which images they were made from.

    Args:
        study: The exam's files.
        row: Its row of ``scores.csv`` (see :func:`mri_alm.bundle.trained_run.score_rows`).
        facts: Its entry of ``report.json``, which says which series were used.
        point: The threshold's record.
        checkpoints: Digests of the ensemble's members.
        salt: The secret of the study keys.

    Returns:
        An Enhanced SR with a new instance UID, ready to be saved.

    Raises:
        InputError: If highdicom is not installed.
    """
    check_highdicom()
    from highdicom.sr import EnhancedSR

    logging.getLogger("highdicom").setLevel(logging.WARNING)  # six lines for every report otherwise
    evidence = [_evidence(header, salt, str(row["study"])) for header in _used(study, facts)]
    content = _content(row, point, evidence, model=model_digest(checkpoints))
    report = EnhancedSR(
        evidence=evidence,
        content=content,
        series_instance_uid=generate_uid(prefix=None),
        series_number=900,
        sop_instance_uid=generate_uid(prefix=None),
        instance_number=1,
        manufacturer="mri-alm",
        manufacturer_model_name="mri-alm",
        software_versions=version("mri-alm"),
        series_description="mri-alm, research use only",
        is_complete=True,
    )
    report.PatientIdentityRemoved = "YES"
    report.DeidentificationMethod = "Patient, study and UIDs replaced by keyed hashes"
    result: Dataset = report
    return result


def _used(study: StudyFiles, facts: Mapping[str, Any]) -> list[Dataset]:
    """Headers of the series that the score was made from."""
    chosen = [facts["t2"], facts["hbv"], facts["adc"], *(() if facts["adc"] else facts["dwi"])]
    numbers = {one["series"] for one in chosen if one}
    return [header for header in study.headers if int(header.get("SeriesNumber") or 0) in numbers]


def _evidence(header: Dataset, salt: str, key: str) -> Dataset:
    """What a report may say of a source image: who it is by hash, and nothing about the patient or the date."""
    image = Dataset()
    for name in ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID"):
        setattr(image, name, pseudonymous_uid(str(header.get(name)), salt))
    image.SOPClassUID = header.get("SOPClassUID") or MRImageStorage
    image.PatientID, image.PatientName = key, f"{key}^"  # a name of one component ends in a caret
    for name in ("PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate", "StudyTime"):
        setattr(image, name, "")
    image.ReferringPhysicianName = ""
    return image


_YES_OR_NO = {1: codes.SCT.Yes, 0: codes.SCT.No}


def _content(row: Mapping[str, Any], point: OperatingPoint, evidence: list[Dataset], *, model: str) -> Any:
    """The tree of TID 1500 with one measurement group."""
    from highdicom import sr

    device = sr.DeviceObserverIdentifyingAttributes(
        uid=f"2.25.{int(model[:32], 16)}",
        name="mri-alm",
        manufacturer_name="mri-alm",
        model_name=f"mri-alm {version('mri-alm')}",
        serial_number=model[:16],
    )
    observer = sr.ObserverContext(codes.DCM.Device, device)
    numbers = {SCORE: row["score"], SPREAD: row["spread"]}
    if row["threshold"] != "":
        numbers[THRESHOLD] = row["threshold"]
    group = sr.MeasurementsAndQualitativeEvaluations(
        tracking_identifier=sr.TrackingIdentifier(uid=generate_uid(prefix=None), identifier="mri-alm score"),
        algorithm_id=sr.AlgorithmIdentification("mri-alm", version("mri-alm"), [f"models sha256 {model}"]),
        finding_sites=[sr.FindingSite(codes.SCT.Prostate)],
        measurements=[sr.Measurement(name, _decimal(value), codes.UCUM.NoUnits) for name, value in numbers.items()],
        qualitative_evaluations=[
            *([] if row["dce_needed"] == "" else [sr.QualitativeEvaluation(NEEDED, _YES_OR_NO[row["dce_needed"]])]),
            sr.QualitativeEvaluation(USE, RESEARCH),
        ],
        source_images=[
            sr.SourceImageForMeasurementGroup(image.SOPClassUID, image.SOPInstanceUID) for image in evidence
        ],
    )
    texts = [
        "Research use only. Not a medical device. Nothing here may be used for a decision about a patient.",
        point.in_words(),
        *([f"The model was {row['model_note']}."] if row["model_note"] else []),
        f"Quality by headers and geometry: {row['quality']}.",
        *filter(None, [str(row["warnings"])]),
    ]
    group[0].ContentSequence.extend(
        sr.TextContentItem(codes.DCM.Comment, text, sr.RelationshipTypeValues.CONTAINS) for text in texts
    )
    return sr.MeasurementReport(sr.ObservationContext(observer), MRI, [group])


def _decimal(value: float) -> float:
    """A number whose decimal string fits DICOM's 16 characters."""
    return float(f"{value:.6g}")
