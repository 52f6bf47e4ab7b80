"""Multi-turn samples of the queue: environments answer in their own threads while other samples are generated.

Every worker, a thread that answers, has environments of its own; a conversation stays with one worker, so a slow
tool delays the conversations of its worker only, and none that is being sampled. What an environment answers depends on
the conversation alone, so neither the workers nor the grouping of calls change any token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rft_trainer.async_rollouts.partial_conversation import ConversationDraft, ConversationStage, Recorded
from rft_trainer.async_rollouts.protocols import PartialRollout
from rft_trainer.environments.episodes import EpisodeRunner, Reply
from rft_trainer.protocols import ResponseDecoder
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.scores import RewardStatus
from rft_trainer.rollouts.conversation import Conversation, ConversationStepper

Put = Callable[[], None]


class ConversationSamples:
    """The `RolloutType` of conversations with an environment."""

    def __init__(
        self,
        decoder: ResponseDecoder,
        runners: Sequence[EpisodeRunner],
        taking: ConversationStepper,
        max_new_tokens: int,
    ) -> None:
        """Store the environments and the turn logic.

        Args:
            decoder: from a turn's tokens to its text.
            runners: runners of the episodes, one a thread; closed with `close`.
            taking: turn logic of a conversation.
            max_new_tokens: all tokens after the prompt.
        """
        self._decoder, self._runners, self._taking, self._most = decoder, tuple(runners), taking, max_new_tokens
        self.answers = len(self._runners)
        self._numbers = [itertools.count() for _ in self._runners]
        self._going: list[set[int]] = [set() for _ in self._runners]
        """Numbers of the episodes of each worker that may be asked again."""
        self._places = itertools.count()

    def begin(self, prompt: Prompt, keys: Sequence[int]) -> list[PartialRollout]:
        """Begin one conversation a key, as `RolloutType.begin`."""
        return list(self._begun(prompt, keys))

    def restore(self, prompt: Prompt, keys: Sequence[int], states: Sequence[Mapping[str, Any]]) -> list[PartialRollout]:
        """Restore conversations from their states, as `RolloutType.restore`."""
        drafts = self._begun(prompt, keys)
        for draft, state in zip(drafts, states, strict=True):
            draft.take(state)
        return list(drafts)

    def answer(self, drafts: Sequence[PartialRollout]) -> Put:
        """Answer drafts that all belong to one worker, as `RolloutType.answer`."""
        own = [draft for draft in drafts if isinstance(draft, ConversationDraft)]
        # one worker's environments know none of another's episodes
        [worker_index] = {draft.worker_index for draft in own}
        puts = [
            self._reopened(worker_index, [draft for draft in own if draft.stage is ConversationStage.RESTORED]),
            self._opened(worker_index, [draft for draft in own if draft.stage is ConversationStage.OPENING]),
            self._step_environments(worker_index, [draft for draft in own if draft.stage is ConversationStage.ASKING]),
        ]

        def put() -> None:
            for one in puts:
                one()
            # conversations that are over no longer keep older episodes from being dropped
            self._going[worker_index] -= {draft.conversation.episode.number for draft in own if draft.is_complete}

        return put

    def rollouts(self, groups: Sequence[tuple[Prompt, Sequence[PartialRollout]]]) -> list[list[Rollout]]:
        """Return the rollouts of whole drafts; their rewards are the environments'."""
        return [
            [draft.conversation.rollout() for draft in drafts if isinstance(draft, ConversationDraft)]
            for _, drafts in groups
        ]

    def close(self) -> None:
        """Close the environments of all workers."""
        for runner in self._runners:
            runner.close()

    def _begun(self, prompt: Prompt, keys: Sequence[int]) -> list[ConversationDraft]:
        # in turn over all workers, so that the samples of one prompt do not wait for one slow environment
        worker_indices = [next(self._places) % len(self._runners) for _ in keys]
        pairs = enumerate(zip(keys, worker_indices, strict=True))
        return [
            ConversationDraft(Conversation.start(prompt, index, key, next(self._numbers[worker_index])), worker_index)
            for index, (key, worker_index) in pairs
        ]

    # -- outside of the lock; what is returned is called under it

    def _reset(self, worker_index: int, drafts: Sequence[ConversationDraft]) -> list[Reply]:
        if not drafts:
            return []
        episodes = [replace(draft.conversation.episode, turns=[], seconds=0.0) for draft in drafts]
        # before the reset, which drops every episode with a number below the smallest of these
        self._going[worker_index] |= {episode.number for episode in episodes}
        return self._runners[worker_index].reset(episodes, min(self._going[worker_index]))

    def _opened(self, worker_index: int, drafts: Sequence[ConversationDraft]) -> Put:
        replies = self._reset(worker_index, drafts)
        # copies: outside of the lock the drafts themselves may not change
        conversations = [draft.conversation.copy() for draft in drafts]
        for conversation, reply in zip(conversations, replies, strict=True):
            self._taking.open(conversation, reply, self._most)
        return self._further(drafts, conversations, [[recorded(reply)] for reply in replies])

    def _step_environments(self, worker_index: int, drafts: Sequence[ConversationDraft]) -> Put:
        """Step the environments on completed turns; return the function that records their answers."""
        turns = [draft.sampled_turn for draft in drafts]
        texts = self._decoder.decode_batch([turn.token_ids for turn in turns])
        conversations = [draft.conversation.copy() for draft in drafts]
        spans = [turn.spans for turn in turns]
        step = self._runners[worker_index].step
        replies = self._taking.answer_turns(conversations, turns, spans, texts, step, self._most)
        return self._further(
            drafts,
            conversations,
            [[recorded(replies[index])] if index in replies else [] for index in range(len(drafts))],
        )

    def _further(
        self,
        drafts: Sequence[ConversationDraft],
        conversations: Sequence[Conversation],
        answers: Sequence[Sequence[Recorded]],
    ) -> Put:
        def put() -> None:
            for draft, conversation, more in zip(drafts, conversations, answers, strict=True):
                # a turn with unreadable calls adds nothing: its answer follows from the text and needs no environment
                draft.recorded += more
                draft.begin_turn(conversation, self._taking.budget(conversation, self._most))

        return put

    def _reopened(self, worker_index: int, drafts: Sequence[ConversationDraft]) -> Put:
        """Replay the recorded turns in new environments; a conversation that is answered differently restarts."""
        replies = self._reset(worker_index, drafts)
        going = [draft for draft, reply in zip(drafts, replies, strict=True) if _is_same(reply, draft.recorded[0])]
        # turn by turn over all conversations, so that every round is one call of the runner
        for number in itertools.count(1):
            asked = [draft for draft in going if len(draft.recorded) > number]
            if not asked:
                break
            episodes = [
                replace(draft.conversation.episode, turns=draft.conversation.episode.turns[:number], seconds=0.0)
                for draft in asked
            ]
            replayed = zip(asked, self._runners[worker_index].step(episodes), strict=True)
            other = [id(draft) for draft, reply in replayed if not _is_same(reply, draft.recorded[number])]
            going = [draft for draft in going if id(draft) not in other]
        same = {id(draft) for draft in going}

        def put() -> None:
            for draft in drafts:
                # by identity: drafts are mutable and have no hash
                if id(draft) in same:
                    draft.go_on()
                else:
                    # the new start has an episode of its own; the old one is never asked again
                    self._going[worker_index].discard(draft.conversation.episode.number)
                    draft.restart(next(self._numbers[worker_index]))

        return put


def recorded(reply: Reply) -> Recorded:
    """Return the part of an answer that is recorded for the comparison after a resume."""
    if reply.answer is None:
        return Recorded([])
    assert not any(isinstance(message, str) for message in reply.answer.messages), "a runner gives messages with roles"
    # through JSON, since a checkpoint gives back lists for tuples and the two must compare equal
    return Recorded(json.loads(json.dumps(list(reply.answer.messages))), reply.answer.reward)


def _is_same(reply: Reply, before: Recorded) -> bool:
    # an answer that ended the conversation is never replayed, so an end here is another answer
    done = reply.answer is None or reply.answer.done
    return reply.status is RewardStatus.OK and not done and recorded(reply) == before
