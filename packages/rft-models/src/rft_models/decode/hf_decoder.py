"""Decoding of any causal model with a key-value cache, through its transformers forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_models.decode.kv_cache import GrowingCache, check_room, dynamic_layers, keys_and_values_bytes
from rft_models.families.registry import ATTENTION_LAYERS
from rft_models.layers.eval_mode import eval_mode
from rft_models.layers.moe_router import chosen_routes
from rft_models.vision.decode_inputs import prepare_multimodal
from rft_models.vision.packed_rows import RowInputs

if TYPE_CHECKING:
    from rft_models.policy.causal_policy import CausalPolicy


class HfDecoder:
    """Left-padded rows, explicit positions and a 2D mask: exact for every causal attention model.

    Slower than `FastDecoder`: the cache is copied as it grows and the module tree is walked
    for every token.
    """

    def __init__(self, policy: CausalPolicy) -> None:
        config = policy.model.config.get_text_config(decoder=True)
        self._policy = policy
        self._head = policy.head
        self._model = policy.model
        self._backbone = policy.model.get_decoder()
        self._takes_positions = policy.accepts("position_ids")
        self._tower = policy.tower
        self.vocab_size = policy.head.weight.shape[0]
        self.max_positions = int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", 0))
        layer_types = set(getattr(config, "layer_types", None) or ())
        if not policy.accepts("past_key_values") or not layer_types <= ATTENTION_LAYERS:
            kinds = sorted(layer_types - ATTENTION_LAYERS) or ["no past_key_values argument"]
            raise OptionsError(
                code="models.no_decode",
                what=f"{type(policy.model).__name__} cannot be decoded in process: {', '.join(kinds)}",
                where=policy.where,
                why="rows are added to and dropped from a key-value cache; a recurrent state has no such columns",
                do="generate with the vllm or sglang engine",
            )

    def refresh(self) -> None:
        """Do nothing: no tensor is derived from the weights, the module itself is run."""

    def new_cache(self, max_rows: int, max_len: int) -> GrowingCache:
        """Return an empty cache; memory grows with the rows and columns in use."""
        if self.max_positions:
            check_room(0, max_rows, max_len, self.max_positions)
        return GrowingCache(max_rows, max_len)

    def cache_bytes(self, max_rows: int, max_len: int, *, num_prompts: int, prompt_len: int) -> int:
        """Estimate the peak bytes of keys and values: a step copies them. Prompts are part of their rows."""
        config = self._model.config.get_text_config(decoder=True)
        num_heads = int(config.num_attention_heads)
        num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
        each = self._head.weight.dtype.itemsize
        layers = int(config.num_hidden_layers)
        return 2 * keys_and_values_bytes(layers, max_rows, num_kv_heads, max_len, head_dim, each)

    @torch.inference_mode()
    def prefill(
        self,
        cache: GrowingCache,
        token_ids_PL: Tensor,
        lengths_P: Tensor,
        copies_P: Sequence[int],
        media: Sequence[Any] | None = None,
    ) -> Tensor:
        """Run right-aligned prompts once, see `DecodableModel.prefill`."""
        from transformers import DynamicCache

        lengths = lengths_P.to("cpu", torch.int64)
        longest = int(lengths.max())
        prompt_of_row_B = torch.repeat_interleave(torch.arange(lengths.shape[0]), torch.tensor(list(copies_P)))
        check_room(cache.num_rows + prompt_of_row_B.shape[0], cache.max_rows, longest, cache.max_len)
        # Right-aligned: column c of prompt p is its token c - (longest - length).
        place_PL = torch.arange(longest) - (longest - lengths)[:, None]
        ids_PL = token_ids_PL.to("cpu").gather(1, place_PL.clamp(min=0))
        fresh = DynamicCache()
        row, offsets_P = self._row(media, ids_PL, place_PL, lengths)
        hidden = self._run(row, (ids_PL.shape[0], longest), lengths, fresh)
        index = prompt_of_row_B.to(hidden.device)
        keys, values = dynamic_layers(fresh)
        cache.append(
            [key[index] for key in keys],
            [value[index] for value in values],
            lengths[prompt_of_row_B],
            offsets_P[prompt_of_row_B],
        )
        return self._head.logits(hidden[:, -1])

    @torch.inference_mode()
    def step(self, cache: GrowingCache, token_ids_B: Tensor) -> Tensor:
        """Append one token to every active row, see `DecodableModel.step`."""
        from transformers import DynamicCache

        check_room(cache.num_rows, cache.max_rows, cache.num_columns + 1, cache.max_len)
        # a new container for the same tensors: rows may have come and gone since the last step
        past = DynamicCache()
        for number, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
            past.update(keys, values, number)
        device = self._head.weight.device
        row = RowInputs(token_ids_B.to(device), (cache.lengths + cache.offsets).to(device))
        hidden = self._run(row, (cache.num_rows, 1), cache.lengths + 1, past)
        cache.keys, cache.values = dynamic_layers(past)
        cache.lengths = cache.lengths + 1
        return self._head.logits(hidden[:, -1])

    @torch.inference_mode()
    def routes(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        """Return the experts that whole sequences go to, as a prefill of them; None in a model without known routers.

        Returns:
            [L, T, k] int64: of each layer and of the tokens of all sequences in order, ascending.
        """
        from transformers import DynamicCache

        if not self._policy.has_known_routers:
            return None
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        longest = int(lengths.max())
        place_PL = torch.arange(longest) - (longest - lengths)[:, None]
        ids_PL = torch.tensor([[0] * (longest - len(one)) + list(one) for one in sequences])
        logits: list[Tensor] = []
        row, _ = self._row(None, ids_PL, place_PL, lengths)
        self._run(row, (len(sequences), longest), lengths, DynamicCache(), logits)
        inside = (place_PL >= 0).flatten().to(logits[0].device)
        policy = self._policy
        return chosen_routes([layer[inside] for layer in logits], policy.router, policy.router_biases)

    def _row(
        self, media: Sequence[Any] | None, ids_PL: Tensor, place_PL: Tensor, lengths_P: Tensor
    ) -> tuple[RowInputs, Tensor]:
        """Right-aligned prompts with the features of their images, and [P] what later positions are shifted by."""
        device = self._head.weight.device
        inside_PL = place_PL >= 0
        ids, columns = ids_PL[inside_PL].to(device), place_PL[inside_PL].to(device)
        seen = prepare_multimodal(self._tower, media, lengths_P.tolist(), ids, columns)
        where_PL = inside_PL.flatten().cumsum(0) - 1  # padding repeats a token: nothing attends to it
        first_P = inside_PL.int().argmax(1) + torch.arange(inside_PL.shape[0]) * inside_PL.shape[1]
        where_PL = torch.where(inside_PL, where_PL.view_as(place_PL), where_PL[first_P][:, None])
        return seen.row.select(where_PL.flatten().to(device)), seen.offsets_P

    def _run(
        self,
        row: RowInputs,
        shape: tuple[int, int],
        lengths_B: Tensor,
        past: Any,
        routed: list[Tensor] | None = None,
    ) -> Tensor:
        """[B, Q, D] final hidden states; rows are right-aligned and `lengths_B` long after these tokens.

        `routed` gets the logits [B Q, E] of each layer's router.
        """
        device = self._head.weight.device
        columns = past.get_seq_length() + shape[1]
        mask_BK = (torch.arange(columns) >= columns - lengths_B[:, None]).to(torch.int64)
        inputs = row.arguments(shape, self._backbone.get_input_embeddings())
        if not self._takes_positions:
            del inputs["position_ids"]
        inputs |= {"past_key_values": past, "use_cache": True}
        if routed is not None:
            inputs["output_router_logits"] = True
        # a policy may be in training mode between two updates; tokens are drawn without dropout
        with eval_mode(self._model):
            output = self._backbone(attention_mask=mask_BK.to(device), **inputs)
        if routed is not None:
            routed += [logits.flatten(0, -2) for logits in output.router_logits]
        return output.last_hidden_state
