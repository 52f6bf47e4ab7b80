"""Synchronous multi-turn rollouts: all conversations of a step advance together, one batched turn at a time.

Sampled tokens stay as they were sampled: the next context is the prompt, the tokens so far and the tokens of the
rendered observation, and no text of the policy is ever tokenised again. Which other conversations are in a wave
changes nothing: turn t of a sample is drawn under a key of (the sample's key, t), turn 0 under the sample's own.
`rollouts.conversation` has one conversation, `async_rollouts.multi_turn` those that run ahead of the trainer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_trainer.data.media_cache import media_of
from rft_trainer.environments.episodes import Episode, EpisodeRunner, Reply
from rft_trainer.environments.tool_calls import ToolCallFormat
from rft_trainer.metrics.phase_timer import Phase, PhaseTimer
from rft_trainer.protocols import Engine, ResponseDecoder, SampledCompletion
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.rollouts.conversation import Conversation, ConversationStepper, TurnText
from rft_trainer.rollouts.conversation import ConversationLimits as ConversationLimits


class Conversations:
    """Sampler of complete conversations; their rewards are the environment's."""

    def __init__(
        self,
        engine: Engine,
        decoder: ResponseDecoder,
        episodes: EpisodeRunner,
        text: TurnText,
        calls: ToolCallFormat,
        limits: ConversationLimits,
        *,
        timer: PhaseTimer | None = None,
    ) -> None:
        """Store the engine, the environments and the turn logic.

        Args:
            engine: draws the turns.
            decoder: from a turn's tokens to its text.
            episodes: answers them.
            text: the chat template between them.
            calls: how tool calls are written.
            limits: besides `SamplingOptions.max_new_tokens`, which bounds all tokens after the prompt.
            timer: charges what the environment takes to `tools`.
        """
        self._engine, self._decoder, self._episodes = engine, decoder, episodes
        self._taking = ConversationStepper(text, calls, limits)
        self._timer = timer
        self._numbers = itertools.count()

    def sample(
        self, prompts: Sequence[Prompt], keys: Sequence[Sequence[int]], sampling: SamplingOptions
    ) -> list[list[Rollout]]:
        """Sample conversations: one list a prompt, one rollout a key, with rewards where the environment gave them."""
        grouped = [
            [Conversation.start(prompt, index, key, next(self._numbers)) for index, key in enumerate(prompt_keys)]
            for prompt, prompt_keys in zip(prompts, keys, strict=True)
        ]
        conversations = [conversation for group in grouped for conversation in group]
        self._open(conversations, sampling)
        # by turns: all open conversations share one engine call, and one of the environment
        while going := [conversation for conversation in conversations if not conversation.ended]:
            turns = self._generate_turns(going, sampling)
            self._apply_observations(going, turns, sampling)
        return [[conversation.rollout() for conversation in group] for group in grouped]

    def _tools(self) -> Any:
        return self._timer.phase(Phase.TOOLS) if self._timer is not None else nullcontext()

    def _open(self, conversations: Sequence[Conversation], sampling: SamplingOptions) -> None:
        with self._tools():
            replies = self._episodes.reset([conversation.episode for conversation in conversations])
        for conversation, reply in zip(conversations, replies, strict=True):
            self._taking.open(conversation, reply, sampling.max_new_tokens)

    def _generate_turns(
        self, conversations: Sequence[Conversation], sampling: SamplingOptions
    ) -> list[SampledCompletion]:
        """Sample the next turn of every conversation."""
        budgets = [self._taking.budget(conversation, sampling.max_new_tokens) for conversation in conversations]
        lengths = [len(conversation.prompt.token_ids) + len(conversation.token_ids) for conversation in conversations]
        # no limit of the engine is known: for the longest prompt with all tokens that may follow it
        room = self._taking.limits.room or max(len(t.prompt.token_ids) for t in conversations) + sampling.max_new_tokens
        turns: dict[int, SampledCompletion] = {}
        for wave in batch_turns(lengths, budgets, room):
            turns |= self._wave(conversations, wave, budgets, sampling)
        return [turns[index] for index in range(len(conversations))]

    def _wave(
        self,
        conversations: Sequence[Conversation],
        wave: Sequence[int],
        budgets: Sequence[int],
        sampling: SamplingOptions,
    ) -> dict[int, SampledCompletion]:
        """Sample one wave with one engine call; equal contexts are one prompt, so that they are prefilled once."""
        by_context: dict[tuple[object, ...], list[int]] = {}
        for index in wave:
            conversation = conversations[index]
            # images are compared by identity: samples of one prompt share the object
            by_context.setdefault((id(conversation.prompt.media), *conversation.context), []).append(index)
        owners = list(by_context.values())
        completions = self._engine.generate(
            [list(conversations[own[0]].context) for own in owners],
            [[conversations[index].turn_key for index in own] for own in owners],
            # the largest budget of this wave, which fits beside its longest context
            replace(sampling, max_new_tokens=max(budgets[index] for index in wave)),
            budgets=[[budgets[index] for index in own] for own in owners],
            media=media_of([conversations[own[0]].prompt.media for own in owners]),
        )
        pairs = zip(owners, completions, strict=True)
        return {index: one for own, group in pairs for index, one in zip(own, group, strict=True)}

    def _apply_observations(
        self, conversations: Sequence[Conversation], turns: Sequence[SampledCompletion], sampling: SamplingOptions
    ) -> None:
        """Step the environment on the sampled turns and append its answers to the conversations."""
        texts = self._decoder.decode_batch([one.token_ids for one in turns])
        spans = [[(turn.weight_version, len(turn.token_ids))] for turn in turns]
        self._taking.answer_turns(conversations, turns, spans, texts, self._step, sampling.max_new_tokens)

    def _step(self, episodes: Sequence[Episode]) -> Sequence[Reply]:
        with self._tools():
            return self._episodes.step(episodes)


def batch_turns(lengths: Sequence[int], budgets: Sequence[int], room: int) -> list[list[int]]:
    """Group conversation indices into engine calls whose longest context and largest budget fit into `room`.

    Longest context first; one call where all fit together. A conversation alone always fits.
    """
    # ties by index, so that the waves are the same in every run
    waiting = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    while waiting:
        max_budget = room - lengths[waiting[0]]
        first = waiting[0]
        # the first one without the check, so that every wave has one and the loop ends
        batches.append([index for index in waiting if index == first or budgets[index] <= max_budget])
        taken = set(batches[-1])
        waiting = [index for index in waiting if index not in taken]
    return batches
