"""DeepSpeed's save_checkpoint and load_checkpoint, continued on any ranks at any ZeRO stage.

For loops that call these methods themselves: the Trainer of transformers, accelerate, your own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from llmscale.checkpoint.checkpoints import Checkpoints
from llmscale.checkpoint.deepspeed_pickles import CLIENT_STATE, is_deepspeed_checkpoint, pack, tag_folder, unpack
from llmscale.checkpoint.load_deepspeed import load_deepspeed
from llmscale.checkpoint.manifest import CHECKPOINTS_NAME
from llmscale.engine.collectives import on_all_ranks, on_main_rank
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import write_durably

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_MARK = "is_elastic"


@contextlib.contextmanager
def elastic_checkpoints(
    *, verified: bool = False, allow: Sequence[type] = (), report: Callable[[str], None] = print
) -> Iterator[None]:
    """Within this block load_checkpoint of every DeepSpeed engine continues checkpoints of other ranks and ZeRO stages.

    Files stay DeepSpeed's own, unless `verified`: then save_checkpoint writes llmscale's, complete and hashed, or
    raises. What DeepSpeed loads itself (same ranks, same stage) it still loads. `allow`: classes of yours in
    client_state. Rank 0 gives `report` a line per difference.
    """
    from deepspeed import DeepSpeedEngine

    if hasattr(DeepSpeedEngine.load_checkpoint, _MARK):
        raise CheckpointError("elastic_checkpoints is active already: one block at a time.")
    patch = _Patch(tuple(allow), report)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(DeepSpeedEngine, "load_checkpoint", patch.load_checkpoint))
        if verified:
            stack.enter_context(_replaced(DeepSpeedEngine, "save_checkpoint", patch.save_checkpoint))
        if "accelerate" in sys.modules:
            from accelerate import Accelerator

            stack.enter_context(_replaced(Accelerator, "load_state", patch.load_state))
        yield


@contextlib.contextmanager
def _replaced(owner: type, name: str, wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    original = getattr(owner, name)
    wrapped = functools.wraps(original)(wrap(original))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, original)


@dataclass(frozen=True)
class _Patch:
    """Methods around those of DeepSpeed and accelerate, whose arguments they have."""

    allow: tuple[type, ...]
    report: Callable[[str], None]

    def load_checkpoint(self, original: Callable) -> Callable:
        def load_checkpoint(
            engine: DeepSpeedEngine,
            load_dir: str,
            tag: str | None = None,
            load_module_strict: bool = True,
            load_optimizer_states: bool = True,
            load_lr_scheduler_states: bool = True,
            load_module_only: bool = False,
            custom_load_fn: Callable | None = None,
        ) -> tuple[str | None, Any]:
            place = tag_folder(Path(load_dir), None if tag is None else str(tag))
            is_its_own = place is not None and is_deepspeed_checkpoint(place) and _is_as_saved(engine, place)
            if place is None or custom_load_fn is not None or is_its_own:
                return original(
                    engine,
                    load_dir,
                    tag,
                    load_module_strict=load_module_strict,
                    load_optimizer_states=load_optimizer_states,
                    load_lr_scheduler_states=load_lr_scheduler_states,
                    load_module_only=load_module_only,
                    custom_load_fn=custom_load_fn,
                )
            weights_only = load_module_only or not load_optimizer_states
            with_scheduler = load_lr_scheduler_states and not load_module_only
            return self._load(engine, place, weights_only=weights_only, with_scheduler=with_scheduler)

        return load_checkpoint

    def save_checkpoint(self, original: Callable) -> Callable:
        def save_checkpoint(
            engine: DeepSpeedEngine,
            save_dir: str,
            tag: str | None = None,
            client_state: Mapping[str, Any] | None = None,
            save_latest: bool = True,
            exclude_frozen_parameters: bool = False,
        ) -> bool:
            if tag is None:
                name = f"global_step{engine.global_steps}"
            else:
                name = str(tag)
            checkpoints = Checkpoints(engine, Path(save_dir) / name, keep_last=1, report=self.report)
            group = dist.new_group(backend="gloo")
            try:
                extra = {CLIENT_STATE: on_all_ranks(group, pack, client_state or {})}
                checkpoints.save(engine.global_steps, extra, with_frozen=not exclude_frozen_parameters)
                if save_latest:
                    on_main_rank(group, write_durably, Path(save_dir) / "latest", name)
            finally:
                dist.destroy_process_group(group)
                checkpoints.close()
            return True

        return save_checkpoint

    def load_state(self, original: Callable) -> Callable:
        def load_state(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            original(accelerator, *args, **kwargs)
            # It restored the count of micro-batches of the ranks before, and only on ranks that there were: the
            # optimizer would step in the middle of a step, or ranks would wait for each other.
            accelerator.step = 0

        return load_state

    def _load(
        self, engine: DeepSpeedEngine, place: Path, *, weights_only: bool, with_scheduler: bool
    ) -> tuple[str | None, dict[str, Any]]:
        if hasattr(engine.optimizer, "checkpoint_event_prologue"):
            engine.optimizer.checkpoint_event_prologue()
        if (place / CHECKPOINTS_NAME).is_dir():
            checkpoints = Checkpoints(engine, place, keep_last=1, report=self.report)
            try:
                loaded = checkpoints.load(weights_only=weights_only, with_scheduler=with_scheduler)
            finally:
                checkpoints.close()
            if loaded is None:
                return None, {}
            client_state = unpack(str(loaded.extra.get(CLIENT_STATE, "")), self.allow)
        elif is_deepspeed_checkpoint(place):
            loaded = load_deepspeed(
                engine,
                place.parent,
                place.name,
                weights_only=weights_only,
                with_scheduler=with_scheduler,
                allow=self.allow,
            )
            client_state = loaded.extra
        else:
            raise CheckpointError(f"{place} is not a checkpoint: neither DeepSpeed's files are there, nor llmscale's.")
        if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()
        if dist.get_rank() == 0:
            for line in (f"continuing {loaded.folder} at step {loaded.step}", *loaded.changes):
                self.report(line)
        return str(loaded.folder), client_state


def _is_as_saved(engine: DeepSpeedEngine, place: Path) -> bool:
    """Return whether DeepSpeed can load a folder itself: the names of the files tell ranks and stage."""
    if engine.load_universal_checkpoint():
        return False
    stage = engine.zero_optimization_stage()
    optims = [path.name for path in place.glob("*optim_states.pt")]
    is_divided = any(place.glob("zero_pp_rank_*_model_states.pt"))
    if not optims or not stage:
        return not optims and not stage
    kind = "bf16_zero" if engine.bfloat16_enabled() else "zero"
    is_same_precision = stage == 3 or all(name.startswith(f"{kind}_pp_rank") for name in optims)
    return len(optims) == dist.get_world_size() and is_divided == (stage == 3) and is_same_precision
