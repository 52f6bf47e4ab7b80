"""One number for a whole pre-training run: what `--depth N` makes of the settings that are not given.

Width and horizon in N are those of nanochat (`scripts/base_train.py` of karpathy/nanochat): 64 numbers of width a
block, a batch of 2^19 tokens at 12 blocks that grows with the horizon D as D^0.383 (Bergsma et al. 2025, "Power
Lines"), and a learning rate that falls with the square root of the width and grows with that of the batch. Tokens are
20 a parameter (Hoffmann et al. 2022, "Chinchilla"), in at most four passes over the text: to there repeated tokens
are nearly worth new ones (Muennighoff et al. 2023). The rate at 12 blocks is that of the model of this size in Brown et
al. 2020 (GPT-3 Small: 125 M parameters, 6e-4, 0.5 M tokens a batch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rft.config.rules.sourced_values import SourcedValues
from rft.config.spellings import Derived
from rft.config.values import as_text
from rft.resolved import Origin
from rft_models.new_decoders.sizes import decoder_refusals, decoder_sizes
from rft_models.settings import DecoderSettings

WIDTH_A_BLOCK = 64
HEAD_WIDTH = 64
TOKENS_A_PARAMETER = 20
PASSES = 4
_REFERENCE_DEPTH, _REFERENCE_BATCH, _REFERENCE_RATE = 12, 2**19, 6e-4
_POWER = 0.383
_BYTES = 258
"""Tokens of the tokenizer of bytes: 256 of them and two special ones."""
_LENGTHS = ("max_epochs", "max_steps", "train_tokens")
_BATCHES = ("train_batch_size", "train_batch_tokens")


def from_depth(given: SourcedValues) -> Derived:
    """Return what `depth` says of the settings that no source gives; nothing without it, or with `pretrain`."""
    depth = given.values["depth"]
    if not depth or given.values["pretrain"]:
        return Derived()
    wanted = _shape(depth, given)
    values = dict(given.values) | {name: value for name, value in wanted.items() if not _is_given(given, name)}
    if not decoder_refusals(_decoder(values)):
        wanted |= _run(depth, values, given)
    chosen = {name: value for name, value in wanted.items() if not _is_given(given, name)}
    stays = [
        f"{name} = {as_text(given.values[name])} ({given.origins[name]})"
        for name, value in wanted.items()
        if name not in chosen and given.values[name] != value
    ]
    notes = [f"--depth {depth} leaves what is given: {', '.join(stays)}"] if stays else []
    return Derived(chosen, Origin("derived", text=f"from --depth {depth}"), tuple(notes))


def horizon(values: Mapping[str, Any]) -> int:
    """Return the tokens that a model of these sizes is trained on: 20 a parameter that takes part in matrix products.

    Those are the matrices of the blocks (of experts, those that a token goes to) and the output matrix, whose rows are
    counted where the settings say how many there are.
    """
    vocabulary = {"bpe": values["tokenizer_size"], "byte": _BYTES}.get(values["tokenizer"], 0)
    sizes = decoder_sizes(_decoder({**values, "vocab_size": None}), vocab_size=values["vocab_size"] or vocabulary)
    width, head = sizes.hidden_size, sizes.head_dim
    attention = 2 * width * head * (sizes.num_heads + sizes.num_kv_heads)
    experts = sizes.top_k + sizes.shared_experts if sizes.num_experts else 1
    feed_forward = (3 if sizes.use_glu else 2) * width * sizes.ffn_hidden_size * experts
    matrices = sizes.num_layers * (attention + feed_forward + width * sizes.num_experts)
    return TOKENS_A_PARAMETER * (matrices + width * sizes.vocab_size)


def _shape(depth: int, given: SourcedValues) -> dict[str, Any]:
    width = given.values["hidden_size"] if _is_given(given, "hidden_size") else WIDTH_A_BLOCK * depth
    heads = range(max(1, width // HEAD_WIDTH), 0, -1)
    fitting = [number for number in heads if width % (2 * number) == 0]
    return {"num_layers": depth, "hidden_size": WIDTH_A_BLOCK * depth, "num_heads": fitting[0] if fitting else 1}


def _run(depth: int, values: dict[str, Any], given: SourcedValues) -> dict[str, Any]:
    """Return batch, learning rate and length; a batch or a length given in another unit stands for them."""
    wanted: dict[str, Any] = {}
    tokens = horizon(values)
    window = min(values["max_len"] or values["max_seq_len"], values["max_seq_len"])
    if any(_is_given(given, name) for name in _BATCHES):
        batch = values["train_batch_tokens"] or values["train_batch_size"] * window
    else:
        reference = values | {"num_kv_heads": None, "ffn_hidden_size": None}
        reference |= _shape(_REFERENCE_DEPTH, SourcedValues(values, {}))
        ideal = _REFERENCE_BATCH * (tokens / horizon(reference)) ** _POWER
        wanted["train_batch_size"] = max(1, 2 ** round(math.log2(ideal / window)))
        batch = wanted["train_batch_size"] * window
    wide = _REFERENCE_DEPTH * WIDTH_A_BLOCK / values["hidden_size"]
    wanted["learning_rate"] = float(f"{_REFERENCE_RATE * math.sqrt(wide * batch / _REFERENCE_BATCH):.2g}")
    if not any(_is_given(given, name) for name in _LENGTHS):
        wanted |= {"train_tokens": tokens, "max_epochs": PASSES}
    return wanted


def _decoder(values: Mapping[str, Any]) -> DecoderSettings:
    return DecoderSettings(**{name: values[name] for name in DecoderSettings.__dataclass_fields__})


def _is_given(given: SourcedValues, name: str) -> bool:
    return name in given.origins and given.origins[name].kind not in ("default", "derived")
