from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest

from llmscale.engine.deepspeed_patches import quiet_libraries
from tests.conftest import REPOSITORY


@pytest.fixture
def quiet() -> None:
    """The filters, gone again after the test."""
    logger, before = logging.getLogger("DeepSpeed"), logging.getLogger("DeepSpeed").filters[:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_libraries()
        yield
    logger.filters[:] = before


@pytest.mark.usefixtures("quiet")
def test_the_known_warnings_are_gone_and_every_other_one_stays() -> None:
    warnings.warn("`torch.distributed.all_gather_into_tensor` is deprecated. Please", FutureWarning, stacklevel=1)
    warnings.warn("`torch.distributed.reduce_scatter_tensor` is deprecated. Please", FutureWarning, stacklevel=1)
    for text, kind in (
        ("`torch.distributed.all_reduce` is deprecated.", FutureWarning),
        ("`torch.distributed.all_gather_into_tensor` is deprecated.", UserWarning),
        ("torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to save", UserWarning),
    ):
        with pytest.raises(kind):
            warnings.warn(text, kind, stacklevel=1)


@pytest.mark.usefixtures("quiet")
def test_only_deepspeed_s_message_about_the_cpu_is_gone() -> None:
    logger = logging.getLogger("DeepSpeed")
    for text, passes in (("Setting accelerator to CPU. If you have", False), ("something is wrong", True)):
        record = logger.makeRecord("DeepSpeed", logging.WARNING, "f", 1, text, (), None)
        assert bool(logger.filter(record)) is passes


def test_importing_deepspeed_on_this_machine_says_nothing() -> None:
    code = (
        "from llmscale.engine.deepspeed_patches import quiet_libraries; quiet_libraries()\n"
        "import deepspeed\n"
        "print('device:', deepspeed.get_accelerator().device_name())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("device: "), done.stdout


@pytest.mark.slow
def test_deepspeeds_muon_is_imported_without_the_compiler() -> None:
    """In a process of its own: torch._inductor takes two seconds of each rank's start."""
    code = """
import sys
import deepspeed
from llmscale.engine.deepspeed_patches import import_muon_uncompiled
from deepspeed.runtime import compiler
real = compiler.compile
import_muon_uncompiled()
import deepspeed.runtime.zero.muon.muon_optimizer
assert compiler.compile is real
assert not [name for name in sys.modules if name.startswith("torch._inductor")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
