"""The decode forward: prompts in once, then one token for every row per step.

`FastDecoder` computes the Llama, Mistral, Qwen2 and Qwen3 families directly from their
weights: fused query-key-value and gate-up products, a static cache, about twenty tensor calls a
layer, attention over the live columns. `HfDecoder` (`hf_decoder.py`) runs any other
causal model through transformers. Both give the log-probabilities of the training forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft_models.attention.packed import PackedLayout, packed_attention
from rft_models.decode.attention import BlockAttention, StepAttention
from rft_models.decode.cuda_graphs import CudaGraphs, GraphCapture, GraphedDecoder, StepInputs
from rft_models.decode.kv_cache import DecodeCache, StaticCache, check_room, keys_and_values_bytes
from rft_models.decode.row_groups import group_rows
from rft_models.families.patches import is_patched
from rft_models.families.registry import STATIC_ROTARY, fast_decode_families
from rft_models.families.vision import text_family
from rft_models.layers.fast_linear import FastLinear, PackedMatrix
from rft_models.lora.merge import base_layer, effective_weight
from rft_models.vision.decode_inputs import prepare_multimodal

if TYPE_CHECKING:
    from rft_models.policy.causal_policy import CausalPolicy


class DecodableModel(Protocol):
    """Interface of the models that an in-process engine generates with."""

    vocab_size: int
    max_positions: int

    def new_cache(self, max_rows: int, max_len: int) -> DecodeCache:
        """Return an empty cache for at most `max_rows` sequences of at most `max_len` tokens."""
        ...

    def prefill(
        self,
        cache: Any,
        token_ids_PL: Tensor,
        lengths_P: Tensor,
        copies_P: Sequence[int],
        media: Sequence[Any] | None = None,
    ) -> Tensor:
        """Run P right-padded prompts once and append `copies_P[p]` rows for each, prompt by prompt.

        `media` are the images of each prompt, None where it has none.
        Returns [P, V] float32 logits at each prompt's last token.
        """
        ...

    def step(self, cache: Any, token_ids_B: Tensor) -> Tensor:
        """Append one token to every active row, in row order. Returns [B, V] float32 logits."""
        ...

    def routes(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        """Return [L, T, k] int64 experts of all tokens of whole sequences, ascending; None without known routers."""
        ...

    def refresh(self) -> None:
        """Derive fused weights again after the parameters changed."""
        ...


def decoder_for(policy: CausalPolicy, *, graphs: bool = True) -> DecodableModel:
    """Return the in-process engine's decoder: `FastDecoder` where it is known to be exact, else `HfDecoder`.

    It shares the policy's weights: call `refresh()` after they changed. `graphs`: on a GPU a step may be recorded as a
    CUDA graph, see `cuda_graphs`.
    """
    from rft_models.decode.hf_decoder import HfDecoder

    return FastDecoder(policy, graphs=graphs) if is_fast(policy) else HfDecoder(policy)


def is_fast(policy: CausalPolicy) -> bool:
    """Return whether `FastDecoder` is known to be exact for the policy's architecture and layers."""
    config = policy.model.config.get_text_config(decoder=True)
    if text_family(config.model_type) not in fast_decode_families() or is_patched(policy.model):
        return False
    backbone = policy.model.get_decoder()
    rotary = backbone.rotary_emb
    linears = [module for layer in backbone.layers for module in _linears(layer)]
    head_dim = backbone.layers[0].self_attn.head_dim
    return (
        rotary.rope_type in STATIC_ROTARY
        and rotary.inv_freq.shape[0] * 2 == head_dim  # positions on a part of the head are not computed here
        and all(type(base_layer(module)) in (nn.Linear, FastLinear) for module in linears)
    )


