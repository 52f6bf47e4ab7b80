"""Conversations with an environment, all of a step at once: in waves of one turn through the engine.

What was sampled stays as it was sampled: the next context is the prompt, the tokens so far and the tokens of the
rendered observation, and no text of the policy is ever tokenised again. Which other conversations are in a wave
changes nothing: turn t of a sample is drawn under a key of (the sample's key, t), turn 0 under the sample's own.
`turn_taking` has one conversation, `asynchronous.conversation_samples` those that run ahead of the trainer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from rft_trainer.data.media_cache import load_media
from rft_trainer.environments.episodes import EpisodeRunner
from rft_trainer.environments.protocol import AssistantTurn
from rft_trainer.environments.tool_calls import ToolCallFormat
from rft_trainer.metrics.phase_timer import Phase, PhaseTimer
from rft_trainer.protocols import Engine, ResponseDecoder, SampledCompletion
from rft_trainer.records.rollouts import Prompt, Rollout, Sampling
from rft_trainer.rollouts.conversation import Conversation, ConversationStepper, TurnText, malformed_call_reply
from rft_trainer.rollouts.conversation import ConversationLimits as ConversationLimits


class Conversations:
    """Samples whole conversations; their rewards are the environment's."""

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
        """
        Args:
            engine: draws the turns.
            decoder: from a turn's tokens to its text.
            episodes: answers them.
            text: the chat template between them.
            calls: how tool calls are written.
            limits: besides `Sampling.max_new_tokens`, which bounds all tokens after the prompt.
            timer: charges what the environment takes to `tools`.
        """
        self._engine, self._decoder, self._episodes = engine, decoder, episodes
        self._taking = ConversationStepper(text, calls, limits)
        self._timer = timer
        self._numbers = itertools.count()

    def sample(
        self, prompts: Sequence[Prompt], keys: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Rollout]]:
        """One list a prompt, one rollout a key, with rewards where the environment gave them."""
        grouped = [
            [Conversation.about(prompt, index, key, next(self._numbers)) for index, key in enumerate(own)]
            for prompt, own in zip(prompts, keys, strict=True)
        ]
        talks = [talk for group in grouped for talk in group]
        self._open(talks, sampling)
        while going := [talk for talk in talks if not talk.ended]:
            spoken = self._speak(going, sampling)
            self._listen(going, spoken, sampling)
        return [[talk.rollout() for talk in group] for group in grouped]

    def _tools(self) -> Any:
        return self._timer.phase(Phase.TOOLS) if self._timer is not None else nullcontext()

    def _open(self, talks: Sequence[Conversation], sampling: Sampling) -> None:
        with self._tools():
            replies = self._episodes.reset([talk.episode for talk in talks])
        for talk, reply in zip(talks, replies, strict=True):
            self._taking.open(talk, reply, sampling.max_new_tokens)

    def _speak(self, talks: Sequence[Conversation], sampling: Sampling) -> list[SampledCompletion]:
        """The next turn of every conversation."""
        budgets = [self._taking.budget(talk, sampling.max_new_tokens) for talk in talks]
        lengths = [len(talk.prompt.token_ids) + len(talk.token_ids) for talk in talks]
        room = self._taking.limits.room or max(len(t.prompt.token_ids) for t in talks) + sampling.max_new_tokens
        found: dict[int, SampledCompletion] = {}
        for wave in batch_turns(lengths, budgets, room):
            found |= self._wave(talks, wave, budgets, sampling)
        return [found[place] for place in range(len(talks))]

    def _wave(
        self, talks: Sequence[Conversation], wave: Sequence[int], budgets: Sequence[int], sampling: Sampling
    ) -> dict[int, SampledCompletion]:
        """One call of the engine; equal contexts are one prompt of it, so that they are read once."""
        places: dict[tuple[object, ...], list[int]] = {}
        for place in wave:
            talk = talks[place]
            places.setdefault((id(talk.prompt.media), *talk.context), []).append(place)
        owners = list(places.values())
        images = [talks[own[0]].prompt.media for own in owners]
        media = {} if all(one is None for one in images) else {"media": [load_media(one) for one in images]}
        completions = self._engine.generate(
            [list(talks[own[0]].context) for own in owners],
            [[talks[place].turn_key for place in own] for own in owners],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_new_tokens=max(budgets[place] for place in wave),
            min_new_tokens=sampling.min_new_tokens,
            stop_token_ids=sampling.stop_token_ids,
            first_token_temperature=sampling.first_token_temperature,
            budgets=[[budgets[place] for place in own] for own in owners],
            **media,
        )
        pairs = zip(owners, completions, strict=True)
        return {place: one for own, group in pairs for place, one in zip(own, group, strict=True)}

    def _listen(self, talks: Sequence[Conversation], spoken: Sequence[SampledCompletion], sampling: Sampling) -> None:
        """Take the turns in, ask the environment, and put what it answers behind them."""
        texts = self._decoder.decode_batch([one.token_ids for one in spoken])
        parsed = [self._taking.parse(text) for text in texts]
        asked = [place for place, one in enumerate(parsed) if not one.problems]
        for place in asked:
            turn = AssistantTurn(texts[place], parsed[place].calls, str(spoken[place].finish_reason))
            talks[place].episode.turns.append(turn)
        with self._tools():
            replies = dict(zip(asked, self._episodes.step([talks[place].episode for place in asked]), strict=True))
        for place, talk in enumerate(talks):
            one, reply = spoken[place], replies.get(place) or malformed_call_reply(parsed[place])
            spans = [(one.weight_version, len(one.token_ids))]
            self._taking.take(talk, one, spans, texts[place], parsed[place], reply, sampling.max_new_tokens)


def batch_turns(lengths: Sequence[int], budgets: Sequence[int], room: int) -> list[list[int]]:
    """Places of the conversations of each call, so that its longest context and its largest budget fit into `room`.

    Longest context first; one call where all fit together. A conversation alone always fits.
    """
    waiting = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    found: list[list[int]] = []
    while waiting:
        most = room - lengths[waiting[0]]
        first = waiting[0]
        found.append([place for place in waiting if place == first or budgets[place] <= most])
        taken = set(found[-1])
        waiting = [place for place in waiting if place not in taken]
    return found
