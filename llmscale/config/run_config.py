"""RunConfig: every key of a training run, its default and its meaning. Flags win over the run file, the file over
the defaults. No torch: `--help` and every error answer at once."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from llmscale.architecture.shape import Activation, AttentionBias, Norm, NormPlacement, Positions, QKNorm
from llmscale.config import limits
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.flag_parser import Need
from llmscale.config.loss_settings import CHUNK_TOKENS, LossKernel
from llmscale.config.optimizers import OptimizerName
from llmscale.config.user_paths import check_path, check_path_or_name, check_path_or_url, check_task_file, check_text

NonBlank = Annotated[str, AfterValidator(check_text)]
PathOrName = Annotated[str, AfterValidator(check_path_or_name)]
PathOrUrl = Annotated[str, AfterValidator(check_path_or_url)]
TaskFile = Annotated[str, AfterValidator(check_task_file)]
UserPath = Annotated[Path, BeforeValidator(check_path)]
ScheduleName = Literal["cosine", "linear", "constant", "wsd"]
CompileMode = Literal["auto", "on", "off"]
OnSpike = Literal["warn", "stop", "skip"]

#: What may differ from the checkpoint only when the user says so; the text is what the change breaks.
CHANGES_THAT_BREAK = {
    "global_batch_size": "steps mean another number of samples, the loss curve is not the one that was begun",
    "seq_len": "samples are other windows of the text: some are seen twice, some never",
    "data": "the new set is read from the old position: its first samples are never seen in this epoch",
    "seed": "the rest of the epoch has another order: some samples are seen twice, some never",
    "order": "the rest of the epoch has another order: some samples are seen twice, some never",
}


class RunConfig(BaseModel):
    """One training run. The same keys are flags (`--global-batch-size 64`) and entries of a YAML or TOML file. What
    stands below each is its help (`describe_keys`)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    config: UserPath | None = None
    """YAML or TOML run file that holds any of these keys."""
    ds: UserPath = Path("ds_configs/zero2.json")
    """DeepSpeed JSON: ZeRO stage, offload, precision, activation checkpointing. zero2, zero3_offload and the like name
    llmscale's own."""

    # model
    model: NonBlank = "tiny-10m"
    """Preset (`tiny-1m` ... `gpt3-175b`, `llama3-8b`, `qwen3-4b`, ...), or hf:FOLDER or hf:NAME for a
    published model's shape; the keys below override it."""
    n_layer: int | None = Field(None, ge=1, le=limits.MAX_LAYERS)
    """Transformer blocks."""
    n_head: int | None = Field(None, ge=1, le=limits.MAX_HEADS)
    """Query heads; must divide n_embd unless head_dim is given."""
    n_embd: int | None = Field(None, ge=1, le=limits.MAX_WIDTH)
    """Width of the residual stream."""
    seq_len: int | None = Field(None, ge=1, le=limits.MAX_SEQ_LEN)
    """Tokens per sequence; default: the data set's, which it must equal."""
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
    """The MLP's hidden layer is activation(gate) x up: SwiGLU with silu; default: the preset's."""
    norm: Norm | None = None
    """Layer norm or RMS norm; default: the preset's."""
    norm_eps: float | None = Field(None, gt=0, le=1)
    """Added to a norm's variance; default: the preset's."""
    norm_placement: NormPlacement | None = None
    """Norms before attention and MLP, or behind them (OLMo 2); default: the preset's."""
    positions: Positions | None = None
    """Learned vectors, or rotations of queries and keys; default: the preset's."""
    rope_theta: float | None = Field(None, gt=0, le=limits.MAX_ROPE_THETA)
    """Base of the rotations' wavelengths; default: the preset's."""
    rope_scaling: NonBlank | None = None
    """none, linear:FACTOR, or llama3:FACTOR,LOW,HIGH,ORIGINAL_SEQ_LEN; default: the preset's."""
    qk_norm: QKNorm | None = None
    """RMS norm of queries and keys: none, within each head (Qwen 3), over their whole width (OLMo 2); default: the
    preset's."""
    attention_bias: AttentionBias | None = None
    """Biases in attention alone: none, qkv (Qwen 2), or all; default: the preset's, as `bias`."""
    mlp_bias: bool | None = None
    """Biases in the MLP alone; default: the preset's, as `bias`."""
    tied: bool | None = None
    """The output head is the token embedding; default: the preset's."""
    sliding_window: int | None = Field(None, ge=0, le=limits.MAX_SEQ_LEN)
    """Positions that attention sees, its own included; 0: all before it; default: the preset's."""
    document_mask: bool = False
    """Keep the documents of a sequence from seeing each other: attention and positions begin anew at each. Attention
    takes longer."""
    vocab_size: int | None = Field(None, ge=1, le=limits.MAX_VOCAB)
    """Token ids of the model, at least those of the data set, which are the default."""

    # data
    data: PathOrUrl = "data/python-stdlib"
    """Folder made by `llmscale data prepare`, or its URL (s3://, gs://, hf://, ...), fetched shard by shard; or a YAML
    of several with weights (docs/data.md)."""
    data_cache: UserPath | None = None
    """Where the shards of a remote set are kept; default ~/.cache/llmscale/data."""
    shuffle: bool = True
    """Shuffle each epoch."""
    num_canonical_nodes: int | None = Field(None, ge=1, le=limits.MAX_NODES)
    """Rows of the sample order; a node fetches only its rows when the number of nodes divides this. Default: 48 where
    they do not show (docs/data.md), else 1."""
    shuffle_block_size: int | None = Field(None, ge=1, le=limits.MAX_SAMPLES)
    """Samples that are shuffled among each other within a row; default: all, or 32,768 of a set above 8 GiB."""
    num_workers: int = Field(1, ge=0, le=limits.MAX_WORKERS)
    """Data-loading processes per rank; 0 reads in the training process."""
    cache_limit_gib: float | None = Field(None, gt=0, le=limits.MAX_CACHE_GIB)
    """Local space for shards of a remote set, in GiB; default: unlimited."""
    skip_steps: list[str] = Field(default_factory=list)
    """Leave out the batches that steps A to B-1 would have, given as A:B; the run keeps it. Several are applied
    one after the other: of one log, give the later first."""
    record_samples: bool = False
    """Write the sample ids of every step to the run folder."""

    # batch and duration
    global_batch_size: int | None = Field(None, ge=1, le=limits.MAX_BATCH)
    """Sequences per optimizer step over all ranks; default: the preset's tokens per step."""
    global_batch_tokens: int | None = Field(None, ge=1, le=limits.MAX_BATCH_TOKENS)
    """The same in tokens; must be a multiple of seq_len."""
    micro_batch_size: int | None = Field(None, ge=1, le=limits.MAX_BATCH)
    """Sequences per rank and forward; default: the largest that fits 16,384 tokens."""
    steps: int | None = Field(None, ge=1, le=limits.MAX_STEPS)
    """Optimizer steps of the run; default: one pass over the data."""
    tokens: int | None = Field(None, ge=1, le=limits.MAX_TOKENS)
    """The same in tokens, rounded up to whole steps."""

    # optimizer and schedule
    optimizer: OptimizerName = "adamw"
    """muon: orthogonalised momentum for the blocks' matrices, AdamW for the rest. Adafactor works at ZeRO stage 0
    only."""
    muon_lr_factor: float | None = Field(None, gt=0, le=limits.MAX_LEARNING_RATE_FACTOR)
    """Muon: learning rate of the blocks' matrices over that of everything else; default 1."""
    lr: float | None = Field(None, gt=0, le=limits.MAX_LEARNING_RATE)
    """Peak learning rate; default: the preset's."""
    schedule: ScheduleName = "cosine"
    """cosine to min_lr_frac; linear to min_lr_frac; constant; wsd: warm-up, stable, linear decay."""
    warmup_steps: int | None = Field(None, ge=0, le=limits.MAX_STEPS)
    """Steps of linear warm-up; default: 1 % of the run, at most 2,000."""
    warmup_tokens: int | None = Field(None, ge=0, le=limits.MAX_TOKENS)
    """The same in tokens."""
    decay_steps: int | None = Field(None, ge=1, le=limits.MAX_STEPS)
    """wsd: steps of the final decay (default 20 % of the run); else: steps until min_lr_frac (default the run)."""
    decay_tokens: int | None = Field(None, ge=1, le=limits.MAX_TOKENS)
    """The same in tokens."""
    min_lr_frac: float | None = Field(None, ge=0.0, le=1.0)
    """Final learning rate as a fraction of the peak; default 0.1 for cosine, 0 for linear and wsd."""
    weight_decay: float = Field(0.1, ge=0.0, le=limits.MAX_WEIGHT_DECAY)
    """Decoupled weight decay, on parameters of two or more dimensions only."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """AdamW: decay of the first moment; Muon's momentum is 0.95."""
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    """AdamW: decay of the second moment."""
    eps: float = Field(1e-8, ge=1e-30, le=1.0)
    """AdamW: added to the denominator."""
    gradient_clipping: float | None = Field(None, ge=0.0, le=limits.MAX_CLIPPING)
    """Largest global gradient norm; 0 switches clipping off; default: the ds_config's, else 1.0."""

    keep_zeros: bool = False
    """Elements of the blocks' matrices that are 0 stay 0, such as those of a pruned model that --init-from names."""

    # overrides of the ds_config
    precision: Precision | None = None
    """Overrides the ds_config's precision."""
    activation_checkpointing: CheckpointingMode | None = None
    """Overrides the ds_config's activation checkpointing."""

    # the loss
    loss_chunk_tokens: int = Field(CHUNK_TOKENS, ge=1, le=limits.MAX_BATCH_TOKENS)
    """Tokens of a micro-batch whose logits exist at a time: fewer take less memory and more time."""
    z_loss: float = Field(0.0, ge=0.0, le=limits.MAX_Z_LOSS)
    """Weight of the mean squared log-sum-exp of the logits in the gradients, such as 1e-4; 0: none. The printed loss is
    without it."""
    loss_kernel: LossKernel = "torch"
    """liger: the loss by Liger Kernel's fused Triton kernel, on GPUs, where llmscale[liger] is installed."""

    # speed
    compile: CompileMode = "auto"
    """Compile the blocks with torch.compile: on, off, or auto: on GPUs, when the run is long enough to pay for it."""

    # the loop
    seed: int = Field(1337, ge=0, le=limits.MAX_SEED)
    """Initial weights, order of the data and dropout."""
    log_every: int = Field(10, ge=1, le=limits.MAX_STEPS)
    """Steps between log lines."""
    val_every: int = Field(250, ge=0, le=limits.MAX_STEPS)
    """Steps between validations; 0: never."""
    val_samples: int = Field(256, ge=1, le=limits.MAX_SAMPLES)
    """Sequences per validation (all, when the set has fewer)."""
    sample_every: int = Field(0, ge=0, le=limits.MAX_STEPS)
    """Steps between printed text samples; 0: never."""
    sample_prompt: str = "The "
    """Prompt of the printed samples."""
    sample_prompts: UserPath | None = None
    """Sample after each of the prompts in this file instead: one a line, or in FILE.jsonl objects with a "prompt"."""
    eval_every: int = Field(0, ge=0, le=limits.MAX_STEPS)
    """Steps between evaluations on eval_tasks, where text is sampled too; 0: never."""
    eval_tasks: list[TaskFile] = Field(default_factory=list)
    """Items in JSON lines as FORMAT=FILE, where FORMAT is hellaswag, multiple_choice, likelihood or text."""
    save_every: int = Field(500, ge=0, le=limits.MAX_STEPS)
    """Steps between checkpoints; the last step is always saved; 0: only the last."""
    save_every_minutes: float | None = Field(None, gt=0, le=limits.MAX_MINUTES)
    """Also save when this much time has passed since the last checkpoint."""
    keep_last: int = Field(2, ge=1, le=limits.MAX_CHECKPOINTS)
    """Checkpoints to keep."""
    keep_every: int = Field(0, ge=0, le=limits.MAX_STEPS)
    """Keep every checkpoint whose step is a multiple of this, for ever; 0: none."""
    async_save: bool = True
    """Write checkpoints in the background."""
    run: UserPath = Path("runs/default")
    """Run folder: config, metrics, checkpoints, samples."""
    resume: PathOrName = "auto"
    """auto: continue when the run folder has a checkpoint; none: start anew in a new folder; or a checkpoint folder."""
    init_from: PathOrName | None = None
    """Start at step 0 with the weights of this run or checkpoint, or of hf:FOLDER or hf:NAME, which set the model."""
    allow_changed: list[str] = Field(default_factory=list)
    """On resume, accept a change of: global_batch_size, seq_len, data, seed, order. The log says what it breaks."""
    check_every: int = Field(100, ge=0, le=limits.MAX_STEPS)
    """Steps between checks that all ranks agree on the sample ids of a step; 0: never."""

    # watching
    on_spike: OnSpike = "warn"
    """When the loss leaps: warn; stop, and say how to go on; or skip: go back to the checkpoint before and leave the
    batches out."""
    profile: NonBlank | None = None
    """Profile steps A to B-1, given as A:B: a trace and a table in the run folder's profile/."""

    # reporting
    plain: bool = False
    """Print a line per logged step on a terminal too, instead of a live view."""
    wandb: bool = False
    """Log to Weights & Biases from rank 0; WANDB_MODE=offline needs no account."""
    wandb_project: NonBlank = "llmscale"
    """Weights & Biases project."""
    wandb_name: NonBlank | None = None
    """Weights & Biases run name; default: the run folder's name."""
    tensorboard: bool = False
    """Write TensorBoard event files to the run folder's tensorboard/, from rank 0."""


