"""Score new exams with a trained ensemble: DCE needed or not, at the threshold fixed in training.

    python pipelines/score.py --model runs/prostate_alm --input DICOM_FOLDER_OR_MANIFEST.csv --output OUT

Writes scores.csv, report.json and one picture per exam. Exit status: 0 all scored, 2 some could not be (the rest are
written) or the input cannot be used. Research use only.
"""

import argparse
import logging
import sys
from pathlib import Path

from monai.bundle import ConfigWorkflow

from mri_alm.bundle import user_errors
from mri_alm.errors import InputError
from mri_alm.files import write_csv
from mri_alm.scoring import key_table

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def main() -> int:
    """Parse the arguments, run the inference bundle, report by exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="run folder of a finished training")
    parser.add_argument("--input", type=Path, required=True, help="folder with DICOM studies, or a manifest (.csv)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--threads", type=int, help="exams prepared at once (default: one per core)")
    parser.add_argument(
        "--key-file",
        type=Path,
        help="also write which folder each study key stands for; identifies patients, must lie outside --output",
    )
    parser.add_argument("--calibration", type=Path, help="scores.csv that this model gave a cohort it never saw")
    parser.add_argument("--labels", type=Path, help="with --calibration: CSV with study, label, patient")
    parser.add_argument("--alpha", type=float, default=0.1, help="with --calibration: largest acceptable miss rate")
    parser.add_argument("--eps", type=float, default=0.1, help="with --calibration: chance that it is larger")
    arguments = parser.parse_args()
    names = ("input", "output", "calibration", "labels", "alpha", "eps")
    overrides = {"run_dir": str(arguments.model)} | {
        name: value if isinstance(value, float) else str(value)
        for name in names
        if (value := getattr(arguments, name)) is not None
    }
    if arguments.threads:
        overrides["threads"] = arguments.threads
    with user_errors():
        if arguments.key_file and arguments.output.resolve() in arguments.key_file.resolve().parents:
            raise InputError("--key-file identifies patients: put it outside --output, which is meant to be shared.")
        workflow = ConfigWorkflow(
            str(CONFIGS / "inference.json"),
            logging_file=str(CONFIGS / "logging.conf"),
            workflow_type="infer",
            **overrides,
        )
        workflow.initialize()
        workflow.run()
        studies = workflow.parser.get_parsed_content("studies")
        if arguments.key_file:
            salt = workflow.parser.get_parsed_content("salt")
            write_csv(arguments.key_file, ("study", "folder"), key_table(arguments.input, salt))
        workflow.finalize()
    return 2 if studies.errors else 0


if __name__ == "__main__":
    logging.captureWarnings(True)
    sys.exit(main())
