"""From any export to a checked cohort: DICOM trees, NIfTI / MHA / NRRD, public archives -> manifest, images, QC page.

Examples:
  mri-alm prepare --input EXPORT --labels labels.csv --output COHORT --dry-run
  mri-alm prepare --input EXPORT --labels labels.csv --output COHORT
  mri-alm check COHORT

docs/cohort.md explains the label table, the rules file, every output and every error. Exit status: 0 all studies can be
used, 2 some cannot (the rest are written) or the input cannot be used; --check: 0 safe to train on, 2 not.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--input", type=Path, help="folder of studies, or a table (.csv) of image files")
    found.add_argument("--labels", type=Path, help="table (.csv) with a study or patient column and a label column")
    found.add_argument("--output", type=Path, metavar="COHORT", help="folder to write to; must not lie in --input")
    found.add_argument("--rules", type=Path, help="JSON: layout, roles, overrides per study, label columns, grid")
    found.add_argument("--workers", type=int, default=0, help="studies prepared at once (default: one per core)")
    found.add_argument("--backend", default="threading", help="threading, loky (processes) or ray (default threading)")
    found.add_argument(
        "--ray-address", "--address", help="of a Ray cluster that shares the folders (default: start one here)"
    )
    found.add_argument("--strict", action="store_true", help="all or nothing: stop at the first failed study")
    found.add_argument(
        "--dry-run", action="store_true", help="show folders, roles and decisions on this screen, write no cohort"
    )
    found.add_argument("--resume", action="store_true", help="go on in a folder that holds a cohort")
    found.add_argument("--key-file", type=Path, help="also write what the keys stand for; identifies patients")
    found.add_argument("--salt-file", type=Path, help="secret of the keys (default: your own, docs/cohort.md)")
    found.add_argument("--allow-outside-paths", action="store_true", help="links may lead out of the input folder")
    found.add_argument("--localise", action="store_true", help="crop about the gland, found on T2 by an extra package")
    found.add_argument("--seed", type=int, default=0, help="of the split, where the labels give none (default 0)")
    found.add_argument("--check", type=Path, metavar="COHORT", help="check a prepared cohort instead")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare or check; the exit status."""
    command = parser()
    options = command.parse_args(arguments)
    if not options.check and not (options.input and options.output):
        command.error("give --input and --output, or --check")
    from mri_alm.cohort.labels import StrangeLabelsError
    from mri_alm.cohort.overview import check_cohort, dry_run, summary_text
    from mri_alm.cohort.prepare_cohort import prepare_cohort
    from mri_alm.imaging.dicom_files import silence_readers

    silence_readers()
    try:
        if options.check:
            text, safe = check_cohort(options.check)
            print(text)
            return 0 if safe else 2
        order = _order(options)
        if options.dry_run:
            print(dry_run(order))
            return 0
        outcome = prepare_cohort(order)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, StrangeLabelsError):
            print(error.names, file=sys.stderr)  # for this screen alone
        return 2
    print(summary_text(order, outcome))
    return 2 if outcome.failed else 0


def _order(options: argparse.Namespace) -> Any:
    from mri_alm.cohort.prepare_cohort import Order

    return Order(
        options.input,
        options.output,
        options.labels,
        options.rules,
        workers=options.workers,
        resume=options.resume,
        strict=options.strict,
        key_file=options.key_file,
        seed=options.seed,
        backend=options.backend,
        address=options.ray_address,
        salt_file=options.salt_file,
        allow_outside_paths=options.allow_outside_paths,
        localise=options.localise,
    )


CHECK = """Look for faults in a prepared cohort: patients on both sides of the split, copies, missing labels and files.

example:
  mri-alm check data/mine

exit status: 0 safe to train on, 2 not
"""


def check_parser() -> argparse.ArgumentParser:
    """Of ``mri-alm check``."""
    found = argparse.ArgumentParser(description=CHECK, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("cohort", metavar="COHORT", help="its folder, with manifest.csv")
    return found


def check_main(arguments: Sequence[str] | None = None) -> int:
    """Check; the exit status."""
    return main(["--check", check_parser().parse_args(arguments).cohort])
