"""Write a cohort of synthetic prostate exams with a manifest, for trying out the whole job without patient data.

    python pipelines/make_phantom.py cohorts/phantom --train 270 --test 90
    python pipelines/make_phantom.py cohorts/real_anatomy --train 72 --test 27 --template EXAMS --masks MASKS

With --template the lesions are implanted into real exams, warped at random. Training and test studies then share the
few templates, so such a cohort only shows that everything runs. No number from either kind is a clinical one.
Starting a stopped command again completes the cohort.
"""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from mri_alm.errors import InputError
from mri_alm.phantom_io import make_cohort
from mri_alm.phantom_template import make_template_cohort


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the cohort is written")
    parser.add_argument("--train", type=int, default=270, help="training studies (default %(default)s)")
    parser.add_argument("--test", type=int, default=90, help="test studies (default %(default)s)")
    parser.add_argument("--ratio", type=int, default=8, help="negatives per positive (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another cohort (default %(default)s)")
    parser.add_argument("--form", choices=("nifti", "dicom"), default="nifti", help="file format (default %(default)s)")
    parser.add_argument(
        "--template",
        type=Path,
        metavar="DIR",
        help="one sub-folder per real exam: t2, adc and hbv.nii.gz or a DICOM study, with zones.nii.gz "
        "(1 peripheral, 2 transition) or gland.nii.gz where there are any; NIfTI output only",
    )
    parser.add_argument(
        "--masks",
        type=Path,
        metavar="DIR",
        help="where NAME_zones.nii.gz and NAME_gland.nii.gz of the template sub-folders NAME lie, if not inside them",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Write the cohort; 0 when it is complete, 2 when the arguments or the files cannot be used."""
    options = parse(arguments)
    sizes = {"train": options.train, "test": options.test, "ratio": options.ratio, "seed": options.seed}
    with tqdm(total=options.train + options.test, unit="study", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        try:
            if options.template is None:
                if options.masks:
                    raise InputError("--masks belongs to --template: name the folder with the exams too.")
                manifest = make_cohort(options.folder, **sizes, form=options.form, progress=progress)
            else:
                if options.form != "nifti":
                    raise InputError("--template writes NIfTI only: leave --form out.")
                manifest = make_template_cohort(
                    options.folder, options.template, masks=options.masks, **sizes, progress=progress
                )
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print(manifest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
