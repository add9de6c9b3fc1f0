"""How far apart ADC and high-b are by content: `python benchmarks/content.py DIR --phantoms 100`.

Prints, for every kind of pair, how much the growth of the high-b image exceeds that of the ADC map: right pairs above
the threshold (`mri_alm.imaging.plausibility.SWAPPED`) are false alarms when below it; exchanged, a pair has the
negative value and is noticed when that is below the threshold. Each pair is also taken smoothed by 2 mm, and at 0.5 mm.
Then, for every acquired b-value of the exams, the least rank correlation among three repeats, noisy as one of 4, 10
and 20 averages would be, and that with the mirrored image and with another exam's (`mri_alm.imaging.volume.likeness`).
"""

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import SimpleITK as sitk  # noqa: N813
from scipy.ndimage import uniform_filter

from mri_alm.errors import StudyError
from mri_alm.imaging.choose_series import Diffusion, build_diffusion, diffusion_sets
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.plausibility import SWAPPED, spread_growth
from mri_alm.imaging.series import group_series
from mri_alm.imaging.volume import likeness
from mri_alm.phantom.study import make_study

Pair = tuple[str, sitk.Image, sitk.Image]
RNG = np.random.default_rng(0)


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
    repeats([*diffusion(args.exams)])


def diffusion(exams: Path) -> Iterator[tuple[str, Diffusion]]:
    """Every diffusion set of every exam that can be built."""
    for folder in sorted(place for place in exams.iterdir() if place.is_dir()):
        (files,) = find_studies(folder)
        for group in diffusion_sets(group_series(files.files, files.headers), []):
            with contextlib.suppress(StudyError):
                yield folder.name, build_diffusion(group)


def real(exams: Path) -> Iterator[Pair]:
    """The scanner's ADC with every acquired image at b >= 400 and with the calculated one, of every diffusion set."""
    for _, built in diffusion(exams):
        for b, image in built.dwi.items():
            if b >= 400:
                yield f"real, acquired b = {b:g}", built.adc, image
        if built.info["hbv"]["source"] != "acquired":
            yield "real, calculated b", built.adc, built.hbv


def repeats(exams: Sequence[tuple[str, Diffusion]]) -> None:
    """Print how alike volumes of one b-value are."""
    print("exam | b | repeats of 4, 10, 20 averages | mirrored | other exams, slices and corner cut to fit")
    arrays = [(name, {b: sitk.GetArrayFromImage(one) for b, one in built.dwi.items()}) for name, built in exams]
    for name, own in arrays:
        for b, one in own.items():
            single = [f"{least([averaged(one, count) for _ in range(3)]):.2f}" for count in (4, 10, 20)]
            others = []
            for elsewhere in (other for another, other in arrays if another != name):
                other = elsewhere[min(elsewhere, key=lambda value: abs(value - b))]
                both = tuple(slice(min(pair)) for pair in zip(one.shape, other.shape, strict=True))
                others.append(f"{least([one[both], other[both]]):.2f}")
            told = [", ".join(single), f"{least([one, one[:, :, ::-1]]):.2f}", ", ".join(others)]
            print(f"{name} | {b:g} | {' | '.join(told)}")


def least(volumes: Sequence[np.ndarray]) -> float:
    return min(alike for _, alike in likeness([sitk.GetImageFromArray(one) for one in volumes]))


def averaged(image: np.ndarray, count: int) -> np.ndarray:
    """One of ``count`` images whose mean the given one (slices, rows, columns) may be, with its noise and more."""
    middle = image[:, image.shape[1] // 4 : -image.shape[1] // 4, image.shape[2] // 4 : -image.shape[2] // 4]
    fine = middle - uniform_filter(middle, (1, 3, 3))  # noise and detail: its spread is the noise's at most
    scale = 1.06 * float(np.median(np.abs(fine))) / 0.6745 * (count - 1) ** 0.5
    real, imaginary = RNG.normal(0, scale, (2, *image.shape))
    return np.asarray(np.hypot(image + real, imaginary))


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
