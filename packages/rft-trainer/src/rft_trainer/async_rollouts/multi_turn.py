"""Conversations as samples of the queue: their environments answer in threads of their own while others are drawn.

Every answering thread has environments of its own (a lane); a conversation stays in one lane, so a tool that takes
long holds up the conversations of its lane alone, and none that is being drawn. What an environment answers depends on
the conversation alone, so lanes, and who asks together with whom, change no token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rft_trainer.async_rollouts.partial_conversation import ConversationDraft, Recorded, Stage
from rft_trainer.async_rollouts.protocols import PartialRollout
from rft_trainer.environments.episodes import EpisodeRunner, Reply
from rft_trainer.environments.protocol import AssistantTurn
from rft_trainer.protocols import ResponseDecoder
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.scores import RewardStatus
from rft_trainer.rollouts.conversation import Conversation, ConversationStepper, malformed_call_reply

Put = Callable[[], None]


class ConversationSamples:
    """A `RolloutType`."""

    def __init__(
        self, decoder: ResponseDecoder, lanes: Sequence[EpisodeRunner], taking: ConversationStepper, max_new_tokens: int
    ) -> None:
        """
        Args:
            decoder: from a turn's tokens to its text.
            lanes: who carries the episodes on, one a thread; closed with `close`.
            taking: how turns follow one another.
            max_new_tokens: all tokens after the prompt.
        """
        self._decoder, self._lanes, self._taking, self._most = decoder, tuple(lanes), taking, max_new_tokens
        self.answers = len(self._lanes)
        self._numbers = [itertools.count() for _ in self._lanes]
        self._going: list[set[int]] = [set() for _ in self._lanes]
        """Numbers of the episodes of each lane that may be asked again."""
        self._places = itertools.count()

    def begin(self, prompt: Prompt, keys: Sequence[int]) -> list[PartialRollout]:
        """See `RolloutType`."""
        return list(self._begun(prompt, keys))

    def restore(self, prompt: Prompt, keys: Sequence[int], states: Sequence[Mapping[str, Any]]) -> list[PartialRollout]:
        """See `RolloutType`."""
        drafts = self._begun(prompt, keys)
        for draft, state in zip(drafts, states, strict=True):
            draft.take(state)
        return list(drafts)

    def answer(self, drafts: Sequence[PartialRollout]) -> Put:
        """See `RolloutType`; all drafts of one lane."""
        own = [draft for draft in drafts if isinstance(draft, ConversationDraft)]
        [lane] = {draft.lane for draft in own}
        puts = [
            self._reopened(lane, [draft for draft in own if draft.stage is Stage.RESTORED]),
            self._opened(lane, [draft for draft in own if draft.stage is Stage.OPENING]),
            self._told(lane, [draft for draft in own if draft.stage is Stage.ASKING]),
        ]

        def put() -> None:
            for one in puts:
                one()
            self._going[lane] -= {draft.talk.episode.number for draft in own if draft.is_whole}

        return put

    def rollouts(self, groups: Sequence[tuple[Prompt, Sequence[PartialRollout]]]) -> list[list[Rollout]]:
        """See `RolloutType`; the environments have given the rewards."""
        return [
            [draft.talk.rollout() for draft in drafts if isinstance(draft, ConversationDraft)] for _, drafts in groups
        ]

    def close(self) -> None:
        """End the environments."""
        for runner in self._lanes:
            runner.close()

    def _begun(self, prompt: Prompt, keys: Sequence[int]) -> list[ConversationDraft]:
        lanes = [next(self._places) % len(self._lanes) for _ in keys]
        pairs = enumerate(zip(keys, lanes, strict=True))
        return [
            ConversationDraft(Conversation.about(prompt, index, key, next(self._numbers[lane])), lane)
            for index, (key, lane) in pairs
        ]

    # -- outside of the lock; what is returned is called under it

    def _reset(self, lane: int, drafts: Sequence[ConversationDraft]) -> list[Reply]:
        if not drafts:
            return []
        episodes = [replace(draft.talk.episode, turns=[], seconds=0.0) for draft in drafts]
        self._going[lane] |= {episode.number for episode in episodes}
        return self._lanes[lane].reset(episodes, min(self._going[lane]))

    def _opened(self, lane: int, drafts: Sequence[ConversationDraft]) -> Put:
        replies = self._reset(lane, drafts)
        talks = [draft.talk.copy() for draft in drafts]
        for talk, reply in zip(talks, replies, strict=True):
            self._taking.open(talk, reply, self._most)
        return self._further(drafts, talks, [[recorded(reply)] for reply in replies])

    def _told(self, lane: int, drafts: Sequence[ConversationDraft]) -> Put:
        """What the environments say of turns that are over."""
        spoken = [draft.spoken for draft in drafts]
        texts = self._decoder.decode_batch([turn.token_ids for turn in spoken])
        parsed = [self._taking.parse(text) for text in texts]
        talks = [draft.talk.copy() for draft in drafts]
        asked = [place for place, one in enumerate(parsed) if not one.problems]
        for place in asked:
            turn = AssistantTurn(texts[place], parsed[place].calls, spoken[place].finish_reason)
            talks[place].episode.turns.append(turn)
        told = self._lanes[lane].step([talks[place].episode for place in asked]) if asked else []
        replies = dict(zip(asked, told, strict=True))
        for place, (talk, turn) in enumerate(zip(talks, spoken, strict=True)):
            reply = replies.get(place) or malformed_call_reply(parsed[place])
            self._taking.take(talk, turn, turn.spans, texts[place], parsed[place], reply, self._most)
        return self._further(
            drafts, talks, [[recorded(replies[place])] if place in replies else [] for place in range(len(drafts))]
        )

    def _further(
        self, drafts: Sequence[ConversationDraft], talks: Sequence[Conversation], told: Sequence[Sequence[Recorded]]
    ) -> Put:
        def put() -> None:
            for draft, talk, more in zip(drafts, talks, told, strict=True):
                draft.recorded += more
                draft.begin_turn(talk, self._taking.budget(talk, self._most))

        return put

    def _reopened(self, lane: int, drafts: Sequence[ConversationDraft]) -> Put:
        """Environments walked through the recorded turns; one that answers otherwise than it did begins again."""
        replies = self._reset(lane, drafts)
        going = [draft for draft, reply in zip(drafts, replies, strict=True) if _is_same(reply, draft.recorded[0])]
        for number in itertools.count(1):
            asked = [draft for draft in going if len(draft.recorded) > number]
            if not asked:
                break
            episodes = [
                replace(draft.talk.episode, turns=draft.talk.episode.turns[:number], seconds=0.0) for draft in asked
            ]
            told = zip(asked, self._lanes[lane].step(episodes), strict=True)
            other = [id(draft) for draft, reply in told if not _is_same(reply, draft.recorded[number])]
            going = [draft for draft in going if id(draft) not in other]
        same = {id(draft) for draft in going}

        def put() -> None:
            for draft in drafts:
                if id(draft) in same:
                    draft.go_on()
                else:
                    self._going[lane].discard(draft.talk.episode.number)
                    draft.begin_again(next(self._numbers[lane]))

        return put


def recorded(reply: Reply) -> Recorded:
    """What is kept of an answer."""
    if reply.answer is None:
        return Recorded([])
    assert not any(isinstance(message, str) for message in reply.answer.messages), "a runner gives messages with roles"
    return Recorded(json.loads(json.dumps(list(reply.answer.messages))), reply.answer.reward)


def _is_same(reply: Reply, before: Recorded) -> bool:
    done = reply.answer is None or reply.answer.done
    return reply.status is RewardStatus.OK and not done and recorded(reply) == before
