"""Write the checkpoints of this folder: a rank of a release of DeepSpeed, which saves tests/awkward_module.py.

Each archive was written on 2 ranks and a CPU, with torch 2.13:

    pip install --no-deps --target RELEASE deepspeed==0.14.5
    DS_ACCELERATOR=cpu PYTHONPATH=RELEASE:. torchrun --nproc-per-node 2 tests/checkpoint/deepspeed_releases/write.py OUT
    tar --create --xz --file 0.14.5.tar.xz --directory OUT .

0.18.9 needs torch.no_grad around its all_gather_into_tensor_dp_groups to train beside that torch. An archive has a
folder per cell, with losses.json: what the same process loses in the steps after the checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from tests.awkward_module import build_engine, train

#: ZeRO stage and precision. In bf16 stage 0 takes a step while it is built, and in fp16 it divides by a scale too many.
CELLS = ((0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16"), (2, "fp16"))
STEPS = 3


def main() -> None:
    type(get_accelerator()).is_fp16_supported = lambda self: True
    logger.setLevel("ERROR")
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes minutes to compile
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=False)
    for stage, precision in CELLS:
        folder = Path(sys.argv[1]) / f"zero{stage}-{precision}"
        engine = build_engine(stage, precision)
        train(engine, 0, STEPS)
        engine.save_checkpoint(str(folder), client_state={"mine": [1, 2], "tensor": torch.arange(3)})
        losses = train(engine, STEPS, 2 * STEPS)
        if dist.get_rank() == 0:
            (folder / "losses.json").write_text(json.dumps(losses))
            for script in folder.rglob("*.py"):  # zero_to_fp32.py, which every checkpoint gets
                script.unlink()
            print(deepspeed.__version__, folder.name, losses, flush=True)


if __name__ == "__main__":
    main()
