"""torch's own code asks a fake NVML, for the device that CUDA_VISIBLE_DEVICES names."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from llmscale.training.log_steps import GpuReading, read_gpu

GPU = torch.device("cuda", 0)


class NVMLError_DriverNotLoaded(Exception):
    pass


def answer(value):
    """A query of the GPU with index 1."""

    def query(handle, *sensor):
        if handle != "gpu 1":
            raise NVMLError_DriverNotLoaded("another device")
        return value

    return query


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(
        NVMLError_DriverNotLoaded=NVMLError_DriverNotLoaded,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}",
        nvmlDeviceGetPowerUsage=answer(71_500),
        nvmlDeviceGetTemperature=answer(63),
        nvmlDeviceGetUtilizationRates=answer(SimpleNamespace(gpu=97, memory=40)),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "pynvml", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    return fake


def test_it_is_that_of_the_visible_device(nvml: SimpleNamespace) -> None:
    assert read_gpu(GPU) == GpuReading(power_w=71.5, temperature_c=63, gpu_utilisation=0.97)
    assert read_gpu(torch.device("cpu")) == GpuReading()


def test_what_is_not_told_is_left_out(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.nvmlDeviceGetTemperature = lambda handle, sensor: (_ for _ in ()).throw(OSError("Not Supported"))
    assert read_gpu(GPU) == GpuReading(power_w=71.5, gpu_utilisation=0.97)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", False)
    assert read_gpu(GPU) == GpuReading()
