"""A conversation in progress: its turns so far, the turn that is being sampled, and their checkpoint form.

```
  opening ──answer──► drawing ──turn ends──► asking ──answer──► drawing ──► ... ──► whole
                         ▲                      ▲
  restored ──answer──────┴──────────────────────┘        the environment is walked through the recorded turns;
      └── it answers otherwise than it did ──► opening   the conversation begins again
```

What is sampled of a turn is a `PartialSample` under the turn's key, so that it goes on under new weights as single
responses do. Everything here is called under the queue's lock; `async_rollouts.multi_turn` calls environments outside
of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rft_trainer.async_rollouts.partial_rollout import PartialSample
from rft_trainer.async_rollouts.protocols import DrawnTokens, DrawRequest
from rft_trainer.environments.protocol import AssistantTurn, ToolCall
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import turns_from_json
from rft_trainer.rollouts.conversation import Conversation


class ConversationStage(StrEnum):
    """Stage of a conversation: the event that it waits for."""

    OPENING = "opening"
    """The environment's opening messages."""
    RESTORED = "restored"
    """An environment to which the recorded turns were replayed."""
    DRAWING = "drawing"
    """The policy's turn, or more of it."""
    ASKING = "asking"
    """The environment's answer to a turn."""
    COMPLETE = "whole"


@dataclass(frozen=True, slots=True)
class Recorded:
    """An environment's recorded answer, for the comparison after a resume."""

    messages: Sequence[Mapping[str, Any]]
    """As JSON gives them back."""
    reward: float = 0.0


@dataclass(slots=True)
class ConversationDraft:
    """The `PartialRollout` of a conversation with an environment."""

    conversation: Conversation
    worker_index: int
    """Index of the answering thread that it belongs to."""
    stage: ConversationStage = ConversationStage.OPENING
    turn: PartialSample | None = None
    recorded: list[Recorded] = field(default_factory=list[Recorded])
    """The environment's opening and its answers; it is asked about `conversation.episode.turns`, one fewer."""

    @property
    def needs_generation(self) -> bool:
        """Return whether a turn of the policy is being sampled."""
        return self.stage is ConversationStage.DRAWING

    @property
    def awaits_environment(self) -> bool:
        """Return whether the environment has something to do."""
        return self.stage in (ConversationStage.OPENING, ConversationStage.RESTORED, ConversationStage.ASKING)

    @property
    def is_complete(self) -> bool:
        """Return whether the conversation is over."""
        return self.stage is ConversationStage.COMPLETE

    @property
    def sampled_turn(self) -> PartialSample:
        """The policy's turn that is being sampled or answered."""
        assert self.turn is not None, f"a conversation that is {self.stage} has no turn"
        return self.turn

    def begin_turn(self, conversation: Conversation, budget: int) -> None:
        """Begin the policy's next turn of at most `budget` tokens, or mark the conversation as whole if it is over."""
        self.conversation = conversation
        if conversation.ended:
            self.stage, self.turn = ConversationStage.COMPLETE, None
        else:
            self.stage, self.turn = ConversationStage.DRAWING, PartialSample(conversation.turn_key, budget)

    def request(self, prompt: Prompt) -> DrawRequest:
        """Return the request for the rest of the turn, after all earlier tokens and the turn's own so far."""
        del prompt
        turn = self.sampled_turn
        return DrawRequest((*self.conversation.context, *turn.token_ids), turn.key, len(turn.token_ids), turn.left)

    def add(self, drawn: DrawnTokens) -> None:
        """Append new tokens of the turn; at its end the conversation waits for the environment."""
        turn = self.sampled_turn
        turn.add(drawn)
        if turn.is_complete:
            self.stage = ConversationStage.ASKING

    def state(self) -> dict[str, Any]:
        """Return plain JSON; `spans` are those of all sampled tokens."""
        conversation = self.conversation
        return {
            "conversation": {
                **{
                    name: list(getattr(conversation, name))
                    for name in ("token_ids", "logprobs", "log_kept_mass", "spans")
                },
                "turns": [asdict(turn) for turn in conversation.turns],
                "num_spoken": conversation.num_sampled_turns,
                **{name: getattr(conversation, name) for name in ("ended", "status", "detail")},
                "parts": dict(conversation.parts),
            },
            "heard": [asdict(turn) for turn in conversation.episode.turns],
            "seconds": conversation.episode.seconds,
            "recorded": [asdict(one) for one in self.recorded],
            "turn": None if self.turn is None else self.turn.state(),
            "spans": [*conversation.spans, *(self.turn.spans if self.turn is not None else ())],
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Restore `state()` after JSON; the environment is replayed to its position before anything is sampled."""
        if not state["recorded"]:
            return  # nothing was said
        conversation, stored = self.conversation, state["conversation"]
        for name in ("token_ids", "logprobs", "log_kept_mass"):
            setattr(conversation, name, list(stored[name]))
        conversation.spans = [(int(version), int(number)) for version, number in stored["spans"]]
        conversation.turns = list(turns_from_json(stored["turns"]))
        conversation.num_sampled_turns = int(stored["num_spoken"])
        conversation.ended, conversation.detail = stored["ended"], stored["detail"]
        conversation.status, conversation.parts = RewardStatus(stored["status"]), dict(stored["parts"])
        conversation.episode.turns = [_turn(row) for row in state["heard"]]
        # those before the stop alone: the replay runs on a copy of the episode
        conversation.episode.seconds = float(state["seconds"])
        self.recorded = [Recorded(row["messages"], float(row["reward"])) for row in state["recorded"]]
        self.turn = None if state["turn"] is None else PartialSample.of(state["turn"])
        # its environment is gone with the old process: before the next turn it is walked through the recorded ones
        self.stage = ConversationStage.COMPLETE if conversation.ended else ConversationStage.RESTORED

    def go_on(self) -> None:
        """Resume after the replay: continue sampling, or step the environment on the turn that was complete."""
        self.stage = ConversationStage.ASKING if self.sampled_turn.is_complete else ConversationStage.DRAWING

    def restart(self, number: int) -> None:
        """Restart the conversation, because its environment answers differently; `number` is the new episode's."""
        conversation = self.conversation
        # under the same key, so that its turns are drawn with the same random numbers
        self.conversation = Conversation.start(conversation.prompt, conversation.index, conversation.key, number)
        self.stage, self.turn, self.recorded = ConversationStage.OPENING, None, []


def _turn(row: Mapping[str, Any]) -> AssistantTurn:
    calls: Sequence[Mapping[str, Any]] = row["calls"]
    return AssistantTurn(
        row["text"], tuple(ToolCall(call["name"], call["arguments"]) for call in calls), row["finish_reason"]
    )
