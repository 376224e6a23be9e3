from __future__ import annotations

import pytest

from llmscale.architecture.hf_config import family_of
from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.presets import nominal_parameters
from llmscale.config.resolve import ResolvedRun, SetFacts, fitting_vocabulary, resolve_run, resolve_shape
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import RunConfig, build_run_config
from llmscale.errors import ConfigError

FACTS = SetFacts(vocab_size=50257, seq_len=1024, num_train_samples=10_000, eot_token=50256)


def resolve(
    *flags: str, facts: SetFacts = FACTS, world_size: int = 4, ds: dict[str, object] | None = None
) -> ResolvedRun:
    return resolve_run(parse_run_config(flags), parse_ds_config(ds or {}, "my.json"), facts, world_size)


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 6e-4), ("muon", 6e-4), ("adafactor", 3e-2)])
def test_every_optimizer_has_its_own_default_rate(optimizer: str, rate: float) -> None:
    """Adafactor's is relative to the weights: with AdamW's it hardly trained."""
    flags = ("--model", "gpt2-124m", "--optimizer", optimizer)
    ds: dict[str, object] = {"zero_optimization": {"stage": 0}}
    assert resolve(*flags, ds=ds).schedule.lr == pytest.approx(rate)
    assert resolve(*flags, "--lr", "0.5", ds=ds).schedule.lr == 0.5


@pytest.mark.parametrize(
    ("optimizer", "rate"), [((), 1e-2), (("muon",), 1e-2), (("adamw",), 1e-3), (("adafactor",), 5e-2)]
)
def test_another_optimizer_than_a_preset_s_has_the_rate_of_a_model_of_its_size(
    optimizer: tuple[str, ...], rate: float
) -> None:
    flags = ("--model", "tiny-muon-1m", *(("--optimizer", *optimizer) if optimizer else ()))
    assert resolve(*flags, ds={"zero_optimization": {"stage": 0}}).schedule.lr == pytest.approx(rate)


def test_a_preset_brings_shape_batch_and_learning_rate() -> None:
    run = resolve("--model", "gpt2-124m")
    assert (run.shape.n_layer, run.shape.n_head, run.shape.n_embd) == (12, 12, 768)
    assert run.plan.tokens_per_step == 2**19
    assert run.schedule.lr == 6e-4
    assert run.total_steps == 10_000 // 512, "one pass over the data"


@pytest.mark.parametrize("world_size", [1, 8, 12])
@pytest.mark.parametrize("seq_len", [96, 1000, 1024, 50_000])
@pytest.mark.parametrize("model", ["tiny-1m", "gpt2-124m"])
@pytest.mark.parametrize(
    "flags", [[], ["--micro-batch-size", "3"], ["--batch-ramp-from=64", "--batch-ramp-tokens=1000000000"]]
)
def test_a_default_batch_is_never_refused_and_common_ranks_divide_it(
    model: str, seq_len: int, world_size: int, flags: list[str]
) -> None:
    facts = SetFacts(257, seq_len, 10**9, 256)
    batch = resolve("--model", model, *flags, facts=facts, world_size=world_size).plan.global_batch_size
    wanted = (4096 if model == "tiny-1m" else 2**19) / seq_len
    if not flags:
        assert batch == world_size or 0.66 * wanted <= batch <= 1.5 * wanted
        assert batch == world_size or batch % (64 if wanted >= 512 else 8 if wanted >= 8 else 1) == 0
    if wanted >= 200 and not flags:
        assert batch % 8 == 0 and 0.95 < batch / wanted < 1.05


def test_vocabulary_and_context_are_the_data_set_s() -> None:
    shape = resolve("--model", "gpt2-124m", facts=SetFacts(257, 64, 100_000, 256)).shape
    assert (shape.vocab_size, shape.seq_len) == (257, 64)


def test_flags_override_the_preset() -> None:
    flags = "--model gpt2-124m --n-layer 3 --n-head 2 --n-embd 64 --activation relu --lr 0.5 --dropout 0.1 --no-bias"
    run = resolve(*flags.split())
    shape = run.shape
    assert (shape.n_layer, shape.n_head, shape.n_embd, shape.activation) == (3, 2, 64, "relu")
    assert (shape.dropout, shape.bias, run.schedule.lr) == (0.1, False, 0.5)


def test_batch_and_duration_in_tokens() -> None:
    run = resolve("--global-batch-tokens", "8192", "--tokens", "100000")
    assert run.plan.global_batch_size == 8
    assert run.total_steps == 13, "100,000 / 8,192 = 12.2, rounded up"
    assert run.total_tokens == 13 * 8192


