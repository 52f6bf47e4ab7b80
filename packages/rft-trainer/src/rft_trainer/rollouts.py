"""Prompts in, groups of scored rollouts out; over ranks, each samples its share and all learn the whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rft_algos.keyed_random import derive_key
from rft_trainer.ledger import LedgerEntry
from rft_trainer.protocols import Collectives, Engine, ResponseDecoder
from rft_trainer.records import Prompt, Rollout, RolloutGroup, Sampling
from rft_trainer.rewards.records import RewardItem, RewardStatus, Score
from rft_trainer.throughput import Phase, PhaseTimer

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
        sampling: Sampling,
        group_size: int,
        seed: int,
    ) -> None:
        self._engine = engine
        self._decoder = decoder
        self._reward = reward
        self._collectives = collectives
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed

    def collect(
        self, entries: Sequence[LedgerEntry], prompts: Sequence[Prompt], timer: PhaseTimer
    ) -> list[RolloutGroup]:
        """Groups in the order of `entries`, whatever the number of ranks.

        A sample's key is (seed, epoch, position, sample index), so neither the rank that draws it
        nor a resume in between changes its tokens.
        """
        rank, world_size = self._collectives.rank, self._collectives.world_size
        mine = list(zip(entries, prompts, strict=True))[rank::world_size]
        with timer.phase(Phase.ROLLOUT):
            sampled = sample_responses(
                self._engine,
                self._decoder,
                [prompt for _, prompt in mine],
                [
                    [derive_key(self._seed, "sample", entry.epoch, entry.position, i) for i in range(self._group_size)]
                    for entry, _ in mine
                ],
                self._sampling,
            )
        with timer.phase(Phase.REWARD):
            scored = score_rollouts(self._reward, [prompt for _, prompt in mine], sampled)
        groups = [
            RolloutGroup(prompt, entry.epoch, entry.position, tuple(rollouts))
            for (entry, prompt), rollouts in zip(mine, scored, strict=True)
        ]
        if world_size == 1:
            return groups
        with timer.phase(Phase.SYNC):
            return self._exchange(groups, len(entries))

    def _exchange(self, groups: Sequence[RolloutGroup], num_groups: int) -> list[RolloutGroup]:
        parts = self._collectives.gather_bytes(json.dumps([asdict(group) for group in groups]).encode())
        by_rank = [[_group_from_json(row) for row in json.loads(part)] for part in parts]
        return [by_rank[i % len(by_rank)][i // len(by_rank)] for i in range(num_groups)]


def _group_from_json(row: dict[str, Any]) -> RolloutGroup:
    prompt, rollouts = row["prompt"], row["rollouts"]
    return RolloutGroup(
        prompt=Prompt(**(prompt | {"token_ids": tuple(prompt["token_ids"])})),
        epoch=row["epoch"],
        position=row["position"],
        rollouts=tuple(
            Rollout(
                **(
                    rollout
                    | {key: tuple(rollout[key]) for key in ("completion_ids", "behaviour_logprobs", "log_kept_mass")}
                    | {"status": RewardStatus(rollout["status"])}
                )
            )
            for rollout in rollouts
        ),
    )


def sample_responses(
    engine: Engine,
    decoder: ResponseDecoder,
    prompts: Sequence[Prompt],
    keys: Sequence[Sequence[int]],
    sampling: Sampling,
) -> list[list[Rollout]]:
    """Rollouts without a reward yet: one list a prompt, one rollout a key."""
    if not prompts:
        return []
    completions = engine.generate(
        [prompt.token_ids for prompt in prompts],
        keys,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )
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
    reward: RewardFunction, prompts: Sequence[Prompt], sampled: Sequence[Sequence[Rollout]]
) -> list[list[Rollout]]:
    """The same rollouts with reward, status and breakdown; what failed keeps reward None."""
    items = [
        RewardItem(
            prompt_id=prompt.prompt_id,
            prompt_text=prompt.text,
            response_text=rollout.response_text,
            label=prompt.label,
            finish_reason=rollout.finish_reason,
            num_tokens=len(rollout.completion_ids),
        )
        for prompt, rollouts in zip(prompts, sampled, strict=True)
        for rollout in rollouts
    ]
    scores = iter(reward(items))
    return [[_with_score(rollout, next(scores)) for rollout in rollouts] for rollouts in sampled]


def _with_score(rollout: Rollout, score: Score) -> Rollout:
    return Rollout(
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
        completion_ids=rollout.completion_ids,
        behaviour_logprobs=rollout.behaviour_logprobs,
        log_kept_mass=rollout.log_kept_mass,
        finish_reason=rollout.finish_reason,
        weight_version=rollout.weight_version,
        response_text=rollout.response_text,
        reward=score.value,
        status=score.status,
        breakdown=score.breakdown,
    )
