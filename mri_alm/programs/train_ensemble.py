"""The main job with its splits as tasks: on this machine's cores and GPUs, or on a Ray cluster.

    python pipelines/train_ensemble.py --workers 4 --run_dir runs/mine --cohort COHORT/manifest.csv
    python pipelines/train_ensemble.py --backend ray --ray-address auto --workers 10 --gpus-per-task 1 --run_dir RUN

Whatever else is given overrides a setting of the config, as in `python -m monai.bundle run` (docs/settings.md). Weights
are those of one split after the other, bit for bit. Start it again after a failure: it goes on from what is finished.
docs/cluster.md explains more. Exit status: 0 done, 2 the input cannot be used or a split failed.
"""

import argparse
from collections.abc import Sequence

from mri_alm.errors import InputError
from mri_alm.runtime.console import tolerate_any_letter
from mri_alm.runtime.interruption import user_errors


def parser() -> argparse.ArgumentParser:
    """Its command line, but for the settings."""
    found = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    found.add_argument("--config_file", default="configs/prostate_alm.json", help="config, or a Python list of them")
    found.add_argument("--backend", choices=["loky", "ray"], help="processes of this machine, or Ray")
    found.add_argument("--workers", type=int, help="splits trained at once (default: the config's, 1)")
    found.add_argument(
        "--ray-address",
        "--ray_address",
        "--address",
        help="of a Ray cluster, such as auto or head:6379 (default: start one here)",
    )
    found.add_argument(
        "--gpus-per-task", "--gpus_per_task", type=float, help="Ray: GPUs of each split; 0.5: two share one"
    )
    found.add_argument("--tracking", choices=["mlflow"], help="also record the run there")
    return found


def parse(arguments: Sequence[str] | None) -> dict[str, object]:
    """The command line as settings; what is not given is left to the config."""
    from fire.parser import DefaultParseValue

    options, words = parser().parse_known_args(arguments)
    options.config_file = DefaultParseValue(options.config_file)
    return overrides(words) | vars(options)


def overrides(words: list[str]) -> dict[str, object]:
    """``--name value`` and ``--name=value`` pairs, values read as MONAI's command line reads them."""
    from fire.parser import DefaultParseValue

    from mri_alm.bundle.config import read_words

    pairs = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    names, values = pairs[::2], pairs[1::2]
    if len(names) != len(values) or not all(name.startswith("--") for name in names):
        raise InputError(f"Settings are pairs such as --max_epochs 20, got: {' '.join(words)}")
    typed = {name[2:].replace("-", "_"): value for name, value in zip(names, values, strict=True)}
    return {name: DefaultParseValue(value) for name, value in typed.items()} | read_words(typed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, ensemble, report."""
    tolerate_any_letter()
    with user_errors():
        settings = parse(arguments)
        from monai.bundle import ConfigWorkflow
        from monai.utils import ensure_tuple

        from mri_alm.bundle.config import require_checkout

        require_checkout(ensure_tuple(settings["config_file"]))
        workflow = ConfigWorkflow(**{"workflow_type": "train"} | settings)
        workflow.initialize()
        workflow.run()
        workflow.finalize()
    return 0
