"""Check that heads, columns and experts of a decoder divide over ranks, from its configuration alone, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any

from rft_core.errors import OptionsError
from rft_models.files.directories import existing_directory, read_json


def refuse_uneven_model(directory: str | Path, num_ranks: int) -> None:
    """`refuse_uneven` for the config.json of a model directory; nothing for one rank or without that file."""
    file = existing_directory(directory) / "config.json"
    if num_ranks > 1 and file.is_file():
        config = read_json(file)
        refuse_uneven(config.get("text_config") or config, num_ranks, str(file))


def refuse_uneven(config: Mapping[str, Any], num_ranks: int, where: str) -> None:
    """Raise OptionsError where what ranks share out does not divide; `config` is that of the decoder."""
    heads = int(config.get("num_attention_heads") or 0)
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "intermediate_size": int(config.get("intermediate_size") or 0),
    }
    uneven = {name: size for name, size in sizes.items() if size % num_ranks}
    if not uneven:
        return
    divisor = gcd(*sizes.values())
    allowed = [number for number in range(1, divisor + 1) if divisor % number == 0]
    nearest = min(allowed, key=lambda number: abs(number - num_ranks))
    raise OptionsError(
        code="tensor.uneven",
        what=f"tp_size = {num_ranks}, but the model has {', '.join(f'{name} {size}' for name, size in uneven.items())}",
        where=where,
        why="every rank must compute the same number of heads and columns; "
        f"allowed: {', '.join(map(str, allowed))}; the tokens of a sequence can be split whatever the number of heads",
        state="nothing was loaded",
        do=f"--tp_size {nearest}, or --sp_size {num_ranks} instead",
    )


def refuse_uneven_experts_of(directory: str | Path, num_ranks: int) -> None:
    """`refuse_uneven_experts` for the config.json of a model directory; nothing for one rank or without that file."""
    file = existing_directory(directory) / "config.json"
    if num_ranks > 1 and file.is_file():
        config = read_json(file)
        config = config.get("text_config") or config
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        refuse_uneven_experts(next((int(config[name]) for name in names if config.get(name)), 0), num_ranks, str(file))


def refuse_uneven_experts(num_experts: int, num_ranks: int, where: str) -> None:
    """Raise OptionsError where the experts do not divide over the ranks, or where there are none."""
    if num_experts and num_experts % num_ranks == 0:
        return
    allowed = [number for number in range(1, num_experts + 1) if num_experts % number == 0] or [1]
    why = f"every rank holds equally many experts; allowed: {', '.join(map(str, allowed))}"
    raise OptionsError(
        code="expert.uneven",
        what=f"ep_size = {num_ranks}, but the model has {num_experts or 'no'} experts",
        where=where,
        why=why if num_experts else "experts are what is divided among these ranks, and a dense model has none",
        state="nothing was loaded",
        do=f"--ep_size {min(allowed, key=lambda number: abs(number - num_ranks))}",
    )
