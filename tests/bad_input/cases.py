"""Bad inputs, a line each: the command as a shell would read it, and a regular expression for what must be said.

Words NAME=VALUE before the program are its environment; LONG and NINES stand for 300 letters and 5,000 digits. The
files are made by tests/bad_input/test_bad_input.py.
"""

from __future__ import annotations

from llmscale.config.run_config import RunConfig

LAUNCHED = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29711"
ESTIMATE = "llmscale estimate --model gpt2-1.5b --gpu a100-80gb"
PREPARE = "llmscale data prepare --tokenizer bytes --workers 1 --seq-len 16"
CUSTOM = "llmscale estimate --model gpt2-1.5b --bf16-tflops 100"
PLAN = "llmscale plan --gpu a100-80gb"


def refusal(flag: str, value: str) -> str:
    """Return the pattern of a refused value: a key of the run is named as in a run file, any other flag as a flag."""
    key = flag.replace("-", "_")
    return rf"{key} = '{value}': " if key in RunConfig.model_fields else rf"--{flag}: must be .*, not '{value}'"


LAUNCHER_VARIABLES = [
    ("WORLD_SIZE=2 train", r"WORLD_SIZE is '2', but RANK is not set"),
    ("RANK=0 train", r"RANK is set to '0', but WORLD_SIZE and LOCAL_RANK and MASTER_ADDR and MASTER_PORT are not"),
    (f"{LAUNCHED} WORLD_SIZE=abc train", r"WORLD_SIZE is 'abc'\. Legal: a whole number from 1 to"),
    (f"{LAUNCHED} WORLD_SIZE=99999999999999999999 train", r"WORLD_SIZE is '9+'"),
    (f"{LAUNCHED} WORLD_SIZE=٣ train", r"WORLD_SIZE is '٣'"),
    (f"{LAUNCHED} RANK=abc train", r"RANK is 'abc'\. Legal: a whole number at least 0 and below WORLD_SIZE 1"),
    (f"{LAUNCHED} RANK=3 WORLD_SIZE=2 train", r"RANK is '3'\. Legal: .* below WORLD_SIZE 2"),
    (f"{LAUNCHED} LOCAL_RANK=1 train", r"LOCAL_RANK is '1'\. Legal: a whole number at least 0 and at most RANK 0"),
    (f"{LAUNCHED} LOCAL_WORLD_SIZE=8 train", r"LOCAL_WORLD_SIZE is '8'"),
    (f"{LAUNCHED} MASTER_ADDR=tcp://a train", r"MASTER_ADDR is 'tcp://a'"),
    (f"{LAUNCHED} MASTER_PORT=99999 train", r"MASTER_PORT is '99999'\. Legal: a whole number from 1 to 65535"),
    ("DS_ACCELERATOR=foo train", r"DS_ACCELERATOR is 'foo'\. Legal: cuda, cpu"),
    ("OMP_NUM_THREADS=0 train", r"OMP_NUM_THREADS is '0'"),
    ("CUDA_VISIBLE_DEVICES=foo train", r"CUDA_VISIBLE_DEVICES is 'foo'"),
    ("CUDA_VISIBLE_DEVICES=foo llmscale train --data set --run r", r"CUDA_VISIBLE_DEVICES is 'foo'"),
    ("SLURM_STEP_NUM_TASKS=4 train", r"SLURM_STEP_NUM_TASKS is 4, but RANK is not set"),
]


