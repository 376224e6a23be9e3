"""The shape of our GPT: every number that determines its parameters, FLOPs and activations. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, get_type_hints

from llmscale import limits
from llmscale.architecture.layers import (
    Architecture,
    Layer,
    ParameterTensors,
    attention,
    combined_layer,
    elementwise,
    embedding,
    experts,
    head,
    layer_norm,
    linear,
    rms_norm,
)
from llmscale.architecture.rope_scaling import parse_rope_scaling
from llmscale.errors import ConfigError
from llmscale.keys import Key

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
AttentionBias = Literal["none", "qkv", "all"]
AttentionChoice = Literal["auto", "sdpa"]
Norm = Literal["layernorm", "rmsnorm"]
NormPlacement = Literal["pre", "post"]
Positions = Literal["learned", "rotary"]
QKNorm = Literal["none", "head", "width"]
RouterScore = Literal["softmax", "sigmoid"]

#: Linear layers of a block by the names that --lora-targets has for them.
LORA_TARGETS = {
    "all": ("attn.qkv", "attn.proj", "mlp.up", "mlp.down"),
    "attention": ("attn.qkv", "attn.proj"),
    "mlp": ("mlp.up", "mlp.down"),
}
#: The embedding table is padded to a multiple of this many rows, so that the logits' matrix product has an even
#: shape for tensor cores (Megatron-LM pads to the same multiple).
VOCAB_MULTIPLE = 128


def shape_key(
    *,
    resume: Literal["logged", "weights"],
    of_model: Literal["size", "block", "experts", "training"] = "block",
    may_contradict: bool = False,
    run_default: object = None,
    metavar: str = "",
    **bounds: float,
) -> Key:
    """Declare that a field of GPTShape is a key of a run, with its legal values there (ge, gt, le, lt).

    The text below the field is the key's help. Its ranks are compared by the resolved shape.
    """
    return Key(
        resume,
        "resolved",
        of_model=of_model,
        may_contradict=may_contradict,
        run_default=run_default,
        metavar=metavar,
        outside="value",
        bounds=tuple(bounds.items()),
    )


def shortest_interval(n_layer: int, dense_layers: int, expert_interval: int) -> tuple[int, int]:
    """Return the dense_layers and the smallest expert_interval that give experts to the same blocks.

    Two blocks with experts have one description. A single one has several, such as 2 and 1, or 0 and 3, of three.
    """
    first = dense_layers + expert_interval - 1
    interval = min(expert_interval, n_layer - first)
    return first + 1 - interval, interval


@dataclass(frozen=True)
class GPTShape:
    """Shape of a decoder of equal blocks, of which some may have experts. The defaults are GPT-2's: pre-norm, learned
    positions, tied embeddings, an MLP four times as wide as the residual stream.

    Sizes of 0 and biases of None are derived from the others. Raises ConfigError when the numbers cannot form a model.
    """

    n_layer: Annotated[limits.Blocks, shape_key(resume="weights", of_model="size", ge=1)]
    """Transformer blocks."""
    n_head: Annotated[limits.Heads, shape_key(resume="weights", of_model="size", ge=1)]
    """Query heads; must divide n_embd unless head_dim is given."""
    n_embd: Annotated[limits.Width, shape_key(resume="weights", of_model="size", ge=1)]
    """Width of the residual stream."""
    vocab_size: int
    """Token ids the tokenizer can produce; the table itself has padded_vocab_size rows."""
    seq_len: int
    """Longest sequence, in tokens."""
    activation: Annotated[Activation, shape_key(resume="logged")] = "gelu"
    """MLP non-linearity: exact GELU, its tanh approximation (GPT-2's), ReLU (OPT's) or SiLU (Llama's)."""
    dropout: Annotated[limits.BelowOne, shape_key(resume="logged", of_model="training", run_default=0.0, ge=0.0)] = 0.0
    """Probability of dropping an activation: embeddings, attention weights, residual branches."""
    bias: Annotated[bool, shape_key(resume="weights")] = True
    """Biases in linear layers and layer norms, as in GPT-2."""
    n_kv_head: Annotated[limits.Heads, shape_key(resume="weights", of_model="size", ge=1)] = 0
    """Key-value heads, each shared by n_head / n_kv_head query heads (Ainslie et al. 2023)."""
    head_dim: Annotated[limits.Width, shape_key(resume="weights", of_model="size", ge=1)] = 0
    """Width of a head; default: the preset's, n_embd / n_head."""
    mlp_width: Annotated[limits.Width, shape_key(resume="weights", of_model="size", ge=1)] = 0
    """Hidden width of the MLP; default: the preset's, in its ratio to n_embd."""
    gated_mlp: Annotated[bool, shape_key(resume="weights")] = False
    """Gated MLP, whose hidden layer is activation(gate) x up (Shazeer 2020): SwiGLU with silu, GeGLU with gelu."""
    norm: Annotated[Norm, shape_key(resume="weights")] = "layernorm"
    """Layer norm (Ba et al. 2016) or RMS norm (Zhang and Sennrich 2019)."""
    norm_eps: Annotated[limits.Fraction, shape_key(resume="logged", gt=0)] = 1e-5
    """Constant added to a norm's variance."""
    norm_placement: Annotated[NormPlacement, shape_key(resume="weights")] = "pre"
    """Norms before attention and MLP, or between these and the residual stream (OLMo 2)."""
    positions: Annotated[Positions, shape_key(resume="weights")] = "learned"
    """Learned position vectors, or rotations of queries and keys (Su et al. 2021)."""
    rope_theta: Annotated[limits.Wavelength, shape_key(resume="logged", may_contradict=True, gt=0)] = 10_000.0
    """Base of the rotations' wavelengths."""
    rope_scaling: Annotated[str, shape_key(resume="logged", may_contradict=True, metavar="KIND[:NUMBERS]")] = "none"
    """Extension to longer contexts than the model was first trained on: none, linear:FACTOR,
    llama3:FACTOR,LOW,HIGH,ORIGINAL_SEQ_LEN, or yarn:FACTOR,ORIGINAL_SEQ_LEN."""
    qk_norm: Annotated[QKNorm, shape_key(resume="weights")] = "none"
    """RMS norm of queries and keys: none, within each head (Qwen 3), over their whole width (OLMo 2)."""
    attention_bias: Annotated[AttentionBias | None, shape_key(resume="weights")] = None
    """Biases in attention, in place of `bias`: none, qkv (Qwen 2), or all."""
    mlp_bias: Annotated[bool | None, shape_key(resume="weights")] = None
    """Biases in the MLP, in place of `bias`."""
    tied: Annotated[bool, shape_key(resume="weights")] = True
    """Use the token embedding as output head."""
    sliding_window: Annotated[limits.Positions, shape_key(resume="logged", may_contradict=True, ge=0)] = 0
    """Positions that attention sees, its own included (Mistral); 0: all earlier ones."""
    window_pattern: Annotated[str, shape_key(resume="logged", may_contradict=True)] = "L"
    """Blocks with the sliding window (L, local) and without it (G, global), repeated: GL, LG or LLLLLG, as in GPT-3,
    Gemma 2 and Gemma 3. Kept in its shortest form."""
    attention_kernel: Annotated[AttentionChoice, shape_key(resume="logged", of_model="training")] = "auto"
    """Kernel of attention with a window or a document mask: auto takes FlexAttention on GPUs that have it, which skips
    what the mask hides, and sdpa torch's scaled_dot_product_attention."""
    mlp_tile_tokens: Annotated[limits.BatchTokens, shape_key(resume="logged", of_model="training", ge=0)] = 0
    """Tokens of a micro-batch that an MLP computes at a time, such as 4096; default: all. Bounds its memory for long
    sequences, and computes it twice in the backward pass."""
    num_experts: Annotated[limits.Experts, shape_key(resume="weights", ge=0)] = 0
    """Experts: MLPs of a block among which a router chooses for each token (Shazeer et al. 2017, docs/models.md); 0:
    one MLP."""
    experts_per_token: Annotated[limits.Experts, shape_key(resume="logged", of_model="experts", ge=0)] = 0
    """Experts that a token is sent to; default: the preset's, 2."""
    expert_width: Annotated[limits.Width, shape_key(resume="weights", of_model="experts", ge=0)] = 0
    """Hidden width of an expert; default: the preset's, mlp_width."""
    shared_expert_width: Annotated[limits.Width, shape_key(resume="weights", of_model="experts", ge=0)] = 0
    """Hidden width of a shared expert, an MLP that computes every token (DeepSeek-AI 2024); 0: none."""
    dense_layers: Annotated[limits.Blocks, shape_key(resume="weights", of_model="experts", ge=0)] = 0
    """Number of first blocks that have one MLP and no experts."""
    expert_interval: Annotated[limits.Blocks, shape_key(resume="weights", of_model="experts", ge=1)] = 1
    """1: all blocks after the first dense_layers have experts; N: the last of every N of them has. Kept as small as the
    same blocks allow."""
    router_score: Annotated[RouterScore, shape_key(resume="weights", of_model="experts")] = "softmax"
    """Router's scores: the softmax over all experts, or each expert's sigmoid (DeepSeek V3)."""
    normalize_router: Annotated[bool, shape_key(resume="logged", of_model="experts")] = True
    """Divide the scores of a token's experts by their sum."""
    router_scale: Annotated[limits.Factor, shape_key(resume="logged", of_model="experts", gt=0)] = 1.0
    """Factor of the scores of a token's experts."""
    router_bias: Annotated[bool, shape_key(resume="weights", of_model="experts")] = False
    """Balance the experts' load by adding a bias to each score when experts are chosen, in place of a loss (Wang et al.
    2024, DeepSeek V3)."""
    lora_rank: Annotated[limits.Rank, shape_key(resume="weights", of_model="training", ge=0)] = 0
    """Train adapters of this rank beside frozen weights (LoRA, Hu et al. 2021, docs/fine_tuning.md); 0: none. Begins
    with --init-from."""
    lora_alpha: Annotated[limits.Factor, shape_key(resume="weights", of_model="training", ge=0)] = 0.0
    """Scale of the adapters, times lora_rank; default: 2 x lora_rank."""
    lora_targets: Annotated[
        str, shape_key(resume="weights", of_model="training", metavar="all|attention|mlp|LAYER,...")
    ] = ""
    """Linear layers with adapters: all, attention, mlp, or names among attn.qkv, attn.proj, mlp.up and mlp.down;
    default: all, with experts attention."""
    document_end: int | None = None
    """Last token of every document, from the dataset: a position sees its own document alone, and positions count from
    the document's beginning. None: documents of a sequence see each other."""

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "seq_len"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")
        self._fill_in()
        self._check_heads()
        self._check_bounds()
        self._check_experts()
        self._shorten_pattern()
        self._check_adapters()
        if self.mlp_tile_tokens and self.dropout:
            raise ConfigError(
                f"mlp_tile_tokens {self.mlp_tile_tokens} does not work with dropout {self.dropout:g}: tiles run again "
                "in the backward pass, and would draw other numbers. Give --dropout 0, or no tiles."
            )
        if self.document_end is not None and not 0 <= self.document_end < self.vocab_size:
            raise ConfigError(
                f"document_end {self.document_end} is not a token: the vocabulary is 0 to {self.vocab_size - 1}."
            )

    def _fill_in(self) -> None:
        if self.head_dim == 0 and self.n_embd % self.n_head:
            legal = [n for n in range(1, min(self.n_embd, 256) + 1) if self.n_embd % n == 0]
            raise ConfigError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}. "
                f"Legal n_head for this width: {', '.join(map(str, legal))}; or give head_dim."
            )
        follows: dict[str, object] = {
            "n_kv_head": self.n_kv_head or self.n_head,
            "head_dim": self.head_dim or self.n_embd // self.n_head,
            "mlp_width": self.mlp_width or 4 * self.n_embd,
            "attention_bias": self.attention_bias or ("all" if self.bias else "none"),
            "mlp_bias": (self.bias and not self.num_experts) if self.mlp_bias is None else self.mlp_bias,
            "rope_scaling": str(parse_rope_scaling(self.rope_scaling) or "none"),
        }
        if self.num_experts:
            follows["experts_per_token"] = self.experts_per_token or min(2, self.num_experts)
            follows["expert_width"] = self.expert_width or follows["mlp_width"]
        for name, value in follows.items():
            object.__setattr__(self, name, value)

    def _check_bounds(self) -> None:
        """Raise ConfigError for a number outside of the bounds that are declared with it."""
        for name, key in SHAPE_KEYS.items():
            value = getattr(self, name)
            for bound, limit in key.bounds:
                is_enough = value > limit if bound == "gt" else value >= limit
                if not is_enough or value == math.inf:
                    words = "a number above" if bound == "gt" else "at least"
                    raise ConfigError(f"{name} must be {words} {limit:g}, not {value}.")
        if self.dropout >= 1:
            raise ConfigError(f"dropout must be below 1, not {self.dropout}.")
        if self.norm_eps > 1:
            raise ConfigError(f"norm_eps must be at most 1, not {self.norm_eps}.")

    def _check_heads(self) -> None:
        if self.head_dim < 1 or self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            # A run can have at most 65,536 heads.
            legal = [n for n in range(1, min(self.n_head, 1 << 16) + 1) if self.n_head % n == 0]
            raise ConfigError(
                f"n_kv_head {self.n_kv_head} does not divide n_head {self.n_head}. Legal: {', '.join(map(str, legal))}."
                if self.head_dim >= 1
                else f"head_dim must be at least 1, not {self.head_dim}."
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ConfigError(
                f"rotary positions turn pairs of numbers, and a head of {self.head_dim} (head_dim) has one left over. "
                "Give an even head_dim."
            )

    def _check_experts(self) -> None:
        if not self.num_experts:
            for name, key in SHAPE_KEYS.items():
                if key.of_model == "experts" and (value := getattr(self, name)) != getattr(GPTShape, name):
                    raise ConfigError(
                        f"{name} {value} has no effect without experts. Give num_experts too, or drop it."
                    )
            return
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"experts_per_token {self.experts_per_token} is more than there are experts: num_experts is "
                f"{self.num_experts}. Give at most that."
            )
        if not any(self.is_sparse(block) for block in range(self.n_layer)):
            raise ConfigError(
                f"none of the {self.n_layer} blocks has experts with dense_layers {self.dense_layers} and "
                f"expert_interval {self.expert_interval}: their sum must be at most {self.n_layer}."
            )
        layout = shortest_interval(self.n_layer, self.dense_layers, self.expert_interval)
        for name, value in zip(("dense_layers", "expert_interval"), layout, strict=True):
            object.__setattr__(self, name, value)
        if self.mlp_bias:
            raise ConfigError("mlp_bias does not work with num_experts: experts have no biases. Give --no-mlp-bias.")
        if self.mlp_tile_tokens:
            raise ConfigError(
                f"mlp_tile_tokens {self.mlp_tile_tokens} does not work with num_experts {self.num_experts}: experts do "
                "not run in tiles. Drop one of them."
            )

    def _check_adapters(self) -> None:
        if not self.lora_rank:
            for name in ("lora_alpha", "lora_targets"):
                if value := getattr(self, name):
                    raise ConfigError(f"{name} {value} has no effect without adapters. Give lora_rank too, or drop it.")
            return
        targets = self.lora_targets or ("attention" if self.num_experts else "all")
        layers = {layer for name in targets.split(",") for layer in LORA_TARGETS.get(name, (name,))}
        if unknown := sorted(layers - {*LORA_TARGETS["all"]}):
            raise ConfigError(
                f"lora_targets names '{unknown[0][:80]}'. Legal: {', '.join(LORA_TARGETS)}, or some of "
                f"{', '.join(LORA_TARGETS['all'])}, separated by commas."
            )
        if self.num_experts and layers - {*LORA_TARGETS["attention"]}:
            raise ConfigError(
                f"lora_targets {targets} does not work with num_experts {self.num_experts}: experts have no adapters. "
                "Give --lora-targets attention."
            )
        in_order = tuple(layer for layer in LORA_TARGETS["all"] if layer in layers)
        shortest = next((name for name, group in LORA_TARGETS.items() if group == in_order), ",".join(in_order))
        object.__setattr__(self, "lora_targets", shortest)
        object.__setattr__(self, "lora_alpha", self.lora_alpha or 2.0 * self.lora_rank)

    def adapter_rows(self, layer: str) -> tuple[int, ...]:
        """Return the outputs of each adapter of a block's linear layer; none without adapters.

        Stacked layers have as many adapters as published models have layers: GPT-2's q, k and v are one.
        """
        names = LORA_TARGETS.get(self.lora_targets, tuple(self.lora_targets.split(",")))
        if not self.lora_rank or layer not in names:
            return ()
        queries = self.n_head * self.head_dim
        keys = self.n_kv_head * self.head_dim
        m = self.mlp_width
        return {
            "attn.qkv": (queries, keys, keys) if self.positions == "rotary" else (queries + 2 * keys,),
            "mlp.up": (m, m) if self.gated_mlp else (m,),
        }.get(layer, (self.n_embd,))

    def is_sparse(self, block: int) -> bool:
        """Return whether a block has experts: the last of every expert_interval blocks after the dense ones."""
        after = block - self.dense_layers
        return self.num_experts > 0 and after >= 0 and (after + 1) % self.expert_interval == 0

    def _shorten_pattern(self) -> None:
        pattern = self.window_pattern
        layers = self.n_layer
        if pattern:
            letters = (pattern * -(-layers // len(pattern)))[:layers]
        else:
            letters = ""
        if not letters or set(pattern) - {"L", "G"} or "L" not in letters:
            raise ConfigError(
                f"window_pattern '{pattern[:80]}' is not legal: it has a letter for each of the {layers} blocks, and "
                "is repeated if it is shorter. L (local) has the sliding window, G (global) has none; an L is needed."
            )
        if "G" in letters and not self.sliding_window:
            raise ConfigError(
                f"window_pattern {pattern[:80]} has no effect without a window. Give --sliding-window too, or neither."
            )
        repeats = (size for size in range(1, layers + 1) if (letters[:size] * -(-layers // size))[:layers] == letters)
        object.__setattr__(self, "window_pattern", letters[: next(repeats)])

    def is_local(self, block: int) -> bool:
        """Return whether attention of a block has the sliding window, if there is one."""
        return self.window_pattern[block % len(self.window_pattern)] == "L"

    @property
    def global_layers(self) -> int:
        """Number of blocks that see all earlier positions in spite of a window."""
        repeats, rest = divmod(self.n_layer, len(self.window_pattern))
        return repeats * self.window_pattern.count("G") + self.window_pattern[:rest].count("G")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to a multiple of VOCAB_MULTIPLE."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def qkv_heads(self) -> int:
        """Number of query, key and value heads, which one matrix computes."""
        return self.n_head + 2 * self.n_kv_head

    @property
    def has_window(self) -> bool:
        """True when the sliding window, of any block, is shorter than a full sequence."""
        return 0 < self.sliding_window < self.seq_len

    @property
    def has_document_mask(self) -> bool:
        """True when documents of a sequence do not see each other."""
        return self.document_end is not None

    @property
    def has_mask(self) -> bool:
        """True when attention of any block hides any earlier position."""
        return self.has_window or self.has_document_mask

    def changed(self, given: Mapping[str, object]) -> GPTShape:
        """Return the same kind of model with other values of some fields.

        When the width or the heads change, head_dim follows, and the MLPs' widths and the number of heads that share a
        key keep their ratios. For a fractional ratio an MLP's width is rounded up to a multiple of 64.
        """
        follows: dict[str, object] = {}
        if any(given.get(name, getattr(self, name)) != getattr(self, name) for name in ("n_head", "n_embd")):
            n_head = given.get("n_head", self.n_head)
            n_embd = given.get("n_embd", self.n_embd)
            assert isinstance(n_head, int) and isinstance(n_embd, int)
            shared = math.gcd(self.n_head // self.n_kv_head, n_head)
            follows = {"n_kv_head": n_head // shared, "head_dim": 0}
            for name in ("mlp_width", "expert_width", "shared_expert_width"):
                ratio, rest = divmod(getattr(self, name), self.n_embd)
                rounded = -(-getattr(self, name) * n_embd // self.n_embd // 64) * 64
                follows[name] = rounded if rest else ratio * n_embd
        is_sparse = given.get("num_experts", self.num_experts) != 0
        if is_sparse != (self.num_experts != 0):
            follows["mlp_bias"] = None
            if not is_sparse:
                follows |= {
                    name: getattr(GPTShape, name) for name, key in SHAPE_KEYS.items() if key.of_model == "experts"
                }
        if "bias" in given:
            follows |= {"attention_bias": None, "mlp_bias": None}
        return replace(self, **{**follows, **given})  # type: ignore[arg-type]  # by the fields' names

    @cached_property
    def architecture(self) -> Architecture:
        """Layers of the model."""
        return describe_gpt(self, self.padded_vocab_size)

    @cached_property
    def tensors(self) -> ParameterTensors:
        """Parameters of the model, one by one."""
        return ParameterTensors(self.architecture)

    @property
    def block_parameters(self) -> int:
        """Number of parameters of one block."""
        return self.architecture.block_parameters

    @property
    def num_parameters(self) -> int:
        """Number of parameters that DeepSpeed stores: tied embeddings counted once, padding rows included."""
        return self.architecture.num_parameters

    @property
    def active_parameters(self) -> int:
        """Number of those that one token uses."""
        return self.architecture.active_parameters

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward, at the full sequence length; masked parts are included."""
        return self.architecture.flops_per_token(self.seq_len)


#: Behaviour of the fields that a preset, a run's configuration or a published config.json sets.
SHAPE_KEYS: Mapping[str, Key] = {
    name: part
    for name, hint in get_type_hints(GPTShape, include_extras=True).items()
    for part in getattr(hint, "__metadata__", ())
    if isinstance(part, Key)
}


def build_shape(values: Mapping[str, object]) -> GPTShape:
    """Build a shape from field values whose types were checked. Raises ConfigError."""
    return GPTShape(**values)  # type: ignore[arg-type]


def describe_gpt(shape: GPTShape, rows: int) -> Architecture:
    """Describe the layers of llmscale.model.gpt; `rows`: rows of the token embedding and of an untied output head."""
    h = shape.n_embd
    positions = (embedding("wpe", shape.seq_len, h),) if shape.positions == "learned" else ()
    before, after = (_norm(shape, "ln_1"),), (_norm(shape, "ln_2"),)
    attend = _attention_layers(shape)
    mlp = _mlp_layers(shape, "mlp", shape.mlp_width)
    sparse = _expert_layers(shape)
    add = elementwise(h)
    is_pre = shape.norm_placement == "pre"

    def block(mlp: tuple[Layer, ...]) -> tuple[Layer, ...]:
        if is_pre:
            return (*before, *attend, add, *after, *mlp, add)
        return (*attend, *before, add, *mlp, *after, add)

    blocks = range(shape.n_layer) if sparse else ()
    others = frozenset(index for index in blocks if not shape.is_sparse(index))
    return Architecture(
        before_blocks=(embedding("wte", rows, h), *positions),
        block=block(sparse or mlp),
        n_layer=shape.n_layer,
        after_blocks=(_norm(shape, "ln_f"), head("head", rows, h, tied_to="wte" if shape.tied else "")),
        parameter_order=tuple(layer.name for layer in (*before, *attend, *after, *mlp, *sparse) if layer.name),
        sliding_window=shape.sliding_window,
        global_layers=shape.global_layers,
        other_block=block(mlp) if others else (),
        other_blocks=others,
    )


def _norm(shape: GPTShape, name: str) -> Layer:
    if shape.norm == "rmsnorm":
        return rms_norm(name, shape.n_embd)
    return layer_norm(name, shape.n_embd, bias=shape.bias)


def _attention_layers(shape: GPTShape) -> tuple[Layer, ...]:
    queries = shape.n_head * shape.head_dim
    keys = shape.n_kv_head * shape.head_dim
    norm_widths = {"none": (), "head": (shape.head_dim,) * 2, "width": (queries, keys)}[shape.qk_norm]
    names = ("attn.q_norm", "attn.k_norm")
    turned = (elementwise(queries + keys),) if shape.positions == "rotary" else ()
    return (
        linear(
            "attn.qkv",
            shape.n_embd,
            queries + 2 * keys,
            bias=shape.attention_bias != "none",
            row_blocks=(queries, keys, keys),
            adapter=_adapter(shape, "attn.qkv"),
        ),
        *(rms_norm(name, width) for name, width in zip(names, norm_widths, strict=False)),
        *turned,
        attention(shape.n_head, shape.head_dim),
        linear(
            "attn.proj",
            queries,
            shape.n_embd,
            bias=shape.attention_bias == "all",
            adapter=_adapter(shape, "attn.proj"),
        ),
    )


def _adapter(shape: GPTShape, layer: str) -> tuple[int, tuple[int, ...]]:
    """Return the rank and the outputs of each adapter of a block's linear layer."""
    return shape.lora_rank, shape.adapter_rows(layer)


def _mlp_layers(shape: GPTShape, name: str, m: int) -> tuple[Layer, ...]:
    bias = bool(shape.mlp_bias)
    hidden = (m, m) if shape.gated_mlp else (m,)
    prefix = "" if shape.mlp_tile_tokens else f"{name}."
    layers = (
        linear(
            f"{prefix}up",
            shape.n_embd,
            sum(hidden),
            bias=bias,
            row_blocks=hidden,
            adapter=_adapter(shape, f"{name}.up"),
        ),
        elementwise(2 * m if shape.gated_mlp else m),
        linear(f"{prefix}down", m, shape.n_embd, bias=bias, adapter=_adapter(shape, f"{name}.down")),
    )
    if shape.mlp_tile_tokens:
        return (combined_layer(name, *layers),)
    return layers


def _expert_layers(shape: GPTShape) -> tuple[Layer, ...]:
    if not shape.num_experts:
        return ()
    count = shape.num_experts
    width = shape.shared_expert_width
    router = linear("mlp.router", shape.n_embd, count, bias=False)
    return (
        replace(router, parameters=(replace(router.parameters[0], kind="embedding"),)),
        experts(
            "mlp.experts",
            shape.n_embd,
            shape.expert_width,
            count,
            shape.experts_per_token,
            gated=shape.gated_mlp,
        ),
        *(_mlp_layers(shape, "mlp.shared", width) if width else ()),
    )
