"""Final hidden states of packed segments: the input of log-probabilities and of values."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.attention.hf_interface import native_attention_mode, no_mask
from rft_models.attention.packed import PackedLayout, PiecedLayout, RowLayout
from rft_models.attention.sequence_parallel import SequenceMode, SequenceRanks, SequenceShards, takes_ring
from rft_models.attention.shared_prefix import SharedPrompts, find_shared_prefixes
from rft_models.attention.varlen import VarlenKernel
from rft_models.layers.embedding_noise import EmbeddingNoise
from rft_models.layers.moe_router import compute_gates_in_float32
from rft_models.vision.packed_rows import RowInputs, no_tower

if TYPE_CHECKING:
    from rft_models.vision.tower import VisionTower


class States(NamedTuple):
    """Final hidden states, and where they belong."""

    hidden_KD: Tensor
    """[K, D], or this rank's run of these rows where ranks share a row."""
    place_T: Tensor | None
    """[T] the row of each token; None: in the order of the tokens."""
    here: tuple[int, int] | None = None
    """First and behind-the-last row here, where ranks share a row."""
    num_rows: int = 0
    """K, where ranks share a row."""


class Backbone:
    """A transformers decoder without its head, and the way its packed forward is computed.

    `packed` selects it: true runs the decoder once on all tokens with segment-wise attention (and on a prompt that
    several segments begin with once for all of them, see `shared_prefix`), false runs the decoder's own
    attention on segments padded into blocks of similar length. Both are exact. `kernel` computes the segment-wise
    attention where it can, see `attention.kernels`. `tower` gives the features of images, where the model takes any.
    """

    def __init__(
        self, decoder: Any, *, packed: bool, kernel: VarlenKernel | None = None, tower: VisionTower | None = None
    ) -> None:
        self.decoder = decoder
        self.tower = tower
        self.packed = packed
        self.kernel = kernel
        self.split: SequenceRanks | None = None
        """The ranks that share a row, see `sequence_parallel`; None: each has rows of its own."""
        self.by_ring = False
        """True where their attention is a ring."""
        self._autocast: torch.dtype | None = None
        self.noise: EmbeddingNoise | None = None
        """Noise on the embeddings while gradients are taken; None: without."""
        self._drops_out = _drops_out(decoder)
        self._accepts = frozenset(inspect.signature(decoder.forward).parameters)

    @property
    def autocast(self) -> torch.dtype | None:
        """Type of the layers' products, the routers' apart, and of the final states; None: that of the weights."""
        return self._autocast

    @autocast.setter
    def autocast(self, dtype: torch.dtype | None) -> None:
        self._autocast = dtype
        if dtype is not None:
            compute_gates_in_float32(self.decoder)

    def states(self, tokens: PackedTokens, *, routed: list[Tensor] | None = None) -> States:
        """Compute the final hidden states of the packed row, or of this rank's part of it.

        What stands before the first target of a segment and is shared by neighbouring segments runs once; without
        a target mask every token runs. `routed` gets the logits [K, E] of each layer's router, in the rows of the
        states.
        """
        row = self._row(tokens)
        shared = None
        if self.noise is not None and self.decoder.training and torch.is_grad_enabled():
            row = replace(row, noise=self.noise.rows(tokens.token_ids_T, tokens.positions_T, tokens.segment_ids_T))
        # copies of a prompt drop other entries, and have other noise
        drops_out = (self.decoder.training and self._drops_out) or row.noise is not None
        if tokens.target_mask_T is not None and self.packed and not drops_out:
            # by identities and not by ids: equal words about another image are another prompt
            shared = _shared_prompts(tokens, row)
        if shared is None and self.split is None:
            return States(self._whole_states(row, tokens, routed), None)
        if shared is None:
            layout = PackedLayout.from_segment_ids(tokens.readable.segment_ids_T, row.token_ids_K.device)
            layout.kernel = self.kernel
            return self._own_states(row, layout, None, routed)
        shared.layout.kernel = self.kernel
        return self._own_states(row.select(shared.kept_K), shared.layout, shared.place_T, routed)

    def _row(self, tokens: PackedTokens) -> RowInputs:
        """Return the tokens with the features of their images."""
        images = tokens.mm_inputs
        if self.tower is None:
            if images is not None and any(media is not None for media in images):
                raise no_tower(f"a {type(self.decoder).__name__}")
            return RowInputs(tokens.token_ids_T, tokens.positions_T)
        lengths = [] if images is None else PackedLayout.from_segment_ids(tokens.readable.segment_ids_T).lengths
        return self.tower.row(images, lengths, tokens.token_ids_T, tokens.positions_T)

    def _own_states(
        self, row: RowInputs, layout: PiecedLayout, place_T: Tensor | None, routed: list[Tensor] | None
    ) -> States:
        if self.split is None:
            return States(self._packed_states(row, layout, routed), place_T)
        num_rows = row.token_ids_K.shape[0]
        part = SequenceShards(self.split, self.by_ring).of(layout, num_rows, row.token_ids_K.device)
        # only the attention sees more than this rank's rows: its layout exchanges heads or keys with the other ranks
        hidden = self._packed_states(row.select(part.rows), part.layout, routed)
        return States(hidden, part.places(place_T), part.here, num_rows)

    def hidden_states(self, tokens: PackedTokens) -> Tensor:
        """Compute [T, D] final hidden states (after the last norm), each seeing its own segment only."""
        return self._whole_states(self._row(tokens), tokens, None)

    def _whole_states(self, row: RowInputs, tokens: PackedTokens, routed: list[Tensor] | None) -> Tensor:
        layout = PackedLayout.from_segment_ids(tokens.readable.segment_ids_T, row.token_ids_K.device)
        if self.packed:
            layout.kernel = self.kernel
            return self._packed_states(row, layout, routed)
        return self._padded_states(row, layout, routed)

    def all_rows(self, values_L: Tensor, states: States) -> Tensor:
        """Merge [L] values of this rank's rows of the states with those of the other ranks to [K]."""
        if self.split is None or states.here is None:
            return values_L
        first, behind = states.here
        return self.split.merge(F.pad(values_L, (first, states.num_rows - behind)))

    def split_over(self, ranks: SequenceRanks, where: str, mode: SequenceMode = "auto") -> None:
        """Share every row of `states` with other ranks; `mode` as in `sequence_parallel`.

        Raises:
            OptionsError: the decoder computes its own attention, which needs whole rows; or it drops out in a ring.
        """
        if ranks.size > 1 and not self.packed:
            raise OptionsError(
                code="models.split_native",
                what=f"sp_size = {ranks.size} with a decoder that computes its own attention",
                where=where,
                why="ranks share a row inside the packed attention",
                state="nothing was changed",
                do="--sp_size 1, or a model of one of the families in the README of rft-models",
            )
        self.split = ranks if ranks.size > 1 else None
        self.by_ring = self.split is not None and takes_ring(mode, self.decoder.config, ranks.size, where)

    def own_states(self, token_ids_L: Tensor) -> Tensor:
        """[L, D] of one sequence by the decoder's own forward, to compare with."""
        with native_attention_mode(self.decoder, packed=self.packed):
            return self.decoder(input_ids=token_ids_L[None], use_cache=False).last_hidden_state[0]

    def look_for_dropout(self) -> None:
        """Find out again whether training mode zeroes entries, after modules were put in."""
        self._drops_out = _drops_out(self.decoder)

    def accepts(self, argument: str) -> bool:
        """Return true where the decoder's forward has an argument of this name."""
        return argument in self._accepts

    def _packed_states(self, row: RowInputs, layout: RowLayout, routed: list[Tensor] | None) -> Tensor:
        with self._products(row.token_ids_K.device):
            output = self.decoder(
                **row.arguments((1, row.token_ids_K.shape[0]), self._embed),
                attention_mask=no_mask(row.token_ids_K.device),
                use_cache=False,
                packed_layout=layout,
                **_router_argument(routed),
            )
        if routed is not None:
            routed += [logits.flatten(0, -2) for logits in output.router_logits]
        return self._rounded(output.last_hidden_state[0])

    def _products(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which products of layers are computed in the type of `autocast`."""
        if self.autocast is None:
            return nullcontext()
        # each weight is used once in a forward, so that copies that stay would cost memory and spare nothing
        return torch.autocast(device.type, self.autocast, cache_enabled=False)

    def _rounded(self, states: Tensor) -> Tensor:
        """Return the final states in the type in which the head multiplies them."""
        return states if self.autocast is None else states.to(self.autocast)

    def _embed(self, token_ids_K: Tensor) -> Tensor:
        return self.decoder.get_input_embeddings()(token_ids_K)

    def _padded_states(self, row: RowInputs, layout: PackedLayout, routed: list[Tensor] | None) -> Tensor:
        """Run the decoder's own forward on right-padded blocks; a causal row never sees what stands after it."""
        # the order in which `PackedLayout` puts segments into blocks
        lengths = sorted(layout.lengths, reverse=True)
        outputs, done = [], 0
        blocks_logits: list[list[Tensor]] = []
        for block in layout.blocks:
            shape = (block.num_segments, block.length)
            padded, device = row, row.token_ids_K.device
            inside = torch.ones(shape, dtype=torch.int64, device=device)
            if block.gather_SL is not None:
                padded = row.select(block.gather_SL)
                real_S = torch.tensor(lengths[done : done + block.num_segments], device=device)
                inside = (torch.arange(block.length, device=device) < real_S[:, None]).to(torch.int64)
            done += block.num_segments
            inputs = padded.arguments(shape, self._embed) | _router_argument(routed)
            if not self.accepts("position_ids"):
                del inputs["position_ids"]
            with self._products(device):
                output = self.decoder(attention_mask=inside, use_cache=False, **inputs)
            outputs.append(self._rounded(output.last_hidden_state.flatten(0, 1)))
            if routed is not None:
                blocks_logits.append([logits.flatten(0, -2) for logits in output.router_logits])
        if routed is not None:
            routed += [_in_order(list(layer), layout) for layer in zip(*blocks_logits, strict=True)]
        return _in_order(outputs, layout)


def _in_order(blocks: list[Tensor], layout: PackedLayout) -> Tensor:
    """Return [T, ...] in the order of the tokens from the padded rows of all blocks."""
    joined = torch.cat(blocks)
    return joined if layout.scatter_T is None else joined.index_select(0, layout.scatter_T)


def _router_argument(routed: list[Tensor] | None) -> dict[str, Any]:
    return {} if routed is None else {"output_router_logits": True}


def _drops_out(model: Any) -> bool:
    """Return true where training mode zeroes entries at random."""
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    return any(float(getattr(m, "attention_dropout", None) or 0.0) > 0 for m in model.modules())


def _shared_prompts(tokens: PackedTokens, row: RowInputs) -> SharedPrompts | None:
    """Return the row without its repeated prompts, see `find_shared_prefixes`."""
    # features of images are told apart on the device alone
    of = tokens.readable if row.source_K is None else tokens
    assert of.target_mask_T is not None
    identities_K = of.token_ids_T if row.source_K is None else row.identities_K
    device = row.token_ids_K.device
    return find_shared_prefixes(identities_K, of.positions_T, of.segment_ids_T, of.target_mask_T, device)
