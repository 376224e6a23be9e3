#!/usr/bin/env bash
# Run all checks that need no test: style, types, prose, shell scripts, the Dockerfile. People, pre-commit and CI run this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib/environment.sh
source scripts/lib/environment.sh

main() {
    local failed=()
    ensure_environment "$FOR_TESTS"
    check ruff check .
    check ruff format --check .
    check mypy
    check python scripts/check_prose.py
    check python scripts/check_density.py
    check python scripts/check_key_tables.py
    shopt -s globstar
    check shellcheck --external-sources scripts/**/*.sh scripts/**/*.sbatch .ci/run
    check hadolint scripts/cloud/Dockerfile
    if ((${#failed[@]})); then
        printf '== failed: %s\n' "${failed[@]}" >&2
        return 1
    fi
}

# Run one check and continue if it fails, so that one run shows all problems.
check() {
    printf '== %s\n' "$*"
    "$@" || failed+=("$*")
}

main