_TOO_LARGE = "999999999999999999999999999999"
NUMBERS = [
    *[
        (f"train --{key} {value}", rf"{key.replace('-', '_')} = '{value.replace('.', '[.]')}'")
        for key, value in (
            ("lr", "nan"),
            ("lr", "0"),
            ("steps", "1.5"),
            ("steps", _TOO_LARGE),
            ("micro-batch-size", "0"),
            ("num-workers", "100000"),
            ("seed", "-1"),
            ("cache-limit-gib", "inf"),
            ("eps", "1e-400"),
            ("beta2", "1"),
            ("min-lr-frac", "2"),
        )
    ],
    ("train --steps NINES", r"steps = '9+\.\.\.9+'?.* \(5,00[0-9] characters\)"),
    ("train --lr ''", r"lr = '': must be a finite number"),
    *[
        (f"{ESTIMATE} --{flag} {value}", refusal(flag, value))
        for flag, value in (
            ("n-layer", "1.5"),
            ("num-gpus", "-1"),
            ("host-memory-gib", "nan"),
            ("dropout", "2"),
            ("micro-batch-size", "0"),
        )
    ],
    *[
        (f"{CUSTOM} --gpu-memory-gib {value}", rf"--gpu-memory-gib: .*not '{value}'")
        for value in ("nan", "1e300", "0", "x")
    ],
    ("llmscale estimate --model gpt2-1.5b --gpu-memory-gib 80 --bf16-tflops 1e308", "--bf16-tflops: .*not '1e308'"),
    *[
        (f"llmscale plan --{flag} {value}", rf"--{flag}: .*not '{value}'")
        for flag, value in (
            ("flops", "nan"),
            ("flops", "1.2.3"),
            ("pf-days", "1e308"),
            ("tokens", "1e-5"),
        )
    ],
    *[
        (f"{PLAN} --gpu-hours 10 --{flag} {value}", refusal(flag, value))
        for flag, value in (
            ("num-nodes", "1000000000"),
            ("mfu", "1e-300"),
            ("pue", "nan"),
            ("price-per-gpu-hour", "1e-300"),
        )
    ],
    *[
        (f"llmscale data prepare --input texts --out o --{flag} {value}", rf"--{flag}: .*not '{value}'")
        for flag, value in (
            ("workers", "0"),
            ("seq-len", "1.5"),
            ("val-fraction", "1"),
            ("seed", "-1"),
        )
    ],
    (
        "llmscale data prepare --input texts --out o --shard-mb NINES",
        r"not '9+\.\.\.9+ \(5,001 characters\)|characters\)",
    ),
    *[
        (f"llmscale data train-tokenizer --input texts --out o --vocab-size {value}", rf"--vocab-size: .*not '{value}'")
        for value in ("0", _TOO_LARGE)
    ],
    ("llmscale data inspect set --windows 0", r"--windows: must be a whole number of at least 1"),
    ("train --model hf:", r"^error: --model hf: names nothing"),
    *[(f"llmscale data inspect set --samples {value}", rf"--samples: .*not '{value}'") for value in ("-1", _TOO_LARGE)],
    *[
        (f"llmscale sample adir x --{flag} {value}", rf"--{flag}: .*not '{value}'")
        for flag, value in (
            ("top-k", "0"),
            ("top-k", "2.5"),
            ("top-p", "0"),
            ("temperature", "inf"),
            ("max-new-tokens", "-1"),
            ("batch-size", "1025"),
        )
    ],
    *[
        (f"llmscale doctor --{flag} {value}", rf"--{flag}: .*not '{value}'")
        for flag, value in (("port", "0"), ("timeout", "1e308"))
    ],
    *[
        (f"llmscale launch --{flag} {value}", rf"--{flag}: .*not '{value}'")
        for flag, value in (
            ("slots", "0"),
            ("master-port", "0"),
            ("hang-timeout-s", "nan"),
            ("lost-after-s", "1"),
            ("max-restarts", "-1"),
        )
    ],
    *[
        (f"llmscale train --nproc-per-node {value}", rf"argument --nproc-per-node: must be a whole .*not '{value}'")
        for value in ("0", "1.5", "٣")
    ],
    ("llmscale train --num-gpus", r"--num-gpus: must be a whole number .*not ''"),
    ("train --ds big64.json", r"reduce_bucket_size|64"),
    ("train --ds scale.json", r"initial_scale_power = 100000: must be a whole number of at least 0 and at most 64"),
    ("train --ds clip.json", r"gradient_clipping = 1e\+308: must be a number of at least 0 and at most 1e\+18"),
    ("train --config bool.yaml", r"steps = True: must be a number"),
    ("train --config inf.yaml", r"lr = inf: "),
    (
        "llmscale doctor --no-network-test --hostfile hostbig",
        r"hostbig:1: 'localhost slots=9+.* is not `name slots=N`",
    ),
    ("llmscale doctor --no-network-test --hostfile hostmany", r"hostmany:1: slots=100000 is too many"),
    ("llmscale doctor --no-network-test --hostfile hostarabic", r"hostarabic:1: .* is not `name slots=N`"),
]

