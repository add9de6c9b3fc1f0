"""Tiny exams in every form a hospital or archive gives them, and the rules that fit their size."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
from dicom_writer import Scan, write
from pydicom.dataset import Dataset

from mri_alm.cohort.prepare_cohort import Order, PreparedCohort, prepare_cohort

GRID = {"spacing": [2, 2, 3], "size": [12, 12, 6]}
SHAPE = (6, 20, 20)  # slices, rows, columns of every image, on one grid of 2 x 2 x 3 mm
PLAIN = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
DIFFUSION = ("DERIVED", "PRIMARY", "DIFFUSION", "TRACEW")


def tissue(seed: int, low: int, high: int) -> np.ndarray:
    """Smooth positive structure; the same seed gives the same anatomy, so that images can be registered."""
    rng = np.random.default_rng(seed)
    noise = sitk.SmoothingRecursiveGaussian(sitk.GetImageFromArray(rng.normal(size=SHAPE)), 2.0)
    unit = sitk.GetArrayFromImage(sitk.RescaleIntensity(noise, 0, 1))
    return np.round(low + unit * (high - low)).astype(np.uint16)


def scans(seed: int) -> list[Scan]:
    """T2, b = 50 and 800, ADC and a calculated b = 1400."""

    adc, s0 = tissue(seed, 700, 1800), tissue(seed, 1000, 3500)

    def diffusion(number: int, b: int, name: str, pixels: np.ndarray | None = None, *types: str) -> Scan:
        kind = (*DIFFUSION[:3], *types) if types else DIFFUSION
        signal = np.round(s0 * np.exp(-b * 1e-6 * adc)).astype(np.uint16) if pixels is None else pixels
        return Scan(signal, number, name, kind, elements={(0x0019, 0x100C): ("IS", str(b))})

    found = [
        Scan(tissue(seed, 50, 600), 4, "t2_tse_tra"),
        diffusion(6, 50, "ep2d_diff"),
        diffusion(7, 800, "ep2d_diff"),
        diffusion(8, 800, "ep2d_diff_ADC", adc, "ADC"),
        diffusion(9, 1400, "ep2d_diffCALC_BVAL"),
    ]
    # Diffusion lies 2 mm off T2, as in life: the registration has something to find.
    return [
        scan.but(orientation=PLAIN, spacing=(2.0, 2.0, 3.0), origin=(2.0 * (scan.number > 4), 0.0, 0.0))
        for scan in found
    ]


def dicom_exam(
    folder: Path,
    number: int,
    *,
    patient: str = "",
    without: tuple[int, ...] = (),
    edit: Callable[[Dataset, int], None] | None = None,
) -> Path:
    """One DICOM exam of its own anatomy, StudyInstanceUID and patient; ``without`` leaves series out."""
    for scan in scans(number):
        if scan.number not in without:
            elements = scan.elements | {"PatientID": patient or f"P{number}"}
            write(folder / f"s{scan.number}", scan.but(elements=elements, edit=edit), study=f"9.{number}")
    return folder


def image_exam(folder: Path, number: int, names: dict[str, str]) -> Path:
    """The same exam as image files: ``t2``, ``adc``, ``hbv``, ``gland`` -> file name."""
    found = {scan.number: scan for scan in scans(number)}
    arrays = {"t2": found[4].pixels, "adc": found[8].pixels, "hbv": found[9].pixels}
    arrays["gland"] = np.zeros(SHAPE, np.uint16)
    arrays["gland"][2:5, 6:15, 5:13] = 1
    folder.mkdir(parents=True, exist_ok=True)
    for column, name in names.items():
        write_image(folder / name, arrays[column])
    return folder


def write_image(path: Path, array: np.ndarray) -> None:
    image = sitk.GetImageFromArray(array.astype(np.float32))
    image.SetSpacing((2.0, 2.0, 3.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    sitk.WriteImage(image, str(path))


def write_text(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def prepare(source: Path, output: Path, *, rules: dict[str, Any] | None = None, **order: Any) -> PreparedCohort:
    """Prepare on the small grid."""
    path = write_text(output.with_name(output.name + "_rules.json"), GRID | (rules or {}))
    return prepare_cohort(Order(source, output, rules=path, workers=2, **order))


def check_invariants(source: Path, output: Path, outcome: PreparedCohort) -> None:
    """Studies in = rows out; files seen = used + ignored + failed, and all of them are seen."""
    assert len(outcome.rows) == len(outcome.found.sources) == len({row["study"] for row in outcome.rows})
    seen = len(outcome.found.outside)
    for row in outcome.rows:
        record = json.loads((output / row["study"] / "study.json").read_text())
        states = dict.fromkeys(("used", "ignored", "failed"), 0)
        for entry in record["files"]:
            assert entry["reason"]
            states[entry["state"]] += len(entry["files"])
        assert states == {state: row[f"files_{state}"] for state in states}
        assert sum(states.values()) == row["files_seen"]
        seen += row["files_seen"]
        assert (row["status"] == "failed") == bool(row["error_code"]) == bool(row["error_text"])
        assert row["error_code"] != "unexpected", (output / row["study"] / "bug_report.txt").read_text()
        assert {p.name for p in (output / row["study"]).iterdir()} == (
            {"study.json"}
            if row["status"] == "failed"
            else {"study.json", "qc.jpg", *(f"{name}.nii.gz" for name in record["images"])}
        )
    assert seen == json.loads((output / "cohort.json").read_text())["files"]["seen"]
    if source.is_dir():
        assert seen == sum(1 for file in source.rglob("*") if file.is_file())
