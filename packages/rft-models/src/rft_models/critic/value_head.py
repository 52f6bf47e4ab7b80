"""The value head of a model directory: found and checked in the files, or drawn from a seed."""

from __future__ import annotations

import math
import re
from pathlib import Path

from torch import Tensor, nn

from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import derive_key, keyed_normal
from rft_models.files.head_tensors import file_with_tensor, refuse_bias, stored_tensor

_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def checked_prefix(head_prefix: str) -> str:
    """Return the prefix if tensors can be named with it; else raise `OptionsError`."""
    if _NAME.fullmatch(head_prefix):
        return head_prefix
    raise OptionsError(
        code="models.value_head_prefix",
        what=f"value head prefix {head_prefix!r}",
        where="value head prefix",
        why='the head is the tensor "<prefix>.weight": letters, digits and underscores, perhaps with dots between',
        do='use "score"',
    )


def value_head(weight_1D: Tensor) -> nn.Linear:
    """Return a linear layer without bias around this weight."""
    # without memory: values of its own would be drawn from torch's generator and replaced in the next line
    head = nn.Linear(weight_1D.shape[1], 1, bias=False, device="meta")
    head.weight = nn.Parameter(weight_1D)
    return head


def initial_head(hidden_size: int, *, seed: int) -> Tensor:
    """[1, D] float32, every entry from N(0, 1 / (D + 1)), a function of the seed.

    Source: Stiennon et al. 2020, "Learning to summarize from human feedback" (arXiv 2009.01325), appendix B.1;
    1 / (D + 1) is the variance. With it the first values have about the scale of the normalised states.
    """
    return keyed_normal((1, hidden_size), derive_key(seed, "value-head")) / math.sqrt(hidden_size + 1)


def stored_head(path: Path, head_prefix: str, hidden_size: int) -> Tensor | None:
    """[1, D] of "<prefix>.weight" as it stands in the directory's safetensors, or None where it is not there.

    Raises:
        DataError: a tensor of this name has another shape, or comes with a bias.
    """
    name = f"{head_prefix}.weight"
    weight = stored_tensor(path, name)
    if weight is None:
        return None
    if list(weight.shape) == [1, hidden_size]:
        refuse_bias(path, head_prefix)
        return weight
    raise DataError(
        code="models.value_head_shape",
        what=f"{name} has shape {list(weight.shape)}, but a value head on this model has [1, {hidden_size}]",
        where=str(file_with_tensor(path, name)),
        why=f"one linear layer maps a hidden state of {hidden_size} numbers to one value",
        do="name the prefix of the value head, or one that is not in the file to start from a new head",
    )
