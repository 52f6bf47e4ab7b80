"""Rollout collection: each rank samples and scores its share of the prompts, then all ranks exchange the groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OutageError
from rft_core.keyed_random import derive_key
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.data.media_cache import media_of
from rft_trainer.metrics.phase_timer import Phase, PhaseTimer
from rft_trainer.protocols import Collectives, Engine, ResponseDecoder
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rollouts.group_exchange import exchange_groups, share_outage
from rft_trainer.rollouts.multi_turn import Conversations

RewardFunction = Callable[[Sequence[RewardItem]], Sequence[Score]]


class RolloutCollector:
    """Samples `group_size` completions a prompt, scores them, and gives every rank all groups in order."""

    def __init__(
        self,
        engine: Engine,
        decoder: ResponseDecoder,
        reward: RewardFunction,
        collectives: Collectives,
        *,
        sampling: SamplingOptions,
        group_size: int,
        seed: int,
        greedy_baseline: bool = False,
        conversations: Conversations | None = None,
    ) -> None:
        """Store the collaborators; `conversations` replace single responses, their environment replaces `reward`."""
        self._engine = engine
        self._decoder = decoder
        self._reward = reward
        self._collectives = collectives
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed
        self._conversations = conversations
        self._greedy = replace(sampling, temperature=0.0, first_token_temperature=None) if greedy_baseline else None

    def collect(
        self, entries: Sequence[LedgerEntry], prompts: Sequence[Prompt], timer: PhaseTimer
    ) -> list[RolloutGroup]:
        """Sample and score the groups of `entries`, in that order, whatever the number of ranks.

        A sample's key is (seed, epoch, position, sample index), so neither the rank that draws it
        nor a resume in between changes its tokens.

        Raises:
            OutageError: the reward server of a rank is away, on all ranks.
        """
        rank, world_size = self._collectives.rank, self._collectives.world_size
        # dealt out in turn; the exchange below brings back the order of `entries`
        mine = list(zip(entries, prompts, strict=True))[rank::world_size]
        with timer.phase(Phase.ROLLOUT):
            sampled = self._draw(
                [prompt for _, prompt in mine],
                [sample_keys(self._seed, entry, self._group_size) for entry, _ in mine],
                self._sampling,
            )
            greedy = self._greedy_responses([prompt for _, prompt in mine])
        try:
            with timer.phase(Phase.REWARD):
                scored = self._scored([prompt for _, prompt in mine], sampled, self._decoder)
                # without a decoder: a baseline is one number, its steps are not placed
                baselines = self._scored([prompt for _, prompt in mine], greedy) if greedy else []
        except OutageError as outage:
            share_outage(self._collectives, outage)  # the other ranks wait in the exchange of the groups
            raise
        groups = [
            RolloutGroup(prompt, entry.epoch, entry.position, tuple(rollouts))
            for (entry, prompt), rollouts in zip(mine, scored, strict=True)
        ]
        if greedy:
            pairs = zip(groups, baselines, strict=True)
            groups = [replace(group, baseline_reward=baseline[0].reward) for group, baseline in pairs]
        if world_size == 1:
            return groups
        with timer.phase(Phase.SYNC):
            return exchange_groups(self._collectives, groups, entries, prompts)

    def _greedy_responses(self, prompts: Sequence[Prompt]) -> list[list[Rollout]]:
        """Sample one greedy response a prompt, for algorithms whose baseline it is."""
        if self._greedy is None:
            return []
        # the key does not matter: at temperature 0 nothing is drawn
        return self._draw(prompts, [[0]] * len(prompts), self._greedy)

    def _draw(
        self, prompts: Sequence[Prompt], keys: Sequence[Sequence[int]], sampling: SamplingOptions
    ) -> list[list[Rollout]]:
        if self._conversations is not None:
            return self._conversations.sample(prompts, keys, sampling)
        return sample_responses(self._engine, self._decoder, prompts, keys, sampling)

    def _scored(
        self,
        prompts: Sequence[Prompt],
        sampled: Sequence[Sequence[Rollout]],
        decoder: ResponseDecoder | None = None,
    ) -> list[list[Rollout]]:
        if self._conversations is not None:
            return [list(rollouts) for rollouts in sampled]
        return score_rollouts(self._reward, prompts, sampled, decoder)


def sample_keys(seed: int, entry: LedgerEntry, group_size: int) -> list[int]:
    """Derive the random keys of an entry's samples from (seed, epoch, position, sample index)."""
    return [derive_key(seed, "sample", entry.epoch, entry.position, i) for i in range(group_size)]