PATHS = [
    ("train --data ''", r"data = '': must not be empty"),
    ("train --data LONG", r"data = 'x+\.\.\.: must not hold names of more than 255 bytes; one has 300"),
    ("train --run ''", r"run = '': must not be empty"),
    ("train --run hf://user/run", r"run = 'hf://user/run': must be a path, or a run in a store: s3://BUCKET/NAME"),
    ("train --run s3://bucket/../run", r"run = 's3://bucket/../run': must be a path, or a run in a store"),
    ("train --resume 's3://bucket/run?a=b'", r"resume = 's3://bucket/run\?a=b': must be .* without \?"),
    ("train --data-cache gs://bucket/run", r"must be a path on this machine, not a URL"),
    ("llmscale report ftp://bucket/run", r"RUN: must be a path, or a run in a store"),
    ("llmscale eval 's3://bucket/run[1]'", r"RUN: must be a path, or a run in a store"),
    ("llmscale export adir --to s3://bucket/model", r"--to: must be a path on this machine, not a URL"),
    ("llmscale data clean --input adir --out az://bucket/set", r"--out: must be a path on this machine, not a URL"),
    ("train --run /", r"--run / is the root of all folders; name a folder"),
    ("train --run empty", r"--run empty: empty is a file; name a folder"),
    ("train --run set", r"--run set is a prepared set"),
    ("train --run loop", r"--run loop: loop is a symbolic link to nothing"),
    ("train --run $'a\nb'", r"run = .*control characters or line breaks"),
    ("train --resume maybe", r"maybe does not exist"),
    ("train --document-mask --data endless", r"endless/manifest\.json: eot_token = None: must be a valid integer"),
    ("train --document-mask --data beyond", r"beyond/manifest\.json: eot_token is 257, and must be 0 to 256"),
    ("train --reset-attention-mask", r"--reset-attention-mask.*--document-mask"),
    ("train --on-spike panic", r"on_spike = 'panic': .*'warn', 'stop' or 'skip'"),
    ("train --profile 5", r"--profile '5' is not a range of steps"),
    ("train --profile 1:100", r"--profile 1:100: 99 steps are too many. Give at most 50"),
    (f"{ESTIMATE} --plot ''", r"--plot: must not be empty, not ''"),
    (f"{ESTIMATE} --plot adir", r"--plot adir is a folder; name a file"),
    (f"{ESTIMATE} --plot no/such/x.png", r"--plot no/such/x.png: the folder no/such does not exist"),
    (f"{ESTIMATE} --plot empty/x.png", r"empty is a file; name a folder"),
    (f"{ESTIMATE} --plot loop/x.png", r"loop is a symbolic link to nothing; name a folder"),
    (f"{ESTIMATE} --plot zero", r"--plot zero is a device; name a file"),
    (f"{ESTIMATE} --plot x.nonsense", r"'\.nonsense' is not legal\. Legal: \.png"),
    (f"{ESTIMATE} --emit empty", r"--emit empty exists already.*--force"),
    (f"{ESTIMATE} --emit loop", r"--emit loop is a symbolic link to nothing"),
    (f"{ESTIMATE} --emit fifo --force", r"--emit fifo is a named pipe; name a file"),
    (f"{ESTIMATE} --force", r"--force needs --emit FILE"),
    ("llmscale report", r"RUN"),
    ("llmscale report adir", r"metrics.jsonl cannot be read"),
    ("llmscale report fifo --html a.html", r"metrics.jsonl cannot be read"),
    ("llmscale report adir --html no/a.html", r"--html no/a.html: the folder no does not exist"),
    ("llmscale report adir --html a --svg ./a", r"are the same file"),
    ("llmscale report adir --pdf a.pdf", r"--pdf"),
    ("llmscale checkpoint list LONG", r"RUN: must not hold names"),
    ("llmscale eval adir", r"adir has no checkpoints yet"),
    ("llmscale eval adir --tasks text=fifo", r"fifo cannot be read: is a named pipe"),
    ("llmscale eval adir --tasks text=deep.jsonl", r"deep\.jsonl, line 1"),
    ("llmscale eval adir --tasks hellaswga=gone", r"Did you mean 'hellaswag'\?"),
    ("llmscale eval adir --json gone/out", r"--json gone/out: the folder gone does not exist"),
    ("llmscale eval adir --batch-size 0", r"--batch-size: must be a whole number of at least 1"),
    ("train --eval-every 2", r"eval_tasks names nothing to evaluate on"),
    ("train --eval-every 2 --eval-tasks text=gone", r"gone cannot be read: No such file"),
    ("train --eval-every 2 --eval-tasks hellaswag=deep.jsonl", r"deep\.jsonl, line 1"),
    ("train --eval-every 2 --eval-tasks hellaswag", r"'hellaswag' is not a task: "),
    ("train --keep-zeros", r"--keep-zeros has no zeros to keep"),
    ("train --sample-every 5 --sample-prompts empty", r"--sample-prompts empty holds no prompt"),
    ("llmscale sample adir", r"no prompt given"),
    ("llmscale sample adir --prompts gone", r"--prompts gone cannot be read: No such file"),
    ("llmscale sample adir --prompts empty", r"--prompts empty holds no prompt"),
    ("llmscale sample adir --prompts zero", r"--prompts zero cannot be read: is a device"),
    ("llmscale sample adir --prompts nul.txt", r"--prompts nul\.txt, line 1 holds a NUL character"),
    ("llmscale sample adir --prompts latin.txt", r"--prompts latin\.txt, line 1 is not UTF-8"),
    ("llmscale sample adir --prompts deep.jsonl", r"--prompts deep\.jsonl, line 1"),
    ("llmscale sample adir --prompts bool.yaml --num-samples 1000000 a", r"2 prompts with 1,000,000 samples each"),
    ("llmscale export adir --to out", r"adir has no checkpoints yet"),
    ("llmscale export set --to out", r"set/manifest\.json belongs to no checkpoint, or is damaged"),
    ("llmscale export loop --to out", r"loop/checkpoints cannot be listed: Too many levels of symbolic links"),
    ("llmscale export no/such/checkpoints/step-00000001 --to out", r"does not exist: never saved, expired, or renamed"),
    *[
        (
            f"llmscale export adir --to out --shard-size '{value}'",
            rf"--shard-size: must be a size with its unit .*'{value}'",
        )
        for value in ("", "5", "0GB", "5 GB each")
    ],
    *[
        (f"llmscale export adir --to out --step {value}", rf"--step: must be a whole number .*'{value}'")
        for value in ("-1", "last")
    ],
    ("llmscale export adir --to out --dtype int8", r"'int8' is not known\. Legal: fp32, bf16, fp16"),
    ("llmscale export adir", r"the following arguments are required: --to"),
    ("llmscale export adir --to out --shard-size -1GB", r"--shard-size: expected one argument"),
    ("llmscale doctor --hostfile ''", r"--hostfile: must not be empty"),
    ("llmscale doctor --hostfile fifo", r"fifo cannot be read: is a named pipe, not a regular file"),
    ("llmscale doctor --hostfile adir", r"adir cannot be read: is a folder"),
    ("llmscale launch --master-addr ''", r"--master-addr: must not be empty"),
]

