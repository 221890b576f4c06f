#!/usr/bin/env bash
# Check the style (ruff, rules in pyproject.toml) and run all tests, in a .venv that is made if there is none. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. ./setup.sh dev
python -m ruff check .
# One process per core, one thread each: threads that share a core with another test's only get in each other's way.
export OMP_NUM_THREADS=1
python -m pytest -n 2 --dist=loadfile --no-loadscope-reorder --durations=10 "$@"
