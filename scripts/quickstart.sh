#!/usr/bin/env bash
# From a fresh clone to a trained GPT: install, train with DeepSpeed ZeRO-2 on the documentation of Python, train.py's demo,
# on all GPUs (or two processes on the CPU), and show the loss curve and a sample.
# Arguments go to train.py: ./scripts/quickstart.sh --steps 1000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib/environment.sh
source scripts/lib/environment.sh

RUN=runs/quickstart-$(date +%Y%m%d-%H%M%S)
PROMPT='Return '
# Takes two to three minutes on two CPU cores with bf16 instructions, twice that without, seconds on a GPU. Each default is
# a flag of `llmscale train` that "$@" replaces.
DEFAULTS=(--model=tiny-muon-1m --steps=250 --val-every=125)

main() {
    local num_processes flag
    ensure_environment "$FOR_TRAINING"
    SECONDS=0 # bash counts from here: the times do not include the installation

    num_processes=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')
    for flag in "${DEFAULTS[@]}"; do
        if [[ " $*" != *" ${flag%%=*}"* ]]; then set -- "$flag" "$@"; fi
    done
    step "llmscale train --nproc-per-node $num_processes --run $RUN $*"
    llmscale train --nproc-per-node "$num_processes" --run "$RUN" "$@"

    step "Result"
    llmscale report "$RUN"

    step "Sample: llmscale sample $RUN '$PROMPT' --temperature 0.6"
    llmscale sample "$RUN" "$PROMPT" --temperature 0.6 --max-new-tokens 200

    step "Done"
    cat <<END
run folder   $RUN (configuration, metrics.jsonl, checkpoints)
environment  source .venv/bin/activate
more         llmscale sample $RUN 'The '
             llmscale checkpoint list $RUN
             llmscale train --help
END
}

# Print a heading with the seconds since the start.
step() {
    printf '\n== %s  [%d s]\n' "$1" "$SECONDS"
}

main "$@"
