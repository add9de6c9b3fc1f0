#!/usr/bin/env bash
# Install mri-alm into a virtual environment: `make environment`, `make demo`, CI and the image.
#
#     docker/install.sh FOLDER         # and everything it is tested with
#     docker/install.sh FOLDER core    # what training, scoring and evaluating need
#
# On Linux x86-64 with Python 3.11 every package but PyTorch is installed by hash (requirements-lock.txt and
# requirements-core.txt), elsewhere by version (constraints.txt). PyTorch differs by machine: TORCH=cpu takes its CPU wheel, by hash, from a folder or index
# that pip knows (PIP_FIND_LINKS); without, pip takes what it finds first, by version: see docs/decisions.md (42).
# PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: docker/install.sh FOLDER [core]}
case "${2:-all}" in
    all) lock=requirements-lock.txt project='.[dev]' ;;
    core) lock=requirements-core.txt project=. ;;
    *) echo "error: $2 is neither \"core\" nor left out." >&2; exit 2 ;;
esac
"${PYTHON:-python3}" -m venv "$folder"
pip() {
    "$folder/bin/python" -m pip --disable-pip-version-check "$@"
}
options=()
if [ -n "${CI:-}" ]; then options=(-qq --progress-bar off); fi

machine=$("$folder/bin/python" -c 'import platform as p; print(p.system(), p.machine(), *p.python_version_tuple()[:2])')
if [ "$machine" = "Linux x86_64 3 11" ]; then
    pip install "${options[@]}" --require-hashes --no-deps -r "$lock"
    if [ "${TORCH:-}" = cpu ]; then
        pip install "${options[@]}" --require-hashes --no-deps -r docker/torch-cpu.txt
    else
        pip install "${options[@]}" -c constraints.txt torch
    fi
    pip install "${options[@]}" --no-deps --no-build-isolation -e .
else
    echo "No hashes for $machine: installing by version." >&2
    pip install "${options[@]}" -c constraints.txt -e "$project"
fi
pip check
