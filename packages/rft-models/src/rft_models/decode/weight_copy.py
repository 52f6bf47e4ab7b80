"""A second set of a policy's parameters that an in-process engine generates with.

Where the trained parameters are sharded, or are of another type than the engine should compute
in, nothing can be decoded with them where they are. The copy has the policy's architecture and
whole tensors of its own. They are written in place, one after another, so that beside the copy no
more than one whole tensor has to exist. It has no gradients, and on the fast path the matrices
that a decode step multiplies together are adjacent in memory already, so that nothing is
stored twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rft_core.errors import PreflightError, ServiceError
from rft_models.decode.cuda_graphs import CudaGraphs, GraphCapture
from rft_models.decode.fast_decoder import FastDecoder, is_fast
from rft_models.decode.hf_decoder import HfDecoder
from rft_models.decode.kv_cache import DecodeCache
from rft_models.families import patches
from rft_models.layers.fast_linear import PackedMatrix
from rft_models.loading.transformers_loading import prepare
from rft_models.policy.causal_policy import CausalPolicy

_MOST_NAMED = 5
_META = torch.device("meta")


def needs_copy(policy: CausalPolicy, dtype: torch.dtype | None = None) -> bool:
    """Return true where an engine in this process cannot generate with the parameters that are trained.

    That is so where one of them is sharded, or where the engine is to compute in another type (`dtype`).
    """
    differs = dtype is not None and dtype != policy.dtype
    return differs or any(is_sharded(parameter) for _, parameter in policy.named_parameters())


def is_sharded(tensor: Tensor) -> bool:
    """Return true where this process has only a shard of the tensor (a DTensor placement that is no replica)."""
    return any(not placement.is_replicate() for placement in getattr(tensor, "placements", ()))


class GenerationCopy:
    """A `DecodableModel` with weights of its own: nothing until `begin`, the policy's after `finish`.

    Example::

        twin = GenerationCopy(policy)
        twin.begin()
        for name, tensor in policy.merged_parameters():
            twin.write(name, tensor)
        twin.finish()
    """

    def __init__(self, policy: CausalPolicy, *, dtype: torch.dtype | None = None, graphs: bool = True) -> None:
        """Build the copy of the architecture, without memory for its parameters.

        Args:
            policy: whose architecture and buffers; its parameters come through `write`.
            dtype: of the copy's floating-point parameters; None = that of each of the policy's.
            graphs: see `CausalPolicy.decoder`.

        Raises:
            PreflightError: the configuration does not describe the policy's model.
            OptionsError: the architecture cannot be decoded in process.
        """
        self._source = policy.model
        self._device, self._graphs = policy.device, graphs
        self._twin = CausalPolicy(_skeleton(policy), None, packed=policy.packed, where=policy.where)
        self._dtypes = {
            name: dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            for name, parameter in policy.base_parameters()
        }
        self.dtype = dtype or policy.dtype
        self._names = _first_names(self._twin.model)
        self._decoder = _JoinedDecoder(self._twin) if is_fast(self._twin) else _PlainDecoder(self._twin)
        self._place(_META)
        self._waiting: dict[str, Tensor] = {}
        self._came: set[str] = set()
        self.vocab_size = self._decoder.vocab_size
        self.max_positions = self._decoder.max_positions

    @property
    def num_bytes(self) -> int:
        """Memory of the parameters and of what is derived from them; 0 before `begin` and after `drop`."""
        tensors = [tensor for _, tensor in self.named_tensors()] + self._decoder.fused_tensors()
        # counted by storage: joined parameters are views of one, and the fused tensors are views of the same
        storages = [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]
        num_plain_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return num_plain_bytes + self._decoder.packed_bytes()

    def begin(self) -> None:
        """Take memory where there is none; from now on every tensor is waited for."""
        # a later load writes over the memory of the one before
        if self._twin.head.weight.is_meta:
            self._place(self._device)
        self._waiting, self._came = dict(self.named_tensors()), set()

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Take over one whole tensor; returns its name here and what holds it. A tied one may come under each name.

        Raises:
            ServiceError: the model has no such tensor, it has another shape, or it came before.
        """
        assert not is_sharded(tensor), f"the provider gave a shard of {name}"
        own = self._names.get(name)
        if own is None:
            raise _incomplete(f"{name} is not a tensor of this model", "nothing would be computed with it")
        if name in self._came:
            raise _incomplete(f"{name} was sent twice", "every tensor must be sent once")
        self._came.add(name)
        parameter = self._waiting.pop(own, None)
        if parameter is None:  # under its other name
            return own, dict(self.named_tensors())[own]
        if parameter.shape != tensor.shape:
            what = f"{name} has the shape {list(tensor.shape)}, the model's has {list(parameter.shape)}"
            raise _incomplete(what, "tensors are written in place, whole")
        parameter.copy_(tensor.detach())
        return own, parameter

    @torch.no_grad()
    def finish(self) -> None:
        """Take over the buffers, and derive what is computed from the tensors.

        Raises:
            ServiceError: a tensor was not sent.
        """
        if missing := sorted(self._waiting):
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            what = f"{len(missing)} of {len(set(self._names.values()))} tensors were not sent: "
            raise _incomplete(
                what + ", ".join(missing[:_MOST_NAMED]) + more, "the engine would use old values for them"
            )
        # no provider sends buffers: they come from the policy, which is in this process
        source = dict(self._source.named_buffers())
        for name, _ in list(self._twin.model.named_buffers()):
            path, _, last = name.rpartition(".")
            setattr(self._twin.model.get_submodule(path), last, source[name].detach().clone())
        self.refresh()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that the copy computes with, under the policy's names; tied ones once."""
        yield from self._twin.model.named_parameters()

    def own_name(self, name: str) -> str:
        """Return the name under which `named_tensors` has a tensor of the policy: of a tied one the first."""
        return self._names.get(name, name)

    def drop(self) -> None:
        """Give the memory of the parameters back; `begin` takes it again."""
        self._waiting = {}
        self._place(_META)

    def new_cache(self, max_rows: int, max_len: int) -> DecodeCache:
        """Return an empty cache of the copy's decoder, see `DecodableModel.new_cache`."""
        return self._decoder.new_cache(max_rows, max_len)

    def cache_bytes(self, max_rows: int, max_len: int, *, num_prompts: int, prompt_len: int) -> int:
        """Estimate the peak bytes of keys and values, as the decoders do."""
        return self._decoder.cache_bytes(max_rows, max_len, num_prompts=num_prompts, prompt_len=prompt_len)

    def prefill(
        self,
        cache: Any,
        token_ids_PL: Tensor,
        lengths_P: Tensor,
        copies_P: Sequence[int],
        media: Sequence[Any] | None = None,
    ) -> Tensor:
        """Run prompts once with the copied weights, see `DecodableModel.prefill`."""
        return self._decoder.prefill(cache, token_ids_PL, lengths_P, copies_P, media)

    def step(self, cache: Any, token_ids_B: Tensor) -> Tensor:
        """Append one token to every active row, see `DecodableModel.step`."""
        return self._decoder.step(cache, token_ids_B)

    def routes(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        """Return the experts that whole sequences go to with the copied weights, see `HfDecoder.routes`."""
        return self._decoder.routes(sequences)

    def refresh(self) -> None:
        """Derive fused weights again after the parameters changed."""
        self._decoder.refresh()

    def _place(self, device: torch.device) -> None:
        """New parameters everywhere, tied ones tied and neighbours of a product joined; on "meta" without memory."""
        old = dict(self.named_tensors())
        joined = self._joined(old, device)
        fresh = {
            id(parameter): nn.Parameter(
                joined[name]
                if name in joined
                else torch.empty(parameter.shape, dtype=self._dtypes[name], device=device),
                requires_grad=False,
            )
            for name, parameter in old.items()
        }
        for module in self._twin.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, name, fresh[id(parameter)])
        # a new recorder, since recordings read the addresses of the parameters that were just replaced
        self._decoder.record_steps(CudaGraphs() if self._graphs and device.type == "cuda" else None)
        self.refresh()

    def _joined(self, old: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Name -> rows of one new tensor, for what is multiplied together."""
        names = {id(parameter): name for name, parameter in old.items()}
        rows_by_name: dict[str, Tensor] = {}
        for parts in self._decoder.joined_parts():
            shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            joined = torch.empty(shape, dtype=self._dtypes[names[id(parts[0])]], device=device)
            rows = joined.split([part.shape[0] for part in parts])
            rows_by_name |= {names[id(part)]: row for part, row in zip(parts, rows, strict=True)}
        return rows_by_name


class _PlainDecoder(HfDecoder):
    """A decoder that runs the module itself: nothing is joined, and no step is recorded."""

    def joined_parts(self) -> Iterator[list[Tensor]]:
        """Yield nothing: no tensors are adjacent."""
        return iter(())

    def fused_tensors(self) -> list[Tensor]:
        """Return an empty list: nothing is fused."""
        return []

    def packed_bytes(self) -> int:
        """Return 0: the module's own layers multiply."""
        return 0

    def record_steps(self, recorder: GraphCapture | None) -> None:
        """Do nothing, with or without a recorder."""


class _JoinedDecoder(FastDecoder):
    """A decoder whose fused weights are no copies: the tensors of each of `joined_parts` are rows of one."""

    def joined_parts(self) -> Iterator[list[Tensor]]:
        """Yield the tensors that are adjacent in memory: query, key, value; gate, up; and their biases."""
        for layer in self._layers:
            attention, mlp = layer.module.self_attn, layer.module.mlp
            for modules in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
                yield [module.weight for module in modules]
                if modules[0].bias is not None:
                    yield [module.bias for module in modules]

    def fused_tensors(self) -> list[Tensor]:
        """Return the fused tensors that the products are computed with."""
        fused = [(layer.qkv.weight, layer.qkv_bias, layer.gate_up.weight, layer.gate_up_bias) for layer in self._layers]
        return [tensor for tensors in fused for tensor in tensors if tensor is not None]

    def refresh(self) -> None:
        """Look at the joined tensors as one; before they are joined for the first time nothing has memory."""
        if not self._layers:
            super().refresh()
        else:
            self._layers = [_look_at_joined(layer) for layer in self._layers]
            self._head_matrix = PackedMatrix(self._head.weight)
            self._forget_recordings()


def _look_at_joined(layer: Any) -> Any:
    """Return the layer with views in place of fused copies."""
    attention, mlp = layer.module.self_attn, layer.module.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = (mlp.gate_proj, mlp.up_proj)
    return replace(
        layer,
        qkv=PackedMatrix(_joined_rows([module.weight for module in qkv])),
        qkv_bias=None if qkv[0].bias is None else _joined_rows([module.bias for module in qkv]),
        gate_up=PackedMatrix(_joined_rows([module.weight for module in gate_up])),
        gate_up_bias=None if gate_up[0].bias is None else _joined_rows([module.bias for module in gate_up]),
        output=PackedMatrix(attention.o_proj.weight),
        down=PackedMatrix(mlp.down_proj.weight),
    )


def _joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return a view of the tensor that these are the rows of, in order."""
    offset, storage = 0, parts[0].untyped_storage().data_ptr()
    for part in parts:
        neighbours = part.untyped_storage().data_ptr() == storage and part.storage_offset() == offset
        assert neighbours, "a parameter of the copy was replaced by another tensor"
        offset += part.numel()
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    # a view and no copy: a parameter that is written in place changes the product with it
    return parts[0].detach().as_strided(shape, parts[0].stride(), 0)


def _skeleton(policy: CausalPolicy) -> Any:
    """Build the policy's model from its configuration, patched and switched alike, without memory for its tensors."""
    source = policy.model
    with torch.device(_META):
        # a configuration of its own, since switching the attention writes into it
        model = type(source)(copy.deepcopy(source.config))
    if patches.is_patched(source):
        model = patches.apply(model)
    expected = dict(policy.base_parameters(remove_duplicate=False))
    actual = dict(model.named_parameters(remove_duplicate=False))
    common = expected.keys() & actual.keys()
    differing = sorted(expected.keys() ^ actual.keys())
    differing += [name for name in common if _full_shape(expected[name]) != actual[name].shape]
    if differing:
        raise PreflightError(
            code="models.no_engine_copy",
            what=f"{type(source).__name__} built from its configuration has other tensors: "
            + ", ".join(differing[:_MOST_NAMED]),
            where=policy.where,
            why="an engine with weights of its own needs the same architecture a second time",
            do="--engine_type vllm; or make the change to the model in a registered patch",
        )
    prepare(model, packed=policy.packed)
    return model


def _full_shape(parameter: Tensor) -> torch.Size:
    """Return the full shape, also of a parameter that DeepSpeed has partitioned into an empty tensor."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _first_names(model: Any) -> dict[str, str]:
    """Map every name of a parameter to the first name that it has."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _incomplete(what: str, why: str) -> ServiceError:
    return ServiceError(
        code="models.copy_incomplete",
        what=f"the weights to load are not those of the model: {what}",
        where="the engine's weight provider",
        why=why,
        state="the engine refuses to generate until a load succeeds",
        do="yield every tensor of the policy once, whole, under the policy's name",
    )
