"""torch.compile block by block: all blocks of a kind share one graph, at every ZeRO stage.

A GPT's blocks are of one kind, or with experts of two, so compiling one of each compiles them all; DeepSpeed's hooks
and the loss stay eager. ZeRO-3's hooks on modules inside a block would break the graph. As a leaf module
(`set_z3_leaf_modules`) a block is gathered and released at once, by hooks around its forward, and only that forward is
compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.run_config import CompileTuning
from llmscale.engine.activation_checkpointing import save_products
from llmscale.engine.deepspeed_patches import gather_as_one
from llmscale.model.attention_context import AttentionContext, SequenceSplit
from llmscale.model.gpt import GPT, Block, BlockOutput, CacheAppend
from llmscale.planning.compilation import CompileBackend

#: A block's training forward. It takes the context's tensors one by one, because a graph's inputs are tensors.
_Forward = Callable[
    [Block, Tensor, Tensor | None, Tensor | None, Tensor | BlockMask | None, SequenceSplit | None, int], BlockOutput
]


class BlockCompiler:
    """Compiles the training forward of a model's blocks. Evaluation and sampling, whose lengths vary, stay eager.

    When the compiler fails, blocks continue eagerly with the same results and collectives, so ranks need not agree.
    """

    def __init__(self, backend: CompileBackend, mode: CompileTuning = "default") -> None:
        self.graphs = 0
        """Number of graphs compiled so far."""
        self.compile_s = 0.0
        """Seconds taken by the forward passes that compiled a graph."""
        self.failure: str | None = None
        """The compiler's error, once it has failed."""
        self.on_failure: Callable[[str], None] | None = None
        """Function called when a later graph fails, for example on a step with another context."""
        self.is_paused = False
        """Run blocks eagerly for now, because graphs compiled earlier would skip new hooks."""
        self._backend = backend
        self._mode = mode

    def compile_blocks(self, model: GPT, *, zero_stage: int, checkpointing: CheckpointingMode) -> None:
        """Replace the blocks' forward. Call it before `deepspeed.initialize`.

        Selective checkpointing moves into the graph, whose partition follows the same policy. From outside it cannot
        see a compiled block's operators, and would save none of their results.
        """
        if zero_stage == 3:
            gather_as_one(model, Block)
        is_selective = checkpointing == "selective"
        if is_selective:
            model.checkpoint = None
        eager = _run_selective if is_selective else _run
        compiled = torch.compile(eager, backend=self._compile_graph, dynamic=False, fullgraph=True)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.forward = partial(self._run_block, block, eager, compiled)  # type: ignore[method-assign]

    def _run_block(
        self,
        block: Block,
        eager: _Forward,
        compiled: _Forward,
        x: Tensor,
        context: AttentionContext,
        append_to_cache: CacheAppend | None = None,
    ) -> BlockOutput:
        """Run a block; replaces `Block.forward`."""
        if not block.training or append_to_cache is not None:
            return Block.forward(block, x, context, append_to_cache)
        tensors = (x, context.cos, context.sin, context.mask, context.split, context.padding)
        if self.is_paused or self.failure is not None:
            return eager(block, *tensors)
        graphs = self.graphs
        began = time.perf_counter()
        try:
            y = compiled(block, *tensors)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            self.failure = _first_line(error)
            if self.on_failure is not None:
                self.on_failure(self.failure)
            return eager(block, *tensors)
        if self.graphs > graphs:
            self.compile_s += time.perf_counter() - began
        return y

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        """Compile a graph, as torch.compile's backend.

        - The backward pass is compiled at once, because a later failure could not fall back to an eager pass.
        - Dropout draws eager's numbers. With inductor's own generator, resuming with another setting would change the
          loss.
        """
        import torch._functorch.config
        import torch._inductor.config

        options = {**torch._inductor.list_mode_options(self._mode), "fallback_random": True}
        compile_graph = torch._dynamo.lookup_backend(self._backend)
        with (
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
            torch._inductor.config.patch(options),
        ):
            compiled = compile_graph(graph, inputs)
        self.graphs += 1
        return compiled


def _run(
    block: Block,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | BlockMask | None,
    split: SequenceSplit | None,
    padding: int,
) -> BlockOutput:
    return Block.forward(block, x, AttentionContext(cos, sin, mask, split, padding))


def _run_selective(block: Block, *inputs: Tensor | BlockMask | SequenceSplit | int | None) -> BlockOutput:
    # No anchor as in activation_checkpointing.py: ZeRO-3 gathers the entire block before its backward pass.
    return checkpoint(
        partial(_run, block),
        *inputs,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_products),
    )


def _first_line(error: BaseException) -> str:
    """Return the first line of a compiler's error, without the pages that follow."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:300]}"
