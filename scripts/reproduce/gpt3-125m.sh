#!/usr/bin/env bash
# Train GPT-3's smallest model on 300 billion tokens, with the settings of Brown et al. 2020 (table 2.1, appendix B) and the
# text of llm.c (run_gpt3_125M.sh): three passes over 100 billion tokens of FineWeb.
# Needs `pip install -e '.[train,data]'`. Arguments are further flags of `llmscale train`: --num-gpus 8
# Interrupt it at any place: the same command continues. OUT is the folder of everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-reproduced/gpt3-125m}

# Nothing is downloaded or prepared twice.
python scripts/reproduce/hellaswag.py "$OUT/hellaswag.jsonl"
llmscale data prepare --out "$OUT/data" \
    --input hf:HuggingFaceFW/fineweb:sample-100BT \
    --tokenizer gpt2 --seq-len 2048 --val-fraction 0.001

# Validation and HellaSwag every 250 steps, and after the last. The batch grows from 32,000 tokens over the first 4 to 12
# billion (appendix B).
llmscale train --run "$OUT/run" --data "$OUT/data" --ds zero1 \
    --model gpt3-125m \
    --global-batch-tokens 524288 --batch-ramp-from 16 --batch-ramp-tokens 4000000000 \
    --tokens 300000000000 --warmup-tokens 375000000 --decay-tokens 260000000000 \
    --lr 6e-4 --weight-decay 0.1 \
    --val-every 250 --val-samples 5120 \
    --eval-every 250 --eval-tasks "hellaswag=$OUT/hellaswag.jsonl" \
    --save-every 5000 "$@"

llmscale report "$OUT/run" --html "$OUT/report.html"
llmscale report "$OUT/run"
cat <<END
published        HellaSwag 33.7 %, zero-shot (Brown et al. 2020, table H.1)
here             grep '"evaluation"' $OUT/run/metrics.jsonl | tail -1
END
