"""Rates of arithmetic: what is counted, over which seconds, and against which peak."""

from __future__ import annotations

import pytest
import torch

from rft_trainer.metrics import compute_meter
from rft_trainer.metrics.compute_meter import ComputeMeter, device_memory, device_peak, peak_of


def test_a_rate_is_the_operations_of_all_samples_over_devices_and_seconds_of_work() -> None:
    meter = ComputeMeter(lambda n: 1e12 * n, num_devices=4, peak=10e12)
    meter.add([2, 3])
    meter.add([5])
    times = {"time/train": 1.5, "time/data": 0.5, "time/eval": 9.0, "time/step": 11.0}
    assert meter.take(times) == {"time/model_tflops": pytest.approx(1.25), "time/mfu": pytest.approx(0.125)}
    assert meter.take(times) == {}, "each step counts anew"


def test_without_a_known_peak_there_is_no_share_and_without_work_no_rate() -> None:
    meter = ComputeMeter(float, num_devices=1, peak=None)
    meter.add([10])
    assert list(meter.take({"time/train": 1.0})) == ["time/model_tflops"]
    meter.add([10])
    assert meter.take({"time/train": 0.0}) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("AMD Instinct MI300X", None),
    ],
)
def test_a_device_is_known_by_its_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_a_cpu_has_no_peak_and_a_gpu_that_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_peak(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    assert device_peak(torch.device("cuda")) == 121e12


def test_memory_of_a_gpu_is_the_most_since_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(compute_meter.torch.cuda, "is_initialized", lambda: False)
    assert device_memory() == {}
    monkeypatch.setattr(compute_meter.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(compute_meter.torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(compute_meter.torch.cuda, "reset_peak_memory_stats", lambda: taken.append("reset"))
    monkeypatch.setattr(compute_meter.torch.cuda, "memory_allocated", lambda: 2 * 2**20)
    monkeypatch.setattr(compute_meter.torch.cuda, "memory_reserved", lambda: 5 * 2**20)
    monkeypatch.setattr(compute_meter.torch.cuda, "mem_get_info", lambda: (7 * 2**20, 80 * 2**20))
    assert device_memory() == {
        "memory/peak_device_mib": 3.0,
        "memory/held_device_mib": 2.0,
        "memory/room_device_mib": 12.0,
    }
    assert taken == ["reset"]
