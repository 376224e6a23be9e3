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
# Takes two to three minutes on two CPU cores with bf16 instructions, twice that without, seconds on a GPU.
RECIPE=('model: tiny-1m' 'norm: rmsnorm' 'bias: false' 'positions: rotary' 'activation: silu' 'gated_mlp: true'
    'mlp_width: 384' 'qk_norm: head' 'optimizer: muon' 'lr: 1.0e-2' 'warmup_steps: 10' 'steps: 250' 'log_every: 10'
    'val_every: 125' 'ds: ds_configs/zero2.json')
SEQUENCES=48 # per step

main() {
    local num_processes
    ensure_environment "$FOR_TRAINING"
    SECONDS=0 # bash counts from here: the times do not include the installation

    num_processes=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')
    # A global batch that divides among the processes needs no fillers: round it up.
    SEQUENCES=$(((SEQUENCES + num_processes - 1) / num_processes * num_processes))

    step "Training: ZeRO-2 on $num_processes processes"
    # A run file, because the flags in "$@" override it.
    run_file=$(mktemp --suffix .yaml)
    trap 'rm -f "$run_file"' EXIT
    printf '%s\n' "${RECIPE[@]}" "global_batch_size: $SEQUENCES" >"$run_file"
    llmscale train --nproc-per-node "$num_processes" --config "$run_file" --run "$RUN" "$@"

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
