"""Samples and groups in progress: tokens so far, the weight versions that sampled them, the checkpoint form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rft_trainer.async_rollouts.protocols import DrawnTokens, DrawRequest, PartialRollout
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.rollouts.group_exchange import group_from_json

_LISTS = ("token_ids", "logprobs", "log_kept_mass")


@dataclass(slots=True)
class PartialSample:
    """One single-turn sample in progress, with its tokens so far."""

    key: int
    budget: int
    """Tokens that it may have in all."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    log_kept_mass: list[float] = field(default_factory=list[float])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(weight version, tokens that it drew), in order; a version once."""
    finish_reason: str = ""
    """Empty until it has ended."""

    @property
    def left(self) -> int:
        """Number of tokens that the sample may still have."""
        return self.budget - len(self.token_ids)

    @property
    def needs_generation(self) -> bool:
        """Return whether the sample has not ended."""
        return not self.finish_reason

    @property
    def awaits_environment(self) -> bool:
        """Return False: a single-turn sample has no environment."""
        return False

    @property
    def worker_index(self) -> int:
        """Worker index; single-turn samples have no environment, so always 0."""
        return 0

    @property
    def is_complete(self) -> bool:
        """Return whether the sample has ended."""
        return bool(self.finish_reason)

    def request(self, prompt: Prompt) -> DrawRequest:
        """Return the request for the remaining tokens, after the prompt and the tokens so far."""
        return DrawRequest((*prompt.token_ids, *self.token_ids), self.key, len(self.token_ids), self.left)

    def add(self, drawn: DrawnTokens) -> None:
        """Append new tokens, and record the end of the sample."""
        for name in _LISTS:
            getattr(self, name).extend(getattr(drawn, name))
        if num := len(drawn.token_ids):
            version = drawn.weight_version
            # the same version goes on after an interruption, so its span grows and no second one begins
            before = self.spans.pop()[1] if self.spans and self.spans[-1][0] == version else 0
            self.spans.append((version, before + num))
        assert self.left >= 0, f"{len(self.token_ids)} tokens of at most {self.budget}"
        # an interrupted sample stays open, and goes on after the tokens that it has
        if drawn.finish_reason != "interrupted":
            self.finish_reason = drawn.finish_reason

    def rollout(self, prompt: Prompt, index: int, text: str) -> Rollout:
        """Return the sample as a rollout without a reward yet."""
        assert self.finish_reason, "the sample has not ended"
        return Rollout(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            completion_ids=tuple(self.token_ids),
            behaviour_logprobs=tuple(self.logprobs),
            log_kept_mass=tuple(self.log_kept_mass),
            finish_reason=self.finish_reason,
            weight_version=self.spans[0][0],
            response_text=text,
            reward=None,
            status=RewardStatus.UNSCORED,
            version_spans=tuple(self.spans) if len(self.spans) > 1 else (),
        )

    def state(self) -> dict[str, Any]:
        """Return the sample as plain JSON."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> PartialSample:
        """Build a sample from `state()` after JSON."""
        return cls(**{**state, "spans": [(int(version), int(num)) for version, num in state["spans"]]})


@dataclass(slots=True)
class PartialGroup:
    """The samples of one ledger entry, in progress."""

    entry: LedgerEntry
    prompt: Prompt
    drafts: list[PartialRollout]
    batch: int
    """Number of the submission that it belongs to: those are drawn together where a run is to repeat exactly."""
    version: int
    """Weights that draw it where a run is to repeat exactly; elsewhere the oldest that may."""
    group: RolloutGroup | None = None
    """With rewards, once it has them."""

    @property
    def is_complete(self) -> bool:
        """Return whether every sample has ended."""
        return all(draft.is_complete for draft in self.drafts)

    def state(self) -> dict[str, Any]:
        """Return plain JSON; the prompt is looked up again by its entry."""
        # images are not stored: the prompt of the resumed run brings them again
        bare = None if self.group is None else replace(self.group, prompt=replace(self.group.prompt, media=None))
        return {
            "entry": [self.entry.epoch, self.entry.position, self.entry.prompt_index],
            # a scored group needs no drafts: its rollouts hold the tokens
            "drafts": [] if bare else [draft.state() for draft in self.drafts],
            "group": None if bare is None else asdict(bare),
        }

    def take(
        self, state: Mapping[str, Any], restored: Callable[[Sequence[Mapping[str, Any]]], list[PartialRollout]]
    ) -> None:
        """Restore `state()` of the same entry after JSON; `restored` builds samples from their states."""
        if state["group"] is not None:
            self.group = replace(group_from_json(state["group"]), prompt=self.prompt)
            self.drafts = []
        else:
            self.drafts = restored(state["drafts"])


def oldest_version(state: Mapping[str, Any], otherwise: int) -> int:
    """Return the oldest weight version that sampled a token of a stored group; `otherwise` where there is no token."""
    # drafts state every span, scored rollouts their first version, which is their oldest
    versions = [int(version) for draft in state["drafts"] for version, _ in draft["spans"]]
    versions += [int(rollout["weight_version"]) for rollout in (state["group"] or {"rollouts": ()})["rollouts"]]
    return min(versions, default=otherwise)