DATA = [
    (f"{PREPARE} --input no-such --out o", r"--input no-such does not exist\. Legal"),
    (f"{PREPARE} --input Python-stdlib --out o", r"does not exist\. Did you mean 'python-stdlib'\?"),
    (f"{PREPARE} --input fifo --out o", r"--input fifo cannot be read: is a named pipe"),
    (f"{PREPARE} --input texts --out ''", r"--out: must not be empty"),
    (f"{PREPARE} --input texts --out texts/o", r"--out texts/o and --input texts are inside one another"),
    (f"{PREPARE} --input texts --input nowhere --out o", r"--input nowhere does not exist"),
    (f"{PREPARE} --input set --out o", r"--input set: set holds MDS shards"),
    (f"{PREPARE} --input mixed --out o", r"mixed/prepared holds MDS shards|mixed/prepared/train holds MDS shards"),
    (f"{PREPARE} --input nul.txt --out o", r"nul.txt holds zero bytes or UTF-16"),
    (f"{PREPARE} --input latin.txt --out o", r"latin.txt is not UTF-8"),
    (f"{PREPARE} --input deep.jsonl --out o", r"deep.jsonl, line 1"),
    (f"{PREPARE} --input texts/0.txt --glob '*.py' --out o", r"--glob '\*.py' selects files of a folder"),
    (
        f"{PREPARE} --input python-stdlib --glob 'json/*' --out o",
        r"--glob 'json/\*' selects files of a folder",
    ),
    (f"{PREPARE} --input texts --out empty/x", r"--out empty/x: empty is a file; name a folder"),
    (f"{PREPARE} --input texts --out loop", r"loop is a symbolic link to nothing; name a folder"),
    (f"{PREPARE} --input texts --out o --train-on all", r"--chat"),
    (f"{PREPARE} --input texts --out o --chat --packing stream", r"Legal: best-fit and pad"),
    (f"{PREPARE} --input texts --out o --packing pad", r"pad needs --chat"),
    (
        f"{PREPARE} --input texts --out o --chat --chat-template missing.jinja",
        r"--chat-template missing\.jinja cannot be read",
    ),
    (f"{PREPARE} --input plain.jsonl --out o --chat", r"no field 'messages'"),
    (f"{PREPARE} --input texts --out x/y/z --seq-len 100000", r"--seq-len is given twice: 16 and 100000"),
    ("llmscale data train-tokenizer --input texts --out texts/tok --vocab-size 260", r"are inside one another"),
    (
        "llmscale data train-tokenizer --input texts --out empty/x --vocab-size 260",
        r"--out empty/x: empty is a file; name a folder",
    ),
    *[
        (f"{PREPARE[:22]} --input texts --out o --tokenizer {name}", expected)
        for name, expected in (
            ("models/slow", r"models/slow holds no tokenizer\.json, only vocab\.json\. .*save_pretrained"),
            ("models/beyond", r"models/beyond/tokenizer\.json has the token id 1099511627776"),
            ("models/own_code", r"models/own_code/tokenizer_config\.json has an auto_map: .*never run"),
            ("models/no_end", r"models/no_end has no end-of-text token: .*--eot-token"),
            (
                "models/two_ends",
                r"models/two_ends names several end-of-text tokens: '</s>' .*Choose one with --eot-token",
            ),
            (
                "models/two_ends --eot-token '<s>'",
                r"--eot-token '<s>' is not a token of models/two_ends\. Did you mean '</s>'",
            ),
            ("models/deep", r"models/deep/tokenizer\.json is not JSON: it nests objects and lists too deeply"),
            ("models/nan", r"models/nan/tokenizer\.json is not JSON: NaN is not a JSON number"),
            (
                "bytes --eot-token '<s>'",
                r"--eot-token <s> is wrong: with --tokenizer bytes documents end with <\|endoftext",
            ),
            ("hf:../models/slow", r"Tokenizer 'hf:\.\./models/slow' is neither gpt2, bytes"),
        )
    ],
    (
        f"{PREPARE[:22]} --input texts --out o --tokenizer characters --eot-token '<end>'",
        r"with --tokenizer characters documents end with <\|endoftext\|>",
    ),
    *[
        (f"llmscale data clean --input texts --out o {flags}", expected)
        for flags, expected in (
            ("--steps exact,neer", r"unknown step 'neer'. Did you mean 'near'\? Legal: exact, language"),
            ("--steps exact,exact", r"names a step twice"),
            ("--steps ,", r"names no step"),
            ("--steps language", r"needs --languages"),
            ("--steps decontaminate", r"needs --decontaminate"),
            ("--steps exact --languages en", r"leaves out language"),
            ("--languages xy", r"xy is not known"),
            ("--bands 200", r"--bands 200 of --permutations 128"),
            ("--decontaminate nowhere.txt", r"nowhere\.txt cannot be read"),
            ("--decontaminate plain.jsonl --steps decontaminate,exact", r"must be the last"),
            ("--tokenizer characters", r"'characters' is made from a text by `llmscale data prepare`"),
            ("--tokenizer byte", r"Tokenizer 'byte' is neither .* Did you mean 'bytes'"),
            ("--eot-token '<end>'", r"--eot-token needs --tokenizer NAME"),
            ("--tasks 3", r"--tasks needs --executor ray"),
            ("--executor-options x.yaml", r"--executor-options needs --executor ray"),
            ("--executor slurm", r"`sbatch --nodes N scripts/slurm/clean\.sbatch --input"),
        )
    ],
    (
        "llmscale data clean --input - --out o --executor ray",
        r"other machines cannot read this one's standard input",
    ),
    ("llmscale data clean --input texts --out texts/o", r"are inside one another"),
    (
        f"HF_HUB_OFFLINE=1 {PREPARE[:22]} --input texts --out o --tokenizer models/none",
        r"models/none is not a file or folder here, is not in the Hugging Face cache, .*HF_HUB_OFFLINE is set",
    ),
]