def test_schedule_defaults() -> None:
    cosine = resolve("--global-batch-size", "8", "--steps", "1000").schedule
    assert (cosine.schedule, cosine.warmup_steps, cosine.decay_steps, cosine.min_lr_frac) == ("cosine", 10, 1000, 0.1)
    wsd = resolve("--global-batch-size", "8", "--steps", "1000", "--schedule", "wsd").schedule
    assert (wsd.decay_steps, wsd.min_lr_frac) == (200, 0.0)
    assert resolve("--global-batch-size=8", "--steps=1000000").schedule.warmup_steps == 2000
    assert resolve("--global-batch-size=8", "--steps=1").schedule.learning_rate(0) > 0


def test_schedule_in_tokens_and_an_explicit_zero() -> None:
    flags = ("--global-batch-size", "8", "--steps", "100")
    schedule = resolve(*flags, "--warmup-tokens", "16385", "--decay-tokens", "409600").schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == (3, 50)
    schedule = resolve(*flags, "--warmup-steps", "0", "--min-lr-frac", "0").schedule
    assert (schedule.warmup_steps, schedule.min_lr_frac) == (0, 0.0)


def test_the_world_size_changes_the_accumulation_and_nothing_else() -> None:
    one, four = (resolve("--global-batch-size", "8", "--micro-batch-size", "1", world_size=n) for n in (1, 4))
    assert (one.plan.gradient_accumulation_steps, four.plan.gradient_accumulation_steps) == (8, 2)
    assert (one.shape, one.schedule, one.total_steps) == (four.shape, four.schedule, four.total_steps)


def test_a_set_smaller_than_a_batch_still_gives_a_step() -> None:
    assert resolve("--global-batch-size", "64", facts=SetFacts(257, 8, 10, 256)).total_steps == 1


def test_the_ds_config_is_resolved_with_the_run_and_flags_override_it() -> None:
    ds = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "activation_checkpointing": {}}
    run = resolve("--global-batch-size", "8", "--micro-batch-size", "1", ds=ds)
    assert (run.zero_stage, run.precision, run.checkpointing) == (1, "bf16", "full")
    assert (run.ds_config["gradient_accumulation_steps"], run.ds_config["gradient_clipping"]) == (2, 1.0)
    flags = ("--precision=fp32", "--activation-checkpointing=selective", "--gradient-clipping=0.5")
    run = resolve("--global-batch-size=8", *flags, ds=ds)
    assert (run.precision, run.checkpointing) == ("fp32", "selective")
    assert run.ds_config["bf16"] == {"enabled": False}
    assert run.ds_config["gradient_clipping"] == 0.5


@pytest.mark.parametrize(
    ("flags", "ds", "without_bf16"),
    [
        ([], {"bf16": {"enabled": "auto"}}, "fp32"),
        ([], {"bf16": {"enabled": True}}, "bf16"),
        (["--precision", "bf16"], {"bf16": {"enabled": "auto"}}, "bf16"),
        (["--precision", "autocast"], {"bf16": {"enabled": "auto"}}, "autocast"),
        ([], {"bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": "bf16"}}, "bf16"),
        ([], {"bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": "fp32"}}, "fp32"),
        ([], {"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}, "fp16"),
        ([], {}, "fp32"),
    ],
)
def test_a_cpu_without_bf16_arithmetic_takes_fp32_where_nothing_names_bf16(
    flags: list[str], ds: dict[str, object], without_bf16: str
) -> None:
    run = resolve(*flags, ds={"zero_optimization": {"stage": 2}, **ds})
    there = run.on_cpu(has_bf16=False)
    assert run.on_cpu().precision == run.precision
    assert there.precision == without_bf16
    assert there.ds_config["bf16"]["enabled"] is (without_bf16 == "bf16")  # type: ignore[index]
    exchanged = {"autocast": "bf16"}.get(without_bf16, without_bf16)
    assert there.ds_config["communication_data_type"] == exchanged


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--global-batch-tokens", "5000"], "not a multiple of seq_len 1024. The nearest legal values are 4096 or 51"),
        (["--global-batch-tokens", "500"], "The nearest legal values are 1024."),
        (["--muon-lr-factor", "2"], "--muon-lr-factor needs --optimizer muon. Without that 2.0 has no effect"),
        (["--keep-zeros", "--optimizer", "muon"], "--keep-zeros does not work with --optimizer muon"),
    ],
)
def test_what_cannot_work_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(*flags)
    assert message in str(raised.value)


