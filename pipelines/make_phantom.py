"""Write a cohort of synthetic prostate exams with a manifest, for trying out the whole job without patient data.

    python pipelines/make_phantom.py cohorts/phantom --train 270 --test 90

No number from it is a clinical one. Starting a stopped command again completes the cohort.
"""

import argparse
import sys
from pathlib import Path

from mri_alm.runtime.interruption import answer_signals

if __name__ == "__main__":
    answer_signals()  # before imports that take seconds

from mri_alm.errors import InputError
from mri_alm.phantom.cohort import make_cohort
from mri_alm.runtime.console import tolerate_any_letter
from mri_alm.runtime.progress import progress_bar


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the cohort is written")
    parser.add_argument("--train", type=int, default=270, help="training studies (default %(default)s)")
    parser.add_argument("--test", type=int, default=90, help="test studies (default %(default)s)")
    parser.add_argument("--ratio", type=int, default=8, help="negatives per positive (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another cohort (default %(default)s)")
    parser.add_argument("--form", choices=("nifti", "dicom"), default="nifti", help="file format (default %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Write the cohort; 0 when it is complete, 2 when the arguments or the files cannot be used."""
    tolerate_any_letter()
    options = parse(arguments)
    sizes = {"train": options.train, "test": options.test, "ratio": options.ratio, "seed": options.seed}
    with progress_bar("phantom", options.train + options.test, "study") as bar:
        try:
            manifest = make_cohort(
                options.folder, **sizes, form=options.form, progress=lambda done, _: bar.update(done - bar.n)
            )
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print(manifest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
