"""Compilation of a trained model's layers (`--compile`): whether, why, and the packed attention, which stays out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from rft.process.machine import Machine
from rft_dist.settings import StrategySettings
from rft_dist.strategies.registry import choose_strategy
from rft_models.attention.hf_interface import keep_out_of_graphs
from rft_models.layers.compiled_blocks import CompiledBlocks, choose

_LOG = logging.getLogger(__name__)


def compile_layers(blocks: Sequence[nn.Module], strategy: StrategySettings, machine: Machine) -> CompiledBlocks | None:
    """Compile the layers where the settings ask for it, and say what was chosen; None = they compute in eager."""
    if strategy.compile == "off":
        return None
    chosen = choose_strategy(strategy)
    on, reason = choose(strategy.compile, torch.device(machine.device).type)
    if strategy.compile == "auto" and (chosen.collective_forward or chosen.group_sizes(strategy).matrix > 1):
        on, reason = False, f"{chosen.setting} exchanges weights or states in each layer"
    if machine.is_first:
        _LOG.info("compile: %s (%s)", "on" if on else "off", reason)
    if not on:
        return None
    keep_out_of_graphs()
    return CompiledBlocks(blocks)
