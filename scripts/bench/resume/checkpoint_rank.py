"""One rank of checkpoint.py: saves and resumes on order, both ways, and measures it."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import deepspeed  # noqa: F401  # imported once and not in every fork
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from llmscale.checkpoint.inventory import find_checkpoint
from llmscale.checkpoint.load import load_engine
from llmscale.checkpoint.manifest import read_checkpoint
from llmscale.checkpoint.run_state import RunState, load_run_state
from llmscale.checkpoint.save import CheckpointSaver, Snapshot, copy_out
from llmscale.checkpoint.store import CheckpointStore
from llmscale.checkpoint.tensor_files import Fragment, FragmentSavePlanner, engine_fragments
from llmscale.config.optimizers import ADAMW
from llmscale.config.run_config import RunConfig
from llmscale.engine.deepspeed_engine import build_engine, set_learning_rate
from llmscale.engine.loss_scale import set_scaler_state
from llmscale.engine.process_group import is_gpu, join_world, leave_world
from llmscale.engine.train_step import PhaseTimer, train_step
from llmscale.engine.zero_shards import (
    MASTER,
    group_scalars,
    materialise_optimizer_state,
    refresh_low_precision_weights,
    state_views,
    write_back,
)
from llmscale.training.loss_spikes import check_weights
from llmscale.training.start import prepare_start
from scripts.bench.harness import REPOSITORY, folder_bytes, status_bytes
from scripts.bench.resume.resume_matrix import end_on_warning

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

GLOBAL_BATCH = 4


class FragmentLoadPlanner(DefaultLoadPlanner):
    """Lets DCP fill fragments in place."""

    def set_up_planner(
        self, state_dict: dict[str, Fragment], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The base class would flatten nested dicts of tensors here; fragments are already flat.
        self.state_dict = self.original_state_dict = dict(state_dict)
        self.metadata, self.is_coordinator, self.mappings = metadata, is_coordinator, {}

    def create_local_plan(self) -> LoadPlan:
        items = []
        for fqn, fragment in self.state_dict.items():
            size = torch.Size([fragment.local.numel()])
            chunk = ChunkStorageMetadata(offsets=torch.Size([fragment.start]), sizes=size)
            items += create_read_items_for_chunk_list(
                fqn, self.metadata.state_dict_metadata[fqn], [chunk] if size[0] else []
            )
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].local


class CheckpointRank:
    """A rank that saves and resumes. Collective: all ranks get the same orders."""

    def __init__(self, folder: Path, data: Path, stage: int, layers: int, width: int, precision: str) -> None:
        self._folder = folder
        self._world = join_world()
        config = RunConfig(  # type: ignore[call-arg]  # the model's keys are added by pydantic
            ds=REPOSITORY / "ds_configs" / f"zero{stage}.json",
            data=str(data),
            model="tiny-1m",
            n_layer=layers,
            n_head=width // min(64, width),
            n_embd=width,
            precision=precision,
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=GLOBAL_BATCH // self._world.world_size,
            steps=10,
            run=folder / "unused",
        )
        run = prepare_start(config, self._world.world_size)
        self._run = run if is_gpu() else run.on_cpu()

    def obey(self, task: list[str]) -> dict[str, float]:
        """Execute `save ours|dcp|deepspeed` or `resume ours|dcp|deepspeed|universal SAVED_BY`, once per process."""
        if task[0] == "resume":
            answer = self._resume(task[1], int(task[2]))
        elif task[1] == "ours":
            answer = self._save_ours(self._train())
        elif task[1] == "dcp":
            answer = self._save_dcp(self._train())
        else:
            answer = self._save_deepspeed(self._train())
        leave_world()
        return answer

    def _build(self, extra: dict[str, object]) -> DeepSpeedEngine:
        resolved = self._run.resolved
        return build_engine(self._run.config, replace(resolved, ds_config={**resolved.ds_config, **extra}))

    def _train(self) -> DeepSpeedEngine:
        """Return an engine after one step, so that no moment is zero."""
        engine = self._build({})
        shape, plan = self._run.resolved.shape, self._run.resolved.plan
        generator = torch.Generator().manual_seed(self._world.rank)
        size = (plan.micro_batch_size, shape.seq_len + 1)
        tokens = torch.randint(shape.vocab_size, size, generator=generator)
        set_learning_rate(engine, ADAMW, 1e-3)
        train_step(engine, [tokens], self._world.device, PhaseTimer(self._world.device))
        sums = self._sums(engine)
        if self._world.is_main:
            torch.save(sums, self._sums_path(self._world.world_size))
        return engine

    def _save_ours(self, engine: DeepSpeedEngine) -> dict[str, float]:
        """Save as Session.save does, then wait for the background save."""
        folder = self._folder / f"ours-{self._world.world_size}"
        saver = CheckpointSaver(
            folder, keep_last=1, keep_every=0, in_background=True, report=end_on_warning, disks=self._world.disks
        )
        with self._measured() as taken:
            began = time.perf_counter()
            fragments = engine_fragments(engine)
            weights = (fragment.local for key, fragment in fragments.items() if key.startswith(f"{MASTER}/"))
            check_weights(weights, self._world.control, 1, folder)
            state = self._run_state(engine).as_dict()
            stage, precision = self._run.resolved.zero_stage, self._run.resolved.precision
            saver.save(Snapshot(1, 0, stage, precision, state, copy_out(fragments)))
            taken["held_s"] = time.perf_counter() - began
            saver.wait()
        return {**taken, "bytes": folder_bytes(folder), "parameters": self._run.resolved.shape.num_parameters}

    def _save_dcp(self, engine: DeepSpeedEngine) -> dict[str, float]:
        folder = self._folder / "dcp"
        if self._world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        with self._measured() as taken:
            began = time.perf_counter()
            writer = dcp.FileSystemWriter(folder, thread_count=1, sync_files=True)
            saving = dcp.async_save(
                engine_fragments(engine),
                storage_writer=writer,
                planner=FragmentSavePlanner(),
                process_group=self._world.control,
                async_stager=CopyFragments(),
            )
            taken["held_s"] = time.perf_counter() - began
            saving.result()
        return {**taken, "bytes": folder_bytes(folder)}

    def _run_state(self, engine: DeepSpeedEngine) -> RunState:
        return RunState(
            step=1,
            samples_seen=GLOBAL_BATCH,
            tokens_seen=0,
            skipped_steps=0,
            identity={},
            precision=self._run.resolved.precision,
            optimizer_scalars=group_scalars(engine),
        )

    def _save_deepspeed(self, engine: DeepSpeedEngine) -> dict[str, float]:
        folder = self._folder / "deepspeed"
        if self._world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        with self._measured() as taken:
            engine.save_checkpoint(str(folder), tag="step")
        began = time.perf_counter()
        if self._world.is_main:
            sync_files(folder)
        return {**taken, "sync_s": time.perf_counter() - began, "bytes": folder_bytes(folder)}

    def _resume(self, whose: str, saved_by: int) -> dict[str, float]:
        """Fill a fresh engine; the clock starts after it is built."""
        engine = self._build({"checkpoint": {"load_universal": True}} if whose == "universal" else {})
        with self._measured() as taken:
            if whose == "ours":
                began = time.perf_counter()
                checkpoint = find_checkpoint(self._folder / f"ours-{saved_by}")
                store = CheckpointStore(self._folder / f"ours-{saved_by}", self._world.control, self._world.disks)
                damage = store.find_damage(read_checkpoint(checkpoint))
                if damage:
                    raise SystemExit(damage)
                taken["verify_s"] = time.perf_counter() - began
                state = load_run_state(checkpoint)
                load_engine(engine, checkpoint, state.optimizer_scalars, self._world.control, self._world.disks)
                set_scaler_state(engine, state.loss_scaler)
            elif whose == "dcp":
                materialise_optimizer_state(engine)
                fragments = engine_fragments(engine)
                reader = dcp.FileSystemReader(self._folder / "dcp")
                dcp.load(
                    fragments,
                    storage_reader=reader,
                    planner=FragmentLoadPlanner(),
                    process_group=self._world.control,
                )
                write_back(engine, fragments)
                refresh_low_precision_weights(engine)
            elif whose == "deepspeed":
                engine.load_checkpoint(str(self._folder / "deepspeed"), tag="step")
            else:
                engine.load_checkpoint(str(self._folder), tag="universal")
        self._check(engine, saved_by)
        return taken

    @contextmanager
    def _measured(self) -> Iterator[dict[str, float]]:
        """Measure the seconds between two barriers and the peak resident memory between them, in bytes."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory left by building the engine would hide the growth
        before = status_bytes("VmRSS")
        # Starts a new VmHWM: proc(5), clear_refs.
        Path("/proc/self/clear_refs").write_text("5")
        taken: dict[str, float] = {}
        dist.barrier(self._world.control)
        began = time.perf_counter()
        yield taken
        dist.barrier(self._world.control)
        taken["seconds"] = time.perf_counter() - began
        taken["peak_rss_bytes"] = status_bytes("VmHWM")
        taken["peak_rss_growth_bytes"] = taken["peak_rss_bytes"] - before

    def _sums(self, engine: DeepSpeedEngine) -> torch.Tensor:
        """Return sums of magnitudes of weights and of each moment over all ranks, fp64 [3]."""
        totals = torch.zeros(3, dtype=torch.float64)
        for key, view in state_views(engine).items():
            kind = key.partition("/")[0]
            if kind in STATES:
                totals[STATES.index(kind)] += view.local.double().abs().sum()
        dist.all_reduce(totals, group=self._world.control)
        return totals

    def _sums_path(self, saved_by: int) -> Path:
        return self._folder / f"sums-{saved_by}.pt"

    def _check(self, engine: DeepSpeedEngine, saved_by: int) -> None:
        loaded, saved = self._sums(engine), torch.load(self._sums_path(saved_by), weights_only=True)
        if not torch.allclose(loaded, saved, rtol=1e-9):
            raise SystemExit(f"sums of {STATES} were {saved.tolist()} when saved and are {loaded.tolist()}")


class CopyFragments(BlockingAsyncStager):
    """Copies fragments to the host, as DCP copies tensors."""

    def stage(self, state_dict: dict[str, Fragment]) -> dict[str, Fragment]:
        return copy_out(state_dict)


STATES = (MASTER, "exp_avg", "exp_avg_sq")


def sync_files(folder: Path) -> None:
    """Sync every file below `folder`."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
