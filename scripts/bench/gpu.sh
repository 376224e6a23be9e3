#!/usr/bin/env bash
# Everything that only a GPU can show, on one GPU in under 25 minutes, installation included: speed and MFU by model
# and ZeRO stage, beside nanoGPT, memory beside its estimate. Arguments go to gpu/gpu.py (--help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
echo "== llmscale on one GPU: installation, then cells, the most important ones first"
# An environment that has everything, an image's or one that is active, is taken as it is.
HAS_ALL='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))'
if ! python -c "$HAS_ALL" accelerate deepspeed streaming torch xxhash 2>/dev/null; then
    # shellcheck source=scripts/lib/environment.sh
    source scripts/lib/environment.sh
    ensure_environment "$FOR_TESTS"
fi
exec python -m scripts.bench.gpu.gpu --spent-s "$SECONDS" "$@"