REPEATED = [
    ("llmscale train --nproc-per-node 2 --nproc_per_node=2", r"--nproc-per-node and --nproc_per_node are the same"),
    (
        "llmscale train --num-gpus 1 --nproc-per-node 2",
        r"--num-gpus and --nproc-per-node are the same setting twice\. Give it once",
    ),
    ("llmscale train --steps 5 --steps 6", r"--steps is given twice: 5 and 6\. Give it once"),
    (f"{PREPARE} --input texts --out o --no-shuffle --no-shuffle", r"--no-shuffle is given twice"),
    ("llmscale launch --env A=1 --env A=2", r"--env A is given twice"),
    ("train --steps 5 --steps 6", r"--steps is given twice: 5 and 6\. Give it once"),
    ("train --lr 1 --shuffle --no-shuffle", r"--shuffle and --no-shuffle are the same setting twice"),
    ("train --global-batch-size 8 --global_batch_size 16", r"--global-batch-size is given twice: 8 and 16"),
    (f"{ESTIMATE} --gpu h100-80gb", r"--gpu is given twice: a100-80gb and h100-80gb"),
    (f"{ESTIMATE} --ds a.json --ds b.json", r"--ds is given twice: a.json and b.json\. Give it once, with all its"),
    ("train --config dupkebab.yaml", r"the key 'global_batch_size' is given twice"),
    ("train --config nested.yaml", r"a run file cannot name another one"),
    ("train --local_rank=abc", r"unknown argument '--local-rank'"),
    ("""train --allow-changed '["data"'""", r"allow_changed = .* is not known. Legal: seed, seq_len"),
]

SUGGESTIONS = [
    *[
        (f"train --{word} 5", rf"unknown argument '--{word.replace('_', '-')}'\. Did you mean '--{meant}'")
        for word, meant in (
            ("learning_rate", "lr"),
            ("max-iters", "steps"),
            ("epochs", "steps' or '--tokens"),
            ("batch-size", "micro-batch-size' or '--global-batch-size"),
            ("per_device_train_batch_size", "micro-batch-size"),
        )
    ],
    ("llmscale train --nproc 2", r"unknown argument '--nproc'\. Did you mean '--nproc-per-node'\?"),
    (f"{PREPARE} --input texts --out o --noshuffle", r"Did you mean '--no-shuffle'\?"),
    ("train --device cpu", r"unknown argument '--device'\. `train.py --help all` lists all"),
    ("train --compile yes", r"compile = 'yes': must be 'auto', 'on' or 'off'"),
    ("train --config iters.yaml", r"unknown key 'max_iters'\. Did you mean 'steps'\?"),
    (
        "train --model GPT2-124M",
        r"model 'GPT2-124M' is not a preset\. Did you mean 'gpt2-124m'\?.*gpt3-175b.*give n_layer, n_head and n_embd",
    ),
    ("train --model gpt2-xl", r"Did you mean 'gpt2-1.5b'\?"),
    (
        "train --ds grad_clip.json",
        r"'grad_clip' is not a key that DeepSpeed reads\. Did you mean 'gradient_clipping'\?",
    ),
    ("llmscale estimate --model gpt2-1.5b --gpu 'NVIDIA A100-SXM4-80GB'", r"Did you mean 'a100-80gb'\?"),
    (f"{ESTIMATE} --num_layers 5", r"Did you mean '--n-layer'\?"),
    ("llmscale completion bsh", r"Did you mean 'bash'\? Legal: bash, zsh, fish\."),
    ("llmscale data", r"the following arguments are required: "),
    ("llmscale Estimate", r"'Estimate' is not known\. Did you mean 'estimate'\?"),
    ("llmscale generate", r"Did you mean 'sample'\?"),
    ("llmscale export adir --out out", r"Did you mean '--to'\?"),
    ("llmscale export adir --to out --max-shard-size 5GB", r"Did you mean '--shard-size'\?"),
    ("llmscale ''", r"'' is not known\. Legal: plan, estimate"),
    (f"{PREPARE[:22]} --input texts --out o --tokenizer GPT2", r"Did you mean 'gpt2'\?"),
    (
        f"{PREPARE[:22]} --input texts --out o --tokenizer gpt22",
        r"neither gpt2, bytes, .* nor a model's name on the Hub",
    ),
    ("llmscale plan --law HOFFMANN --flops 1e20", r"Did you mean 'hoffmann'\?"),
]

