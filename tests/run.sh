#!/usr/bin/env bash
# Check style and types (ruff, mypy: rules in pyproject.toml) and run all tests, in a .venv that is made if there is
# none. Arguments go to pytest.
set -euo pipefail
case " $* " in *" -h "* | *" --help "*) sed -n '2,/^set /{/^#/!d; s/^# \{0,1\}//; p;}' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
. ./setup.sh dev
python -m ruff check .
python -m mypy
# One process more than the two cores this is made for, as tests also wait for servers and signals; one thread each:
# threads that share a core with another test's only get in each other's way.
export OMP_NUM_THREADS=1
python -m pytest -n 3 --dist=loadfile --no-loadscope-reorder --durations=10 "$@"
