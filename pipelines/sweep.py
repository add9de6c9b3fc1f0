"""The paper's staged search on validation metrics: common settings, the loss's value, mu0 and rho, delta.

    python pipelines/sweep.py --table cifar10_binary_100 --protocol quick --methods alm_bce --runs 3 --data data/cifar

Writes configs/tuned.json, which pipelines/benchmark.py takes with --tuned. Stop it and start it again: it goes on.
The trainings of a stage run on --workers; several processes, also on other machines, share a search when all are
given the same --runs-dir.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path

from mri_alm.runtime.interruption import answer_signals

if __name__ == "__main__":
    answer_signals()  # before imports that take seconds

from mri_alm.bundle.config import user_errors
from mri_alm.cifar.table import TABLES, BenchmarkTable
from mri_alm.cifar.training import Search, points, write_tuned
from mri_alm.errors import InputError
from mri_alm.runtime.atomic import private_files
from mri_alm.runtime.console import tolerate_any_letter
from mri_alm.runtime.tasks import Pool, joined


def main() -> int:
    """Parse the arguments, search stage by stage, write what was chosen."""
    tolerate_any_letter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", required=True, help="name of a table of mri_alm/cifar/tables.json")
    parser.add_argument("--protocol", default="quick", help="paper or quick")
    parser.add_argument("--methods", nargs="+", help="rows such as a_fl alm_a_fl (default: the paper's)")
    parser.add_argument("--runs", type=int, default=10, help="trainings per point (the paper: 10)")
    parser.add_argument("--storage", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help="folder of the images (default: data/cifar or data/medmnist)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/sweep"), help="checkpoints and results")
    parser.add_argument("--output", type=Path, default=Path("configs/tuned.json"))
    parser.add_argument("--workers", type=int, default=1, help="models trained at once (default 1)")
    parser.add_argument("--backend", default="loky", choices=["loky", "ray"], help="processes of this machine, or Ray")
    parser.add_argument(
        "--ray-address", "--address", help="of a Ray cluster that shares the folders (default: start one here)"
    )
    parser.add_argument("--gpus-per-task", type=float, default=0, help="Ray: GPUs of each model")
    arguments = parser.parse_args()
    with user_errors(), private_files():
        if arguments.storage:
            raise InputError("--storage is gone: results lie in --runs-dir, which processes share. Leave it out.")
        table = BenchmarkTable(TABLES, arguments.table, arguments.protocol)
        methods = arguments.methods or table.methods()
        pool = Pool(arguments.backend, arguments.workers, arguments.ray_address, arguments.gpus_per_task)
        search = Search(table, arguments.data or table.data, arguments.runs_dir, arguments.runs, pool)
        print(f"{points(table, methods)} points of {arguments.runs} trainings each.")
        with joined(pool):
            common = search.common()
            for key in methods:
                write_tuned(arguments.output, table, arguments.runs, {key: search.method(key, common)})
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("mri_alm.cifar").setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message="parsing config_file")
    sys.exit(main())