def test_muons_matrices_have_a_learning_rate_of_their_own() -> None:
    factors = [
        [group.learning_rate_factor for group in resolve("--optimizer", "muon", *flags).optimizer.groups]
        for flags in ((), ("--muon-lr-factor", "0.5"))
    ]
    assert factors == [[1.0, 1.0, 1.0], [0.5, 1.0, 1.0]]


def test_a_run_folder_names_all_ranks() -> None:
    assert resolve("--global-batch-size", "8", "--micro-batch-size", "1").as_dict()["plan"] == {
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "world_size": 4,
        "sequence_parallel_size": 1,
        "expert_parallel_size": 1,
        "seq_len": FACTS.seq_len,
    }


def test_ranks_that_divide_sequences_count_in_deepspeeds_batch_alone() -> None:
    flags = ("--model", "gpt2-124m", "--global-batch-size", "8", "--sequence-parallel-size")
    run = resolve(*flags, "2")
    assert (run.plan.global_batch_size, run.plan.ranks.data_parallel_size) == (8, 2)
    assert run.ds_config["train_batch_size"] == 16
    with pytest.raises(ConfigError, match="8 does not divide the 12 query heads"):
        resolve(*flags, "8", world_size=8)


def test_a_document_ends_with_the_data_set_s_token_when_it_is_asked_for() -> None:
    assert resolve("--model", "gpt2-124m").shape.document_end is None
    shape = resolve("--model", "llama3-8b", "--document-mask", "--n-head", "16").shape
    assert (shape.document_end, shape.has_mask) == (50256, True)
    assert family_of(shape).model_type == "llama", "which documents see each other is not the weights' business"


#: The configuration in a checkpoint that was made before shapes had more than these fields.
OLD = {
    "config": None,
    "ds": "ds_configs/zero1.json",
    "model": "tiny-1m",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "seq_len": None,
    "activation": None,
    "dropout": 0.1,
    "data": "set",
    "global_batch_size": 8,
    "steps": 20,
    "lr": 0.003,
}


@pytest.mark.parametrize("bias", [True, False])
def test_a_configuration_of_before_the_families_is_the_same_gpt2(bias: bool) -> None:
    shape = resolve_run(RunConfig(**{**OLD, "bias": bias}), parse_ds_config({}, "my.json"), FACTS, 1).shape
    expected = GPTShape(2, 2, 32, FACTS.vocab_size, FACTS.seq_len, "gelu_tanh", dropout=0.1, bias=bias)
    assert shape == expected
    assert (shape.n_kv_head, shape.positions, shape.norm, shape.tied) == (2, "learned", "layernorm", True)


@pytest.mark.parametrize(
    ("zero", "reason"),
    [
        ({"stage": 0}, "stage 0, whose norm and clipping"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size, whose copies"),
        ({"stage": 1, "contiguous_gradients": False}, "contiguous_gradients false at stage 1"),
        ({"stage": 2, "reduce_scatter": False}, "reduce_scatter false at stage 2"),
    ],
)
def test_keys_that_deepspeed_cannot_divide_experts_with_are_refused(zero: dict[str, object], reason: str) -> None:
    flags = ("--model", "gpt2-124m", "--global-batch-size", "8", "--num-experts", "4", "--expert-parallel-size", "2")
    with pytest.raises(ConfigError, match=rf"my.json: DeepSpeed cannot divide experts .*{reason}.*or drop"):
        resolve(*flags, ds={"zero_optimization": zero})
    resolved = resolve(*flags, ds={"zero_optimization": {"stage": 3, "reduce_scatter": False}})
    assert (resolved.plan.ranks.expert_shard_ranks, resolved.plan.ranks.experts_of_rank(4)) == (2, 2)


@pytest.mark.parametrize(
    ("keys", "vocab_size"),
    [
        ({"model": "tiny-1m"}, 2048),
        ({"model": "tiny-10m"}, 2048),
        ({"model": "gpt2-124m"}, 32768),
        ({"model": "tiny-10m", "vocab_size": 1000}, 512),
        ({"model": "tiny-1m", "n_layer": 8}, 4096),
    ],
)
def test_a_vocabulary_fits_the_size_in_a_model_s_name(keys: dict[str, object], vocab_size: int) -> None:
    config = build_run_config(keys)
    assert fitting_vocabulary(config, 128) == vocab_size
    if len(keys) == 1:
        size = resolve_shape(config, SetFacts(vocab_size, 128, 1, 0)).num_parameters
        assert size == pytest.approx(nominal_parameters(config.model), rel=0.16)
