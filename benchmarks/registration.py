"""What registration and the ADC fit do on real exams: `python benchmarks/registration.py DIR`, one sub-folder per exam.

Recovery: the diffusion's position is changed by a known 6 mm and 5 degrees in a random direction (its header only, no
voxel is interpolated), and registration has to find it again on top of what it found before. The residual is the mean
distance over a box of 50 mm, about a gland's size, at T2's centre.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813

from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.diffusion import fit_adc
from mri_alm.imaging.exam import read_study
from mri_alm.imaging.registration import image_centre, register_rigid

SHIFT_MM, ANGLE_DEG, BOX_MM = 6.0, 5.0, 50.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exams", type=Path, help="folder with one sub-folder of DICOM files per exam")
    parser.add_argument("--trials", type=int, default=20, help="random movements per exam (20)")
    args = parser.parse_args()
    print("exam | MI before -> after | accepted | shift mm | s | refused | residual mean / max mm | ADC r, median diff")
    for folder in sorted(place for place in args.exams.iterdir() if place.is_dir()):
        (files,) = find_studies(folder)
        study = read_study(files)
        start = time.perf_counter()
        found = register_rigid(study.t2, study.adc)
        seconds = time.perf_counter() - start
        residuals = recover(study.t2, study.adc, found.transform, args.trials)
        maps = agreement(study.adc, fit_adc(study.dwi), study.dwi[min(study.dwi)])
        kept = [value for value in residuals if value is not None]
        print(
            f"{folder.name} | {found.mi_before:.3f} -> {found.mi_after:.3f} | {found.accepted} | {found.shift_mm:.1f} "
            f"| {seconds:.2f} | {len(residuals) - len(kept)}/{len(residuals)} "
            f"| {np.mean(kept):.2f} / {np.max(kept):.2f} | {maps}",
            flush=True,
        )


def recover(t2: sitk.Image, adc: sitk.Image, rest: sitk.Transform, trials: int) -> list[float | None]:
    """Residual in mm of each random movement, None where the gate refused."""
    rng = np.random.default_rng(0)
    centre = np.array(image_centre(t2))
    corners = np.stack(np.meshgrid(*[np.linspace(-BOX_MM / 2, BOX_MM / 2, 5)] * 3), axis=-1).reshape(-1, 3) + centre
    residuals: list[float | None] = []
    for _ in range(trials):
        axis, direction = (vector / np.linalg.norm(vector) for vector in rng.normal(size=(2, 3)))
        move = sitk.VersorRigid3DTransform()
        move.SetCenter(centre.tolist())
        move.SetRotation(axis.tolist(), float(np.deg2rad(ANGLE_DEG)))
        move.SetTranslation((SHIFT_MM * direction).tolist())
        found = register_rigid(t2, moved(adc, move))
        truth = [move.TransformPoint(rest.TransformPoint(point)) for point in corners.tolist()]
        got = [found.transform.TransformPoint(point) for point in corners.tolist()]
        distance = float(np.linalg.norm(np.subtract(got, truth), axis=1).mean())
        residuals.append(distance if found.accepted else None)
    return residuals


def moved(image: sitk.Image, move: Any) -> sitk.Image:
    """The same voxels at moved positions."""
    other = sitk.Image(image)
    other.SetOrigin(move.TransformPoint(image.GetOrigin()))
    rotation = np.array(move.GetMatrix()).reshape(3, 3)
    other.SetDirection((rotation @ np.array(image.GetDirection()).reshape(3, 3)).ravel().tolist())
    return other


def agreement(scanner: sitk.Image, fitted: sitk.Image, lowest: sitk.Image) -> str:
    """Correlation and median relative difference of two ADC maps in the central half in plane, where there is tissue.

    Tissue: the scanner's map is above 0, and the lowest b-value among its brightest 40 % of voxels.
    """
    first, second, signal = (sitk.GetArrayFromImage(image) for image in (scanner, fitted, lowest))
    centre = (slice(None), *(slice(n // 4, n - n // 4) for n in first.shape[1:]))
    tissue = (first > 0) & (signal > np.percentile(signal, 60))
    a, b = first[centre][tissue[centre]], second[centre][tissue[centre]]
    return f"{np.corrcoef(a, b)[0, 1]:.4f}, {100 * np.median(np.abs(b - a) / a):.1f} %"


if __name__ == "__main__":
    main()
