"""The layout of this project: the tokens of several sequences one after another, and who belongs to which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from conformance.adapters.base import Case, Compute, Key, numbers
from rft_algos.losses import aggregation

COMPUTE: dict[Key, Compute] = {}
WIDE = torch.float64


def computes(kind: str, *names: str) -> Callable[[Any], Any]:
    """Decorator: the function computes these cases."""

    def join(function: Compute) -> Compute:
        COMPUTE.update({(kind, name): function for name in names})
        return function

    return join


def packed(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    """[T] the rows one after another."""
    return numbers([v for row in rows for v in row], dtype)


def unpacked(values_T: Tensor, rows: Sequence[Sequence[Any]]) -> list[list[float]]:
    """The inverse of `packed` for rows of these lengths."""
    return [part.tolist() for part in values_T.detach().split([len(row) for row in rows])]


def layout(case: Case) -> tuple[Tensor, Tensor]:
    """[T] loss mask and [T] segment ids of a case."""
    mask = case["inputs"]["mask"]
    ids = [i for i, row in enumerate(mask) for _ in row]
    return packed(mask, torch.bool), torch.tensor(ids, dtype=torch.int64)


def weights(name: str, case: Case, dtype: torch.dtype, rows: Sequence[int] | None = None) -> Tensor:
    """[T] weights of an aggregation, with the denominators of the whole step; of some rows of it if asked."""
    mask = case["inputs"]["mask"]
    num_tokens, num_sequences = sum(map(sum, mask)), sum(1 for row in mask if sum(row))
    part = [mask[i] for i in (range(len(mask)) if rows is None else rows)]
    mask_T, ids_T = layout({"inputs": {"mask": part}})
    if name == "token_mean":
        return aggregation.token_mean(mask_T, num_tokens, dtype=dtype)
    if name == "sequence_mean_token_mean":
        return aggregation.sequence_mean_token_mean(mask_T, ids_T, num_sequences, dtype=dtype)
    if name == "sequence_mean_token_sum":
        return aggregation.sequence_mean_token_sum(mask_T, num_sequences, dtype=dtype)
    if name == "token_sum":
        return aggregation.token_sum(mask_T, dtype=dtype)
    if name == "prompt_mean_token_mean":
        prompts, lengths = case["params"]["prompts"], [sum(row) for row in mask]
        of_prompt = {g: sum(n for n, h in zip(lengths, prompts, strict=True) if h == g) for g in prompts}
        own = [of_prompt[prompts[i]] for i in (range(len(mask)) if rows is None else rows)]
        return aggregation.prompt_mean_token_mean(
            mask_T, torch.tensor(own)[ids_T], sum(map(bool, of_prompt.values())), dtype=dtype
        )
    return aggregation.fixed_length(mask_T, num_sequences, case["params"]["max_tokens"], dtype=dtype)
