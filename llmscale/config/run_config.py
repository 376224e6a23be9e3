"""RunConfig: every key of a training run, with its default, meaning and behaviour. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from llmscale.architecture.shape import SHAPE_KEYS, GPTShape
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.loss_settings import CHUNK_TOKENS, LossKernel
from llmscale.config.optimizers import OptimizerName
from llmscale.config.presets import PRESETS
from llmscale.config.schedule import OF_DEEPSPEED, ScheduleName, WarmupType
from llmscale.config.user_paths import (
    check_other_run_or_name,
    check_own_run,
    check_path,
    check_path_or_url,
    check_task_file,
    check_text,
)
from llmscale.errors import ConfigError
from llmscale.keys import Breaks, Condition, Key, MayDiffer
from llmscale.limits import (
    BatchTokens,
    BelowOne,
    CacheGib,
    Checkpoints,
    Experts,
    Factor,
    Fraction,
    GradientNorm,
    Heads,
    LearningRate,
    LossWeight,
    Minutes,
    Nodes,
    Positions,
    Processes,
    Samples,
    Seconds,
    Seed,
    Sequences,
    Steps,
    TokenIds,
    Tokens,
    WeightDecay,
)
from llmscale.suggestions import describe_invalid, did_you_mean
from llmscale.terminal.human_numbers import parse_number, parse_whole

NonBlank = Annotated[str, AfterValidator(check_text)]
TaskFile = Annotated[str, AfterValidator(check_task_file)]
#: Marks the types of keys that name a file or folder, which shells complete.
IS_PATH = "is a path"
OtherRunOrName = Annotated[str, AfterValidator(check_other_run_or_name), IS_PATH]
OwnRun = Annotated[Path, BeforeValidator(check_own_run), IS_PATH]
PathOrUrl = Annotated[str, AfterValidator(check_path_or_url), IS_PATH]
UserPath = Annotated[Path, BeforeValidator(check_path), IS_PATH]
CompileMode = Literal["auto", "on", "off"]
CompileTuning = Literal["default", "max-autotune-no-cudagraphs"]
OnSpike = Literal["warn", "stop", "skip"]

SEED = Breaks("the rest of the epoch has another order: some samples are seen twice, some never")
ORDER = SEED._replace(under="order", at="stream.identity.order")
BATCH = Breaks(
    "a step has another number of samples, so the loss curve is not comparable",
    under="global_batch_size",
    at="resolved.plan.samples_per_step",
)
DATA = Breaks(
    "the new set is read from the old position: its first samples are never seen in this epoch",
    at="sets.fingerprint",
)
LOCAL_DISK = MayDiffer("a local disk")
RANK_0 = MayDiffer("only rank 0's counts")
A_CACHE = Condition(
    "--data-cache FOLDER or a remote --data", lambda run: run.data_cache or re.search(r"://|\.ya?ml$", run.data)
)
#: Kinds of numbers, and what a text for one must be.
_NUMBERS: Mapping[type, str] = {
    int: "a whole number such as 811,008 or 10M",
    float: "a finite number without a unit, such as 0.5, 3e-4 or 1,000",
}
A_DEEPSPEED_SCHEDULE = Condition(
    "--schedule WarmupLR, WarmupDecayLR or WarmupCosineLR", lambda run: run.schedule in OF_DEEPSPEED
)


def key(default: object = None, *, needs: str | tuple[str | Condition, ...] = (), **settings: Any) -> Any:
    """Declare a key: its default and legal values as pydantic's Field has them, and its behaviour (`keys.Key`).

    `resume` and `ranks` are needed, except beside `in_place_of` (the other key's value is reported and compared) and
    `place` (the value at that place is). A text needs `outside`. The text below the key is its help, the comment above
    a group its section. `metavar`, `asked_by`, `asked_default` and `usual` must be literals, which
    `run_flags.describe_keys` reads from the source.
    """
    if settings.get("in_place_of"):
        settings |= {"resume": "resolved", "ranks": "resolved"}
    if settings.get("place"):
        settings = {"resume": "logged", "ranks": "resolved", **settings}
    field = {name: settings.pop(name) for name in ("ge", "gt", "le", "lt", "default_factory") if name in settings}
    behaviour = Key(needs=tuple(needs.split(", ")) if isinstance(needs, str) else needs, **settings)
    return Field(*(() if "default_factory" in field else (default,)), json_schema_extra=behaviour, **field)


class FirstKeys(BaseModel):
    """The first keys of a run, which its help begins with."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    # run
    config: UserPath | None = key(
        None,
        resume="free",
        ranks=MayDiffer("a path; the keys in the file are compared"),
        by_ladder=True,
        metavar="FILE",
        outside="name",
        usual=True,
    )
    """YAML or TOML run file with any of these keys."""
    run: OwnRun = key(
        Path("runs/default"),
        by_ladder=True,
        resume="free",
        ranks=MayDiffer("a path; the nodes may have separate disks"),
        metavar="FOLDER",
        outside="name",
        usual=True,
    )
    """Run folder, for configuration, metrics, checkpoints and samples; or its URL (s3://, gs://, az://): the nodes
    publish what is on their disks there (docs/checkpoints.md)."""
    seed: Seed = key(1337, ge=0, resume=SEED, ranks="same")
    """Seed of initial weights, data order and dropout."""

    # model
    model: NonBlank = key(
        "tiny-10m", resume="resolved", ranks="resolved", metavar="PRESET|hf:NAME", outside="name", usual=True
    )
    """Preset (tiny-1m ... gpt3-175b, llama3-8b, qwen3-4b, ...), or hf:FOLDER or hf:NAME for the shape of a published
    model. The keys below override its values."""


if TYPE_CHECKING:  # keys of the model that code names, for type checkers

    class ModelKeys(FirstKeys):
        dropout: float = 0.0
        lora_rank: int | None = None
else:

    def _shape_fields() -> Iterator[tuple[str, tuple[object, object]]]:
        """Yield the fields of GPTShape as pydantic's."""
        types = get_type_hints(GPTShape, include_extras=True)
        for name, behaviour in SHAPE_KEYS.items():
            kind = NonBlank if types[name].__origin__ is str else types[name].__origin__
            for unit in types[name].__metadata__:
                kind = kind if unit is behaviour else Annotated[kind, unit]
            default = behaviour.run_default
            bounds = dict(behaviour.bounds)
            yield (
                name,
                (kind if default is not None else kind | None, Field(default, json_schema_extra=behaviour, **bounds)),
            )

    ModelKeys = create_model("ModelKeys", __base__=FirstKeys, __module__=__name__, **dict(_shape_fields()))


class RunConfig(ModelKeys):
    """Configuration of a training run.

    Every key is a flag (`--global-batch-size 64`) and an entry of a YAML or TOML file; those of the model's block are
    the fields of GPTShape. Each declaration has its key's behaviour; KEYS has it by name.
    """

    # model
    seq_len: Positions | None = key(
        None,
        ge=1,
        asked_default="the model's",
        resume=Breaks("samples are other windows of the text: some are seen twice, some never"),
        ranks="resolved",
        metavar="T",
    )
    """Tokens per sequence; default: the dataset's, which it must equal; for text the model's, at most 2,048."""
    document_mask: bool = key(False, resume="logged", ranks="same")
    """Restrict attention to one document, and restart positions at each document. Attention takes longer."""
    vocab_size: TokenIds | None = key(
        None, ge=1, resume="refused", ranks="resolved", metavar="V", asked_default="the published model's"
    )
    """Token ids of the model; default and minimum: those of the dataset."""

    # data
    data: PathOrUrl = key(
        "data/python-stdlib",
        resume=DATA,
        ranks=MayDiffer("a path or URL, mounted elsewhere; the contents of the dataset are compared"),
        needs="not text",
        by_ladder=True,
        metavar="FOLDER|URL",
        outside="name",
        usual=True,
    )
    """Folder made by `llmscale data prepare`, or its URL (s3://, gs://, hf://, ...), fetched shard by shard. A YAML
    file mixes several datasets by weight (docs/data.md). Where the default does not exist: the demo, text=python-docs,
    prepared by the first start."""
    text: PathOrUrl | None = key(
        None,
        resume="resolved",
        ranks=MayDiffer("a path; the contents of its dataset are compared"),
        by_ladder=True,
        metavar="FOLDER|FILE",
        outside="name",
        usual=True,
    )
    """Text in place of data: a folder, a file or any other --input of `llmscale data prepare`. The first start prepares
    it into the cache, later ones find it there."""
    tokenizer: PathOrUrl | None = key(
        None,
        resume="resolved",
        ranks=MayDiffer("a path; that of the dataset is compared"),
        needs="text",
        metavar="gpt2|bytes|characters|FILE|FOLDER|NAME",
        outside="name",
        usual=True,
    )
    """Tokenizer for text, as of `llmscale data prepare`; default: that of a published model, else one trained on the
    text."""
    skip_undecodable: bool = key(
        False,
        resume="resolved",
        ranks=MayDiffer("how text is read; the contents of its dataset are compared"),
        needs="text",
        outside="value",
    )
    """Skip and count texts that are not UTF-8."""
    data_cache: UserPath | None = key(None, resume="free", ranks=LOCAL_DISK, metavar="FOLDER", outside="private")
    """Cache for the shards of a remote dataset, or for prepared text; default: ~/.cache/llmscale."""
    shuffle: bool = key(True, resume=ORDER, ranks="same")
    """Shuffle each epoch."""
    num_canonical_nodes: Nodes | None = key(None, ge=1, resume=ORDER, ranks="same", needs="shuffle")
    """Rows of the sample order. If the number of nodes divides it, every node fetches only its own rows. Default: 48 if
    that does not change the order (docs/data.md), else 1."""
    shuffle_block_size: Samples | None = key(None, ge=1, resume=ORDER, ranks="same", needs="shuffle")
    """Samples of a row that are shuffled together; default: all, or 32,768 if the dataset is larger than 8 GiB."""
    num_workers: Processes = key(1, ge=0, resume="free", ranks=MayDiffer("changes who reads a sample, not which"))
    """Data-loading processes per rank; 0: read in the training process."""
    cache_limit_gib: CacheGib | None = key(
        None, gt=0, resume="free", ranks=LOCAL_DISK, needs=("not text", A_CACHE), metavar="GIB"
    )
    """Disk space for the shards of a remote dataset, in GiB; default: unlimited."""
    skip_steps: list[str] = key(
        default_factory=list,
        resume="refused",
        ranks="same",
        begins=True,
        needs="not overfit_batch",
        metavar="A:B",
        outside="value",
    )
    """Leave out the batches of steps A to B-1, now and after every resume. Ranges are applied one after the other: of
    the steps in one log, give the later ones first."""
    overfit_batch: Sequences | None = key(None, ge=1, resume="refused", ranks="same", by_ladder=True)
    """Train on the run's first N samples in every step, as a first check that the model learns. Ends with a verdict,
    saves nothing; default: 200 steps."""

    # batch and schedule
    global_batch_size: Sequences | None = key(
        None,
        ge=1,
        resume=BATCH,
        ranks="resolved",
        needs="not overfit_batch",
        asked_by=("estimate", "plan"),
        by_ladder=True,
        usual=True,
    )
    """Sequences per optimizer step over all ranks; default: about the preset's tokens per step, in a number that common
    numbers of ranks divide, and the checkpoint's for a run that resumes."""
    global_batch_tokens: BatchTokens | None = key(
        None, ge=1, in_place_of="global_batch_size", needs="not overfit_batch"
    )
    """Tokens per optimizer step, in place of global_batch_size; a multiple of seq_len."""
    micro_batch_size: Sequences | None = key(
        None,
        ge=1,
        resume="logged",
        ranks="resolved",
        asked_by=("estimate",),
        asked_default="the largest that fits",
    )
    """Sequences per rank and forward pass; default: the largest within 16,384 tokens that needs the fewest
    fillers (docs/checkpoints.md)."""
    batch_ramp_from: Sequences | None = key(
        None, ge=1, resume=BATCH, ranks="same", needs="batch_ramp_tokens, not overfit_batch", by_ladder=True
    )
    """Sequences of the first step; the global batch grows by as many at a time to its full size. The micro-batch must
    divide it."""
    batch_ramp_tokens: Tokens | None = key(
        None, ge=1, resume=BATCH, ranks="same", needs="batch_ramp_from, not overfit_batch", by_ladder=True
    )
    """Tokens over which the global batch grows, linearly, as GPT-3's did."""
    seq_len_ramp_from: Positions | None = key(
        None, ge=1, resume="logged", ranks="same", needs="seq_len_ramp_tokens, not overfit_batch", by_ladder=True
    )
    """Tokens of the first sequences, into which samples are cut; the length doubles up to the dataset's seq_len."""
    seq_len_ramp_tokens: Tokens | None = key(
        None, ge=1, resume="logged", ranks="same", needs="seq_len_ramp_from, not overfit_batch", by_ladder=True
    )
    """Tokens over which sequences grow, as many at each length. Steps have the same samples and tokens throughout."""
    steps: Steps | None = key(None, ge=1, resume="logged", ranks="resolved", by_ladder=True, usual=True)
    """Optimizer steps of the run; default: one pass over the data."""
    tokens: Tokens | None = key(None, ge=1, in_place_of="steps", usual=True)
    """Training tokens, in place of steps; rounded up to complete steps."""
    minutes: Minutes | None = key(
        None, gt=0, in_place_of="steps", needs="not overfit_batch", metavar="MINUTES", usual=True
    )
    """Minutes from the start of the ranks to the last checkpoint, in place of steps: the first start times some steps,
    undoes them, and sets the steps of the run."""
    lr: LearningRate | None = key(None, gt=0, resume="logged", ranks="resolved", usual=True)
    """Peak learning rate; default: the preset's, or that of the nearest in size if the preset's is for another
    optimizer; for adafactor divided by 0.02, as its rate is relative to weights."""
    schedule: ScheduleName = key("cosine", resume="logged", ranks="resolved")
    """Learning-rate schedule. cosine and linear decay to min_lr_frac; wsd: warm-up, stable, linear decay. WarmupLR
    (constant), WarmupDecayLR (linear) and WarmupCosineLR are DeepSpeed's own curves, which a ds_config names."""
    warmup_steps: Steps | None = key(None, ge=0, resume="logged", ranks="resolved", by_ladder=True)
    """Steps of linear warm-up; default: 1 % of the run, at most 2,000."""
    warmup_tokens: Tokens | None = key(None, ge=0, in_place_of="warmup_steps")
    """Tokens of linear warm-up, in place of warmup_steps."""
    warmup_type: WarmupType | None = key(None, resume="logged", ranks="resolved", needs=(A_DEEPSPEED_SCHEDULE,))
    """Curve of the warm-up of DeepSpeed's schedules; default: log, as DeepSpeed's."""
    warmup_min_lr: LearningRate | None = key(
        None, ge=0, resume="logged", ranks="resolved", needs=(A_DEEPSPEED_SCHEDULE,)
    )
    """Learning rate at which the warm-up of DeepSpeed's schedules begins, and WarmupDecayLR ends; default: 0."""
    warmup_min_ratio: Fraction | None = key(None, ge=0.0, in_place_of="warmup_min_lr", needs=(A_DEEPSPEED_SCHEDULE,))
    """Fraction of the peak at which that warm-up begins, in place of warmup_min_lr."""
    decay_steps: Steps | None = key(
        None,
        ge=1,
        resume="logged",
        ranks="resolved",
        needs="not schedule=constant, not schedule=WarmupLR",
        by_ladder=True,
    )
    """wsd: steps of the final decay; default: 20 % of the run. Others: steps until min_lr_frac; default: all."""
    decay_tokens: Tokens | None = key(
        None, ge=1, in_place_of="decay_steps", needs="not schedule=constant, not schedule=WarmupLR"
    )
    """Tokens of the decay, in place of decay_steps."""
    min_lr_frac: Fraction | None = key(
        None, ge=0.0, resume="logged", ranks="resolved", needs="not schedule=constant, not schedule=WarmupLR"
    )
    """Final learning rate as a fraction of the peak; default: 0.1 for cosine, 0.0001 for WarmupCosineLR, warmup_min_lr
    for WarmupDecayLR, 0 for others."""

    # optimizer
    optimizer: OptimizerName = key("adamw", resume="weights", ranks="same", asked_by=("estimate", "plan"), usual=True)
    """Optimizer. muon: orthogonalised momentum for the blocks' matrices, AdamW for the rest. adafactor: at ZeRO stage 0
    only."""
    muon_lr_factor: Factor | None = key(None, gt=0, resume="logged", ranks="same", needs="optimizer=muon")
    """Muon: ratio of the blocks' matrices' learning rate to that of all other parameters; default: 1."""
    param_group: list[NonBlank] = key(
        default_factory=list, resume="logged", ranks="same", metavar="PATTERN:lr=Fx:decay=D", outside="value"
    )
    """Learning rate and weight decay of the parameters whose names match: 'wte*:lr=0.1x:decay=0'. The first pattern
    that matches counts."""
    freeze: list[NonBlank] = key(
        default_factory=list, resume="weights", ranks="same", asked_by=("estimate",), metavar="PATTERN", outside="value"
    )
    """Do not train the parameters whose names match, such as 'blocks.0.*': no gradients, no optimizer states."""
    weight_decay: WeightDecay = key(0.1, ge=0.0, resume="logged", ranks="same")
    """Decoupled weight decay; applies to parameters of two or more dimensions. adafactor: a fiftieth of it, as its
    learning rate is fifty times AdamW's."""
    beta1: BelowOne = key(0.9, ge=0.0, resume="logged", ranks="same", needs="not optimizer=adafactor")
    """AdamW: decay of the first moment; Muon's momentum is 0.95."""
    beta2: BelowOne = key(0.95, ge=0.0, resume="logged", ranks="same", needs="not optimizer=adafactor")
    """AdamW: decay of the second moment."""
    eps: Fraction = key(1e-8, ge=1e-30, resume="logged", ranks="same", needs="not optimizer=adafactor")
    """AdamW: constant added to the denominator."""
    gradient_clipping: GradientNorm | None = key(None, ge=0.0, place="resolved.ds_config.gradient_clipping")
    """Largest global gradient norm; 0: no clipping; default: the ds_config's, else 1.0."""
    keep_zeros: bool = key(False, resume="logged", ranks="same")
    """Keep zero elements of the blocks' matrices at zero, such as those of a pruned model given as --init-from."""
    z_loss: LossWeight = key(0.0, ge=0.0, resume="logged", ranks="same")
    """Weight of the mean squared log-sum-exp of the logits, such as 1e-4; 0: off. The printed loss does not include
    it."""
    balance_loss: LossWeight | None = key(None, ge=0.0, resume="logged", ranks="same", needs_of_model="num_experts")
    """Weight of the loss that balances the experts' load (Switch Transformer); the printed loss does not include it.
    Default: 0.01; 0 if router_bias is on."""
    router_z_loss: LossWeight = key(0.0, ge=0.0, resume="logged", ranks="same", needs_of_model="num_experts")
    """Weight of the mean squared log-sum-exp of the routers' logits, such as 1e-3; 0: off. Not in the printed loss."""
    router_bias_speed: LossWeight | None = key(
        None, ge=0.0, resume="logged", ranks="same", needs_of_model="router_bias"
    )
    """Amount by which a router's biases rise or fall in a step; default: 0.001."""

    # precision and ZeRO
    ds: UserPath = key(
        Path("ds_configs/zero2.json"),
        resume="resolved",
        ranks=MayDiffer("a path; the ds_config is compared"),
        metavar="FILE|NAME",
        outside="name",
        usual=True,
    )
    """DeepSpeed JSON: ZeRO stage, offload, precision, activation checkpointing. zero2, zero3_offload and the like
    are names of llmscale's own files."""
    precision: Precision | None = key(
        None,
        place="resolved.precision",
        asked_by=("estimate", "plan"),
        asked_default="the ds_config's, else bf16, or fp16 on a GPU without bf16",
        usual=True,
    )
    """Precision: bf16, fp16, fp32 or autocast; default: the ds_config's."""
    activation_checkpointing: CheckpointingMode | None = key(
        None, place="resolved.checkpointing", asked_by=("estimate",), asked_default="all of them"
    )
    """Activation checkpointing: none, selective or full; default: the ds_config's."""
    sequence_parallel_size: Heads = key(
        1,
        ge=1,
        resume="logged",
        ranks="resolved",
        asked_by=("estimate",),
        asked_default="1, for --max-seq-len every number",
    )
    """Neighbouring ranks that divide the tokens of a sequence, for contexts longer than one GPU holds; divides the
    ranks and the query heads (docs/long_sequences.md)."""
    expert_parallel_size: Experts = key(1, ge=1, resume="logged", ranks="resolved", asked_by=("estimate", "plan"))
    """Neighbouring ranks that divide the experts of a block and exchange tokens; divides the ranks and the experts
    (docs/models.md)."""
    loss_chunk_tokens: BatchTokens = key(
        CHUNK_TOKENS, ge=1, resume="logged", ranks="same", asked_by=("estimate", "plan")
    )
    """Tokens of a micro-batch whose logits are in memory at a time. Fewer need less memory and more time."""
    loss_kernel: LossKernel = key("torch", resume="logged", ranks="same")
    """Implementation of the loss. liger: Liger Kernel's fused Triton kernel, on GPUs with llmscale[liger] installed."""
    compile: CompileMode = key("auto", ranks="same", place="compilation.setting")
    """Compile the blocks with torch.compile. auto: on GPUs, if the run is long enough for a net gain."""
    compile_mode: CompileTuning = key("default", resume="logged", ranks="same", needs="not compile=off")
    """torch.compile's mode. max-autotune-no-cudagraphs tries more kernels, and compiles for minutes. Its modes that
    capture CUDA graphs are not offered: one graph runs once per block."""

    # checkpoints
    save_every: Steps = key(500, ge=0, off=0, resume="free", ranks="same", needs="not overfit_batch", usual=True)
    """Steps between checkpoints; the last step is always saved; 0: only the last if save_every_minutes is not
    given."""
    save_every_minutes: Minutes | None = key(
        10.0, ge=0, off=0.0, resume="free", ranks="same", needs="not overfit_batch", metavar="MINUTES"
    )
    """Also save when this much time has passed since the last checkpoint; 0: never."""
    keep_last: Checkpoints = key(2, ge=1, resume="free", ranks="same", needs="not overfit_batch", asked_by=("plan",))
    """Newest checkpoints to keep, beside the one with the lowest validation loss."""
    keep_every: Steps = key(
        0,
        ge=0,
        resume="free",
        ranks="same",
        needs="save_every or minutes_between_saves, not overfit_batch",
        asked_by=("plan",),
    )
    """Also keep every checkpoint whose step is a multiple of this; 0: none."""
    async_save: bool = key(True, resume="free", ranks="same")
    """Write checkpoints in the background."""
    resume: OtherRunOrName = key(
        "auto",
        off="none",
        resume="free",
        ranks="resolved",
        begins=True,
        needs="not overfit_batch",
        metavar="auto|none|best|CHECKPOINT",
        outside="name",
        usual=True,
    )
    """auto: resume if the run folder has a checkpoint; none: start from scratch in a new folder; best: go back to the
    run's lowest validation loss; or the folder of a checkpoint."""
    init_from: OtherRunOrName | None = key(
        None,
        resume="refused",
        ranks="resolved",
        begins=True,
        metavar="RUN|hf:NAME",
        outside="name",
        usual=True,
    )
    """Start at step 0 with the weights of a run, a checkpoint, or hf:FOLDER or hf:NAME, which also set the model."""
    lora_from: UserPath | None = key(
        None, resume="free", ranks="same", begins=True, needs="lora_rank", metavar="FOLDER", outside="name"
    )
    """Begin with the adapters of a folder of Hugging Face's peft, or of `llmscale export`, in place of new ones."""
    allow_changed: list[str] = key(
        default_factory=list,
        resume="free",
        ranks="same",
        needs="not overfit_batch, not resume=none, not init_from",
        metavar="KEY",
        outside="value",
    )
    """On resume, accept a change of this key: global_batch_size, seq_len, data, seed or order. The log names the
    consequences."""

    # evaluation
    val_every: Steps = key(
        250, ge=0, off=0, resume="free", ranks="same", needs="not overfit_batch", by_ladder=True, usual=True
    )
    """Steps between validations; 0: never."""
    val_samples: Samples = key(256, ge=1, resume="free", ranks="same", needs="val_every, not overfit_batch")
    """Sequences per validation; all if the dataset has fewer."""
    sample_every: Steps = key(0, ge=0, resume="free", ranks="same")
    """Steps between printed text samples; 0: never."""
    sample_prompt: str = key(
        "The ",
        resume="free",
        ranks="same",
        needs="sample_every or eval_every, not sample_prompts",
        metavar="TEXT",
        outside="value",
    )
    """Prompt of the printed samples."""
    sample_prompts: UserPath | None = key(
        None, resume="free", ranks="resolved", needs="sample_every or eval_every", metavar="FILE", outside="name"
    )
    """File of prompts, in place of sample_prompt: one per line, or in FILE.jsonl objects with a "prompt"."""
    eval_every: Steps = key(0, ge=0, resume="free", ranks="same")
    """Steps between evaluations on eval_tasks, which also print text samples; 0: never."""
    eval_tasks: list[TaskFile] = key(
        default_factory=list, resume="free", ranks="resolved", needs="eval_every", metavar="FORMAT=FILE", outside="name"
    )
    """Evaluation items in JSON lines; FORMAT is hellaswag, multiple_choice, likelihood or text."""

    # watching
    log_every: Steps = key(10, ge=1, resume="free", ranks="same")
    """Steps between log lines."""
    check_every: Steps = key(100, ge=0, resume="free", ranks="same")
    """Steps between checks that all ranks use the same sample ids; 0: never."""
    check_numerics: bool = key(False, resume="free", ranks="same")
    """Compare the first two steps of this start with plain arithmetic, and print one line: the weights in use, the
    reduction of gradients, norm and clipping, the optimizer's step (docs/numerics.md). Takes up to 1 GiB a rank."""
    on_spike: OnSpike = key("warn", resume="logged", ranks="same")
    """Action after a loss spike. stop: end the run and print how to resume. skip: return to the checkpoint before it
    and leave out the batches."""
    notify: NonBlank | None = key(None, resume="free", ranks="same", metavar="COMMAND", outside="private")
    """Command for `sh -c` that is run when the run finishes, stops, fails or meets a loss spike, with the facts as JSON
    on its stdin. The run folder records it: keep secrets in variables."""
    hang_timeout_s: Seconds = key(1800.0, ge=0, resume="free", ranks="same", metavar="SECONDS")
    """Longest time of a step, with the validation and the save that follow it. A rank that takes longer writes its
    stacks to the run folder's logs/ and ends. 0: unlimited."""
    start_timeout_s: Seconds = key(1800.0, ge=0, resume="free", ranks="same", metavar="SECONDS")
    """Longest time of a start, or of a download in it, likewise."""
    profile: NonBlank | None = key(None, resume="free", ranks=RANK_0, metavar="A:B", outside="value")
    """Profile steps A to B-1: a trace and a table in the run folder's profile/."""
    plain: bool = key(False, resume="free", ranks=RANK_0)
    """Print a line per logged step, also on a terminal, in place of the live view."""
    verbose: bool = key(False, resume="free", ranks=RANK_0, usual=True)
    """Print every choice of a start and its times; start.txt of the run folder has them in any case."""
    wandb: bool = key(False, resume="free", ranks=RANK_0)
    """Log to Weights & Biases, from rank 0. Its variables count, such as WANDB_ENTITY; WANDB_MODE=offline needs no
    account."""
    wandb_project: NonBlank = key("llmscale", resume="free", ranks=RANK_0, needs="wandb", outside="value")
    """Weights & Biases project; if it is not given, WANDB_PROJECT counts."""
    wandb_name: NonBlank | None = key(None, resume="free", ranks=RANK_0, needs="wandb", outside="value")
    """Weights & Biases run name; default: WANDB_NAME, else the run folder's name."""
    tensorboard: bool = key(False, resume="free", ranks=RANK_0)
    """Write TensorBoard event files to the run folder's tensorboard/."""

    @property
    def minutes_between_saves(self) -> float:
        """Minutes after which a checkpoint is due by the clock; 0 for never, as beside save_every=0 alone."""
        is_off = not self.save_every and "save_every_minutes" not in self.model_fields_set
        return 0.0 if is_off else self.save_every_minutes or 0.0


#: Behaviour of every key.
KEYS: Mapping[str, Key] = {
    name: field.json_schema_extra
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.json_schema_extra, Key)
}


