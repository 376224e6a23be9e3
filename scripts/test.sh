#!/usr/bin/env bash
# Run the checks of check.sh, then the tests. Arguments go to pytest: ./scripts/test.sh -m slow, ./scripts/test.sh tests/data -k order
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib/environment.sh
source scripts/lib/environment.sh
ensure_environment "$FOR_TESTS"

./scripts/check.sh
echo "== pytest"
# Every rank of a distributed test is a separate process and needs one thread. Most are forked from a process that has
# imported everything; with COLD_TESTS=1 each rank imports by itself, which takes several times as long.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Two at a time for each core, at most 8: tests wait for their own processes and for the disk. A file's
# tests stay together, because they share fixtures. In the order of their names: the long files have few tests, and would
# otherwise all come last. Lost workers are not replaced: xdist 3.8 would then wait endlessly for the tests that it
# assigned twice.
# nproc alone would answer OMP_NUM_THREADS.
cores=$(env -u OMP_NUM_THREADS nproc)
workers=$((cores < 4 ? 2 * cores : 8))
# What is compiled once serves every start of Python.
unset PYTHONDONTWRITEBYTECODE
pytest --numprocesses "$workers" --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"
