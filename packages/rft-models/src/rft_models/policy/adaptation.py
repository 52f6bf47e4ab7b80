"""Adapters on a policy or a critic: what is trained then, and where their first values are."""

from __future__ import annotations

from pathlib import Path

from rft_models.backbone.packed_model import PackedModel
from rft_models.lora.adapters import AdapterRules, Adapters, add_lora
from rft_models.lora.initial_values import PendingLoraWeights


def add_adapters(model: PackedModel, rules: AdapterRules, *, seed: int, base: str | Path | None = None) -> Adapters:
    """Put adapters around linear layers, once and before an optimizer is made; of the model only they are trained then.

    A critic's head is trained beside them. `base` is the directory of the weights under them; None = what was loaded.
    Errors as of `adapters.add_lora`.
    """
    assert model.adapters is None, "there are adapters already"
    where = model.where if base is None else str(base)
    files = model.pending_weights
    model.adapters = add_lora(model.model, rules, seed=seed, where=where, packed=model.packed, files=files)
    model.pending_weights = None if files is None else PendingLoraWeights(files, model.adapters.waiting)
    model.backbone.look_for_dropout()  # the adapters may bring dropout modules of their own
    return model.adapters
