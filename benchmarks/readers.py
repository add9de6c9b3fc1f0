"""The same DICOM folders in other readers: how many images each makes of a folder, and on which grid.

python benchmarks/readers.py ../shared/data/prostate
"""

import argparse
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import SimpleITK as sitk  # noqa: N813
from monai.data.image_reader import ITKReader, PydicomReader

from mri_alm.errors import StudyError
from mri_alm.imaging.dicom_files import silence_readers
from mri_alm.imaging.exam import read_series

Image = tuple[tuple[int, ...], tuple[float, ...]]  # voxels and their size in mm, both along x, y, z


def ours(folder: Path) -> list[tuple[str, Image]]:
    """Volumes with their b-value, or the empty text for T2 and ADC."""
    return [
        ("" if b is None else f"b{b:g}", (image.GetSize(), image.GetSpacing()))
        for b, image in read_series(folder).items()
    ]


def simple_itk(folder: Path) -> list[Image]:
    """One image per series that GDCM finds."""
    found = []
    for name in sitk.ImageSeriesReader.GetGDCMSeriesIDs(str(folder)):
        reader = sitk.ImageSeriesReader()
        reader.SetFileNames(sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(folder), name))
        image = reader.Execute()
        found.append((image.GetSize(), image.GetSpacing()))
    return found


def monai(reader: ITKReader | PydicomReader) -> Callable[[Path], list[Image]]:
    """What MONAI's readers make of a folder: always one image."""

    def read(folder: Path) -> list[Image]:
        array, meta = reader.get_data(reader.read(str(folder)))
        return [(array.shape, tuple(np.linalg.norm(np.asarray(meta["affine"])[:3, :3], axis=0)))]

    return read


def text(image: Image) -> str:
    size, spacing = image
    return f"{'x'.join(map(str, size))} at {'x'.join(f'{mm:.2f}' for mm in spacing)}"


def tried(read: Callable[[Path], list[Image]], folder: Path, wanted: list[Image]) -> str:
    """``same`` where number, sizes and spacings are ours (not voxels); otherwise what came, or which error."""
    try:
        found = read(folder)
    except Exception as error:  # whatever a reader throws is its result
        return f"{type(error).__name__}"
    alike = (
        found != []
        and len(found) == len(wanted)
        and all(a[0] == b[0] and np.allclose(a[1], b[1], atol=0.01) for a, b in zip(found, wanted, strict=True))
    )
    return "same" if alike else "; ".join(map(text, found)) or "no image"


def folders(root: Path) -> Iterator[Path]:
    """Those that hold files and no folders, in order."""
    for place, below, files in sorted(os.walk(root)):
        if files and not below:
            yield Path(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of DICOM folders")
    root = parser.parse_args().root
    silence_readers()
    warnings.simplefilter("ignore")
    sitk.ProcessObject.SetGlobalWarningDisplay(False)
    readers = {"SimpleITK": simple_itk, "PydicomReader": monai(PydicomReader())}
    if importlib.util.find_spec("itk"):
        readers["ITKReader"] = monai(ITKReader())
    else:
        print("ITKReader not tried: the package itk is not installed.")
    print(", ".join(f"{name} {version(name)}" for name in ("SimpleITK", "monai", "pydicom")))
    print(f"| folder | files | ours | {' | '.join(readers)} |\n|{'---|' * (3 + len(readers))}")
    for folder in folders(root):
        try:
            found = ours(folder)
            images = [image for _, image in found]
            names = " ".join(name for name, _ in found if name)
            mine = f"{len(found)}: {' '.join(filter(None, (names, text(images[0]))))}"
        except StudyError as error:
            images, mine = [], f"refused: {error.code}"
        cells = [tried(read, folder, images) for read in readers.values()]
        print(f"| {folder.relative_to(root)} | {len(list(folder.iterdir()))} | {mine} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
