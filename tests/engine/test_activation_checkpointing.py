"""Run as a script, this file is one rank of the distributed tests."""

from __future__ import annotations

import contextlib
import json
import sys
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.engine.activation_checkpointing import build_block_checkpoint, tile_mlps
from llmscale.engine.deepspeed_patches import compute_in_bf16
from llmscale.errors import ConfigError
from llmscale.model.gpt import GPT
from tests.rank_end import end_rank

WAYS: dict[str, tuple[str, dict[str, object]]] = {
    "none": ("none", {}),
    "full": ("full", {"partition_activations": False, "number_checkpoints": 3}),
    "full, on the host": ("full", {"cpu_checkpointing": True}),
    "full, timed": ("full", {"profile": True, "synchronize_checkpoint_boundary": True}),
    "selective": ("selective", {"cpu_checkpointing": False}),
}

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 300, "seq_len": 32}
BLOCKS: dict[str, dict[str, object]] = {
    "gpt2": {},
    "llama": {
        "norm": "rmsnorm",
        "bias": False,
        "positions": "rotary",
        "activation": "silu",
        "gated_mlp": True,
        "n_kv_head": 2,
        "qk_norm": "head",
        "mlp_width": 90,
        "tied": False,
        "sliding_window": 9,
    },
}


def test_none_keeps_everything() -> None:
    assert build_block_checkpoint("none", {"cpu_checkpointing": True}) is None


@pytest.mark.parametrize("key", ["cpu_checkpointing", "profile", "synchronize_checkpoint_boundary"])
def test_selective_refuses_what_it_cannot_honour(key: str) -> None:
    with pytest.raises(ConfigError, match=f"'selective' .* {key}. Remove the key, or choose 'full'"):
        build_block_checkpoint("selective", {key: True})


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_selective_recomputes_the_cheap_and_keeps_the_dear(dropout: float) -> None:
    counts = {mode: count_operators_in_backward(mode, dropout) for mode in ("none", "selective")}
    matrix_products = ("mm", "addmm")
    assert [counts["selective"][op] for op in matrix_products] == [counts["none"][op] for op in matrix_products]
    assert counts["none"]["gelu"] == 0
    assert counts["selective"]["gelu"] == counts["selective"]["native_layer_norm"] / 2 == 3


@pytest.mark.parametrize(("dropout", "runs"), [(0.0, 1), (0.1, 2)])
def test_selective_runs_fused_attention_again_only_for_its_random_numbers(dropout: float, runs: int) -> None:
    """Later dropouts of the block continue the sequence, so a recomputation must not skip its draws."""
    checkpoint = build_block_checkpoint("selective", {})
    assert checkpoint is not None
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    count = 0

    class FlashAttentionOfAGpu(TorchDispatchMode):
        """Stands in for the kernels that a CPU lacks: as many results, of the right shapes."""

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal count
            if op is attention.default:
                count += 1
                query, small = args[0], torch.zeros(2)
                return (query.clone(), query[..., 0].clone(), small, small, 8, 8, small, small, small)
            if op is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
                return tuple(torch.zeros_like(tensor) for tensor in args[1:4])
            return op(*args, **(kwargs or {}))

    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    with FlashAttentionOfAGpu():
        y = checkpoint(lambda x: attention(x, x, x, dropout, True)[0] * 2, x)
        y.sum().backward()
    assert count == runs


def test_selective_recomputes_what_gathers_run_in_another_order() -> None:
    """ZeRO-3 gathers within a block what no earlier block has prefetched: in the recomputation it is something else."""
    model = GPT(GPTShape(2, 4, 64, 300, 32), seed=0, checkpoint=build_block_checkpoint("selective", {}))
    gathers = iter(range(100))

    def gather(*_: object) -> None:
        """Stand in for ZeRO-3's hooks: more operators at each call, some of them first seen in the recomputation."""
        part = torch.ones(2)
        for _ in range(next(gathers)):
            torch.cat([part, part]).mul(2)
        if next(gathers) > 20:
            part.sqrt()

    for module in model.blocks.modules():
        module.register_forward_pre_hook(gather)
    tokens = torch.arange(64).view(2, 32)
    loss = model(tokens, tokens)
    loss.backward()
    plain = GPT(GPTShape(2, 4, 64, 300, 32), seed=0)
    plain(tokens, tokens).backward()
    for weight, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight.grad, expected.grad)


