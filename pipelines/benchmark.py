"""Train and print a table, the paper's or MedMNIST's: our numbers beside the printed ones, with intervals and the null.

    python pipelines/benchmark.py --table cifar10_binary_100 --protocol quick --data data/cifar
    python pipelines/benchmark.py --table vessel --protocol official --data data/medmnist

Goes on from whatever is finished; --report-only trains nothing. Writes results/TABLE/PROTOCOL/METHOD/split_k.json and
table.md, table.csv, figure.png beside them. Exit status: 0 done, 2 the input cannot be used.
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
from mri_alm.cifar.long_tail_report import write_multiclass_report
from mri_alm.cifar.report import make_report, write_table_report
from mri_alm.cifar.table import TABLES, BenchmarkTable, read_results
from mri_alm.cifar.training import train_missing
from mri_alm.runtime.atomic import private_files
from mri_alm.runtime.console import tolerate_any_letter
from mri_alm.runtime.tasks import Pool


def main() -> int:
    """Parse the arguments, train what is missing, write the table."""
    tolerate_any_letter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", required=True, help="name of a table of mri_alm/cifar/tables.json")
    parser.add_argument(
        "--protocol", default="quick", help="paper: as published; quick: smaller, declared in the tables' file"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        help="rows such as bce alm_bce published_bce mu1e-4_bce (default: the table's)",
    )
    parser.add_argument("--splits", type=int, help="models per ensemble (default: the protocol's)")
    parser.add_argument(
        "--seeds", type=int, default=1, help="trainings per split and method (the baseline: 2 at least)"
    )
    parser.add_argument("--data", type=Path, help="folder of the images (default: data/cifar or data/medmnist)")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="checkpoints")
    parser.add_argument("--tuned", type=Path, help="configs/tuned.json, as pipelines/sweep.py writes it")
    parser.add_argument("--report-only", action="store_true", help="train nothing")
    parser.add_argument("--workers", type=int, default=1, help="models trained at once (default 1)")
    parser.add_argument("--backend", default="loky", choices=["loky", "ray"], help="processes of this machine, or Ray")
    parser.add_argument(
        "--ray-address", "--address", help="of a Ray cluster that shares the folders (default: start one here)"
    )
    parser.add_argument("--gpus-per-task", type=float, default=0, help="Ray: GPUs of each model")
    arguments = parser.parse_args()
    with user_errors(), private_files():
        table = BenchmarkTable(TABLES, arguments.table, arguments.protocol, arguments.tuned)
        splits = arguments.splits or table.splits
        plan = table.trainings(arguments.methods or table.methods(), splits, arguments.seeds)
        if not arguments.report_only:
            pool = Pool(arguments.backend, arguments.workers, arguments.ray_address, arguments.gpus_per_task)
            folders = {"data": arguments.data or table.data, "runs": arguments.runs, "results": arguments.results}
            if left := train_missing(table, plan, **folders, pool=pool):
                logging.warning("%d models were left to other processes: start again when those have ended.", left)
        results = read_results(table, arguments.results, plan)
        keys = list(dict.fromkeys(job.method.key for job in plan))
        place = table.folder(arguments.results)
        if table.binary:
            print(write_table_report(make_report(table, results, keys, splits), place))
        else:
            print(write_multiclass_report(table, results, keys, splits, place))
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("mri_alm.cifar").setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message="parsing config_file")
    sys.exit(main())
