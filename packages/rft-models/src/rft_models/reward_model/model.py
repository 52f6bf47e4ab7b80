"""A causal decoder with scalar heads: packed texts in, scores by head out. Loading and saving: `loading`, `saving`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from rft_core.packed_tokens import PackedTokens
from rft_models.attention.varlen import VarlenKernel
from rft_models.backbone.backbone import States
from rft_models.backbone.packed_model import PackedModel
from rft_models.lora.files import save_beside
from rft_models.reward_model.head import ScoreHead, last_tokens
from rft_models.reward_model.saving import write_spec
from rft_models.reward_model.spec import RewardSpec

if TYPE_CHECKING:
    from rft_models.tokenization.tokenizer import HfTokenizer


class RewardModel(PackedModel):
    """A transformers decoder, a `ScoreHead` on its states, and the tokenizer that its texts go through.

    The head is computed in float32 (float64 for float64 weights), whatever the decoder's type. With the plain
    spec (one pooled state, the last) it computes what a sequence classifier of transformers computes.
    """

    def __init__(
        self,
        model: Any,
        head: ScoreHead,
        tokenizer: HfTokenizer | None,
        *,
        packed: bool,
        kernel: VarlenKernel | None = None,
        where: str = "model",
    ) -> None:
        super().__init__(model, tokenizer, packed=packed, kernel=kernel, where=where)
        self.head = head
        self._pad_id: int | None = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)

    @property
    def spec(self) -> RewardSpec:
        """Specification of what the head computes."""
        return self.head.spec

    def scores(self, tokens: PackedTokens) -> dict[str, Tensor]:
        """Compute the scores of packed texts by head: the columns of `score_matrix`, each [S]."""
        return dict(zip(self.spec.heads, self.score_matrix(tokens).unbind(1), strict=True))

    def score_matrix(self, tokens: PackedTokens) -> Tensor:
        """Compute the scores of packed texts, a segment a text; what a text is packed with changes none of them.

        The target mask changes no score either: what stands before the first target of a segment and is shared by
        neighbouring segments runs once.

        Returns:
            [S, K] of each head in the spec's order, float32 (float64 for float64 weights), differentiable; segments
            in order.
        """
        # a segment begins at the token that nothing predicts
        segment_T = (~tokens.predictable_T).to(torch.int64).cumsum(0) - 1
        pooled_SD = self._pooled(self.backbone.states(tokens), tokens.token_ids_T, segment_T, int(segment_T[-1]) + 1)
        return self.head(pooled_SD)

    def step_scores(self, tokens: PackedTokens) -> Tensor:
        """Compute the scores of the steps of packed texts: the targets are the tokens that end a step.

        Returns:
            [N] logits that a step is right, one a target and in their order, float32 (float64 for float64 weights),
            differentiable.
        """
        states = self.backbone.states(tokens)
        rows_N = tokens.targets_T.nonzero()[:, 0]
        rows_N = rows_N if states.place_T is None else states.place_T[rows_N]
        # the token that ends a step is read itself: nothing is predicted
        return self.head(states.hidden_KD.index_select(0, rows_N).to(self.head.score.weight.dtype))[:, 0]

    def _pooled(self, states: States, token_ids_T: Tensor, segment_T: Tensor, num_segments: int) -> Tensor:
        """Pool the states of each segment to [S, D], in the head's type."""
        dtype = self.head.score.weight.dtype
        if self.head.pooling is None:
            rows_S = last_tokens(token_ids_T, segment_T, num_segments, self._pad_id)
            rows_S = rows_S if states.place_T is None else states.place_T[rows_S]
            return states.hidden_KD.index_select(0, rows_S).to(dtype)
        states_TD = states.hidden_KD if states.place_T is None else states.hidden_KD.index_select(0, states.place_T)
        return self.head.pooling(states_TD.to(dtype), segment_T, num_segments)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by their names in the saved directory."""
        yield from super().named_parameters()
        yield from self.head_parameters()

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of a saved directory: adapters, which are folded in, are not among them."""
        for name, parameter in self.base_parameters():
            yield self.saved_name(name), parameter
        yield from self.head_parameters()

    def head_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the head's parameters by their names in the saved directory."""
        yield from self.head.named_parameters(self.spec.tensor_prefix.rstrip("."))

    def saved_name(self, name: str) -> str:
        """Return the name in files of a decoder's parameter: with the prefix that causal language models' files have.

        The decoder of a vision-language model has no prefix: transformers has no classifier around one.
        """
        prefix = self.model.base_model_prefix if self.tower is None else ""
        return f"{prefix}.{name}" if prefix and self.spec.is_classifier else name

    def snapshot(self, copy: Callable[[str, Tensor], Tensor]) -> Callable[[Path], None]:
        """`save_pretrained` of the weights as they are now: each is copied by `copy(name, tensor)`.

        With the plain spec a model of text is a sequence classifier of transformers whose labels are the heads.
        Adapters are folded in, and written alone to the folder `adapter` below.
        """
        # copied at once: files are written later, perhaps while training goes on
        weights = {name: copy(name, tensor) for name, tensor in self.model.state_dict().items()}
        named = {f"{self.spec.tensor_prefix}{name}": tensor for name, tensor in self.head.state_dict().items()}
        head = {name: copy(name, tensor) for name, tensor in named.items()}

        def write(directory: Path) -> None:
            merged = weights if self.adapters is None else save_beside(self.adapters, directory, weights)
            self.write(directory, {self.saved_name(name): tensor for name, tensor in merged.items()} | head)
            write_spec(self.spec, self.model.config.model_type, directory / "config.json")

        return write

    def save_description(self, directory: str | Path) -> None:
        """Write what a directory holds besides the weights: configuration, tokenizer, what the head computes."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        self.model.config.save_pretrained(str(path))
        self.write_tokenizer(path)
        write_spec(self.spec, self.model.config.model_type, path / "config.json")

    @property
    def max_positions(self) -> int:
        """Tokens of the longest text that can be placed; 0 = no limit."""
        config = self.model.config.get_text_config(decoder=True)
        return int(getattr(config, "max_position_embeddings", 0) or 0)

    def to(self, device: torch.device | str) -> Self:
        """Move decoder and head to a device."""
        self.model.to(device)
        self.head.to(device)
        return self

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode: dropout as configured, checkpointing if requested, the learned scale."""
        self.head.train(mode)
        return super().train(mode)
