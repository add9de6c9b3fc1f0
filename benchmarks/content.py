"""How far apart ADC and high-b are by content: `python benchmarks/content.py DIR --phantoms 100`.

Prints, for every kind of pair, how much the growth of the high-b image exceeds that of the ADC map: right pairs above
the threshold (`mri_alm.imaging.plausibility.SWAPPED`) are false alarms when below it; exchanged, a pair has the
negative value and is noticed when that is below the threshold. Each pair is also taken smoothed by 2 mm, and at 0.5 mm.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import SimpleITK as sitk  # noqa: N813

from mri_alm.errors import StudyError
from mri_alm.imaging.choose_series import build_diffusion, diffusion_sets
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.plausibility import SWAPPED, spread_growth
from mri_alm.imaging.series import group_series
from mri_alm.phantom.study import make_study

Pair = tuple[str, sitk.Image, sitk.Image]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exams", type=Path, help="folder with one sub-folder of DICOM files per exam")
    parser.add_argument("--phantoms", type=int, default=100, help="number of phantoms (100)")
    args = parser.parse_args()
    found = defaultdict(list)
    changes = {"as stored": sitk.Image, "smoothed 2 mm": smoothed, "at 0.5 mm": finer}
    for (kind, adc, high), (name, change) in product([*real(args.exams)], changes.items()):
        found[kind, name].append(spread_growth(change(high)) - spread_growth(change(adc)))
    for index in range(args.phantoms):
        for (kind, adc, high), (name, change) in product(phantom(index), changes.items()):
            found[kind, name].append(spread_growth(change(high)) - spread_growth(change(adc)))
    print("pairs | n | least, 5 %, median difference | false alarms | swaps noticed")
    for (kind, name), values in sorted(found.items()):
        low, five, middle = np.percentile(values, (0, 5, 50))
        alarms, noticed = sum(v < SWAPPED for v in values), sum(-v < SWAPPED for v in values)
        print(f"{kind}, {name} | {len(values)} | {low:.2f}, {five:.2f}, {middle:.2f} | {alarms} | {noticed}")


def real(exams: Path) -> Iterator[Pair]:
    """The scanner's ADC with every acquired image at b >= 400 and with the calculated one, of every diffusion set."""
    for folder in sorted(place for place in exams.iterdir() if place.is_dir()):
        (files,) = find_studies(folder)
        for group in diffusion_sets(group_series(files.files, files.headers), []):
            try:
                built = build_diffusion(group)
            except StudyError:
                continue
            for b, image in built.dwi.items():
                if b >= 400:
                    yield f"real, acquired b = {b:g}", built.adc, image
            if built.info["hbv"]["source"] != "acquired":
                yield "real, calculated b", built.adc, built.hbv


def phantom(index: int) -> Iterator[Pair]:
    study = make_study(index, index % 2)
    yield "phantom, calculated b = 2000", study.adc, study.hbv
    for b in (400.0, 800.0):
        yield f"phantom, acquired b = {b:g}", study.adc, study.dwi[b]
    yield handed_over(study.adc, study.hbv)


def handed_over(adc: sitk.Image, high: sitk.Image) -> Pair:
    """As another program might hand them over: eight bits, ADC in mm2/s."""
    scale = 255 / float(np.percentile(sitk.GetArrayViewFromImage(high), 99.9))
    eight = sitk.Cast(sitk.Clamp(sitk.Cast(high, sitk.sitkFloat32) * scale, sitk.sitkFloat32, 0, 255), sitk.sitkUInt8)
    return "phantom, 8 bits", sitk.Cast(adc, sitk.sitkFloat32) * 1e-6, eight


def smoothed(image: sitk.Image) -> sitk.Image:
    return sitk.DiscreteGaussian(sitk.Cast(image, sitk.sitkFloat32), [4.0, 4.0, 0.0])


def finer(image: sitk.Image) -> sitk.Image:
    x, y, z = image.GetSpacing()
    columns, rows, slices = image.GetSize()
    size = [int(columns * x / 0.5), int(rows * y / 0.5), slices]
    still, linear = sitk.Transform(), sitk.sitkLinear
    return sitk.Resample(
        image, size, still, linear, image.GetOrigin(), (0.5, 0.5, z), image.GetDirection(), 0.0, sitk.sitkFloat32
    )


if __name__ == "__main__":
    main()