#: Keys that some other key switches off.
NEEDS = (
    Need("eval_tasks", "--eval-every N"),
    Need("val_samples", "--val-every N"),
    Need("sample_prompt sample_prompts", "--sample-every N", lambda run: run.sample_every or run.eval_every),
    Need("sample_prompt", "with --sample-prompts", lambda run: run.sample_prompts is None),
    Need("wandb_project wandb_name", "--wandb"),
    Need("muon_lr_factor", "--optimizer muon", lambda run: run.optimizer == "muon"),
    Need("beta1 beta2 eps", "with --optimizer adafactor", lambda run: run.optimizer != "adafactor"),
    Need("min_lr_frac decay_steps decay_tokens", "with --schedule constant", lambda run: run.schedule != "constant"),
    Need("num_canonical_nodes shuffle_block_size", "with --no-shuffle", lambda run: run.shuffle),
    Need(
        "cache_limit_gib",
        "--data-cache FOLDER or a remote --data",
        lambda run: run.data_cache or re.search(r"://|\.ya?ml$", run.data),
    ),
    Need("keep_every", "--save-every N", lambda run: run.save_every or run.save_every_minutes),
    Need("allow_changed", "with --resume none", lambda run: run.resume != "none"),
    Need("allow_changed", "with --init-from", lambda run: run.init_from is None),
)


def describe_keys() -> dict[str, str]:
    """Key of a run -> its help. Read from the source when somebody asks: pydantic's own `use_attribute_docstrings`
    would do so in every command that imports the class."""
    (definition,) = ast.parse(inspect.getsource(RunConfig)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        key.target.id: inspect.cleandoc(text.value.value)
        for key, text in pairwise(definition.body)
        if isinstance(key, ast.AnnAssign)
        and isinstance(key.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
