#!/usr/bin/env bash
# Train GPT-2's largest model on 34 billion tokens of FineWeb-Edu, with the settings of llm.c (run_gpt2_1558M.sh).
# Needs `pip install -e '.[train,data]'`. Arguments are further flags of `llmscale train`: --num-gpus 8, --micro-batch-size 16
# Interrupt it at any place: the same command continues. OUT is the folder of everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-reproduced/gpt2-1.5b}

# Nothing is downloaded or prepared twice.
python scripts/reproduce/hellaswag.py "$OUT/hellaswag.jsonl"
llmscale data prepare --out "$OUT/data" \
    --input hf:HuggingFaceFW/fineweb-edu:sample-100BT \
    --tokenizer gpt2 --seq-len 1024 --val-fraction 0.001

# Validation and HellaSwag every 250 steps, and after the last.
llmscale train --run "$OUT/run" --data "$OUT/data" --ds zero1 \
    --model gpt2-1.5b \
    --global-batch-tokens 1048576 --steps 32000 \
    --lr 6e-4 --warmup-steps 700 --weight-decay 0.1 \
    --val-every 250 --val-samples 10240 \
    --eval-every 250 --eval-tasks "hellaswag=$OUT/hellaswag.jsonl" \
    --save-every 1000 "$@"

llmscale report "$OUT/run" --html "$OUT/report.html"
llmscale report "$OUT/run"
cat <<END
published        HellaSwag acc_tokens 48.89 % (OpenAI's GPT-2: llm.c, dev/vislog.ipynb)
                 24 hours and \$672 on 8 H100 80GB (llm.c, run_gpt2_1558M.sh)
here             grep '"evaluation"' $OUT/run/metrics.jsonl | tail -1
END
