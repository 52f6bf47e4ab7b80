"""Tensors of a model under the names that its files give them.

In memory, transformers holds the experts of a layer as one tensor and the parts of some models under other
prefixes; files, and the engines that read them, have a tensor for each expert's matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]


def to_checkpoint_names(model: Any, named: NamedTensors) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    """Rename a stream of tensors to the names and shapes that `save_pretrained` would write, one after another.

    Args:
        model: the transformers model whose tensors they are.
        named: gives whole tensors under the model's own names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named():
            # one tensor at a time: the experts of a layer become many, all at once a second model
            yield from revert_weight_conversion(model, {name: tensor.detach()}).items()

    return tensors


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a directory holds beside the parameters, such as the biases of routers, by their names."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def to_module_names(model: Any, named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name in files -> the model's own name of the tensor that it is, or is a part of; nothing is computed."""
    module_names: dict[str, str] = {}
    for name, tensor in named:
        single = [(name, tensor.detach().to("meta"))]  # the conversion then computes shapes only
        module_names |= {saved: name for saved, _ in to_checkpoint_names(model, lambda single=single: single)()}
    return module_names


def names_in_files(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Map the model's own names to names in the files, as transformers' loading pairs them.

    Tensors that loading joins or splits are left out. `to_checkpoint_names` and `save_pretrained` give this model's
    tensors the names of these files from now on, as they do for one that was loaded from them.

    Args:
        model: a transformers model, its tensors with memory or without.
        stored: every name in the files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    own = model.state_dict()
    file_names: dict[str, str] = {}
    for name in sorted(stored):
        own_name, joined = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        # a renaming of older files may also match a name that is the model's own already
        if own_name not in own and name in own:
            own_name, joined = rename_source_key(name, [], [], model.base_model_prefix, own)
        if own_name in own and joined is None:
            file_names[own_name] = name
    # where transformers keeps what loading did, for `save_pretrained` to undo
    model._weight_conversions = [each for each in conversions if each.was_used()]
    return file_names