def test_selective_refuses_to_hand_out_the_result_of_another_product() -> None:
    checkpoint = build_block_checkpoint("selective", {})
    is_again = False

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, x) if is_again else x @ x

    y = checkpoint(block, torch.randn(3, 3, requires_grad=True))
    is_again = True
    with pytest.raises(RuntimeError, match=r"runs aten.addmm.default where its forward pass ran aten.mm.default"):
        y.sum().backward()


@pytest.mark.parametrize("norm_placement", ["pre", "post"])
def test_selective_keeps_nothing_within_a_tile(norm_placement: str) -> None:
    tokens = torch.arange(64).view(2, 32)
    alive, gradients = {}, {}
    for tile in (0, 16):
        model = build_tiled(tile, "selective", norm_placement)
        with Products() as products:
            loss = model(tokens, tokens)
        alive[tile] = products.alive
        loss.backward()
        gradients[tile] = [weight.grad for weight in model.parameters()]
    blocks, products_of_mlp = 2, 2
    assert alive[0] - alive[16] == blocks * products_of_mlp
    torch.testing.assert_close(gradients[16], gradients[0])


@pytest.mark.parametrize(("norm_placement", "times"), [("pre", 0), ("post", 1)])
def test_selective_recomputes_a_tiled_mlp_only_where_a_gradient_depends_on_it(norm_placement: str, times: int) -> None:
    tokens = torch.arange(64).view(2, 32)
    ran = {}
    for mode in ("none", "selective"):
        model = build_tiled(16, mode, norm_placement)
        loss = model(tokens, tokens)
        with Products() as products:
            loss.backward()
        ran[mode] = len(products.storages)
    tiles, products_of_mlp = 64 // 16, 2
    assert ran["selective"] - ran["none"] == times * 2 * tiles * products_of_mlp


def build_tiled(tile_tokens: int, mode: CheckpointingMode, norm_placement: str) -> GPT:
    """A GPT of two blocks whose MLPs run in tiles, unless `tile_tokens` is 0."""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 300, "seq_len": 32}
    shape = build_shape({**sizes, "mlp_tile_tokens": tile_tokens, "norm_placement": norm_placement})
    model = GPT(shape, seed=0, checkpoint=build_block_checkpoint(mode, {}))
    if tile_tokens:
        tile_mlps(model, tile_tokens, zero_stage=0, checkpointing=mode)
    return model


