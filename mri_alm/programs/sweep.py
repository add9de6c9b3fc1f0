"""The paper's staged search on validation metrics: common settings, the loss's value, mu0 and rho, delta.

Example:
  mri-alm sweep --table cifar10_binary_100 --protocol quick --methods alm_bce --runs 3 --data data/cifar

Writes configs/tuned.json, which `mri-alm benchmark` takes with --tuned. Stop it and start it again: it goes on.
The trainings of a stage run on --workers; several processes, also on other machines, share a search when all are
given the same --runs-dir.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mri_alm.errors import InputError
from mri_alm.programs.command import add_pool_options
from mri_alm.runtime.atomic import private_files
from mri_alm.runtime.interruption import user_errors


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--table", required=True, help="name of a table of mri_alm/cifar/tables.json")
    found.add_argument("--protocol", default="quick", help="paper or quick")
    found.add_argument("--methods", nargs="+", help="rows such as a_fl alm_a_fl (default: the paper's)")
    found.add_argument("--runs", type=int, default=10, help="trainings per point (the paper: 10)")
    found.add_argument("--storage", help=argparse.SUPPRESS)
    found.add_argument("--data", type=Path, help="folder of the images (default: data/cifar or data/medmnist)")
    found.add_argument("--runs-dir", type=Path, default=Path("runs/sweep"), help="checkpoints and results")
    found.add_argument("--output", type=Path, default=Path("configs/tuned.json"))
    add_pool_options(found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Search stage by stage, write what was chosen."""
    options = parser().parse_args(arguments)
    with user_errors(), private_files():
        from mri_alm.cifar.table import TABLES, BenchmarkTable
        from mri_alm.cifar.training import Search, points, write_tuned
        from mri_alm.runtime.tasks import Pool, joined

        if options.storage:
            raise InputError("--storage is gone: results lie in --runs-dir, which processes share. Leave it out.")
        table = BenchmarkTable(TABLES, options.table, options.protocol)
        methods = options.methods or table.methods()
        pool = Pool(options.backend, options.workers, options.ray_address, options.gpus_per_task)
        search = Search(table, options.data or table.data, options.runs_dir, options.runs, pool)
        print(f"{points(table, methods)} points of {options.runs} trainings each.")
        with joined(pool):
            common = search.common()
            for key in methods:
                write_tuned(options.output, table, options.runs, {key: search.method(key, common)})
    return 0
