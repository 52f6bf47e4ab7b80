"""Records of one training step: frozen dataclasses of plain lists, tensors only after packing.

```
Prompt -> Completion (engine) -> Rollout (reward, status) -> RolloutGroup
       -> TrainingSample (advantage, masks, log-probs) -> TokenBatch (tensors)
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn, sampled_mask

# workers that tokenise rows start without torch, which takes seconds
if TYPE_CHECKING:
    from torch import Tensor

    from rft_core.packed_tokens import PackedTokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the model sees it.

    Example::

        Prompt("train.jsonl:17", (5, 8, 1, 3, 9, 12), text="47+25=", label="072", source="train.jsonl")
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    label: Any
    source: str
    media: Any = None
    """Its images, opaque here; None without any. `token_ids` hold a placeholder for each of their features."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation that `text` renders, for models with a template of their own; empty where it is plain text."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All columns of the data row, where code of the user scores; else empty."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response with its reward.

    `completion_ids`, `behaviour_logprobs` and `log_kept_mass` have one entry a token after the prompt: a sampled
    one, the stop token among them, or in a conversation one of an observation, whose log-probs are 0.
    `reward` is None unless `status` is ok.
    """

    prompt_id: str
    sample_index: int
    completion_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    log_kept_mass: tuple[float, ...]
    finish_reason: str
    weight_version: int
    response_text: str
    reward: float | None
    status: RewardStatus
    breakdown: Mapping[str, float] = field(default_factory=dict[str, float])
    steps: tuple[tuple[int, float], ...] = ()
    """(index of the response token that ends a step, its reward), where the reward function judges steps."""
    version_spans: tuple[tuple[int, int], ...] = ()
    """(weight version, tokens that it drew), in order, where more than one drew them; `weight_version` is the first."""
    turns: tuple[Turn, ...] = ()
    """The conversation that the tokens are, in order; empty where all of them are one sampled response."""
    detail: str = ""
    """Why there is no reward, with file:line where code of the user failed; empty otherwise."""
    failure: str = ""
    """Kind of the failure of a reward function, where it is finer than the status."""

    def __post_init__(self) -> None:
        lengths = (len(self.completion_ids), len(self.behaviour_logprobs), len(self.log_kept_mass))
        if len(set(lengths)) != 1:
            raise ValueError(
                f"rollout {self.prompt_id}#{self.sample_index}: completion_ids, behaviour_logprobs, "
                f"log_kept_mass have lengths {lengths}"
            )
        if self.turns and sum(turn.num_tokens for turn in self.turns) != lengths[0]:
            raise ValueError(
                f"rollout {self.prompt_id}#{self.sample_index}: turns of {[turn.num_tokens for turn in self.turns]} "
                f"tokens, {lengths[0]} tokens in all"
            )

    @property
    def newest_version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self.version_spans[-1][0] if self.version_spans else self.weight_version

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """Loss mask with one entry a token, true where the policy sampled it; empty where it sampled all."""
        return sampled_mask(self.turns)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled: the length of the response."""
        return sum(turn.num_tokens for turn in self.turns if turn.sampled) if self.turns else len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one prompt, in sample order."""

    prompt: Prompt
    epoch: int
    position: int
    rollouts: tuple[Rollout, ...]
    baseline_reward: float | None = None
    """Reward of one greedy response, where the algorithm compares with it and it was scored."""


_OVER_RESPONSE = (
    "behaviour_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "token_advantages",
    "old_values",
    "returns",
    "token_weights",
    "selected",
    "loss_mask",
)
"""Fields of a `TrainingSample` with one entry a response token, or none."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence to train on; lists over the response have one entry a response token, or none.

    `loss_mask` leaves out response tokens that the policy did not sample. `old_logprobs[t]` is a token's
    log-probability under the policy that starts the step, `behaviour_logprobs[t]` under the engine that sampled it
    (t counts response tokens). `advantage` is the one number that outcome rewards give a sequence;
    `token_advantages` takes its place where every token has its own. `old_values` are the critic's estimates
    at the start of the step, `returns` what they are trained towards, `token_weights` factors on the loss of
    single tokens, `selected` marks tokens that the algorithm treats apart. Lists over the response are empty
    where they are not used.

    Example: prompt of 2 tokens, response of 3::

        TrainingSample("p:0#1", token_ids=(5, 6, 7, 8, 1), prompt_length=2, advantage=0.7, ...)
    """

    sample_id: str
    token_ids: tuple[int, ...]
    prompt_length: int
    advantage: float
    behaviour_logprobs: tuple[float, ...] = ()
    old_logprobs: tuple[float, ...] = ()
    reference_logprobs: tuple[float, ...] = ()
    token_advantages: tuple[float, ...] = ()
    old_values: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()
    token_weights: tuple[float, ...] = ()
    selected: tuple[bool, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    """Which response tokens are learned; empty = all of them."""
    media: Any = None
    """The prompt's images; None without any."""
    weight: float = 1.0
    """Factor on the loss of all its tokens, where rows have weights; above 0."""
    unit: str = ""
    """Samples next to each other with the same name are one unit, which is never divided; empty = one by itself."""
    sequence_numbers: tuple[float, ...] = ()
    """Numbers of the sequence as a whole that its loss reads, such as the label of a pair (`records.pairs`); as many in
    every sample of a batch."""

    def __post_init__(self) -> None:
        expected = len(self.token_ids) - self.prompt_length
        if not 0 <= self.prompt_length <= len(self.token_ids):
            raise ValueError(
                f"sample {self.sample_id}: prompt_length {self.prompt_length} of {len(self.token_ids)} tokens"
            )
        for name in _OVER_RESPONSE:
            values = getattr(self, name)
            if values and len(values) != expected:
                raise ValueError(
                    f"sample {self.sample_id}: {name} has {len(values)} entries, {expected} response tokens"
                )

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response together."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Number of response tokens in the loss; the first token of a sequence cannot be predicted."""
        if self.loss_mask:
            return sum(self.loss_mask[max(1 - self.prompt_length, 0) :])
        return len(self.token_ids) - max(self.prompt_length, 1)

    @property
    def has_advantage(self) -> bool:
        """Return whether any token's advantage is not zero."""
        return any(self.token_advantages) if self.token_advantages else self.advantage != 0.0

    @property
    def mean_advantage(self) -> float:
        """Mean advantage of the response tokens in the loss; 0 where there are none."""
        if not self.token_advantages:
            return self.advantage
        learned = self.loss_mask or (True,) * len(self.token_advantages)
        values = [value for value, is_learned in zip(self.token_advantages, learned, strict=True) if is_learned]
        return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """The denominators of one optimizer step, over all micro-batches and ranks."""

    num_loss_tokens: int
    num_sequences: int
    num_units: int = 0
    """Indivisible units: samples, or groups of samples that a loss compares (`rft_trainer.batches.units`)."""
    loss_weight: float | None = None
    """Sum over samples of weight x loss tokens, where any weight is not 1; None = `num_loss_tokens`."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A packed micro-batch: T tokens of several sequences one after another, no padding.

    `positions_T` restarts at 0 with each sequence, `segment_ids_T` numbers them. All [T];
    fields that samples carry for the response are 0 at the prompt. Optional fields are None
    when no sample carries them.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    segment_ids_T: Tensor
    loss_mask_T: Tensor
    advantages_T: Tensor
    old_logprobs_T: Tensor | None
    behaviour_logprobs_T: Tensor | None
    reference_logprobs_T: Tensor | None
    old_values_T: Tensor | None = None
    returns_T: Tensor | None = None
    token_weights_T: Tensor | None = None
    selected_T: Tensor | None = None
    mm_inputs: tuple[Any, ...] | None = None
    """The images of each segment as the model's forward takes them, None for one of text alone; None where all are."""
    row_weights_S: Tensor | None = None
    """[S] float64: the weight of each segment; None where all are 1."""
    unit_ids_S: Tensor | None = None
    """The unit of each segment, counted from 0; None where every segment is a unit by itself."""
    sequence_numbers_SN: Tensor | None = None
    """Numbers of each segment as a whole; None where no sample carries any."""
    not_finite: str = ""
    """The first field that is not finite; empty where all are. A ratio of such a log-prob may well be finite."""
    host: PackedTokens | None = None
    """The tokens in host memory, where those of the batch are on a device; None: there are these alone."""

    @property
    def tokens(self) -> PackedTokens:
        """The input of the models' forwards; the targets are the tokens in the loss."""
        from rft_core.packed_tokens import PackedTokens

        of_text = (self.token_ids_T, self.positions_T, self.segment_ids_T, self.loss_mask_T)
        return PackedTokens(*of_text, self.mm_inputs, host=self.host)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens in the loss; read without a wait where they are known to the host."""
        mask_T = self.loss_mask_T if self.host is None else self.host.target_mask_T
        assert mask_T is not None
        return int(mask_T.sum())

    @property
    def row_weights_T(self) -> Tensor | None:
        """[T] float64: the weight of each token's segment; None where all are 1."""
        return None if self.row_weights_S is None else self.row_weights_S[self.segment_ids_T]
