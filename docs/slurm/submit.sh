#!/bin/bash
# The array of splits, then the ensemble when all have ended:
#   docs/slurm/submit.sh 10 --run_dir runs/mine --cohort /data/cohort/manifest.csv --max_epochs 60
# The exams are prepared by the first task that needs them; prepare a large cohort before (pipelines/prepare_cohort.py).
set -euo pipefail
SPLITS="${1:?number of splits, then settings}"
shift
HERE="$(dirname "$0")"
ARRAY="$(sbatch --parsable --array="0-$((SPLITS - 1))" "$HERE/splits.sbatch" --splits "$SPLITS" "$@")"
sbatch --dependency="afterany:$ARRAY" "$HERE/ensemble.sbatch" --splits "$SPLITS" "$@"
