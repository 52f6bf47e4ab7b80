"""Target modules of adapters: all linear layers, or those with given ends of names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names

ALL_LINEAR = "all-linear"
_NEAR = 4


def linear_layers(model: Any) -> list[str]:
    """Return the names of the layers that can have an adapter: linear ones, the output matrix left out."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]


def target_modules(layers: Sequence[str], asked: Sequence[str], modules: Sequence[str], where: str) -> list[str]:
    """Ends of names that match the layers to adapt and no other module, for peft.

    Args:
        layers: what can have an adapter.
        asked: "all-linear", or ends of names: "q_proj" is "model.layers.0.self_attn.q_proj" and its like.
        modules: names of all modules.
        where: the model, for errors.

    Raises:
        OptionsError: one that matches nothing, or something that cannot have an adapter.
    """
    if list(asked) == [ALL_LINEAR] or not asked:
        ends = sorted({name.rpartition(".")[2] for name in layers})
        others = {name.rpartition(".")[2] for name in modules if name not in set(layers)}
        # peft matches ends of names: an end that other modules have too is replaced by all full names
        return ends if layers and not others.intersection(ends) else list(layers)
    for end in asked:
        matching = [name for name in modules if ends_with(name, end)]
        unfit = [name for name in matching if name not in set(layers)]
        if not matching or unfit:
            raise _refusal(end, unfit, layers, where)
    return sorted(set(asked))


def ends_with(name: str, end: str) -> bool:
    """Return true where a module's name is `end`, or ends with it from a dot on."""
    return name == end or name.endswith(f".{end}")


def _refusal(end: str, unfit: Sequence[str], layers: Sequence[str], where: str) -> OptionsError:
    near = near_names(end, layers)
    if unfit:
        what = f"target_modules {end!r} matches {unfit[0]}{' and others' if len(unfit) > 1 else ''}, not a linear layer"
        why = "adapters are put around linear layers, the output matrix left out"
    else:
        what = f"target_modules {end!r} matches none of the {len(layers)} linear layers"
        why = "a name matches the end of a layer's name, from a dot on"
    return OptionsError(
        code="adapters.no_such_layer",
        what=what,
        where=where,
        why=f"{why}; similar names: {', '.join(near)}",
        state="nothing was changed",
        do=f"--target_modules {near[0]}" if near else f"--target_modules {ALL_LINEAR}",
    )


def near_names(end: str, layers: Sequence[str]) -> list[str]:
    """Return ends of layers' names that may have been meant, the likeliest first."""
    ends = sorted({name.rpartition(".")[2] for name in layers})
    alike = nearest_names(end.rpartition(".")[2], ends, count=_NEAR, cutoff=0.3)
    inside = [name.rpartition(".")[2] for name in layers if end in name]
    return list(dict.fromkeys([*alike, *inside, *ends]))[:_NEAR]
