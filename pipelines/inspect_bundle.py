"""What would a MONAI bundle run? Listed before anything of it does; refused where it is not in an allow-list.

    python pipelines/inspect_bundle.py BUNDLE_FOLDER
    python pipelines/inspect_bundle.py configs/prostate_alm.json

One line for each _target_, $ expression, import and macro, with file and identifier. Of a folder every JSON and YAML
file counts, and code, pickles and links that lead out of it are refused. Of a file, macros are followed from the
working directory. Nothing is evaluated. Exit status: 0 nothing refused, or --trust; 1 something is; 2 the input
cannot be read. docs/security.md says what such a check cannot see.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mri_alm.runtime.interruption import answer_signals

if __name__ == "__main__":
    answer_signals("start the same command again")  # before imports that take seconds

from mri_alm.bundle.config import user_errors
from mri_alm.bundle.inspection import inspect_bundle


def main(arguments: Sequence[str] | None = None) -> int:
    """Inspect and list; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path, metavar="FOLDER_OR_CONFIG", help="a bundle's folder, or a config file")
    parser.add_argument("--trust", action="store_true", help="list what is refused, and exit with 0 all the same")
    options = parser.parse_args(arguments)
    with user_errors():
        findings = inspect_bundle(options.place)
    for finding in findings:
        print(finding)
    bad = sum(bool(finding.problem) for finding in findings)
    callables = len({name for finding in findings for name in finding.names})
    print(f"{len(findings)} findings, {callables} callables, {bad} refused.")
    if bad and not options.trust:
        print("Read the refused lines; run it only if you trust whoever made it (--trust).", file=sys.stderr)
    return int(bad > 0 and not options.trust)


if __name__ == "__main__":
    sys.exit(main())
