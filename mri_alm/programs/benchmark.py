"""Train and print a table, the paper's or MedMNIST's: our numbers beside the printed ones, with intervals and the null.

Examples:
  mri-alm benchmark --table cifar10_binary_100 --protocol quick --data data/cifar
  mri-alm benchmark --table vessel --protocol official --data data/medmnist

Goes on from whatever is finished; --report-only trains nothing. Writes results/TABLE/PROTOCOL/METHOD/split_k.json and
table.md, table.csv, figure.png beside them, of every method that is kept there. Exit status: 0 done, 2 the input cannot
be used.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from mri_alm.programs.command import add_pool_options
from mri_alm.runtime.atomic import private_files
from mri_alm.runtime.interruption import user_errors


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--table", required=True, help="name of a table of mri_alm/cifar/tables.json")
    found.add_argument(
        "--protocol", default="quick", help="paper: as published; quick: smaller, declared in the tables' file"
    )
    found.add_argument(
        "--methods",
        nargs="+",
        help="train these, such as bce alm_bce published_bce mu1e-4_bce (default: the table's)",
    )
    found.add_argument("--splits", type=int, help="models per ensemble (default: the protocol's)")
    found.add_argument("--seeds", type=int, default=1, help="trainings per split and method (the baseline: 2 at least)")
    found.add_argument("--data", type=Path, help="folder of the images (default: data/cifar or data/medmnist)")
    found.add_argument("--results", type=Path, default=Path("results"))
    found.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="checkpoints")
    found.add_argument("--tuned", type=Path, help="configs/tuned.json, as mri-alm sweep writes it")
    found.add_argument("--report-only", action="store_true", help="train nothing")
    add_pool_options(found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, write the table."""
    options = parser().parse_args(arguments)
    with user_errors(), private_files():
        from mri_alm.cifar.long_tail_report import write_multiclass_report
        from mri_alm.cifar.report import make_report, write_table_report
        from mri_alm.cifar.table import TABLES, BenchmarkTable, read_results
        from mri_alm.cifar.training import train_missing
        from mri_alm.runtime.tasks import Pool

        table = BenchmarkTable(TABLES, options.table, options.protocol, options.tuned)
        splits = options.splits or table.splits
        asked = options.methods or table.methods()
        plan = table.trainings(asked, splits, options.seeds)
        # What is kept and cannot be read is refused before anything is trained.
        read_results(table, options.results, table.trainings(table.kept(options.results), splits, options.seeds))
        if not options.report_only:
            pool = Pool(options.backend, options.workers, options.ray_address, options.gpus_per_task)
            folders = {"data": options.data or table.data, "runs": options.runs, "results": options.results}
            if left := train_missing(table, plan, **folders, pool=pool):
                logging.warning("%d models were left to other processes: start again when those have ended.", left)
        shown = table.trainings([*asked, *table.kept(options.results)], splits, options.seeds)
        results = read_results(table, options.results, shown)
        keys = list(dict.fromkeys(job.method.key for job in shown))
        place = table.folder(options.results)
        if table.binary:
            print(write_table_report(make_report(table, results, keys, splits), place))
        else:
            print(write_multiclass_report(table, results, keys, splits, place))
    return 0
