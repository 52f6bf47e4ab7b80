"""What vLLM's workers learn to do: draw under our keys, take weights in place, tell what they hold.

vLLM mixes this class into its own worker (`worker_extension_cls`), so that its methods can be
called by name through `collective_rpc`. No vLLM is imported: `self` brings all that is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rft_engine.engine_process_weights import read_weight_file
from rft_engine.sampling import SamplingOptions
from rft_engine.vllm_draws import KeyedDraws
from rft_engine.vllm_handles import decode_update
from rft_engine.vllm_weights import Fingerprint, element_digest, fingerprint_of

Shapes: TypeAlias = Mapping[str, Sequence[int]]


class VllmWorkerExtension:
    """Methods for `collective_rpc`; every name starts with `rft_`, so that none of vLLM's is hidden."""

    model_runner: Any
    model_config: Any
    device: torch.device

    def rft_begin(self, options: dict[str, Any], keys: Sequence[int]) -> None:
        """Start a `generate` call: options as keyword arguments of `SamplingOptions`, one key a sample."""
        fields: dict[str, Any] = {**options, "stop_token_ids": tuple(options["stop_token_ids"])}
        self.rft_draws().begin(SamplingOptions(**fields), keys, self.model_config.get_vocab_size(), self.device)

    def rft_take(self, samples: Sequence[int], lengths: Sequence[int]) -> list[dict[str, Any]]:
        """What was drawn for samples that are done."""
        taken = self.rft_draws().take(samples, lengths)
        return [
            {"token_ids": drawn.token_ids, "logprobs": drawn.logprobs, "log_kept_mass": drawn.log_kept_mass}
            for drawn in taken
        ]

    def rft_load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole tensors under their checkpoint names, in place: repacked, fused and cut as vLLM holds them."""
        self.reload_weights(weights_iterator=tensors)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        repack_tied(self.model_runner.get_model())

    def rft_load_file(self, path: str) -> Fingerprint:
        """Take the tensors of a file in the layout of safetensors; returns what was read from it."""
        tensors = read_weight_file(path)
        self.rft_load_tensors(tensors.items())
        return fingerprint_of(tensors.items(), self.model_config.dtype)

    def rft_update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's own `update_weights` with CUDA handles that came as text (`vllm_handles`)."""
        self.update_weights(decode_update(update_info))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def rft_held(self, shapes: dict[str, list[int]]) -> Fingerprint:
        """Digests of the tensors that this worker holds in the order of their checkpoint, of these `shapes`.

        Matrices that were repacked for the CPU's kernels, rounded to 8 bits or cut over GPUs are not
        among them.
        """
        model = self.model_runner.get_model()
        found: Fingerprint = {}
        for name, shape in shapes.items():
            tensor = held_tensor(model, name, shapes)
            if tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                found[name] = element_digest(tensor, shape, self.model_config.dtype)
        return found

    def rft_draws(self) -> KeyedDraws:
        """This worker's logits processor."""
        processors = self.model_runner.input_batch.logitsprocs.all
        [draws] = [processor for processor in processors if isinstance(processor, KeyedDraws)]
        return draws


def repack_tied(model: Any) -> int:
    """Pack again what a module has packed of a matrix that is another module's; returns how many were.

    On a CPU the output head multiplies with a packed copy of the embedding. vLLM 0.32 loads and packs
    the module under whose name a tensor comes, the embedding, and leaves the head with its old copy:
    logits of the old matrix, while every parameter shows the new one.
    """
    packed = [module for module in model.modules() if hasattr(module, "cpu_linear") and module.weight.numel()]
    owners = [module.weight.data_ptr() for module in packed]
    tied = [module for module, owner in zip(packed, owners, strict=True) if owners.count(owner) > 1]
    for module in tied:
        module.quant_method.process_weights_after_loading(module)
    return len(tied)


def held_tensor(model: Any, name: str, shapes: Shapes) -> Tensor | None:
    """The rows of the model's parameters that checkpoint tensor `name` became, or None where there are no such rows."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    shape = tuple(shapes[name])
    if name in parameters:
        return _rows(parameters[name], 0, shape)
    mapping: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for fused, parts in mapping.items():
        for number, part in enumerate(parts):
            if f".{part}." not in name:
                continue
            siblings = [name.replace(f".{part}.", f".{other}.") for other in parts[:number]]
            target = parameters.get(name.replace(f".{part}.", f".{fused}."))
            if target is not None and all(sibling in shapes for sibling in siblings):
                return _rows(target, sum(shapes[sibling][0] for sibling in siblings), shape)
    return None


def _rows(parameter: Tensor, first: int, shape: tuple[int, ...]) -> Tensor | None:
    """Rows `first` and on of a parameter that may have more (a padded vocabulary, a fused matrix)."""
    if parameter.dim() != len(shape) or parameter.dim() == 0 or parameter.shape[1:] != shape[1:]:
        return None
    if parameter.shape[0] < first + shape[0]:
        return None
    return parameter.detach()[first : first + shape[0]]
