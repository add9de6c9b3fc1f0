"""A page of pictures of the augmentation, and its cost: `python benchmarks/augmentation_page.py PAGE.png --draws 10`.

Rows are ADC, high b and T2 of a phantom exam (`--exam` a manifest's first exam), all in the slice of the grid's middle;
columns are the exam as it is prepared, and draws of the training transforms. Printed: milliseconds of processor time
that a draw takes, the mean over `--repeat` draws in one thread.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from monai.bundle import ConfigParser
from monai.transforms import Compose

from mri_alm.cohort.manifest import read_manifest
from mri_alm.phantom.cohort import make_cohort

WINDOWS = {"ADC": (0.0, 0.7), "high b": (-1.0, 5.0), "T2": (-2.0, 2.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="the picture to write")
    parser.add_argument("--augmentation", default="field", help="as the setting (default %(default)s)")
    parser.add_argument("--exam", type=Path, help="a manifest, whose first exam is shown (default: a phantom)")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--spacing", type=float, nargs=3, default=(2.8, 2.8, 3.0))
    parser.add_argument("--size", type=int, nargs=3, default=(40, 40, 28))
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepared, augmentation = transforms(args)
    with tempfile.TemporaryDirectory() as folder:
        manifest = args.exam or make_cohort(Path(folder), train=2, test=2)
        exam = prepared(read_manifest(manifest)[0].item())
    augmentation.set_random_state(0)
    images = [exam["image"], *(augmentation(dict(exam))["image"] for _ in range(args.draws))]
    start = time.process_time()
    for _ in range(args.repeat):
        augmentation(dict(exam))
    print(f"{args.augmentation}, {args.size}: {1000 * (time.process_time() - start) / args.repeat:.1f} ms a draw")
    draw(args.page, images)


def transforms(args: argparse.Namespace) -> tuple[Compose, Compose]:
    """What prepares an exam, and what changes it anew in every epoch."""
    parser = ConfigParser()
    parser.read_config("configs/prostate_alm.json")
    parser.update({"augmentation": args.augmentation, "spacing": list(args.spacing), "size": list(args.size)})
    return tuple(Compose(parser.get_parsed_content(name)) for name in ("preprocessing", "train::augmentation"))


def draw(page: Path, images: list[Any]) -> None:
    """The page."""
    shown, axes = plt.subplots(3, len(images), figsize=(1.25 * len(images), 4), squeeze=False)
    for number, (row, (name, (low, high))) in enumerate(zip(axes, WINDOWS.items(), strict=True)):
        for column, (axis, image) in enumerate(zip(row, images, strict=True)):
            axis.imshow(image[number, :, :, image.shape[3] // 2].T, cmap="gray", vmin=low, vmax=high)
            axis.set(xticks=[], yticks=[])
            if number == 0:
                axis.set_title(f"draw {column}" if column else "prepared", fontsize=8)
        row[0].set_ylabel(name, fontsize=8)
    shown.tight_layout(pad=0.3)
    shown.savefig(page, dpi=60)


if __name__ == "__main__":
    main()
