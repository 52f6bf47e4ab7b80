"""Tensors of a model under the names that its files give them.

In memory, transformers holds the experts of a layer as one tensor and the parts of some models under other
prefixes; files, and the engines that read them, have a tensor for each expert's matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]


def as_saved(model: Any, named: NamedTensors) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    """The same tensors, one after another, as `save_pretrained` would write them.

    Args:
        model: the transformers model whose tensors they are.
        named: gives whole tensors under the model's own names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named():
            yield from revert_weight_conversion(model, {name: tensor.detach()}).items()

    return tensors
