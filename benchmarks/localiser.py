"""How well and how fast the gland is found on exams with a mask: overlap, centre, volume, seconds; and on phantoms.

DATA is a folder with ``prostatex/EXAM`` (DICOM) and ``masks/EXAM_gland.nii.gz``; needs lavlab-taps (docs/cohort.md).

    python benchmarks/localiser.py ../shared/data/prostate
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import SimpleITK as sitk  # noqa: N813

from mri_alm.imaging.exam import load_images
from mri_alm.imaging.registration import image_centre, mask_centre
from mri_alm.localiser import localiser_name, segment_gland
from mri_alm.phantom.study import make_study


def main() -> None:
    """Print a line per exam."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    print(f"{localiser_name()}: exam, ml, confidence, mm from T2's centre, seconds; Dice, mm from the mask's, its ml")
    for number in range(10):
        found = segment_gland(make_study(number, number % 2).t2)
        print(f"phantom {number}: {f'{found.millilitres:.1f} ml' if found else 'none found'}")
    for exam in sorted((data / "prostatex").iterdir()):
        t2 = load_images({"dicom": exam})[0]["t2"]
        begun = time.perf_counter()
        found = segment_gland(t2)
        seconds = time.perf_counter() - begun
        if found is None:
            print(f"{exam.name}: none found, {seconds:.1f} s")
            continue
        centre = mask_centre(found.mask)
        text = f"{exam.name}: {found.millilitres:.1f} ml, {found.confidence:.2f}, "
        text += f"{math.dist(centre, image_centre(t2)):.1f} mm, {seconds:.1f} s"
        file = data / "masks" / f"{exam.name}_gland.nii.gz"
        print(text + (f"; {_against(sitk.ReadImage(str(file)), found.mask)}" if file.exists() else ""))


def _against(mask: sitk.Image, found: sitk.Image) -> str:
    """Agreement with a mask drawn by a person, on the grid of the found one."""
    on_grid = sitk.Resample(mask > 0, found, sitk.Transform(3, sitk.sitkIdentity), sitk.sitkNearestNeighbor)
    drawn, marked = (sitk.GetArrayFromImage(image) > 0 for image in (on_grid, found))
    dice = 2 * (drawn & marked).sum() / (drawn.sum() + marked.sum())
    apart = math.dist(mask_centre(mask), mask_centre(found))
    return f"Dice {dice:.2f}, {apart:.1f} mm, {drawn.sum() * np.prod(found.GetSpacing()) / 1000:.1f} ml"


if __name__ == "__main__":
    main()
