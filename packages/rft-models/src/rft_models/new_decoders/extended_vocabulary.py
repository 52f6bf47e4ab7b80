"""A model whose vocabulary is extended: new rows of its matrices start from the mean of the old ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_core.errors import DataError
from rft_core.keyed_random import derive_key
from rft_models.files.directories import existing_directory, no_progress_bars, read_config
from rft_models.loading.transformers_loading import auto_class_of, load_model, native_attention
from rft_models.tokenization.added_tokens import known_tokens, with_added_tokens
from rft_models.tokenization.tokenizer import load_tokenizer

_NOISE = 0.01
"""Standard deviation of a new row around the mean, as a share of that of the old rows."""


def extend_vocabulary(source: str | Path, target: str | Path, tokens: Sequence[str], *, seed: int) -> int:
    """Write the model of `source` with `tokens` behind its vocabulary to `target`; returns the id of the first one.

    A new row of the embedding, and of the output matrix where it is not the same, is the mean of the old rows and
    noise of a hundredth of their standard deviation, which depends on nothing but the seed. Rows without a token, which
    some models have, are dropped.

    Raises:
        DataError: no model, a vocabulary that has some of the tokens already, or a token that is not one id.
    """
    path = existing_directory(source)
    tokenizer = load_tokenizer(path)
    known = known_tokens(tokenizer, tokens)
    if known:
        raise DataError(
            code="tokenizer.has_tokens",
            what=f"{len(known)} of {len(tokens)} new tokens are in the vocabulary already, the first {known[0]!r}",
            where=str(path),
            why="a vocabulary is extended once, by all of them: the rows of the others would not belong to them",
            do="take the model that was not extended yet, or one that has all of these tokens",
        )
    first = tokenizer.vocab_size
    tokenizer = with_added_tokens(tokenizer, tokens)
    config = read_config(path)
    model = load_model(path, "auto", native_attention(config), auto_class=auto_class_of(config))
    _extend_rows(model, first, tokenizer.vocab_size, seed)
    Path(target).mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(str(target))
    tokenizer.save_pretrained(target)
    return first


@torch.no_grad()
def _extend_rows(model: Any, first: int, size: int, seed: int) -> None:
    model.resize_token_embeddings(size, mean_resizing=False)
    matrices = {"input": model.get_input_embeddings().weight, "output": model.get_output_embeddings().weight}
    if matrices["input"] is matrices["output"]:
        del matrices["output"]
    for name, weight in matrices.items():
        weight[first:] = _new_rows(weight[:first].float(), size - first, derive_key(seed, f"new rows {name}"))


def _new_rows(old_VD: Tensor, count: int, key: int) -> Tensor:
    generator = torch.Generator().manual_seed(key % 2**63)
    noise_ND = torch.randn(count, old_VD.shape[1], generator=generator)
    return old_VD.mean(dim=0) + _NOISE * old_VD.std(dim=0) * noise_ND