FROM = "train --init-from hf:hub"
PUBLISHED = [
    (
        f"HF_HUB_OFFLINE=1 {FROM}/none",
        r"--init-from hf:hub/none is not a file or folder here, is not in the Hugging Face cache.*HF_HUB_OFFLINE",
    ),
    ("train --init-from hf:", r"--init-from hf: names nothing"),
    ("train --init-from hf:LONG", r"init_from = 'hf:x+\.\.\.: must not hold names of more than 255 bytes"),
    ("train --init-from hf:./none", r"--init-from hf:./none does not exist. Give a config.json, its folder, or a name"),
    ("train --init-from hf:empty", r"--init-from hf:empty is not JSON"),
    ("HF_HUB_OFFLINE=1 train --init-from hf:fifo", r"--init-from hf:fifo is not a file or folder"),
    (f"{FROM}/mamba", r"hub/mamba: llmscale has no model of type 'mamba'.* Supported: gpt2, opt, llama"),
    (f"{FROM}/coded", r"auto_map names code of its own, which is never run"),
    (f"{FROM}/quantised", r"hub/quantised: the weights are quantised"),
    (f"{FROM}/adapter", r"hub/adapter holds adapter_config.json: an adapter, not a model. Merge it"),
    (f"{FROM}/rope", r"rope_type is 'dynamic'"),
    (f"{FROM}/small", r"vocab_size 100 is smaller than the dataset's"),
    (f"{FROM}/short", r"samples of 32 tokens, and --init-from hf:hub/short has learned positions for 16"),
    (f"{FROM}/large", r"tokenizer of 257 tokens, but the weights in .*hub/large have 50,257 rows"),
    (f"{FROM}/missing", r"hub/missing lacks 'transformer.h.0.mlp.c_fc.weight', .* \(15 tensors\)"),
    (
        f"{FROM}/none@..",
        r"--init-from hf:hub/none@\.\. does not exist. Give a config.json, its folder, or a name on the Hub",
    ),
    (f"{FROM}/int8", r"c_fc.weight' has the type I8. Legal: F32, F16, BF16"),
    (f"{FROM}/escaping", r"'\.\./good/model.safetensors', the file of .*, is not a .safetensors file of this folder"),
    (f"{FROM}/good --n-layer 2", r"n_layer is 2 by --n-layer and 1 by --init-from hf:hub/good .*Drop --n-layer"),
    (f"{FROM}/good --model tiny-1m", r"n_layer is 4 by --model tiny-1m and 1 by --init-from hf:hub/good"),
    (f"{FROM}/good --resume set", r"--init-from starts at step 0 and --resume PATH continues"),
    ("train --model hf:hub/mamba", r"--model hf:hub/mamba: llmscale has no model of type 'mamba'"),
    ("train --model hf:hub/good --n-head 3", r"n_embd 8 is not divisible by n_head 3"),
    ("llmscale train --data set --run r --init-from hf:hub/int8", r"c_fc.weight' has the type I8"),
]

MODERN = "train --model tiny-modern-10m"

BLOCKS = [
    (f"{MODERN} --n-kv-head 4", r"n_kv_head 4 does not divide n_head 6\. Legal: 1, 2, 3, 6"),
    (f"{MODERN} --head-dim 7", r"a head of 7 \(head_dim\) has one left over\. Give an even head_dim"),
    (f"{MODERN} --n-embd 100", r"n_embd 100 is not divisible by n_head 6\. Legal n_head for this width: 1, 2, 4"),
    (f"{MODERN} --experts-per-token 3", r"experts_per_token 3 has no effect without experts"),
    (f"{MODERN} --num-experts 4 --experts-per-token 5", r"experts_per_token 5 is more than there are .*at most that"),
    (f"{MODERN} --num-experts 4 --dense-layers 99", r"none of the \d+ blocks has experts"),
    (f"{MODERN} --num-experts 4 --mlp-bias", r"experts have no biases\. Give --no-mlp-bias"),
    (f"{MODERN} --num-experts 4 --router-bias-speed 0.1", r"no effect without --router-bias"),
    (f"{MODERN} --balance-loss 0.1", r"no effect without --num-experts N"),
    (f"{MODERN} --norm layer_norm", r"norm = 'layer_norm'.* Did you mean 'layernorm'\?"),
    (f"{MODERN} --positions alibi", r"positions = 'alibi'.*learned.*rotary"),
    (f"{MODERN} --attention-bias true", r"attention_bias = 'true'.*none.*qkv.*all"),
    (f"{MODERN} --activation swiglu", r"activation = 'swiglu'.*gelu.*silu"),
    (f"{MODERN} --rope-theta 0", r"rope_theta = '0'"),
    (f"{MODERN} --rope-scaling yarn", r"rope_scaling 'yarn' is not legal\. Legal: none, linear:FACTOR"),
    (f"{MODERN} --rope-scaling linear:0.5", r"rope_scaling 'linear:0\.5' is not legal.*FACTOR at least 1"),
    (f"{MODERN} --rope-scaling llama3:8,4,1,8192", r"rope_scaling 'llama3:8,4,1,8192' is not legal.*LOW below HIGH"),
    ("train --model llama-3.1-8b", r"Did you mean 'llama3-8b'\?"),
    *[
        (f"train --{other} 8", rf"Did you mean '--{ours}'\?")
        for other, ours in (
            ("num-key-value-heads", "n-kv-head"),
            ("intermediate-size", "mlp-width"),
        )
    ],
]

