"""Which layers are compiled, and what is said of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn

from rft.parallel import compiled as module
from rft.parallel.compiled import compile_layers
from rft_dist.settings import StrategySettings


@pytest.mark.parametrize(
    ("settings", "device", "on", "said"),
    [
        ({}, "cuda", False, ""),
        ({"compile": "auto"}, "cuda", True, "compile: on (on a GPU"),
        ({"compile": "auto"}, "cpu", False, "compile: off (on a CPU"),
        ({"compile": "auto", "fsdp": True}, "cuda", False, "compile: off (fsdp exchanges"),
        ({"compile": "auto", "tp_size": 2}, "cuda", False, "compile: off (tp_size exchanges"),
        ({"compile": "on"}, "cpu", True, "compile: on (asked for)"),
    ],
)
def test_layers_are_compiled_as_the_settings_and_the_device_say(
    calls: Any,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    device: str,
    on: bool,
    said: str,
) -> None:
    calls.put(module, "CompiledBlocks keep_out_of_graphs")
    machine = calls.double("machine", device=device, is_first=True)
    with caplog.at_level(logging.INFO):
        found: Any = compile_layers([nn.Identity()], StrategySettings(**settings), machine)
    assert found == ("CompiledBlocks()" if on else None)
    assert ("keep_out_of_graphs()" in calls.taken()) is on
    messages = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert bool(messages) == bool(said)
    assert all(message.startswith(said) for message in messages)
