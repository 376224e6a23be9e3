#!/usr/bin/env bash
# Test llmscale[engine], which has no Streaming, beside the newest numpy, torch and transformers: a demo from training to export,
# then the tests of order, shards, loader, checkpoints and export. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib/environment.sh
source scripts/lib/environment.sh

main() {
    local venv=${VENV:-.venv/engine} folder
    [[ -x $venv/bin/python ]] || "$(find_python)" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[engine]' \
        hypothesis 'moto[server]' pytest pytest-timeout transformers
    export PATH=$PWD/$venv/bin:$PATH OMP_NUM_THREADS=1
    python -c 'import numpy, torch, transformers; print(numpy.__version__, torch.__version__, transformers.__version__)'
    if python -c 'import streaming' 2>/dev/null; then
        echo "error: mosaicml-streaming is installed in $venv" >&2
        return 1
    fi

    folder=$(mktemp -d)
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf '$folder'" EXIT
    llmscale train --nproc-per-node 2 --ds zero2 --model tiny-1m --steps 20 --global-batch-size 16 --run "$folder/run" \
        --data-cache "$folder/cache"
    llmscale report "$folder/run"
    llmscale sample "$folder/run" 'Return ' --max-new-tokens 20
    llmscale export "$folder/run" --to "$folder/exported"
    pytest tests/data/order tests/data/shards tests/data/test_loader.py tests/checkpoint tests/cli/test_export.py "$@"
}

main "$@"
