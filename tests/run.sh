#!/usr/bin/env bash
# Run all tests in a .venv of the repo's own, made from nothing if need be. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. ./setup.sh dev
# One process per core, one thread each: threads that share a core with another test's only get in each other's way.
export OMP_NUM_THREADS=1
python -m pytest -n 2 --dist=loadfile --no-loadscope-reorder --durations=10 "$@"
