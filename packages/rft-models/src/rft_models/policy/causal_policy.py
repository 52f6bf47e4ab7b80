"""A causal language model as the trainer sees it: packed tokens in, log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rft_core.device_copies import to_device
from rft_core.errors import OptionsError, PreflightError
from rft_core.packed_tokens import PackedTokens
from rft_models.attention.hf_interface import native_attention_mode
from rft_models.attention.sequence_parallel import SequenceMode, SequenceRanks, balance_rows, local_rows
from rft_models.attention.varlen import VarlenKernel
from rft_models.backbone.backbone import States
from rft_models.backbone.logits_check import check_logits
from rft_models.backbone.packed_model import PackedModel
from rft_models.layers.eval_mode import eval_mode
from rft_models.layers.moe_router import (
    AuxLossShare,
    RoutedRows,
    Router,
    biases_of,
    chosen_routes,
    count_experts,
    gates_of,
    load_balancing_loss,
    routed_rows,
    router_of,
    verify_router,
)
from rft_models.logprobs.fused_loss import LossOutputs, TokenObjective
from rft_models.logprobs.output_head import head_of
from rft_models.logprobs.planned_device import device_type
from rft_models.lora.files import save_beside
from rft_models.lora.quantization import saved_as_numbers, state_of

if TYPE_CHECKING:
    from rft_models.tokenization.tokenizer import HfTokenizer


FUSED_FROM = 33_554_432
"""Logits above which the loss goes through the head where that is quicker; fewer take 128 MiB in float32 at most."""


class ForwardWrapper(Protocol):
    """Callable that runs a function, with work of its own before and after the call."""

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any: ...


def call_directly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class CausalPolicy(PackedModel):
    """A transformers causal language model, its tokenizer, and the way its packed forward is computed.

    `head_chunk_size` is the number of rows whose logits are formed at a time; None picks by size. What is trained is
    chosen by `freezing.freeze` and `adaptation.add_adapters`.
    """

    _watched: list[RoutedRows] | None = None
    """What the routers said of the forwards so far, within `watching_routers`."""

    def __init__(
        self,
        model: Any,
        tokenizer: HfTokenizer | None,
        *,
        packed: bool,
        head_chunk_size: int | None = None,
        kernel: VarlenKernel | None = None,
        where: str = "model",
    ) -> None:
        super().__init__(model, tokenizer, packed=packed, kernel=kernel, where=where)
        self.head_chunk_size = head_chunk_size
        self.head = head_of(model, where)
        self._vocab_size = self.head.weight.shape[0]  # read here: a sharded weight may be empty later
        self._wrapper: ForwardWrapper = call_directly

    def _decoder(self) -> Any:
        return self.model.get_decoder()

    def wrap_forward(self, wrapper: ForwardWrapper) -> None:
        """Run every forward inside `wrapper(function, *arguments)`, for weights that have to be gathered first."""
        self._wrapper = wrapper
        # images are in some rows only, and ranks that gather weights together must all use the tower
        self.gather_always()

    def enable_sequence_parallel(self, ranks: SequenceRanks, mode: SequenceMode = "auto") -> None:
        """Compute every packed row together with other ranks, which must make the same calls.

        The ways to share a row are in `attention.sequence_parallel`.

        Raises:
            OptionsError: the model's own attention is used, which needs whole rows; or a ring would drop out.
        """
        self.backbone.split_over(ranks, self.where, mode)

    def token_logprobs(
        self,
        tokens: PackedTokens,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute log p(token t | earlier tokens of its segment) at logits / temperature, for the targets.

        Args:
            tokens: the head runs on the rows that predict targets and on no others; an image that several segments
                have runs once. With `allowed` a target's probability, and the entropy, are within its allowed tokens.
            temperature: positive divisor of the logits.
            with_entropy: also the entropy (nats) of the distribution that predicts each target.
            entropy_gradient: let gradients flow through that entropy.

        Returns:
            ([T] log-probabilities, [T] entropies or None), float32 (float64 for float64 weights),
            0 at tokens that are no targets and at the first token of a segment, which nothing predicts.
        """
        return self._wrapper(self._token_logprobs, tokens, temperature, with_entropy, entropy_gradient)

    def _token_logprobs(
        self, tokens: PackedTokens, temperature: float, with_entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        targets_R, hidden_RD = self._predicting(tokens)
        return self._head_logprobs(hidden_RD, tokens, targets_R, temperature, with_entropy, entropy_gradient)

    def vocabulary_terms(self, tokens: PackedTokens, *, with_mean: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute `token_logprobs`, log Z, and on request the mean of the log-probs over the vocabulary; all [T].

        Each is 0 at tokens that are no targets. Where the vocabulary is divided among ranks no rank has them.

        Raises:
            OptionsError: as of `OutputHead.vocabulary_terms`.
        """
        return self._wrapper(self._vocabulary_terms, tokens, with_mean)

    def _vocabulary_terms(self, tokens: PackedTokens, with_mean: bool) -> tuple[Tensor | None, ...]:
        targets_R, hidden_RD = self._predicting(tokens)
        terms = self.head.vocabulary_terms(
            hidden_RD,
            tokens.token_ids_T.index_select(0, targets_R),
            with_mean=with_mean,
            chunk_size=self.head_chunk_size,
        )
        return tuple(None if one is None else self._at_tokens(one, targets_R, tokens.num_tokens) for one in terms)

    def _at_tokens(self, values_R: Tensor, targets_R: Tensor, num_tokens: int) -> Tensor:
        zeros_T = torch.zeros(num_tokens, dtype=values_R.dtype, device=values_R.device)
        return self._merged(zeros_T.index_copy(0, targets_R, values_R))

    def prefers_fused_loss(self, num_rows: int) -> bool:
        """Return true where `fused_loss` is cheaper than `token_logprobs` for this number of targets.

        Where their logits are few it saves nothing. In float32 on a CPU, where the gradient of the matrix is
        added up chunk after chunk of rows, it saves 4 to 7 % at twice the memory (2048 x 512 x 32000; in bfloat16
        19 %), so it is left out.
        """
        saves = self.head_chunk_size is not None or num_rows * self._vocab_size > FUSED_FROM
        return saves and (device_type(self.head.weight) != "cpu" or self.dtype in (torch.bfloat16, torch.float16))

    def fused_loss(self, tokens: PackedTokens, objective: TokenObjective, *, temperature: float = 1.0) -> LossOutputs:
        """Sum an objective of single tokens at three products with the output matrix in place of four.

        Equal to the objective applied to `token_logprobs` with its entropies, see `rft_models.logprobs.fused_loss`.

        Args:
            tokens, temperature: as in `token_logprobs`.
            objective: (log-probabilities [N], entropies [N], tokens [N] int64) -> losses [N]; the tokens are
                indices in 0 .. T - 1, those of a call any of the targets.

        Returns:
            The loss, which can go backward once, and [T] log-probabilities and entropies without gradient.
        """
        return LossOutputs(*self._wrapper(self._fused_loss, tokens, objective, temperature))

    def _fused_loss(self, tokens: PackedTokens, objective: TokenObjective, temperature: float) -> tuple[Tensor, ...]:
        targets_R, hidden_RD = self._predicting(tokens)
        outputs = self.head.loss(
            hidden_RD,
            tokens.token_ids_T.index_select(0, targets_R),
            # the head counts its own rows, the objective is asked by tokens
            lambda logprobs_N, entropy_N, rows_N: objective(logprobs_N, entropy_N, targets_R[rows_N]),
            temperature=temperature,
            chunk_size=self.head_chunk_size,
        )
        zeros_T = torch.zeros(tokens.num_tokens, dtype=outputs.logprobs.dtype, device=outputs.logprobs.device)
        per_row = (outputs.logprobs, outputs.entropy)
        return outputs.loss, *(self._merged(zeros_T.index_copy(0, targets_R, values)) for values in per_row)

    def token_logprobs_and_balance(
        self,
        tokens: PackedTokens,
        *,
        expert_counts_E: Tensor | None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None, AuxLossShare]:
        """Compute `token_logprobs`, and from the same forward this batch's part of the routers' loss, see `router`.

        `expert_counts_E` are the counts of the whole step (`expert_counts`, summed); None: this batch is the step.
        """
        logprobs_T, entropy_T, *share = self._wrapper(
            self._logprobs_and_balance, tokens, expert_counts_E, temperature, with_entropy, entropy_gradient
        )
        return logprobs_T, entropy_T, AuxLossShare(*share)

    def _logprobs_and_balance(
        self,
        tokens: PackedTokens,
        expert_counts_E: Tensor | None,
        temperature: float,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor | None, ...]:
        router, logits = self.router, list[Tensor]()
        states = self.backbone.states(tokens, routed=logits)
        # the rows of this rank and not an even share of all: the routers' logits are of these rows
        targets_R, rows_R = _predictions(tokens, states)
        hidden_RD = states.hidden_KD.index_select(0, rows_R)
        logprobs_T, entropy_T = self._head_logprobs(
            hidden_RD, tokens, targets_R, temperature, with_entropy, entropy_gradient
        )
        said = load_balancing_loss(logits, rows_R, router, expert_counts_E, self.router_biases)
        return logprobs_T, entropy_T, *(getattr(said, field.name) for field in fields(said))

    @contextmanager
    def watching_routers(self) -> Iterator[list[RoutedRows]]:
        """Keep what the routers say of the rows that predict targets, of each forward of log-probs within the context.

        The forwards return what they return without it, and no gradient goes through what is kept.

        Raises:
            OptionsError, PreflightError: as of `router`.
        """
        _ = self.router  # before a forward: reading it for the first time makes one
        self._watched = kept = list[RoutedRows]()
        try:
            yield kept
        finally:
            self._watched = None

    @torch.no_grad()
    def expert_counts(self, tokens: PackedTokens) -> Tensor:
        """[E] float64: rows that go to each expert, see `count_experts`. A forward of the backbone."""
        return self._wrapper(self._expert_counts, tokens)

    def _expert_counts(self, tokens: PackedTokens) -> Tensor:
        router, logits = self.router, list[Tensor]()
        states = self.backbone.states(tokens, routed=logits)
        return count_experts(logits, _predictions(tokens, states)[1], router, self.router_biases)

    @torch.no_grad()
    def routes(self, tokens: PackedTokens) -> Tensor:
        """[L, T, k] int64: the experts that each token goes to in each layer, in ascending order; without dropout.

        A forward of the backbone on all tokens, none of which needs to be a target.
        """
        return self._wrapper(self._routes, replace(tokens, target_mask_T=None))

    def _routes(self, tokens: PackedTokens) -> Tensor:
        router, logits = self.router, list[Tensor]()
        with eval_mode(self.model):
            self.backbone.states(tokens, routed=logits)
        return chosen_routes(logits, router, self.router_biases)

    @cached_property
    def router(self) -> Router:
        """Settings that all routers of the model share.

        Raises:
            OptionsError: it has none that are known here.
            PreflightError: its own load-balancing loss is another one.
        """
        config = self.model.config.get_text_config(decoder=True)
        router = router_of(self.model.config.model_type, config.to_dict(), self.where)
        with native_attention_mode(self.model, packed=self.packed):
            verify_router(self.model, router, self.where)
        return router

    @property
    def num_experts(self) -> int:
        """Number of experts in each layer of a mixture of experts."""
        return self.router.num_experts

    @property
    def num_routers(self) -> int:
        """Number of layers with experts."""
        return len(gates_of(self.model))

    @property
    def router_biases(self) -> list[Tensor]:
        """The [E] bias of each layer's router, which may be changed in place; empty where routers have none."""
        return biases_of(gates_of(self.model))

    @property
    def has_known_routers(self) -> bool:
        """Return true for a mixture of experts whose routers' numbers are computed here."""
        try:
            return bool(self.num_experts)
        except (OptionsError, PreflightError):
            return False

    @property
    def is_compiled(self) -> bool:
        """Return true where its layers are compiled one by one (`CompiledBlocks`)."""
        return any(getattr(layer, "_compiled_call_impl", None) is not None for layer in self.layers)

    def _predicting(self, tokens: PackedTokens) -> tuple[Tensor, Tensor]:
        """Return ([R] targets, [R, D] states that predict them): all, or this rank's even share of them."""
        logits = None if self._watched is None else list[Tensor]()
        states = self.backbone.states(tokens, routed=logits)
        targets_R, rows_R = _all_predictions(tokens, states)
        if logits is not None and self._watched is not None:
            here_R = rows_R if states.here is None else local_rows(targets_R, rows_R, states.here)[1]
            self._watched.append(routed_rows(logits, here_R, self.router, self.router_biases))
            del logits  # their memory is free for the head and the backward pass
        if self.backbone.split is None or states.here is None:
            return targets_R, states.hidden_KD.index_select(0, rows_R)
        return balance_rows(self.backbone.split, states.hidden_KD, states.num_rows, targets_R, rows_R)

    def _head_logprobs(
        self,
        hidden_RD: Tensor,
        tokens: PackedTokens,
        targets_R: Tensor,
        temperature: float,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ids_R = tokens.token_ids_T.index_select(0, targets_R)
        options: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
        options["entropy_gradient"] = entropy_gradient
        if tokens.allowed is None:
            logprobs_R, entropy_R = self.head.logprobs(hidden_RD, ids_R, chunk_size=self.head_chunk_size, **options)
        else:
            # a rank may have a share of the targets
            numbers_R = (tokens.targets_T.cumsum(0) - 1)[targets_R]
            logprobs_R, entropy_R = self.head.allowed_logprobs(
                hidden_RD, ids_R, tokens.allowed.of_rows(numbers_R), **options
            )
        zeros_T = torch.zeros(tokens.num_tokens, dtype=logprobs_R.dtype, device=logprobs_R.device)
        entropy_T = None if entropy_R is None else self._merged(zeros_T.index_copy(0, targets_R, entropy_R))
        return self._merged(zeros_T.index_copy(0, targets_R, logprobs_R)), entropy_T

    def _merged(self, values_T: Tensor) -> Tensor:
        """Return the [T] values with those that other ranks computed merged in."""
        return values_T if self.backbone.split is None else self.backbone.split.merge(values_T)

    def hidden_states(self, tokens: PackedTokens) -> Tensor:
        """[T, D] final hidden states (after the last norm), each seeing its own segment only."""
        return self._wrapper(self.backbone.hidden_states, tokens)

    def verify(self, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        """Compare the packed forward and the head with the model's own forward on two short segments.

        Catches an architecture whose head or attention does more than is computed here. `device` and `dtype` are
        those of the computation where the weights are kept in others; every rank of them must call it.

        Raises:
            PreflightError: the log-probabilities differ by more than the weights' precision explains.
        """
        check_logits(
            self.model,
            self.tower,
            lambda tokens: self._wrapper(self._packed_logits, tokens),
            self._vocab_size,
            packed=self.packed,
            device=device or self.device,
            dtype=dtype or self.dtype,
            where=self.where,
        )

    def _packed_logits(self, tokens: PackedTokens) -> Tensor:
        return self.head.logits(self.backbone.hidden_states(tokens))

    def snapshot(self, copy: Callable[[str, Tensor], Tensor]) -> Callable[[Path], None]:
        """`save_pretrained` of the weights as they are now: each is copied by `copy(name, tensor)`.

        Adapters are folded in, and written alone to the folder `adapter` below, which peft loads.
        """
        # copied at once: files are written later, perhaps while training goes on
        weights = {name: copy(name, tensor) for name, tensor in state_of(self.model).items()}

        def write(directory: Path) -> None:
            merged = weights if self.adapters is None else save_beside(self.adapters, directory, weights)
            with saved_as_numbers(self.model):
                self.write(directory, merged)

        return write

    def save_description(self, directory: str | Path) -> None:
        """Write what a Hugging Face directory holds besides the weights: configuration, tokenizer."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        self.model.config.save_pretrained(str(path))
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(str(path))
        self.write_tokenizer(path)


def _predictions(tokens: PackedTokens, states: States) -> tuple[Tensor, Tensor]:
    """([R] targets that something here predicts, [R] the rows of the states that predict them)."""
    targets_R, rows_R = _all_predictions(tokens, states)
    return (targets_R, rows_R) if states.here is None else local_rows(targets_R, rows_R, states.here)


def _all_predictions(tokens: PackedTokens, states: States) -> tuple[Tensor, Tensor]:
    """([R] targets that something predicts, [R] the rows that do, as the ranks hold them one after another)."""
    targets_R = to_device(tokens.readable.targets_T.nonzero()[:, 0], tokens.token_ids_T.device)
    # the state of token t - 1 predicts token t
    return targets_R, targets_R - 1 if states.place_T is None else states.place_T[targets_R - 1]
