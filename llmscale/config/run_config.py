"""RunConfig: every key of a training run, with its default and meaning, from flags and a run file. No torch.

Flags override the run file, and the file overrides the defaults. Every mistake gives one clear line.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from llmscale import __version__
from llmscale.architecture.shape import Activation, AttentionBias, Norm, NormPlacement, Positions, QKNorm, RouterScore
from llmscale.config import limits
from llmscale.config.command_line import FlagParser, Need
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.loss_settings import CHUNK_TOKENS, LossKernel
from llmscale.config.optimizers import OptimizerName
from llmscale.config.run_flags import add_run_flags, describe_keys
from llmscale.config.run_urls import check_other_run_or_name, check_own_run
from llmscale.config.user_paths import check_path, check_path_or_url, check_task_file, check_text
from llmscale.errors import ConfigError
from llmscale.suggestions import describe_invalid, did_you_mean
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_toml, load_yaml

NonBlank = Annotated[str, AfterValidator(check_text)]
OtherRunOrName = Annotated[str, AfterValidator(check_other_run_or_name)]
OwnRun = Annotated[Path, BeforeValidator(check_own_run)]
PathOrUrl = Annotated[str, AfterValidator(check_path_or_url)]
TaskFile = Annotated[str, AfterValidator(check_task_file)]
UserPath = Annotated[Path, BeforeValidator(check_path)]
ScheduleName = Literal["cosine", "linear", "constant", "wsd"]
CompileMode = Literal["auto", "on", "off"]
CompileTuning = Literal["default", "max-autotune-no-cudagraphs"]
OnSpike = Literal["warn", "stop", "skip"]

_EXAMPLE = "deepspeed --num_gpus 8 llmscale/train.py --ds zero2 --data data/mine --model gpt2-124m"
#: Changes after a checkpoint that --allow-changed must permit, each with what it breaks.
CHANGES_THAT_BREAK = {
    "global_batch_size": "a step has another number of samples, so the loss curve is not comparable",
    "seq_len": "samples are other windows of the text: some are seen twice, some never",
    "data": "the new set is read from the old position: its first samples are never seen in this epoch",
    "seed": "the rest of the epoch has another order: some samples are seen twice, some never",
    "order": "the rest of the epoch has another order: some samples are seen twice, some never",
}


class RunConfig(BaseModel):
    """Configuration of a training run.

    Every key is a flag (`--global-batch-size 64`) and an entry of a YAML or TOML file. The string below a key is its
    help text, the comment above a group its section of the help (`run_flags.describe_keys`).
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    # run
    config: UserPath | None = None
    """YAML or TOML run file with any of these keys."""
    run: OwnRun = Path("runs/default")
    """Run folder, for configuration, metrics, checkpoints and samples; or its URL (s3://, gs://, az://): the nodes
    publish what is on their disks there (docs/checkpoints.md)."""
    seed: int = Field(1337, ge=0, le=limits.MAX_SEED)
    """Seed of initial weights, data order and dropout."""

    # model
    model: NonBlank = "tiny-10m"
    """Preset (tiny-1m ... gpt3-175b, llama3-8b, qwen3-4b, ...), or hf:FOLDER or hf:NAME for the shape of a published
    model. The keys below override its values."""
    n_layer: int | None = Field(None, ge=1, le=limits.MAX_LAYERS)
    """Transformer blocks."""
    n_head: int | None = Field(None, ge=1, le=limits.MAX_HEADS)
    """Query heads; must divide n_embd unless head_dim is given."""
    n_embd: int | None = Field(None, ge=1, le=limits.MAX_WIDTH)
    """Width of the residual stream."""
    seq_len: int | None = Field(None, ge=1, le=limits.MAX_SEQ_LEN)
    """Tokens per sequence; default: the dataset's, which it must equal; for text the model's, at most 2,048."""
    activation: Activation | None = None
    """MLP non-linearity; default: the preset's."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability."""
    bias: bool | None = None
    """Biases in linear layers and layer norms; default: the preset's."""
    n_kv_head: int | None = Field(None, ge=1, le=limits.MAX_HEADS)
    """Key-value heads, which must divide n_head; default: the preset's."""
    head_dim: int | None = Field(None, ge=1, le=limits.MAX_WIDTH)
    """Width of a head; default: the preset's, n_embd / n_head."""
    mlp_width: int | None = Field(None, ge=1, le=limits.MAX_WIDTH)
    """Hidden width of the MLP; default: the preset's, in its ratio to n_embd."""
    gated_mlp: bool | None = None
    """Gated MLP, whose hidden layer is activation(gate) x up (SwiGLU with silu); default: the preset's."""
    norm: Norm | None = None
    """Layer norm or RMS norm; default: the preset's."""
    norm_eps: float | None = Field(None, gt=0, le=1)
    """Constant added to a norm's variance; default: the preset's."""
    norm_placement: NormPlacement | None = None
    """Norms before attention and MLP, or after them (OLMo 2); default: the preset's."""
    positions: Positions | None = None
    """Learned position vectors, or rotations of queries and keys; default: the preset's."""
    rope_theta: float | None = Field(None, gt=0, le=limits.MAX_ROPE_THETA)
    """Base of the rotations' wavelengths; default: the preset's."""
    rope_scaling: NonBlank | None = None
    """none, linear:FACTOR, llama3:FACTOR,LOW,HIGH,ORIGINAL_SEQ_LEN, or yarn:FACTOR,ORIGINAL_SEQ_LEN; default: the
    preset's."""
    qk_norm: QKNorm | None = None
    """RMS norm of queries and keys: none, within each head (Qwen 3), over their whole width (OLMo 2); default: the
    preset's."""
    attention_bias: AttentionBias | None = None
    """Biases in attention, in place of `bias`: none, qkv (Qwen 2), or all; default: the preset's."""
    mlp_bias: bool | None = None
    """Biases in the MLP, in place of `bias`; default: the preset's."""
    tied: bool | None = None
    """Use the token embedding as output head; default: the preset's."""
    sliding_window: int | None = Field(None, ge=0, le=limits.MAX_SEQ_LEN)
    """Positions that attention sees, its own included; 0: all earlier ones; default: the preset's."""
    window_pattern: NonBlank | None = None
    """Blocks with the sliding window (L, local) and without it (G, global), repeated: GL, LG or LLLLLG, as in GPT-3,
    Gemma 2 and Gemma 3; default: the preset's, L."""
    mlp_tile_tokens: int | None = Field(None, ge=0, le=limits.MAX_BATCH_TOKENS)
    """Tokens of a micro-batch that an MLP computes at a time, such as 4096; default: all. Bounds its memory for long
    sequences, and computes it twice in the backward pass."""
    num_experts: int | None = Field(None, ge=0, le=limits.MAX_EXPERTS)
    """Experts: MLPs of a block among which a router chooses for each token (docs/models.md); 0: one MLP; default: the
    preset's."""
    experts_per_token: int | None = Field(None, ge=0, le=limits.MAX_EXPERTS)
    """Experts that a token is sent to; default: the preset's, 2."""
    expert_width: int | None = Field(None, ge=0, le=limits.MAX_WIDTH)
    """Hidden width of an expert; default: the preset's, mlp_width."""
    shared_expert_width: int | None = Field(None, ge=0, le=limits.MAX_WIDTH)
    """Hidden width of a shared expert, an MLP that computes every token; 0: none; default: the preset's."""
    dense_layers: int | None = Field(None, ge=0, le=limits.MAX_LAYERS)
    """Number of first blocks that have one MLP and no experts; default: the preset's, 0."""
    expert_interval: int | None = Field(None, ge=1, le=limits.MAX_LAYERS)
    """1: all blocks after the first dense_layers have experts; N: the last of every N of them has; default: the
    preset's, 1."""
    router_score: RouterScore | None = None
    """Router's scores: the softmax over all experts, or each expert's sigmoid (DeepSeek V3); default: the preset's."""
    normalize_router: bool | None = None
    """Divide the scores of a token's experts by their sum; default: the preset's, on."""
    router_scale: float | None = Field(None, gt=0, le=limits.MAX_LEARNING_RATE_FACTOR)
    """Factor of the scores of a token's experts; default: the preset's, 1."""
    router_bias: bool | None = None
    """Balance the experts' load by adding a bias to each score when experts are chosen, in place of a loss (DeepSeek
    V3); default: the preset's."""
    document_mask: bool = False
    """Restrict attention to one document, and restart positions at each document. Attention takes longer."""
    vocab_size: int | None = Field(None, ge=1, le=limits.MAX_VOCAB)
    """Token ids of the model; default and minimum: those of the dataset."""

    # data
    data: PathOrUrl = "data/python-stdlib"
    """Folder made by `llmscale data prepare`, or its URL (s3://, gs://, hf://, ...), fetched shard by shard. A YAML
    file mixes several datasets by weight (docs/data.md)."""
    text: PathOrUrl | None = None
    """Text in place of data: a folder, a file or any other --input of `llmscale data prepare`. The first start prepares
    it into the cache, later ones find it there."""
    tokenizer: PathOrUrl | None = None
    """Tokenizer for text, as of `llmscale data prepare`; default: that of a published model, else one trained on the
    text."""
    data_cache: UserPath | None = None
    """Cache for the shards of a remote dataset, or for prepared text; default: ~/.cache/llmscale."""
    shuffle: bool = True
    """Shuffle each epoch."""
    num_canonical_nodes: int | None = Field(None, ge=1, le=limits.MAX_NODES)
    """Rows of the sample order. If the number of nodes divides it, every node fetches only its own rows. Default: 48 if
    that does not change the order (docs/data.md), else 1."""
    shuffle_block_size: int | None = Field(None, ge=1, le=limits.MAX_SAMPLES)
    """Samples of a row that are shuffled together; default: all, or 32,768 if the dataset is larger than 8 GiB."""
    num_workers: int = Field(1, ge=0, le=limits.MAX_WORKERS)
    """Data-loading processes per rank; 0: read in the training process."""
    cache_limit_gib: float | None = Field(None, gt=0, le=limits.MAX_CACHE_GIB)
    """Disk space for the shards of a remote dataset, in GiB; default: unlimited."""
    skip_steps: list[str] = Field(default_factory=list)
    """Leave out the batches of steps A to B-1, now and after every resume. Ranges are applied one after the other: of
    the steps in one log, give the later ones first."""
    overfit_batch: int | None = Field(None, ge=1, le=limits.MAX_BATCH)
    """Train on the run's first N samples in every step, as a first check that the model learns. Ends with a verdict,
    saves nothing; default: 200 steps."""
    record_samples: bool = False
    """Write the sample ids of every step to the run folder."""

    # batch and schedule
    global_batch_size: int | None = Field(None, ge=1, le=limits.MAX_BATCH)
    """Sequences per optimizer step over all ranks; default: the preset's tokens per step."""
    global_batch_tokens: int | None = Field(None, ge=1, le=limits.MAX_BATCH_TOKENS)
    """Tokens per optimizer step, in place of global_batch_size; a multiple of seq_len."""
    micro_batch_size: int | None = Field(None, ge=1, le=limits.MAX_BATCH)
    """Sequences per rank and forward pass; default: the largest within 16,384 tokens."""
    batch_ramp_from: int | None = Field(None, ge=1, le=limits.MAX_BATCH)
    """Sequences of the first step; the global batch grows by as many at a time to its full size. The number of ranks
    must divide it."""
    batch_ramp_tokens: int | None = Field(None, ge=1, le=limits.MAX_TOKENS)
    """Tokens over which the global batch grows, linearly, as GPT-3's did."""
    seq_len_ramp_from: int | None = Field(None, ge=1, le=limits.MAX_SEQ_LEN)
    """Tokens of the first sequences, into which samples are cut; the length doubles up to the dataset's seq_len."""
    seq_len_ramp_tokens: int | None = Field(None, ge=1, le=limits.MAX_TOKENS)
    """Tokens over which sequences grow, as many at each length. Steps have the same samples and tokens throughout."""
    steps: int | None = Field(None, ge=1, le=limits.MAX_STEPS)
    """Optimizer steps of the run; default: one pass over the data."""
    tokens: int | None = Field(None, ge=1, le=limits.MAX_TOKENS)
    """Training tokens, in place of steps; rounded up to complete steps."""
    lr: float | None = Field(None, gt=0, le=limits.MAX_LEARNING_RATE)
    """Peak learning rate; default: the preset's."""
    schedule: ScheduleName = "cosine"
    """Learning-rate schedule. cosine and linear decay to min_lr_frac; wsd: warm-up, stable, linear decay."""
    warmup_steps: int | None = Field(None, ge=0, le=limits.MAX_STEPS)
    """Steps of linear warm-up; default: 1 % of the run, at most 2,000."""
    warmup_tokens: int | None = Field(None, ge=0, le=limits.MAX_TOKENS)
    """Tokens of linear warm-up, in place of warmup_steps."""
    decay_steps: int | None = Field(None, ge=1, le=limits.MAX_STEPS)
    """wsd: steps of the final decay; default: 20 % of the run. Others: steps until min_lr_frac; default: all."""
    decay_tokens: int | None = Field(None, ge=1, le=limits.MAX_TOKENS)
    """Tokens of the decay, in place of decay_steps."""
    min_lr_frac: float | None = Field(None, ge=0.0, le=1.0)
    """Final learning rate as a fraction of the peak; default: 0.1 for cosine, 0 for linear and wsd."""

    # optimizer
    optimizer: OptimizerName = "adamw"
    """Optimizer. muon: orthogonalised momentum for the blocks' matrices, AdamW for the rest. adafactor: at ZeRO stage 0
    only."""
    muon_lr_factor: float | None = Field(None, gt=0, le=limits.MAX_LEARNING_RATE_FACTOR)
    """Muon: ratio of the blocks' matrices' learning rate to that of all other parameters; default: 1."""
    param_group: list[NonBlank] = Field(default_factory=list)
    """Learning rate and weight decay of the parameters whose names match: 'wte*:lr=0.1x:decay=0'. The first pattern
    that matches counts."""
    freeze: list[NonBlank] = Field(default_factory=list)
    """Do not train the parameters whose names match, such as 'blocks.0.*': no gradients, no optimizer states."""
    weight_decay: float = Field(0.1, ge=0.0, le=limits.MAX_WEIGHT_DECAY)
    """Decoupled weight decay; applies to parameters of two or more dimensions."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """AdamW: decay of the first moment; Muon's momentum is 0.95."""
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    """AdamW: decay of the second moment."""
    eps: float = Field(1e-8, ge=1e-30, le=1.0)
    """AdamW: constant added to the denominator."""
    gradient_clipping: float | None = Field(None, ge=0.0, le=limits.MAX_CLIPPING)
    """Largest global gradient norm; 0: no clipping; default: the ds_config's, else 1.0."""
    keep_zeros: bool = False
    """Keep zero elements of the blocks' matrices at zero, such as those of a pruned model given as --init-from."""
    z_loss: float = Field(0.0, ge=0.0, le=limits.MAX_Z_LOSS)
    """Weight of the mean squared log-sum-exp of the logits, such as 1e-4; 0: off. The printed loss does not include
    it."""
    balance_loss: float | None = Field(None, ge=0.0, le=limits.MAX_Z_LOSS)
    """Weight of the loss that balances the experts' load (Switch Transformer); the printed loss does not include it.
    Default: 0.01; 0 if router_bias is on."""
    router_z_loss: float = Field(0.0, ge=0.0, le=limits.MAX_Z_LOSS)
    """Weight of the mean squared log-sum-exp of the routers' logits, such as 1e-3; 0: off. Not in the printed loss."""
    router_bias_speed: float | None = Field(None, ge=0.0, le=limits.MAX_Z_LOSS)
    """Amount by which a router's biases rise or fall in a step; default: 0.001."""

    # precision and ZeRO
    ds: UserPath = Path("ds_configs/zero2.json")
    """DeepSpeed JSON: ZeRO stage, offload, precision, activation checkpointing. zero2, zero3_offload and the like
    are names of llmscale's own files."""
    precision: Precision | None = None
    """Precision; default: the ds_config's."""
    activation_checkpointing: CheckpointingMode | None = None
    """Activation checkpointing; default: the ds_config's."""
    sequence_parallel_size: int = Field(1, ge=1, le=limits.MAX_HEADS)
    """Neighbouring ranks that divide the tokens of a sequence, for contexts longer than one GPU holds; divides the
    ranks and the query heads (docs/long_sequences.md)."""
    expert_parallel_size: int = Field(1, ge=1, le=limits.MAX_EXPERTS)
    """Neighbouring ranks that divide the experts of a block and exchange tokens; divides the ranks and the experts
    (docs/models.md)."""
    loss_chunk_tokens: int = Field(CHUNK_TOKENS, ge=1, le=limits.MAX_BATCH_TOKENS)
    """Tokens of a micro-batch whose logits are in memory at a time. Fewer need less memory and more time."""
    loss_kernel: LossKernel = "torch"
    """Implementation of the loss. liger: Liger Kernel's fused Triton kernel, on GPUs with llmscale[liger] installed."""
    compile: CompileMode = "auto"
    """Compile the blocks with torch.compile. auto: on GPUs, if the run is long enough for a net gain."""
    compile_mode: CompileTuning = "default"
    """torch.compile's mode. max-autotune-no-cudagraphs tries more kernels, and compiles for minutes. Its modes that
    capture CUDA graphs are not offered: one graph runs once per block."""

    # checkpoints
    save_every: int = Field(500, ge=0, le=limits.MAX_STEPS)
    """Steps between checkpoints; the last step is always saved; 0: only the last."""
    save_every_minutes: float | None = Field(None, gt=0, le=limits.MAX_MINUTES)
    """Also save when this much time has passed since the last checkpoint."""
    keep_last: int = Field(2, ge=1, le=limits.MAX_CHECKPOINTS)
    """Newest checkpoints to keep, beside the one with the lowest validation loss."""
    keep_every: int = Field(0, ge=0, le=limits.MAX_STEPS)
    """Also keep every checkpoint whose step is a multiple of this; 0: none."""
    async_save: bool = True
    """Write checkpoints in the background."""
    resume: OtherRunOrName = "auto"
    """auto: resume if the run folder has a checkpoint; none: start from scratch in a new folder; best: go back to the
    run's lowest validation loss; or the folder of a checkpoint."""
    init_from: OtherRunOrName | None = None
    """Start at step 0 with the weights of a run, a checkpoint, or hf:FOLDER or hf:NAME, which also set the model."""
    allow_changed: list[str] = Field(default_factory=list)
    """On resume, accept a change of this key: global_batch_size, seq_len, data, seed or order. The log names the
    consequences."""

    # evaluation
    val_every: int = Field(250, ge=0, le=limits.MAX_STEPS)
    """Steps between validations; 0: never."""
    val_samples: int = Field(256, ge=1, le=limits.MAX_SAMPLES)
    """Sequences per validation; all if the dataset has fewer."""
    sample_every: int = Field(0, ge=0, le=limits.MAX_STEPS)
    """Steps between printed text samples; 0: never."""
    sample_prompt: str = "The "
    """Prompt of the printed samples."""
    sample_prompts: UserPath | None = None
    """File of prompts, in place of sample_prompt: one per line, or in FILE.jsonl objects with a "prompt"."""
    eval_every: int = Field(0, ge=0, le=limits.MAX_STEPS)
    """Steps between evaluations on eval_tasks, which also print text samples; 0: never."""
    eval_tasks: list[TaskFile] = Field(default_factory=list)
    """Evaluation items in JSON lines; FORMAT is hellaswag, multiple_choice, likelihood or text."""

    # watching
    log_every: int = Field(10, ge=1, le=limits.MAX_STEPS)
    """Steps between log lines."""
    check_every: int = Field(100, ge=0, le=limits.MAX_STEPS)
    """Steps between checks that all ranks use the same sample ids; 0: never."""
    on_spike: OnSpike = "warn"
    """Action after a loss spike. stop: end the run and print how to resume. skip: return to the checkpoint before it
    and leave out the batches."""
    notify: NonBlank | None = None
    """Command for `sh -c` that is run when the run finishes, stops, fails or meets a loss spike, with the facts as JSON
    on its stdin. The run folder records it: keep secrets in variables."""
    profile: NonBlank | None = None
    """Profile steps A to B-1: a trace and a table in the run folder's profile/."""
    plain: bool = False
    """Print a line per logged step, also on a terminal, in place of the live view."""
    wandb: bool = False
    """Log to Weights & Biases, from rank 0. WANDB_MODE=offline needs no account."""
    wandb_project: NonBlank = "llmscale"
    """Weights & Biases project."""
    wandb_name: NonBlank | None = None
    """Weights & Biases run name; default: the run folder's name."""
    tensorboard: bool = False
    """Write TensorBoard event files to the run folder's tensorboard/."""