RUNS = [
    ("train --config key.yaml", r"unknown key 'global_batch_sise'. Did you mean 'global_batch_size'\?"),
    ("train --config type.toml", r"steps = 'ten': must be a whole number such as 811,008 or 10M"),
    ("train --z-loss nan", r"z_loss = 'nan': must be a finite number."),
    ("train --optimizer sgd", r"optimizer = 'sgd': must be 'adamw', 'muon' or 'adafactor'"),
    ("train --steps", r"expected one argument"),
    ("train stray", r"unknown argument 'stray'"),
    ("train --config run.ini", r"run.ini: the suffix says the format, and must be .yaml, .yml or"),
    ("train --config broken.yaml", r"broken.yaml is not valid yaml: .*line 2"),
    ("train --steps 5 --tokens 500", r"steps and tokens say the same thing in other units"),
    ("train --minutes 5 --tokens 500", r"tokens and minutes say the same thing in other units"),
    ("train --allow-changed sed", r"allow_changed = 'sed' is not known. Did you mean 'seed'\?"),
    ("train --data none", r"none does not exist. Make it with `llmscale data prepare --input PATH .*python-docs"),
    ("train --data adir", r"adir is empty. Make it with `llmscale data prepare --input PATH"),
    ("train --data empty", r"empty is a file; --data takes the folder"),
    ("train --data texts", r"is not a prepared dataset: it has no manifest.json. If it holds text"),
    ("train --data damaged", r"manifest.json is not JSON"),
    ("train --seq-len 64", r"seq_len 64 does not match the dataset in .*, whose samples have 32 tokens"),
    (
        "train --model tiny-1m --n-embd 32 --n-head 5",
        r"n_embd 32 is not divisible by n_head 5. Legal n_head for this width: 1, 2, 4, 8",
    ),
    (
        f"{LAUNCHED} WORLD_SIZE=3 train --global-batch-size 2",
        r"global_batch_size 2 has fewer sequences than there are ranks .*: 3 ranks. Use at most 2 ranks",
    ),
    (
        f"{LAUNCHED} WORLD_SIZE=2 train --global-batch-size 8 --micro-batch-size 3",
        r"micro_batch_size 3 does not divide .* Legal.*: 1, 2, 4, 8.",
    ),
    ("train --global-batch-tokens 100", r"multiple of seq_len 32. .* 96 or 128"),
    ("train --steps 5 --warmup-steps 5", r"warmup_steps 5 must be less than the 5 steps"),
    ("train --ds ds_configs/zero22.json", r"zero22.json does not exist. Did you mean 'zero2.json'\?"),
    ("train --ds malformed.json", r"malformed.json is not JSON: .* at line 1"),
    ("train --ds list.json", r"list.json must hold a JSON object"),
    ("train --ds top.json", r"'zero_optimisation' is not a key .* Did you mean 'zero_optimization'\?"),
    ("train --ds nested.json", r"'zero_optimization.overlap_com' .* mean 'overlap_comm'\?"),
    ("train --ds deep.json", r"'zero_optimization.offload_param.pin_mem' .* mean 'pin_memory'\?"),
    ("train --ds many.json", r"many.json: 2 problems. \(1\) 'zero_optimisation' .* \(2\) 'foo' .*--fixed OUT"),
    ("train --ds ds_configs/zero0.json --precision fp16", r"fp16 does not train at stage 0"),
    ("train --optimizer adafactor", r"'adafactor' cannot run at ZeRO stage 2: .* --optimizer adamw.*--ds zero0"),
    ("train --run empty/run", r"--run empty/run: empty is a file; name a folder"),
    ("train --run old --resume none", r"--resume none begins .* step-00000002"),
    ("train --run old --init-from old", r"--init-from begins a new run, but"),
    ("train --resume adir", r"adir has no checkpoints yet. Name a run folder"),
    ("train --init-from none", r"none does not exist. Name a run folder"),
    ("train --init-from old --resume old", r"--init-from starts at step 0 and"),
    ("llmscale train --stps 3", r"Did you mean '--steps'\? `llmscale train --help all` lists all."),
    (
        "CUDA_VISIBLE_DEVICES=1,2 llmscale train --data set --run r --nproc-per-node 3",
        r"this machine has 2 GPUs in CUDA_VISIBLE_DEVICES",
    ),
    ("LOCAL_RANK=0 llmscale train --data set --run r", r"a launcher started this"),
    ("OMPI_COMM_WORLD_SIZE=2 llmscale launch -- --steps 1", r"mpirun started as many copies of `llmscale launch`"),
    *[
        (f"llmscale launch {flags} -- --data set --run r", expected)
        for flags, expected in (
            ("--hostfile gone", r"gone.* does not exist"),
            ("--hostfile empty", r"names no host"),
            ("--hostfile onehost --slots 2", r"--slots 2 has no effect with --hostfile"),
            ("--hostfile onehost --min-hosts 2", r"--min-hosts 2 is more than the number of hosts, 1\."),
            ("--env NOT_THERE", r"this shell has no such variable"),
            ("--launcher slurm", r"SLURM_JOB_NODELIST is not set"),
            ("--launcher slrum", r"Did you mean 'slurm'\?"),
        )
    ],
    ("llmscale smple", r"^error: 'smple' is not known. Did you mean 'sample'\? Legal: plan, "),
    (
        "llmscale checkpoint lst",
        r"^error: 'lst' is not known. Did you mean 'list'\? Legal: list, show, verify, prune, diff, .*, reshard.\n",
    ),
    (
        "llmscale sample r p --top-k x",
        r"^error: argument --top-k: must be a whole number of at least 1, not 'x'.",
    ),
    ("llmscale sample", r"no prompt given"),
    (
        "llmscale sample nowhere p",
        r"^error: nowhere does not exist. Name a run folder of train.py \(--run\), or one of",
    ),
    ("SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0 llmscale train --data set --run r", r"Start one, with `srun --ntasks=1`"),
]