def sample_responses(
    engine: Engine,
    decoder: ResponseDecoder,
    prompts: Sequence[Prompt],
    keys: Sequence[Sequence[int]],
    sampling: SamplingOptions,
) -> list[list[Rollout]]:
    """Sample responses as rollouts without a reward yet: one list a prompt, one rollout a key."""
    if not prompts:
        return []
    completions = engine.generate(
        [prompt.token_ids for prompt in prompts],
        keys,
        sampling,
        media=media_of([prompt.media for prompt in prompts]),
    )
    # all groups in one call of the tokenizer
    texts = iter(decoder.decode_batch([c.token_ids for group in completions for c in group]))
    return [
        [
            Rollout(
                prompt_id=prompt.prompt_id,
                sample_index=index,
                completion_ids=tuple(completion.token_ids),
                behaviour_logprobs=tuple(completion.logprobs),
                log_kept_mass=tuple(completion.log_kept_mass),
                finish_reason=completion.finish_reason,
                weight_version=completion.weight_version,
                response_text=next(texts),
                reward=None,
                status=RewardStatus.UNSCORED,
            )
            for index, completion in enumerate(group)
        ]
        for prompt, group in zip(prompts, completions, strict=True)
    ]


def score_rollouts(
    reward: RewardFunction,
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Rollout]],
    decoder: ResponseDecoder | None = None,
) -> list[list[Rollout]]:
    """Score rollouts: return them with reward, status and breakdown; a failed one keeps reward None.

    With a `decoder`, rewards of steps are placed at the tokens that end them.
    """
    items = [
        RewardItem(
            prompt_id=prompt.prompt_id,
            prompt_text=prompt.text,
            response_text=rollout.response_text,
            label=prompt.label,
            finish_reason=rollout.finish_reason,
            num_tokens=len(rollout.completion_ids),
            messages=prompt.messages,
            media=prompt.media,
            columns=prompt.columns,
        )
        for prompt, rollouts in zip(prompts, sampled, strict=True)
        for rollout in rollouts
    ]
    # one call for all prompts, so that a pool or a server has all its work at once
    scores = iter(reward(items))
    return [[_with_score(rollout, next(scores), decoder) for rollout in rollouts] for rollouts in sampled]


def _with_score(rollout: Rollout, score: Score, decoder: ResponseDecoder | None) -> Rollout:
    steps = place_steps(rollout.completion_ids, score.steps, decoder) if decoder and score.steps else ()
    detail = score.detail or rollout.detail
    return replace(
        rollout,
        reward=score.value,
        status=score.status,
        breakdown=score.breakdown,
        steps=steps,
        detail=detail,
        failure=score.failure,
    )


def place_steps(
    completion_ids: Sequence[int], steps: Sequence[tuple[int, float]], decoder: ResponseDecoder
) -> tuple[tuple[int, float], ...]:
    """Map step rewards from character positions to the tokens that end the steps; rewards on one token are summed.

    The token that ends a step is the first whose text, with all before it, reaches the step's last character;
    a step that ends beyond the response ends with it.
    """
    # decoded as prefixes: the text of one token depends on those before it (bytes of one character, spaces)
    prefixes = [completion_ids[: count + 1] for count in range(len(completion_ids))]
    reached = [len(text) for text in decoder.decode_batch(prefixes)]
    placed: dict[int, float] = {}
    for end, value in steps:
        token = next((index for index, length in enumerate(reached) if length >= end), len(completion_ids) - 1)
        placed[token] = placed.get(token, 0.0) + value
    return tuple(sorted(placed.items()))