#: Keys without effect unless another key allows them.
NEEDS = (
    Need("eval_tasks", "--eval-every N"),
    Need("batch_ramp_from", "--batch-ramp-tokens N"),
    Need("batch_ramp_tokens", "--batch-ramp-from N"),
    Need("seq_len_ramp_from", "--seq-len-ramp-tokens N"),
    Need("seq_len_ramp_tokens", "--seq-len-ramp-from N"),
    Need("val_samples", "--val-every N"),
    Need("sample_prompt sample_prompts", "--sample-every N", lambda run: run.sample_every or run.eval_every),
    Need("compile_mode", "with --compile off", lambda run: run.compile != "off"),
    Need("sample_prompt", "with --sample-prompts", lambda run: run.sample_prompts is None),
    Need("wandb_project wandb_name", "--wandb"),
    Need("muon_lr_factor", "--optimizer muon", lambda run: run.optimizer == "muon"),
    Need("beta1 beta2 eps", "with --optimizer adafactor", lambda run: run.optimizer != "adafactor"),
    Need("min_lr_frac decay_steps decay_tokens", "with --schedule constant", lambda run: run.schedule != "constant"),
    Need("num_canonical_nodes shuffle_block_size", "with --no-shuffle", lambda run: run.shuffle),
    Need("data cache_limit_gib", "with --text", lambda run: run.text is None),
    Need("tokenizer", "--text FOLDER"),
    Need(
        "cache_limit_gib",
        "--data-cache FOLDER or a remote --data",
        lambda run: run.data_cache or re.search(r"://|\.ya?ml$", run.data),
    ),
    Need("keep_every", "--save-every N", lambda run: run.save_every or run.save_every_minutes),
    Need(
        "global_batch_size global_batch_tokens batch_ramp_from batch_ramp_tokens seq_len_ramp_from "
        "seq_len_ramp_tokens skip_steps val_every val_samples save_every save_every_minutes keep_last keep_every "
        "resume allow_changed",
        "with --overfit-batch",
        lambda run: run.overfit_batch is None,
    ),
    Need("allow_changed", "with --resume none", lambda run: run.resume != "none"),
    Need("allow_changed", "with --init-from", lambda run: run.init_from is None),
)


