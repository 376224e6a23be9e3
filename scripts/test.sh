#!/usr/bin/env bash
# The checks of check.sh, then the tests. Arguments go to pytest: ./scripts/test.sh -m slow, ./scripts/test.sh tests/data -k order
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib/environment.sh
source scripts/lib/environment.sh
ensure_environment "$FOR_TESTS"

./scripts/check.sh
echo "== pytest"
# Every rank of a distributed test is a process of its own, so one thread each is plenty. Most are forked from a process
# that has imported everything; with COLD_TESTS=1 each imports for itself, which takes several times as long.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Two at a time: most tests wait for processes of their own. A file's tests stay together, for what they share. In the
# order of their names: files of few tests are the long ones here, and would all come last. Without new workers for lost
# ones: xdist 3.8 then waits for ever for the tests that it gave out twice.
pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"