class Products(TorchDispatchMode):
    """Storages of the results of matrix products of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and 300 not in result.shape:
            self.storages.append(weakref.ref(result.untyped_storage()))
        return result

    @property
    def alive(self) -> int:
        return sum(storage() is not None for storage in self.storages)


def test_selective_recomputes_to_the_end_before_gradients_enter() -> None:
    """ZeRO-3 releases weights in forward hooks and gathers them in backward hooks: in any other order they clash."""
    model = GPT(GPTShape(1, 4, 64, 300, 32), seed=0, checkpoint=build_block_checkpoint("selective", {}))
    events: list[str] = []
    last = model.blocks[0].mlp.down
    last.register_forward_pre_hook(lambda *_: events.append("begins"))
    last.register_forward_hook(lambda *_: events.append("ends"))
    last.register_full_backward_pre_hook(lambda *_: events.append("gradient"))
    tokens = torch.zeros(2, 32, dtype=torch.long)
    model(tokens, tokens).backward()
    assert events == ["begins", "ends", "begins", "ends", "gradient"]


@pytest.mark.parametrize(
    ("block", "zero_stage", "world_size"),
    [
        ("gpt2", 2, 2),
        *[pytest.param("gpt2", stage, world, marks=pytest.mark.slow) for stage, world in ((0, 2), (3, 1), (3, 2))],
        *[
            pytest.param("llama", stage, world, marks=pytest.mark.slow)
            for stage, world in ((0, 2), (2, 2), (3, 1), (3, 2))
        ],
    ],
)
def test_losses_and_gradients_are_identical(run_ranks, block: str, zero_stage: int, world_size: int) -> None:
    """Bit by bit, over two steps of two micro-steps, with and without dropout, in fp32 and under autocast."""
    for outcomes in run_ranks(world_size, f"{block}-{zero_stage}"):
        assert len(outcomes) == len(WAYS) + 4 * 3
        for name, outcome in outcomes.items():
            setting = name.split("/")[0]
            assert outcome == outcomes[f"{setting}/none"], name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cpu_checkpointing_takes_activations_off_the_gpu(run_ranks) -> None:
    (outcome,) = run_ranks(1, "gpu")
    inputs_bytes = GPU_SHAPE.n_layer * GPU_BATCH * GPU_SHAPE.seq_len * GPU_SHAPE.n_embd * 4
    # The last block's input may wait on the GPU, where it is needed first.
    saved = outcome["full"]["bytes"] - outcome["full, on the host"]["bytes"]
    assert saved > 0.5 * inputs_bytes
    assert outcome["full"]["bytes"] < outcome["selective"]["bytes"] < outcome["none"]["bytes"]
    assert all(outcome[variant]["gradients"] == outcome["none"]["gradients"] for variant in outcome)


@pytest.fixture
def run_ranks(ranks):
    """`run_ranks(n, job)`: what each of n ranks of this file run as a script printed as JSON."""

    def run(world_size: int, job: str) -> list[dict]:
        jobs = ranks([__file__, job], world_size)
        outputs = jobs.wait()
        assert jobs.exit_codes == [0] * world_size, outputs
        lines = [line for output in outputs for line in output.splitlines()]
        answers = [json.loads(line) for line in lines if line.startswith("{")]
        assert len(answers) == world_size
        return answers

    return run


def count_operators_in_backward(mode, dropout: float) -> Counter[str]:
    model = GPT(GPTShape(3, 4, 64, 300, 32, dropout=dropout), seed=0)
    model.checkpoint = build_block_checkpoint(mode, {})
    loss = model(torch.zeros(2, 32, dtype=torch.long), torch.ones(2, 32, dtype=torch.long))
    counts: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            counts[op.__name__.split(".")[0]] += 1
            return op(*args, **(kwargs or {}))

    with Count():
        loss.backward()
    return counts


def train_two_steps(
    block: str, zero_stage: int, variant: str, *, dropout: float, autocast: bool, mask: bool
) -> list[float]:
    """Losses and the sums of every gradient, in full fp64 digits."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    ds_config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": zero_stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    mode, section = WAYS[variant]
    masked: dict = {"document_end": 0, "sliding_window": 11, "positions": "rotary", "n_kv_head": 2} if mask else {}
    shape = build_shape({**SIZES, **BLOCKS[block], "dropout": dropout, **masked})
    sharded = deepspeed.zero.Init(config_dict_or_path=ds_config) if zero_stage == 3 else contextlib.nullcontext()
    with sharded:
        model = GPT(shape, seed=7, checkpoint=build_block_checkpoint(mode, section))
    if autocast:
        compute_in_bf16(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    data = torch.Generator().manual_seed(rank)
    record = []
    for micro_step in range(4):
        tokens = torch.randint(300, (2, 33), generator=data)
        tokens[0, [5, 6, 20]] = 0
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        record.append(loss.item())
        if micro_step % 2:
            for parameter in model.parameters():
                gradient = safe_get_full_grad(parameter) if zero_stage else parameter.grad
                record += [gradient.double().sum().item(), gradient.double().abs().sum().item()]
        engine.step()
    record.append(torch.rand(1).item())  # the random state is where it would be
    engine.destroy()
    return record


def compare_ways(block: str, zero_stage: int) -> dict[str, list[float]]:
    """Every way where everything is on, and one of each mode where less is."""
    settings = {
        "fp32": (0.0, False, False),
        "dropout": (0.1, False, False),
        "autocast": (0.1, True, False),
        "mask": (0.0, False, True),
        "all": (0.1, True, True),
    }
    return {
        f"{setting}/{variant}": train_two_steps(
            block, zero_stage, variant, dropout=dropout, autocast=autocast, mask=mask
        )
        for setting, (dropout, autocast, mask) in settings.items()
        for variant in (WAYS if setting == "all" else ("none", "full", "selective"))
    }


GPU_SHAPE = GPTShape(8, 4, 256, 300, 256, dropout=0.1)
GPU_BATCH = 8


def measure_on_gpu() -> dict[str, dict]:
    outcome = {}
    tokens = torch.randint(300, (GPU_BATCH, 257), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for variant, (mode, section) in WAYS.items():
        model = GPT(GPU_SHAPE, seed=7, checkpoint=build_block_checkpoint(mode, section)).cuda()
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        torch.cuda.synchronize()
        remaining = torch.cuda.memory_allocated() - before
        loss.backward()
        gradients = [parameter.grad.double().sum().item() for parameter in model.parameters()]
        outcome[variant] = {"bytes": remaining, "gradients": gradients}
    return outcome


def main(job: str) -> None:
    from llmscale.engine.process_group import join_world

    join_world()
    block, _, stage = job.partition("-")
    outcome = measure_on_gpu() if job == "gpu" else compare_ways(block, int(stage))
    sys.stdout.write(json.dumps(outcome) + "\n")
    end_rank()


if __name__ == "__main__":
    main(sys.argv[1])