#: Keys for one quantity in two units. A flag for either overrides the file's entries for both.
EXCLUSIVE_KEYS = (
    ("global_batch_size", "global_batch_tokens"),
    ("steps", "tokens"),
    ("warmup_steps", "warmup_tokens"),
    ("decay_steps", "decay_tokens"),
)


def parse_run_config(argv: Sequence[str], parser: FlagParser | None = None) -> RunConfig:
    """Return the run's configuration: flags override the `--config` file, and that the defaults.

    `parser` names the command and may have further flags. Raises ConfigError, and SystemExit after --help.
    """
    parser = parser or FlagParser(prog="train.py", example=_EXAMPLE)
    add_run_config_flags(parser)
    given = vars(parser.parse_args(_normalise_flags(argv)))
    flags = {key: value for key, value in given.items() if value is not None and key in RunConfig.model_fields}
    for key, value in flags.items():
        # `null` and `[]` undo a key of the run file; a restart by `launch` needs that.
        if isinstance(value, list):
            flags[key] = [] if value == ["[]"] else [word for text in value for word in text.split(",")]
        elif value == "null":
            flags[key] = None
    from_file = load_run_file(_path("config", flags["config"])) if "config" in flags else {}
    for key, twin in EXCLUSIVE_KEYS:
        for own, overridden in ((key, twin), (twin, key)):
            if own in flags and overridden not in flags:
                from_file.pop(overridden, None)
    config = build_run_config({**from_file, **flags}, f"--config {flags.get('config')}: ", flags)
    _check_needs(config, flags, from_file)
    return config