_GPT2 = "--model gpt2-124m --tokens 10B"
_MACHINES = "--gpu a100-40gb --num-gpus 8"
PLANS = [
    *[
        (f"llmscale estimate {words}", expected)
        for words, expected in (
            ("--model gpt2-1.5b --gpu h100-80", r"Did you mean 'h100-80gb'\?"),
            ("--model gpt2-1.5b", r"which GPU\?"),
            (f"{_MACHINES}", r"which model\?"),
            ("--model gpt2-1.5b --gpu-memory-gib 24", r"--bf16-tflops"),
            (f"--model gpt2-1.5b {_MACHINES} --gpu-memory-gib 24", r"--gpu names a GPU of the table"),
            (f"--model gpt2-1.5b {_MACHINES} --n-head 7", r"not divisible by n_head 7"),
            (
                f"--model gpt2-1.5b {_MACHINES} --host-memory-gib 0",
                r"--host-memory-gib: must be a number of at least 0.01",
            ),
            (
                f"--model gpt2-1.5b {_MACHINES} --global-batch-size 7",
                r"fewer sequences than there are ranks .*: 8 ranks",
            ),
            (
                f"--model gpt2-1.5b {_MACHINES} --micro-batch-size 3 --global-batch-size 512",
                r"Legal micro-batches: 1, 2, 4",
            ),
            (f"--model gpt2-1.5b {_MACHINES} --interconnect ib-40g", r"Did you mean 'ib-400g'\?"),
            ("--model gpt2-1.5b --gpu v100-32gb --precision bf16", r"Use fp16"),
            (f"--model gpt2-1.5b {_MACHINES} --emit no/such/folder/x.json", r"the folder no/such/folder does not"),
            (f"--model gpt2-1.5b {_MACHINES} --max-model --plot x.png", r"exclude each other"),
            (f"--hf gpt2 --model gpt2-1.5b {_MACHINES}", r"exclude each other"),
        )
    ],
    *[
        (f"llmscale plan {words}", f"^error: {expected}")
        for words, expected in (
            ("", r"plan for what\? Give one of --budget-usd, --gpu-hours, --flops, "),
            ("--flops 1e21 --pf-days 3", r"--flops and --pf-days are two goals that contradict each other"),
            ("--model gpt2-124m --params 1B", r"--model and --params are two goals that contradict each other"),
            ("--flops 0", r"argument --flops: must be a number above 0 such as 5.76e23, 70B or 1.4T, not '0'"),
            ("--flops 1e21 --mfu 40 --gpu t4", r"argument --mfu: .* at least 0.0001 and at most 1, not '40'"),
            ("--flops 1e21 --gpu t4 --interconnect ib-40g", r"interconnect 'ib-40g' is .* Did you mean 'ib-400g'\?"),
            ("--budget-usd 100 --price-per-gpu-hour 1", r"--budget-usd needs --gpu NAME"),
            ("--budget-usd 100 --gpu t4", r"--budget-usd needs --price-per-gpu-hour"),
            ("--flops 1e21 --mfu 0.4", r"--mfu needs --gpu NAME"),
            ("--flops 1e21 --inference-mfu 0.4 --gpu t4", r"--inference-mfu needs --inference-tokens"),
            ("--loss 1.5", r"a loss of 1.5 nats per token cannot be reached"),
            (f"{_GPT2} --serve 1000:250", r"--serve needs --gpu NAME"),
            (
                f"{_GPT2} --gpu t4 --serve 1000",
                r".*must be tokens of prompt and output such as 1000:250, not '1000'",
            ),
            (f"{_GPT2} --gpu t4 --serve 9000:1", r".*the model's context has 1,024"),
            (f"{_GPT2} --gpu t4 --buy-usd-per-gpu 30000", r"--buy-usd-per-gpu needs --usd-per-kwh"),
            (f"{_GPT2} --gpu t4 --years 3", r"--years needs --buy-usd-per-gpu"),
            (f"{_GPT2} --gpu t4 l4 --price-per-gpu-hour 1", r"--price-per-gpu-hour has 1 value for 2 GPUs\."),
            (f"{_GPT2} --gpu t4 l4 --serve 9:9", r".*has no effect with several GPUs"),
            ("--model gpt2-124m --tokens 10000", r".*10,000 tokens are less than one step of 512 sequences"),
            (
                "--model gpt2-124m --loss 2",
                r".*124,475,904 parameters does not reach a loss of 2 .* Leave the m",
            ),
            (f"{_GPT2} --days 3", r"--days needs --gpu NAME"),
            (f"{_GPT2} --gpu t4 --keep-weights", r"--keep-weights needs --keep-hours"),
            (f"{_GPT2} --gpu t4 --keep-hours 1 --keep-every 9", r"--keep-hours 1.0 has no effect with --keep-every"),
            ("--flops 1e21 --law kaplan", r"--law 'kaplan' is not known. Legal: besiroglu, hoffmann"),
        )
    ],
]

CASES = [*LAUNCHER_VARIABLES, *NUMBERS, *PATHS, *DATA, *REPEATED, *SUGGESTIONS, *PUBLISHED, *BLOCKS, *RUNS, *PLANS]
