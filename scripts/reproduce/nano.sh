#!/usr/bin/env bash
# Try all steps of the other scripts in minutes on 2 CPU cores, without a network: a model of 1M parameters on the source
# code of this Python's standard library.
# Needs `pip install -e '.[train,data]'`. Arguments are further flags of `llmscale train`: --nproc-per-node 2
# Interrupt it at any place: the same command continues. OUT is the folder of everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-reproduced/nano}

llmscale data prepare --out "$OUT/data" \
    --input python-stdlib \
    --tokenizer bytes --seq-len 128 --val-fraction 0.01

# Validation and multiple choice every 100 steps, and after the last.
llmscale train --run "$OUT/run" --data "$OUT/data" --ds zero1 \
    --model tiny-1m \
    --global-batch-size 16 --steps 200 \
    --lr 3e-3 --warmup-steps 20 --log-every 10 \
    --val-every 100 --val-samples 256 \
    --eval-every 100 --eval-tasks hellaswag=scripts/reproduce/nano.jsonl \
    --save-every 50 "$@"

llmscale report "$OUT/run" --html "$OUT/report.html"
llmscale report "$OUT/run"
cat <<END
an earlier run   validation loss 2.3614 after 0.02 hours on 1 of 2 busy cores; other versions of Python are other text
here             grep '"evaluation"' $OUT/run/metrics.jsonl | tail -1
END