def add_run_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add every key of a run as a flag, in the sections of RunConfig, and --version."""
    parser.usage = "%(prog)s [FLAGS]"
    parser.description = parser.description or "Train a GPT under DeepSpeed ZeRO. --config FILE holds any of the flags."
    parser.add_argument("--version", action="version", version=f"llmscale {__version__}")
    fields = RunConfig.model_fields
    for section, keys in groupby(describe_keys().items(), lambda item: item[1].section):
        names = [key for key, _ in keys]
        add_run_flags(
            parser.add_argument_group(section),
            {key: fields[key].annotation for key in names},
            defaults={key: fields[key].default for key in names if fields[key].default_factory is None},
        )


def _check_needs(config: RunConfig, flags: Collection[str], from_file: Collection[str]) -> None:
    """Raise ConfigError for a key without effect.

    A run file's key may equal its default, and a flag may switch off a feature that the file configures.
    """
    fields = RunConfig.model_fields
    defaults = {key: fields[key].get_default(call_default_factory=True) for key in (*flags, *from_file)}
    changed = [key for key in defaults if getattr(config, key) != defaults[key]]
    for need in NEEDS:
        need.check([key for key in flags if key in changed or defaults[key]], config)
        if not need.others() & {*flags}:
            need.check(changed, config, f"--config {config.config}: ")


def build_run_config(values: dict[str, object], where: str = "", flags: Collection[str] = ()) -> RunConfig:
    """Build a RunConfig from plain values. Raises ConfigError naming the first wrong key, its value and the rule.

    `where` begins the messages about values that come from a file, which are all but `flags`.
    """

    def refuse(key: str, why: str) -> NoReturn:
        raise ConfigError(f"{'' if key in flags else where}{why}") from None

    if isinstance(values.get("compile"), bool):  # YAML's on and off
        values = {**values, "compile": "on" if values["compile"] else "off"}
    for key, value in values.items():
        # pydantic reads true as 1, and YAML reads yes and on as true.
        if (
            isinstance(value, bool)
            and key in RunConfig.model_fields
            and RunConfig.model_fields[key].annotation not in (bool, bool | None)
        ):
            refuse(key, f"{key} = {value!r}: must be {_kind(key)}.")
    try:
        config = RunConfig(**values)  # type: ignore[arg-type]  # checked by pydantic
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "?"
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(key, RunConfig.model_fields)
            refuse(key, f"unknown key '{key}'.{hint} `train.py --help` lists all keys.")
        refuse(key, describe_invalid(key, first))
    for key, twin in EXCLUSIVE_KEYS:
        if getattr(config, key) is not None and getattr(config, twin) is not None:
            refuse(key, f"{key} and {twin} say the same thing in other units. Give one of them.")
    for change in config.allow_changed:
        if change not in CHANGES_THAT_BREAK:
            refuse(
                "allow_changed",
                f"allow_changed = '{change}' is not known.{did_you_mean(change, CHANGES_THAT_BREAK)} "
                f"Legal: {', '.join(CHANGES_THAT_BREAK)}.",
            )
    return config


def _kind(key: str) -> str:
    annotation = str(RunConfig.model_fields[key].annotation)
    return "a number" if "int" in annotation or "float" in annotation else "text"


def _path(key: str, text: str) -> Path:
    try:
        return check_path(text)
    except ValueError as error:
        raise ConfigError(f"{key} = {text!r}: {error}.") from None


def load_run_file(path: Path) -> dict[str, object]:
    """Return the keys of a YAML or TOML run file. Raises ConfigError if it is missing, malformed or not a mapping."""
    if path.suffix not in {".yaml", ".yml", ".toml"}:
        raise ConfigError(f"--config {path}: the suffix says the format, and must be .yaml, .yml or .toml.")
    load = load_toml if path.suffix == ".toml" else load_yaml
    try:
        values = load(path, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES), f"--config {path}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}.") from None
    keys = {str(key).replace("-", "_"): value for key, value in values.items()}
    if len(keys) < len(values):
        twice = next(key for key in keys if sum(str(other).replace("-", "_") == key for other in values) > 1)
        raise ConfigError(f"--config {path}: the key '{twice}' is given twice. Keep one of them.")
    if "config" in keys:
        raise ConfigError(f"--config {path}: a run file cannot name another one ('config'). Copy its keys here.")
    return keys


def _normalise_flags(argv: Sequence[str]) -> list[str]:
    """Accept --snake_case for --kebab-case, and drop --local_rank=N, which DeepSpeed's launcher adds."""
    flags = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        if re.fullmatch(r"--local-rank=[0-9]+", word) is None:
            flags.append(word)
    return flags
