"""Write a cohort of synthetic prostate exams with a manifest, for trying out the whole job without patient data.

Example:
  mri-alm phantom data/phantom --train 270 --test 90

No number from it is a clinical one. Starting a stopped command again completes the cohort.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mri_alm.errors import InputError


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", type=Path, help="where the cohort is written")
    found.add_argument("--train", type=int, default=270, help="training studies (default %(default)s)")
    found.add_argument("--test", type=int, default=90, help="test studies (default %(default)s)")
    found.add_argument("--ratio", type=int, default=8, help="negatives per positive (default %(default)s)")
    found.add_argument("--seed", type=int, default=0, help="another seed, another cohort (default %(default)s)")
    found.add_argument("--form", choices=("nifti", "dicom"), default="nifti", help="file format (default %(default)s)")
    found.add_argument(
        "--difficulty",
        choices=("plain", "real"),
        default="plain",
        help="real: lesions as small as real ones, diffusion distorted near gas (default %(default)s)",
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the cohort; 0 when it is complete, 2 when the arguments or the files cannot be used."""
    options = parser().parse_args(arguments)
    from mri_alm.phantom.cohort import make_cohort
    from mri_alm.runtime.progress import progress_bar

    sizes = {"train": options.train, "test": options.test, "ratio": options.ratio, "seed": options.seed}
    with progress_bar("phantom", options.train + options.test, "study") as bar:
        try:
            manifest = make_cohort(
                options.folder,
                **sizes,
                form=options.form,
                difficulty=options.difficulty,
                progress=lambda done, _: bar.update(done - bar.n),
            )
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print(manifest)
    return 0