def _linears(layer: Any) -> tuple[nn.Module, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return (
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    )


@dataclass(slots=True)
class _Layer:
    """One block's weights: `qkv` and `gate_up` are copies laid one after another, the rest is the module's."""

    module: Any
    sliding_window: int | None
    qkv: PackedMatrix
    qkv_bias: Tensor | None
    gate_up: PackedMatrix
    gate_up_bias: Tensor | None
    output: PackedMatrix
    """The attention's output matrix, with its adapter folded in where it has one; `down` likewise."""
    down: PackedMatrix
    norms_HD: Tensor | None = None
    """Weights of the norms of all heads of query and key, which are then one norm; None: the module's, one each."""


class FastDecoder:
    """Decoding of pre-norm RMSNorm blocks with rotary positions and gated MLPs (Llama, Mistral, Qwen2, Qwen3).

    The weights are those of the policy, except for fused copies and, on a CPU, matrices laid out for oneDNN, which
    `refresh` drops: call it after an optimizer step and before generating.
    """

    def __init__(self, policy: CausalPolicy, *, graphs: bool = True) -> None:
        self._head = policy.head
        self._backbone = policy.model.get_decoder()
        self._tower = policy.tower
        config = policy.model.config.get_text_config(decoder=True)
        attention = self._backbone.layers[0].self_attn
        self.vocab_size = policy.head.weight.shape[0]
        self.max_positions = int(config.max_position_embeddings)
        self._head_dim = int(attention.head_dim)
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._scaling = float(attention.scaling)
        self._layers: list[_Layer] = []
        self._head_matrix = PackedMatrix(policy.head.weight)
        self._cos = self._sin = torch.empty(0)
        self._recorded: GraphedDecoder | None = None
        if graphs and policy.head.weight.device.type == "cuda":
            self.record_steps(CudaGraphs())
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Derive fused weights again after the parameters changed."""
        self._forget_recordings()  # they read the fused copies that are replaced now
        for index, layer in enumerate(self._backbone.layers):
            # each takes the place of the one before it, so that memory never holds two sets of them
            self._layers[index : index + 1] = [_fuse(layer)]
        self._head_matrix = PackedMatrix(self._head.weight)

    def packed_bytes(self) -> int:
        """Return the bytes of the matrices laid out for oneDNN; 0 before the first product."""
        layers = (matrix for layer in self._layers for matrix in (layer.qkv, layer.gate_up, layer.output, layer.down))
        return sum(matrix.packed_bytes for matrix in (*layers, self._head_matrix))

    @torch.inference_mode()
    def new_cache(self, max_rows: int, max_len: int) -> StaticCache:
        """Return an empty cache; memory is 2 x layers x rows x kv heads x max_len x head_dim values."""
        check_room(0, max_rows, max_len, self.max_positions)
        weight = self._head.weight
        self._make_rotary(max_len, weight)
        return StaticCache(
            len(self._layers),
            max_rows,
            self._num_kv_heads,
            max_len,
            self._head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )

    def cache_bytes(self, max_rows: int, max_len: int, *, num_prompts: int, prompt_len: int) -> int:
        """Estimate peak bytes of keys and values: all rows at once, the prompts beside them, a layer being copied."""
        num_layers, heads = len(self._layers), (self._num_kv_heads, self._head_dim)
        each = self._head.weight.dtype.itemsize
        counts = ((max_rows, max_len), (num_prompts, prompt_len))
        parts = [keys_and_values_bytes(num_layers, n, heads[0], length, heads[1], each) for n, length in counts]
        return sum(part + part // (2 * num_layers) for part in parts)

    @torch.inference_mode()
    def prefill(
        self,
        cache: StaticCache,
        token_ids_PL: Tensor,
        lengths_P: Tensor,
        copies_P: Sequence[int],
        media: Sequence[Any] | None = None,
    ) -> Tensor:
        """Run prompts once, see `DecodableModel.prefill`; linear layers run on real tokens alone, not on padding."""
        device = self._head.weight.device
        lengths_P = lengths_P.to("cpu", torch.int64)  # shapes follow from these, and must not wait for a device
        layout = PackedLayout.from_lengths(lengths_P.tolist(), device)
        # before anything is computed: it refuses prompts that do not fit
        cache.append(lengths_P, torch.tensor(list(copies_P)))
        longest = int(lengths_P.max())
        inside_PL = torch.arange(longest, device=device) < lengths_P.to(device)[:, None]
        place_T = inside_PL.reshape(-1).nonzero()[:, 0]
        token_ids_T = token_ids_PL.to(device)[:, :longest][inside_PL]
        seen = prepare_multimodal(self._tower, media, layout.lengths, token_ids_T, place_T % longest)
        cache.shift_positions(seen.offsets_P)
        hidden_TD = seen.embedded(self._embedding)
        cos, sin = self._rotary(place_T % longest) if seen.axes_3T is None else self._rotary_of_axes(seen.axes_3T)
        for number, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden_TD, cos, sin)
            # for the steps that follow: the prompts themselves attend among the packed tokens, not in the cache
            padded = [_to_rows(tensor, place_T, lengths_P.shape[0], longest) for tensor in (key, value)]
            cache.write_prompts(number, padded[0], padded[1])
            attended = packed_attention(
                query, key, value, layout, scaling=self._scaling, sliding_window=layer.sliding_window
            )
            self._finish(layer, hidden_TD, attended.flatten(1))
            seen.add_deep(number, hidden_TD)
        return self._logits(hidden_TD[lengths_P.cumsum(0).to(device) - 1])

    @torch.inference_mode()
    def step(self, cache: StaticCache, token_ids_B: Tensor) -> Tensor:
        """Append one token to every active row, see `DecodableModel.step`."""
        check_room(cache.num_rows, cache.max_rows, cache.longest() + 1, cache.max_len)
        if self._recorded is not None and (logits := self._recorded.step(cache, token_ids_B)) is not None:
            return logits
        cache.clear_next_column()
        blocks = group_rows(cache, self._num_heads * self._head_dim)
        attention = StepAttention(cache, self._num_kv_heads, self._scaling, blocks)
        logits = self._forward(cache, StepInputs.of(cache, token_ids_B), attention)
        cache.own_lengths_B = cache.own_lengths_B + 1
        return logits

    def routes(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        """Return None: these families are dense."""

    def record_steps(self, recorder: GraphCapture | None) -> None:
        """Do steps from recordings where rows stay for a while; None = one operation at a time.

        The logits of a step are then valid until the next one.
        """
        heads = (self._num_kv_heads, self._scaling)
        self._recorded = None if recorder is None else GraphedDecoder(self._forward, recorder, *heads)

    def _forget_recordings(self) -> None:
        """Make recordings invalid: the tensors that a step reads have other addresses now."""
        if self._recorded is not None:
            self._recorded.refresh()

    def _forward(self, cache: StaticCache, inputs: StepInputs, attention: StepAttention | BlockAttention) -> Tensor:
        """Logits [B, V] of one token a row, whose keys and values go into the cache."""
        places = _next_places(cache, inputs, attention)
        hidden_BD = F.embedding(inputs.token_ids_B, self._embedding)
        cos, sin = self._rotary(inputs.positions_B)
        for number, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden_BD, cos, sin)
            # before the attention, which sees the new token too
            cache.keys[number][places] = key
            cache.values[number][places] = value
            self._finish(layer, hidden_BD, attention(number, query, layer.sliding_window))
        return self._logits(hidden_BD)

    @property
    def _embedding(self) -> Tensor:
        return self._backbone.embed_tokens.weight

    def _make_rotary(self, num_positions: int, like: Tensor) -> None:
        """cos and sin [positions, 1, D] from the module's own frequencies; sin carries the sign of the rotation."""
        if self._cos.shape[0] >= num_positions and self._cos.device == like.device:
            return
        rotary = self._backbone.rotary_emb
        # in float32: bfloat16 does not tell positions above 256 apart
        angles = torch.arange(num_positions, device=like.device).float()[:, None] * rotary.inv_freq.float()
        cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        self._cos = torch.cat([cos, cos], -1)[:, None].to(like.dtype)
        self._sin = torch.cat([-sin, sin], -1)[:, None].to(like.dtype)
        self._forget_recordings()  # they read the tables that were just replaced

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos[positions], self._sin[positions]

    def _rotary_of_axes(self, axes_3T: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cos and sin of tokens whose positions have three axes, each with its share of the frequencies."""
        cos_1TD, sin_1TD = self._backbone.rotary_emb(self._embedding, axes_3T[:, None])
        # `_project` rolls the halves and negates none, so the sine carries the sign; the module's own does not
        signs_D = torch.ones(self._head_dim, device=sin_1TD.device, dtype=sin_1TD.dtype)
        signs_D[: self._head_dim // 2] = -1
        return cos_1TD[0, :, None], (sin_1TD[0] * signs_D)[:, None]

    def _project(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed, projected, rotated query [N, H, D], key and value [N, G, D] of N rows."""
        normed = _rms_norm(hidden, layer.module.input_layernorm)
        # query and key stay side by side, so that one rotation serves both
        heads = layer.qkv.linear(normed, layer.qkv_bias).view(hidden.shape[0], -1, self._head_dim)
        rotated, value = heads[:, : -self._num_kv_heads], heads[:, -self._num_kv_heads :]
        norm = getattr(layer.module.self_attn, "q_norm", None)
        if layer.norms_HD is not None:
            epsilon = layer.module.self_attn.q_norm.variance_epsilon
            rotated = F.rms_norm(rotated, (self._head_dim,), None, epsilon).mul_(layer.norms_HD)
        elif norm is not None:
            query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
            key_norm = layer.module.self_attn.k_norm
            rotated = torch.cat([_rms_norm(query, norm), _rms_norm(key, key_norm)], 1)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self._head_dim // 2, -1), sin)
        return rotated[:, : self._num_heads], rotated[:, self._num_heads :], value

    def _finish(self, layer: _Layer, hidden: Tensor, attended: Tensor) -> None:
        """Output projection and MLP, added to `hidden` in place."""
        module = layer.module
        hidden.add_(layer.output.linear(attended, module.self_attn.o_proj.bias))
        normed = _rms_norm(hidden, module.post_attention_layernorm)
        gate, up = layer.gate_up.linear(normed, layer.gate_up_bias).chunk(2, -1)
        hidden.add_(layer.down.linear(module.mlp.act_fn(gate).mul_(up), module.mlp.down_proj.bias))

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(_rms_norm(hidden, self._backbone.norm), self._head_matrix)


def _next_places(cache: StaticCache, inputs: StepInputs, attention: StepAttention | BlockAttention) -> Any:
    """Return the index of each row's next column in the keys and values of a layer."""
    if attention.even_column is not None:
        # one column of all rows is a view, and a copy into it; places of their own are a scatter
        return (slice(cache.num_rows), slice(None), attention.even_column)
    return (torch.arange(cache.num_rows, device=inputs.own_lengths_B.device), slice(None), inputs.own_lengths_B)


def _to_rows(tensor_TGD: Tensor, place_T: Tensor, num_prompts: int, length: int) -> Tensor:
    """[T, G, D] tokens -> [P, G, L, D], zeros behind each prompt."""
    rows = tensor_TGD.new_zeros(num_prompts * length, *tensor_TGD.shape[1:])
    rows[place_T] = tensor_TGD
    return rows.view(num_prompts, length, *tensor_TGD.shape[1:]).transpose(1, 2)


def _rms_norm(hidden: Tensor, module: Any) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w."""
    return F.rms_norm(hidden, (hidden.shape[-1],), module.weight, module.variance_epsilon)


def _fuse(module: Any) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = (mlp.gate_proj, mlp.up_proj)
    return _Layer(
        module=module,
        sliding_window=_window(attention),
        qkv=PackedMatrix(torch.cat([effective_weight(part) for part in qkv])),
        qkv_bias=_fused_bias(qkv),
        gate_up=PackedMatrix(torch.cat([effective_weight(part) for part in gate_up])),
        gate_up_bias=_fused_bias(gate_up),
        norms_HD=_joined_norms(attention),
        # folded in once a refresh: decoding takes 1.13 to 1.24 times as long with both factors at every token
        output=PackedMatrix(effective_weight(attention.o_proj)),
        down=PackedMatrix(effective_weight(mlp.down_proj)),
    )


def _joined_norms(attention: Any) -> Tensor | None:
    """[H + G, D] weights of the norms of query and key by head; None where there are none, or one norm is no gain.

    On a CPU torch multiplies by the weight behind the norm, so that the result is the same to the last bit.
    """
    query, key = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if query is None or key is None or query.variance_epsilon != key.variance_epsilon:
        return None
    if query.weight.device.type != "cpu" or query.weight.dtype is not torch.float32:
        return None
    config, width = attention.config, query.weight.shape[0]
    return torch.cat(
        [
            query.weight.expand(config.num_attention_heads, width),
            key.weight.expand(config.num_key_value_heads, width),
        ]
    )


def _window(attention: Any) -> int | None:
    """Mistral has one window for all layers in its configuration, Qwen2 and Qwen3 one per layer."""
    if attention.config.model_type == "mistral":
        return attention.config.sliding_window
    return getattr(attention, "sliding_window", None)


def _fused_bias(parts: Sequence[Any]) -> Tensor | None:
    return None if parts[0].bias is None else torch.cat([part.bias for part in parts])
