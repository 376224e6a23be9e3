#!/usr/bin/env bash
# From a base model to one that answers in turns, in minutes on 2 CPU cores, without a network: pre-training on the
# documentation of Python, then fine-tuning on 200 conversations made from it.
# Needs `pip install -e '.[train,data]'`. Arguments are further flags of both `llmscale train`: --nproc-per-node 2
# Interrupt it at any place: the same command continues. OUT is the folder of everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-reproduced/nano-chat}
mkdir -p "$OUT"

[ -d "$OUT/tokenizer" ] || llmscale data train-tokenizer --input python-docs --out "$OUT/tokenizer" --vocab-size 2048
llmscale data prepare --input python-docs --tokenizer "$OUT/tokenizer" --seq-len 128 --out "$OUT/text"
llmscale train --run "$OUT/base" --data "$OUT/text" --ds zero1 \
    --model tiny-1m --global-batch-size 16 --steps 400 --lr 3e-3 --warmup-steps 20 \
    --val-every 200 --val-samples 128 --save-every 100 "$@"

# Questions about 200 functions, each with a second turn, which needs the first.
[ -f "$OUT/chats.jsonl" ] || python - "$OUT/chats.jsonl" <<'PYTHON'
import importlib, inspect, json, random, sys
functions = {}
for name in "builtins math os os.path random re shutil statistics string textwrap itertools functools json".split():
    for function, value in sorted(vars(importlib.import_module(name)).items()):
        says = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
        if callable(value) and function.islower() and function[0] != "_" and 10 < len(says) < 120:
            functions.setdefault(function, (name, says))
with open(sys.argv[1], "w") as file:
    for function, (name, says) in random.Random(0).sample(sorted(functions.items()), 200):
        turns = [f"What does {function} do?", says, "Which module is it in?", f"It is in {name}."]
        roles = ("user", "assistant") * 2
        messages = [{"role": role, "content": content} for role, content in zip(roles, turns)]
        file.write(json.dumps({"messages": messages}) + "\n")
PYTHON
llmscale data prepare --chat --input "$OUT/chats.jsonl" --tokenizer "$OUT/tokenizer" --seq-len 128 \
    --val-fraction 0.05 --out "$OUT/chats"
# A run that has checkpoints continues from them.
ORIGIN=$OUT/base
if compgen -G "$OUT/chat/checkpoints/step-*" >/dev/null; then ORIGIN=; fi
llmscale train --run "$OUT/chat" ${ORIGIN:+--init-from "$ORIGIN"} --data "$OUT/chats" --ds zero1 \
    --model tiny-1m --precision fp32 --global-batch-size 16 --steps 500 --lr 6e-3 --warmup-steps 10 \
    --val-every 100 --save-every 100 "$@"

llmscale sample "$OUT/chat" --chat --temperature 0 --max-new-tokens 40 \
    <<<$'What does sqrt do?\nWhich module is it in?'
