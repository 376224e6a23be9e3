"""torch.compile block by block: one graph that all blocks share, whatever the ZeRO stage.

A GPT's blocks are equal, so compiling one compiles them all, and what lies around them (DeepSpeed's hooks, the loss)
stays as it is. ZeRO-3's hooks of the modules inside a block would break the graph at each of them: as a leaf module
(`set_z3_leaf_modules`) a block is gathered and released as a whole, by hooks around its forward, which is all that is
compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.engine.activation_checkpointing import save_products
from llmscale.model.attention_context import AttentionContext
from llmscale.model.block import Block, Remember
from llmscale.model.gpt import GPT
from llmscale.planning.compilation import CompileBackend

#: A block's training forward, with its context's tensors one by one: what a graph takes are tensors.
_Forward = Callable[[Block, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]


class BlockCompiler:
    """Compiles the training forward of a model's blocks; evaluation and sampling stay eager, whose lengths vary.

    Where the compiler fails, blocks go on eagerly with the same results and the same collectives, so that ranks need
    not agree on it.
    """

    def __init__(self, backend: CompileBackend) -> None:
        self.graphs = 0
        """That were compiled so far."""
        self.compile_s = 0.0
        """Seconds that the forward passes took in which that happened."""
        self.failure: str | None = None
        """The compiler's words, once it has failed."""
        self.on_failure: Callable[[str], None] | None = None
        """Told of a failure of a later graph, such as of a context that another step has."""
        self.is_paused = False
        """Blocks run eagerly meanwhile, for hooks that a graph compiled before them would leave out."""
        self._backend = backend

    def compile_blocks(self, model: GPT, *, zero_stage: int, checkpointing: CheckpointingMode) -> None:
        """Before `deepspeed.initialize`.

        Selective checkpointing becomes part of the graph, whose partition follows the same policy. Around a compiled
        block, whose operators it does not see, it would save nothing of it.
        """
        if zero_stage == 3:
            import deepspeed

            deepspeed.utils.set_z3_leaf_modules(model, [Block])
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
        remember: Remember | None = None,
    ) -> Tensor:
        """In place of `Block.forward`."""
        if not block.training or remember is not None:
            return Block.forward(block, x, context, remember)
        tensors = (x, context.cos, context.sin, context.mask)
        if self.is_paused or self.failure is not None:
            return eager(block, *tensors)
        graphs, began = self.graphs, time.perf_counter()
        try:
            y = compiled(block, *tensors)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            self.failure = _in_one_line(error)
            if self.on_failure is not None:
                self.on_failure(self.failure)
            return eager(block, *tensors)
        if self.graphs > graphs:
            self.compile_s += time.perf_counter() - began
        return y

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        """torch.compile's backend.

        - The backward pass is compiled at once: there a failure could no longer be turned into an eager pass.
        - Dropout draws eager's numbers: inductor's own generator would change the loss of a run that is resumed with
          another setting.
        """
        import torch._functorch.config
        import torch._inductor.config

        compile_graph = torch._dynamo.lookup_backend(self._backend)
        with (
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
            torch._inductor.config.patch(fallback_random=True),
        ):
            compiled = compile_graph(graph, inputs)
        self.graphs += 1
        return compiled


def _run(block: Block, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> Tensor:
    return Block.forward(block, x, AttentionContext(cos, sin, mask))


def _run_selective(block: Block, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> Tensor:
    """ZeRO-3 has gathered all of the block before its backward pass, whose recomputation needs no anchor."""
    return checkpoint(
        partial(_run, block),
        *(x, cos, sin, mask),
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_products),
    )


def _in_one_line(error: BaseException) -> str:
    """The compiler's first words, without the pages that follow."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:300]}"
