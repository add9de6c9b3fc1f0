"""Score new exams with a trained ensemble: DCE needed or not, at a threshold fixed before.

Examples:
  mri-alm score --model runs/prostate_alm --input FOLDER_OR_MANIFEST.csv --output OUT
  mri-alm score ... --calibration CALIBRATION/scores.csv --labels calibration.csv --alpha 0.1 --eps 0.1
  mri-alm score ... --log decisions.csv

Without --calibration the threshold is that of training, which is approximate. With it, the chance that the threshold
misses more than a share --alpha of the patients who need DCE is at most --eps; with too few positives everyone is
examined (docs/operating_point.md). Writes scores.csv, report.json, one picture per exam and index.html, the page of all
of them. Exit status: 0 all scored, 2 some could not be (the rest are written) or the input cannot be used. Research use
only.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError
from mri_alm.runtime.atomic import private_files, sweep
from mri_alm.runtime.interruption import user_errors
from mri_alm.runtime.locks import exclusive_lock
from mri_alm.runtime.tables import write_csv


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", type=Path, required=True, help="run folder of a finished training")
    found.add_argument(
        "--input", type=Path, required=True, help="folder of exams of any layout, or a table or manifest (.csv)"
    )
    found.add_argument("--output", type=Path, required=True, help="folder to write to")
    found.add_argument("--threads", type=int, help="exams prepared at once (default: one per core)")
    found.add_argument(
        "--key-file",
        type=Path,
        help="also write which folder each study key stands for; identifies patients, must lie outside --output",
    )
    found.add_argument("--salt-file", type=Path, help="secret of the study keys (default: your own, docs/cohort.md)")
    found.add_argument("--calibration", type=Path, help="scores.csv that this model gave a cohort it never saw")
    found.add_argument("--labels", type=Path, help="with --calibration: CSV with study, label, patient")
    found.add_argument("--alpha", type=float, help="with --calibration: largest acceptable miss rate (default 0.1)")
    found.add_argument("--eps", type=float, help="with --calibration: chance that it is larger (default 0.1)")
    found.add_argument("--log", type=Path, metavar="FILE", help="append each decision to this table (shadow log)")
    found.add_argument("--sr", action="store_true", help="also write a pseudonymous DICOM Structured Report per exam")
    found.add_argument("--explain", type=int, default=0, metavar="N", help="explain the N exams nearest the threshold")
    found.add_argument(
        "--allow-outside-paths",
        "--outside",
        action="store_true",
        help="the table or links may lead out of the input",
    )
    found.add_argument("--trust", action="store_true", help="execute the model's own config (docs/security.md)")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the inference bundle; 2 when some exams could not be scored."""
    options = parser().parse_args(arguments)
    others = {name: value for name, value in vars(options).items() if name not in ("model", "key_file")}
    # Paths stay paths: MONAI evaluates texts that begin with $, @ or %.
    overrides = {"run_dir": options.model} | {name: value for name, value in others.items() if value is not None}
    with user_errors(), private_files(), exclusive_lock(options.output / ".lock"):
        sweep(options.output)
        if options.calibration is None and not {"labels", "alpha", "eps"}.isdisjoint(overrides):
            raise InputError("--labels, --alpha and --eps belong to a calibration cohort: give --calibration too.")
        if options.explain < 0:
            raise InputError(f"--explain must be 0 or more, got {options.explain}.")
        return 2 if _score(overrides, options.key_file) else 0


def _score(overrides: dict[str, Any], key_file: Path | None) -> bool:
    """Whether some exams could not be scored."""
    from monai.bundle import ConfigWorkflow

    from mri_alm.bundle.settings import configs_folder
    from mri_alm.scoring.new_exams import is_manifest, key_table

    output, place = overrides["output"], overrides["input"]
    if key_file and output.resolve() in key_file.resolve().parents:
        raise InputError("--key-file identifies patients: put it outside --output, which is meant to be shared.")
    if key_file and is_manifest(place):
        raise InputError("--key-file is for exams that get keys: a manifest names its studies itself.")
    workflow = ConfigWorkflow(
        str(configs_folder() / "inference.json"),
        logging_file=str(configs_folder() / "logging.conf"),
        workflow_type="infer",
        **overrides,
    )
    workflow.initialize()
    workflow.run()
    studies = workflow.parser.get_parsed_content("studies")
    if key_file:
        write_csv(key_file, ("study", "folder", "name"), key_table(studies))
    workflow.finalize()
    return bool(studies.errors)
