"""Extension of vLLM's workers: keyed sampling, weight updates in place, fingerprints of the weights held.

vLLM mixes this class into its own worker (`worker_extension_cls`), so that its methods can be
called by name through `collective_rpc`. No vLLM is imported: `self` has all that is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_engine.vllm.cuda_ipc import decode_update
from rft_engine.vllm.keyed_sampler import KeyedSampler
from rft_engine.vllm.lora import WEIGHTS, adapter_request
from rft_engine.weight_sync.fingerprints import Fingerprint, fingerprint_of
from rft_engine.weight_sync.fused_parameters import held_fingerprint
from rft_engine.weight_sync.weight_file import read_weight_file


class VllmWorkerExtension:
    """Methods for `collective_rpc`; every name starts with `rft_`, so that none of vLLM's is hidden."""

    model_runner: Any
    model_config: Any
    device: torch.device

    def rft_begin(self, options: dict[str, Any], keys: Sequence[int], constraint: dict[str, Any] | None = None) -> None:
        """Start a `generate` call: fields of `SamplingOptions`, one key a sample, lists of a `TokenTrie` or None."""
        trie = None if constraint is None else TokenTrie.from_lists(constraint)
        drawn = SamplingOptions.from_fields(options)
        self.rft_sampler().begin(drawn, keys, self.model_config.get_vocab_size(), self.device, trie)

    def rft_pop_samples(self, samples: Sequence[int], lengths: Sequence[int]) -> list[dict[str, Any]]:
        """Return the draws of samples that are done."""
        taken = self.rft_sampler().take(samples, lengths)
        return [
            {"token_ids": drawn.token_ids, "logprobs": drawn.logprobs, "log_kept_mass": drawn.log_kept_mass}
            for drawn in taken
        ]

    def rft_load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole tensors under their checkpoint names, in place: repacked, fused and cut as vLLM holds them."""
        self.reload_weights(weights_iterator=tensors)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        # after every load: vLLM packs a tied matrix again under one of its two names only
        repack_tied(self.model_runner.get_model())

    def rft_load_file(self, path: str) -> Fingerprint:
        """Take the tensors of a file in the layout of safetensors; returns what was read from it."""
        tensors = read_weight_file(path)
        self.rft_load_tensors(tensors.items())
        return fingerprint_of(tensors.items(), self.model_config.dtype)

    def rft_load_adapter(self, folder: str) -> Fingerprint:
        """Take the adapters in a directory of peft's in the place of those before; returns what was read."""
        self.add_lora(self.rft_adapter_request(folder))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        return fingerprint_of(read_weight_file(f"{folder}/{WEIGHTS}").items(), torch.float32)

    def rft_adapter_request(self, folder: str) -> Any:
        """Return vLLM's request for the adapters in `folder`."""
        return adapter_request(folder, replaces=True)

    def rft_update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's own `update_weights` with CUDA handles that came as JSON (`vllm.cuda_ipc`)."""
        self.update_weights(decode_update(update_info))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def rft_fingerprints(self, shapes: dict[str, list[int]]) -> Fingerprint:
        """Digests of the tensors that this worker holds in the order of their checkpoint, of these `shapes`.

        Matrices that were repacked for the CPU's kernels, rounded to 8 bits or cut over GPUs are not
        among them.
        """
        return held_fingerprint(self.model_runner.get_model(), shapes, self.model_config.dtype)

    def rft_sampler(self) -> KeyedSampler:
        """Return this worker's logits processor."""
        processors = self.model_runner.input_batch.logitsprocs.all
        [draws] = [processor for processor in processors if isinstance(processor, KeyedSampler)]
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
