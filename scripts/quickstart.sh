#!/usr/bin/env bash
# From a fresh clone to a trained GPT: install, prepare the Python standard library as text, train with DeepSpeed ZeRO-2
# on whatever is there (all GPUs, else two processes on the CPU), show the loss curve and a sample.
# Arguments go to train.py: ./scripts/quickstart.sh --steps 1000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib/environment.sh
source scripts/lib/environment.sh

TOKENIZER=data/python-stdlib-tokenizer
SET=data/python-stdlib # where train.py looks by default
RUN=runs/quickstart-$(date +%Y%m%d-%H%M%S)
# Two to three minutes on two CPU cores, seconds on a GPU.
RECIPE=('model: tiny-3m' 'steps: 300' 'lr: 3.0e-3' 'warmup_steps: 20' 'log_every: 10' 'val_every: 100')
SEQUENCES=12 # per step

main() {
    local num_processes
    ensure_environment "$FOR_TRAINING"
    SECONDS=0 # bash counts on from here: what follows is the time after the installation

    step "Tokenizer: a BPE of 4,096 tokens, trained on the standard library"
    if [[ -d $TOKENIZER ]]; then
        echo "$TOKENIZER is there already."
    else
        llmscale data train-tokenizer --input python-stdlib --vocab-size 4096 --out "$TOKENIZER"
    fi

    step "Data: the sources and docs of the standard library, in windows of 256 tokens"
    llmscale data prepare --input python-stdlib --tokenizer "$TOKENIZER" --seq-len 256 --out "$SET"

    num_processes=$(python -c 'import torch; print(torch.cuda.device_count())')
    if [[ $num_processes == 0 ]]; then
        num_processes=2
        if ! grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then
            # Without instructions for it, bf16 is slower than fp32, and fp32 takes twice the time: halve the batch.
            RECIPE+=('precision: fp32')
            SEQUENCES=$((SEQUENCES / 2))
        fi
    fi
    # The global batch must divide among the processes: round it up.
    SEQUENCES=$(((SEQUENCES + num_processes - 1) / num_processes * num_processes))

    step "Training: ZeRO-2 on $num_processes processes"
    # A run file, because flags win over it: what "$@" says counts.
    run_file=$(mktemp --suffix .yaml)
    trap 'rm -f "$run_file"' EXIT
    printf '%s\n' "${RECIPE[@]}" 'ds: ds_configs/zero2.json' "global_batch_size: $SEQUENCES" >"$run_file"
    llmscale train --nproc-per-node "$num_processes" --config "$run_file" --run "$RUN" "$@"

    step "Result"
    llmscale report "$RUN"

    step "Sample: llmscale sample $RUN '    def __init__' --temperature 0.6"
    llmscale sample "$RUN" '    def __init__' --temperature 0.6 --max-new-tokens 120

    step "Done"
    cat <<END
run folder   $RUN (configuration, metrics.jsonl, checkpoints)
data         $SET, tokenizer $TOKENIZER
environment  source .venv/bin/activate
more         llmscale sample $RUN 'import '
             llmscale checkpoint list $RUN
             llmscale train --help
END
}

# A heading with the seconds since the start.
step() {
    printf '\n== %s  [%d s]\n' "$1" "$SECONDS"
}

main "$@"