#: Changes after a checkpoint that --allow-changed must permit, each with what it breaks.
CHANGES_THAT_BREAK = {
    key.resume.under or name: key.resume.consequence for name, key in KEYS.items() if isinstance(key.resume, Breaks)
}
#: Pairs of keys for one quantity in two units. A flag for either overrides the file's entries for both.
EXCLUSIVE_KEYS = tuple(
    pair
    for first in dict.fromkeys(key.in_place_of for key in KEYS.values() if key.in_place_of)
    for pair in combinations((first, *(name for name, key in KEYS.items() if key.in_place_of == first)), 2)
)


def build_run_config(values: dict[str, object], where: str = "", flags: Collection[str] = ()) -> RunConfig:
    """Build a RunConfig from plain values. Raises ConfigError naming the first wrong key, its value and the rule.

    A preset's keys hold where `values` has none. `where` begins the messages about values that come from a file, which
    are all but `flags`.
    """

    def refuse(key: str, why: str) -> NoReturn:
        raise ConfigError(f"{'' if key in flags else where}{why}") from None

    model = values.get("model")
    if isinstance(model, str) and model in PRESETS:
        values = {**PRESETS[model].run, **values}
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
    numbers = {}
    for key, value in values.items():
        if isinstance(value, str) and (kind := _number_kind(key)) is not None:
            try:
                numbers[key] = _parse(kind, value)
            except ValueError:
                refuse(key, f"{key} = {value!r}: must be {_NUMBERS[kind]}.")
    given = values
    values = {**values, **numbers}
    try:
        config = RunConfig(**values)  # type: ignore[arg-type]  # checked by pydantic
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"]:
            key = str(first["loc"][0])
        else:
            key = "?"
        if key in numbers:
            first["input"] = given[key]
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(key, RunConfig.model_fields)
            refuse(key, f"unknown key '{key}'.{hint} `train.py --help all` lists all keys.")
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


def _parse(kind: type, text: str) -> int | float:
    """Return the number of `kind` that a text means. Raises ValueError."""
    if kind is int:
        return parse_whole(text)
    return float(parse_number(text, with_suffix=False))


def _number_kind(key: str) -> type | None:
    """Return int or float for a key that is a number."""
    if key not in RunConfig.model_fields:
        return None
    kinds = set(_alternatives(RunConfig.model_fields[key].annotation))
    return next((kind for kind in _NUMBERS if kind in kinds), None)


def _alternatives(annotation: object) -> Iterator[object]:
    """Yield a type, or the types of which it is one."""
    if not get_args(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from _alternatives(inner)


def _kind(key: str) -> str:
    return "a number" if _number_kind(key) else "text"
