"""Meter of the arithmetic of a step: operations a second of one device, and the share of its peak (MFU).

    time/model_tflops = F / (seconds x devices x 10^12),   F = sum over the samples trained of F(their tokens)
    time/mfu          = the same over the peak of the device

F(n) counts forward and backward of the model (`rft_models.backbone.training_flops`); seconds are those of training and
of waiting for data: sampling, evaluations and saves are not in them. The peak is that of dense products in bfloat16
with float32 sums, whatever type is computed in, so that runs of one device can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

_PEAKS = {
    "B300": 2250e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A30": 165e12,
    "A6000": 154.8e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165.2e12,
    "RTX 5090": 209.5e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Part of a device's name -> operations a second of dense products in bfloat16 (float16 on V100, T4), as published."""
_WORKING = ("time/train", "time/data")


class ComputeMeter:
    """Counts the operations of the samples that are trained on, and turns them into rates once a step.

    Example::

        meter = ComputeMeter(flops.of, num_devices=8, peak=989e12)
        meter.add(sample.num_tokens for sample in samples)
        meter.take({"time/train": 1.5, "time/data": 0.1})   # {"time/model_tflops": ..., "time/mfu": ...}
    """

    def __init__(self, flops_of: Callable[[int], float], *, num_devices: int, peak: float | None) -> None:
        """Start from nothing.

        Args:
            flops_of: operations of forward and backward of a sample of so many tokens.
            num_devices: that the samples are divided among.
            peak: operations a second of one of them; None = not known.
        """
        self._flops_of = flops_of
        self._num_devices = num_devices
        self._peak = peak
        self._flops = 0.0

    def add(self, lengths: Iterable[int]) -> None:
        """Count samples of these numbers of tokens, those of all ranks."""
        self._flops += sum(self._flops_of(length) for length in lengths)

    def take(self, times: Mapping[str, float]) -> dict[str, float]:
        """Return the rates of a step with these seconds, and count anew; nothing where nothing was trained."""
        flops, self._flops = self._flops, 0.0
        seconds = sum(times.get(name, 0.0) for name in _WORKING)
        if not flops or seconds <= 0:
            return {}
        rate = flops / seconds / self._num_devices
        rates = {"time/model_tflops": rate / 1e12}
        return rates if self._peak is None else {**rates, "time/mfu": rate / self._peak}


def device_peak(device: torch.device) -> float | None:
    """Return the operations a second that a device is made for; None = not known, as of every CPU."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """Return the peak of the device of this name; the longest part of a name that is known counts."""
    found = [part for part in _PEAKS if set(part.split()) <= set(name.replace("-", " ").split())]
    return _PEAKS[max(found, key=len)] if found else None


def device_memory() -> dict[str, float]:
    """Return the memory of tensors on this GPU in MiB: the most since the last call, that of now, and the room for it.

    The room is what tensors can take without another process giving memory back. Empty without a GPU.
    """
    if not torch.cuda.is_initialized():
        return {}
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    # what the allocator keeps is free for tensors, and the driver counts it as taken
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    at_rest = torch.cuda.memory_allocated()
    names = ("memory/peak_device_mib", "memory/held_device_mib", "memory/room_device_mib")
    return {name: value / 2**20 for name, value in zip(names, (peak, at_rest, room), strict=True)}
