"""Share a trained ensemble: a bundle as MONAI's model zoo wants it, without anything that points to patients.

Example:
  mri-alm export --model runs/prostate_alm --output prostate_dce_bundle

Writes configs (inference.json, metadata.json), models (safetensors, and model.pt for MONAI's own programs), threshold,
docs and LICENSE. docs/zoo.md shows how MONAI verifies it and exports it to TorchScript and ONNX. The licence is that of
this project: give --license where the weights have another. Exit status: 0 written, 2 the run cannot be used.
"""

import argparse
from collections.abc import Sequence
from importlib.metadata import files
from pathlib import Path

from mri_alm.runtime.atomic import private_files
from mri_alm.runtime.interruption import user_errors


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", type=Path, required=True, help="run folder of a finished training")
    found.add_argument("--output", type=Path, required=True, help="folder to write, new or empty")
    found.add_argument("--name", default="", help="title of the model")
    found.add_argument("--authors", default="", help="who made the model, separated by commas")
    found.add_argument("--version", default="", help="of this model, three numbers: 1.0.0 (default: that of mri-alm)")
    found.add_argument("--changelog", default="", help="what is new in that version")
    found.add_argument("--license", type=Path, help="text file with the licence of the weights")
    found.add_argument("--data-source", default="", help="where the training exams come from; name no patient")
    found.add_argument(
        "--carry-package",
        action="store_true",
        help="copy mri-alm into the bundle: MONAI then runs it without mri-alm, as the model zoo's checks must",
    )
    found.add_argument("--trust", action="store_true", help="the run's config is a program of your own: run it")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Export; the exit status."""
    options = parser().parse_args(arguments)
    with user_errors(), private_files():
        from mri_alm.bundle.export import BundleLabel, export_bundle
        from mri_alm.bundle.trained_run import TrainedRun

        licence = next(Path(str(file.locate())) for file in files("mri-alm") or () if file.name == "LICENSE")
        label = BundleLabel(
            options.name, options.authors, options.version, options.changelog, options.license, options.data_source
        )
        run = TrainedRun(options.model, trust=options.trust)
        export_bundle(run, options.output, licence=licence, label=label, carry_package=options.carry_package)
    print(f"Written: {options.output}. Read {options.output / 'docs' / 'README.md'} before you share it.")
    return 0
