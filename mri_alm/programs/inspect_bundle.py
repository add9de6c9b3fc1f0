"""What would a MONAI bundle or a run folder execute? Listed without anything of it being run.

Examples:
  mri-alm inspect BUNDLE_OR_RUN_FOLDER
  mri-alm inspect configs/prostate_alm.json

Of mri-alm's own configs the settings are shown that are not the shipped ones. Every other file is listed with each
place where it differs, and with each callable, expression and file that it names. Nothing says that the rest of such a
bundle is harmless: MONAI's own `run` executes all of it. Exit status: 0 only mri-alm's own configs, 1 anything else,
2 the input cannot be read. docs/security.md says more.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mri_alm.runtime.interruption import user_errors


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("place", type=Path, metavar="FOLDER_OR_CONFIG", help="a bundle's folder, or a config file")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Inspect and list; the exit status."""
    options = parser().parse_args(arguments)
    with user_errors():
        from mri_alm.bundle.inspection import inspect_bundle

        files = inspect_bundle(options.place)
    for file in files:
        if file.own:
            settings = ", ".join(f"{name} = {json.dumps(value)}" for name, value in file.settings.items())
            print(f"{file.name}: mri-alm's own config, settings: {settings or 'as shipped'}")
            continue
        print(f"{file.name}: not one of mri-alm's own configs")
        for line in file.differences:
            print(f"  differs  {line}")
        for place, text in file.calls:
            print(f"  names    {place}: {text}")
    others = [file for file in files if not file.own]
    if not others:
        print(f"All that runs is mri-alm's own ({len(files)} configs), with other values of settings at most.")
        return 0
    print(
        f"{len(others)} of {len(files)} files are somebody's program. `monai.bundle run` executes it with your rights, "
        "also what is not listed here; `mri-alm score` refuses such a run without --trust.",
        file=sys.stderr,
    )
    return 1
