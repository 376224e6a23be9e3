#!/usr/bin/env bash
# Train GPT-2's smallest model on 10 billion tokens of FineWeb-Edu, with the settings of build-nanogpt (train_gpt2.py).
# Needs `pip install -e '.[train,data]'`. Arguments are further flags of `llmscale train`: --num-gpus 8, --micro-batch-size 32
# Interrupt it at any place: the same command continues. OUT is the folder of everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-reproduced/gpt2-124m}

# Nothing is downloaded or prepared twice. A hundredth of the text is held back, 100M tokens, as in build-nanogpt.
python scripts/reproduce/hellaswag.py "$OUT/hellaswag.jsonl"
llmscale data prepare --out "$OUT/data" \
    --input hf:HuggingFaceFW/fineweb-edu:sample-10BT \
    --tokenizer gpt2 --seq-len 1024 --val-fraction 0.01

# Validation and HellaSwag every 250 steps, and after the last.
llmscale train --run "$OUT/run" --data "$OUT/data" --ds zero1 \
    --model gpt2-124m \
    --global-batch-tokens 524288 --steps 19073 \
    --lr 6e-4 --warmup-steps 715 --weight-decay 0.1 \
    --val-every 250 --val-samples 10240 \
    --eval-every 250 --eval-tasks "hellaswag=$OUT/hellaswag.jsonl" \
    --save-every 1000 "$@"

llmscale report "$OUT/run" --html "$OUT/report.html"
llmscale report "$OUT/run"
cat <<END
published        validation loss 3.2924 (OpenAI's GPT-2 on FineWeb-Edu: build-nanogpt, play.ipynb)
                 HellaSwag acc_tokens 29.45 % (OpenAI's GPT-2: build-nanogpt, play.ipynb)
                 1.57 hours and \$20 on 8 A100 80GB (planned: llm.c, run_gpt2_124M.sh)
here             grep '"evaluation"' $OUT/run/metrics.jsonl | tail -1
END
