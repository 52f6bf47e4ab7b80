"""Copies to a device: on a CPU there is none, and a GPU gets the values behind its present work."""

from __future__ import annotations

import pytest
import torch

from rft_core.device_copies import to_device


def test_a_tensor_that_stays_on_the_cpu_is_not_copied() -> None:
    numbers = torch.arange(3)
    assert to_device(numbers, "cpu") is numbers
    assert to_device(numbers, torch.device("cpu")) is numbers


def test_a_device_without_pages_of_the_host_gets_it_directly() -> None:
    assert to_device(torch.arange(3), "meta").is_meta


@pytest.mark.gpu
def test_a_gpu_gets_the_values_without_a_wait() -> None:
    numbers = torch.arange(5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        copied = to_device(numbers, "cuda")
        assert to_device(copied, "cuda") is copied
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert copied.tolist() == [0, 1, 2, 3, 4]
