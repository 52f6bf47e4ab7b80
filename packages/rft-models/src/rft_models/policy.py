"""A causal language model as the trainer sees it: packed tokens in, log-probabilities out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from rft_algos.errors import PreflightError
from rft_models.directories import no_progress_bars
from rft_models.head import head_of
from rft_models.packed_attention import IMPLEMENTATION, PackedLayout, RowLayout, no_mask
from rft_models.shared_prompts import share_prompts

if TYPE_CHECKING:
    from rft_models.decode import DecodableModel
    from rft_models.text import HfTextCodec

_PROBE_LENGTHS = (3, 5)


class CausalPolicy:
    """A transformers causal language model, its tokenizer, and the way its packed forward is computed.

    `packed` says which: true runs the backbone once on all tokens with segment-wise attention (and
    on a prompt that several segments begin with once for all of them, see `shared_prompts`),
    false runs the model's own attention on segments padded into blocks of similar length. Both are exact.
    `head_chunk_size` is the number of rows whose logits are formed at a time; None picks by size.
    """

    def __init__(
        self,
        model: Any,
        codec: HfTextCodec | None,
        *,
        packed: bool,
        head_chunk_size: int | None = None,
        where: str = "model",
    ) -> None:
        self.model = model
        self.codec = codec
        self.packed = packed
        self.head_chunk_size = head_chunk_size
        self.where = where
        self.head = head_of(model, where)
        self._backbone = model.get_decoder()
        self._drops_out = _drops_out(model)
        self._accepts = frozenset(inspect.signature(self._backbone.forward).parameters)

    def token_logprobs(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        segment_ids_T: Tensor,
        wanted_T: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token t | earlier tokens of its segment) at logits / temperature, where wanted.

        Args:
            token_ids_T: int64 ids of segments laid one after another.
            positions_T: int64 position of each token inside its segment.
            segment_ids_T: int64; a segment ends where the id changes.
            wanted_T: bool; the head runs on the rows that predict these tokens and on no others.
            temperature: positive divisor of the logits.
            with_entropy: also the entropy (nats) of the distribution that predicts each wanted token.
            entropy_gradient: let gradients flow through that entropy.

        Returns:
            ([T] log-probabilities, [T] entropies or None), float32 (float64 for float64 weights),
            0 where not wanted and at the first token of a segment, which nothing predicts.
        """
        hidden_KD, place_T = self._states(token_ids_T, positions_T, segment_ids_T, wanted_T)
        predicted_T = wanted_T.to(torch.bool).clone()
        predicted_T[:1] = False
        predicted_T[1:] &= segment_ids_T[1:] == segment_ids_T[:-1]
        tokens_R = predicted_T.nonzero()[:, 0]
        logprobs_R, entropy_R = self.head.logprobs(
            hidden_KD.index_select(0, tokens_R - 1 if place_T is None else place_T[tokens_R - 1]),
            token_ids_T.index_select(0, tokens_R),
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            chunk_size=self.head_chunk_size,
        )
        zeros_T = torch.zeros(token_ids_T.shape[0], dtype=logprobs_R.dtype, device=logprobs_R.device)
        entropy_T = None if entropy_R is None else zeros_T.index_copy(0, tokens_R, entropy_R)
        return zeros_T.index_copy(0, tokens_R, logprobs_R), entropy_T

    def _states(
        self, token_ids_T: Tensor, positions_T: Tensor, segment_ids_T: Tensor, wanted_T: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """([K, D] final hidden states, [T] the row among them of each token); None: in the order of the tokens."""
        shared = None
        if self.packed and not (self.model.training and self._drops_out):  # copies of a prompt drop other entries
            shared = share_prompts(token_ids_T, positions_T, segment_ids_T, wanted_T)
        if shared is None:
            return self.hidden_states(token_ids_T, positions_T, segment_ids_T), None
        states_KD = self._packed_states(token_ids_T[shared.kept_K], positions_T[shared.kept_K], shared.layout)
        return states_KD, shared.place_T

    def hidden_states(self, token_ids_T: Tensor, positions_T: Tensor, segment_ids_T: Tensor) -> Tensor:
        """[T, D] final hidden states (after the last norm), each seeing its own segment only."""
        layout = PackedLayout.from_segment_ids(segment_ids_T)
        if self.packed:
            return self._packed_states(token_ids_T, positions_T, layout)
        return self._padded_states(token_ids_T, positions_T, layout)

    def _packed_states(self, token_ids_T: Tensor, positions_T: Tensor, layout: RowLayout) -> Tensor:
        output = self._backbone(
            input_ids=token_ids_T[None],
            position_ids=positions_T[None],
            attention_mask=no_mask(token_ids_T.device),
            use_cache=False,
            packed_layout=layout,
        )
        return output.last_hidden_state[0]

    def _padded_states(self, token_ids_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """The model's own forward on right-padded blocks; a causal row never sees what stands after it."""
        lengths = sorted(layout.lengths, reverse=True)
        places, done = [], 0
        for block in layout.blocks:
            shape = (block.num_segments, block.length)
            ids, positions = token_ids_T, positions_T
            inside = torch.ones(shape, dtype=torch.int64, device=ids.device)
            if block.gather_SL is not None:
                ids, positions = ids[block.gather_SL], positions[block.gather_SL]
                real_S = torch.tensor(lengths[done : done + block.num_segments], device=ids.device)
                inside = (torch.arange(block.length, device=ids.device) < real_S[:, None]).to(torch.int64)
            done += block.num_segments
            given = {"position_ids": positions.view(shape)} if self.accepts("position_ids") else {}
            output = self._backbone(input_ids=ids.view(shape), attention_mask=inside, use_cache=False, **given)
            places.append(output.last_hidden_state.flatten(0, 1))
        joined = torch.cat(places)
        return joined if layout.scatter_T is None else joined.index_select(0, layout.scatter_T)

    def verify(self) -> None:
        """Compare the packed forward and the head with the model's own forward on two short segments.

        Catches an architecture whose head or attention does more than is computed here.

        Raises:
            PreflightError: the log-probabilities differ by more than the weights' precision explains.
        """
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            segments = [self._probe_tokens(length, start) for start, length in enumerate(_PROBE_LENGTHS)]
            expected = torch.cat([self._native_logits(tokens) for tokens in segments])
            hidden = self.hidden_states(
                torch.cat(segments),
                torch.cat([torch.arange(len(tokens), device=self.device) for tokens in segments]),
                torch.cat([torch.full_like(tokens, number) for number, tokens in enumerate(segments)]),
            )
            found = self.head.logits(hidden)
        self.model.train(training)
        spread = float(expected.abs().max()) + 1.0
        name = type(self.model).__name__
        error = float((expected - found).abs().max())
        if not error <= spread * (1e-4 if self.dtype in (torch.float32, torch.float64) else 5e-2):
            raise PreflightError(
                code="models.forward_differs",
                what=f"logits of {name} differ from its own forward by {error:.3g} of {spread:.3g}",
                where=self.where,
                why="log-probabilities must be those of the model; its head or attention does more than is known here",
                do="choose a model of one of the families in the README of rft-models",
            )

    def _probe_tokens(self, length: int, start: int) -> Tensor:
        vocab_size = self.head.weight.shape[0]
        return (torch.arange(length, device=self.device) * 7 + 3 + start) % vocab_size

    def _native_logits(self, tokens: Tensor) -> Tensor:
        if not self.packed:
            return self.model(input_ids=tokens[None], use_cache=False).logits[0].float()
        self.model.set_attn_implementation("eager")
        logits = self.model(input_ids=tokens[None], use_cache=False).logits[0].float()
        self.model.set_attn_implementation(IMPLEMENTATION)
        return logits

    def accepts(self, argument: str) -> bool:
        """Whether the backbone's forward has an argument of this name."""
        return argument in self._accepts

    def decoder(self) -> DecodableModel:
        """What the in-process engine generates with; shares these weights, `refresh()` after they changed."""
        from rft_models.decode import decoder_for

        return decoder_for(self)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names as in the saved directory; tied matrices appear once."""
        yield from self.model.named_parameters()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a complete Hugging Face directory: safetensors weights, configuration, tokenizer."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        with no_progress_bars():
            self.model.save_pretrained(str(directory))
        if self.codec is not None:
            self.codec.save_pretrained(directory)

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied matrices counted once."""
        return sum(parameter.numel() for _, parameter in self.named_parameters())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.head.weight.dtype

    def train(self, mode: bool = True) -> Self:
        """Training mode: dropout as configured, gradient checkpointing if it was asked for."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """No dropout, no checkpointing."""
        return self.train(False)


def _drops_out(model: Any) -> bool:
    """Whether training mode zeroes entries at random."""
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    return any(float(getattr(m, "attention_dropout", None) or 0.0) > 0 for m in model.modules())
