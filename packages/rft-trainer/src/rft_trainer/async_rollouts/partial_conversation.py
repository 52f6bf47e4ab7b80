"""A conversation on its way: its turns so far, the one that is being drawn, and how a checkpoint holds both.

```
  opening ──answer──► drawing ──turn ends──► asking ──answer──► drawing ──► ... ──► whole
                         ▲                      ▲
  restored ──answer──────┴──────────────────────┘        the environment is walked through the recorded turns;
      └── it answers otherwise than it did ──► opening   the conversation begins again
```

What is sampled of a turn is a `PartialSample` under the turn's key, so that it goes on under new weights as single
responses do. Everything here is called under the queue's lock; `conversation_samples` asks environments outside of it.
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


class Stage(StrEnum):
    """What a conversation waits for."""

    OPENING = "opening"
    """The environment's first words."""
    RESTORED = "restored"
    """An environment that has heard what is recorded."""
    DRAWING = "drawing"
    """The policy's turn, or more of it."""
    ASKING = "asking"
    """The environment's answer to a turn."""
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an environment said, for the comparison after a resume."""

    messages: Sequence[Mapping[str, Any]]
    """As JSON gives them back."""
    reward: float = 0.0


@dataclass(slots=True)
class ConversationDraft:
    """A `PartialRollout`."""

    talk: Conversation
    lane: int
    """Which of the answering threads it belongs to."""
    stage: Stage = Stage.OPENING
    turn: PartialSample | None = None
    recorded: list[Recorded] = field(default_factory=list[Recorded])
    """The environment's opening and its answers; it is asked about `talk.episode.turns`, one fewer."""

    @property
    def can_draw(self) -> bool:
        """Whether the policy speaks."""
        return self.stage is Stage.DRAWING

    @property
    def can_ask(self) -> bool:
        """Whether the environment has something to do."""
        return self.stage in (Stage.OPENING, Stage.RESTORED, Stage.ASKING)

    @property
    def is_whole(self) -> bool:
        """Whether the conversation is over."""
        return self.stage is Stage.WHOLE

    @property
    def spoken(self) -> PartialSample:
        """The policy's turn that is being drawn or answered."""
        assert self.turn is not None, f"a conversation that is {self.stage} has no turn"
        return self.turn

    def begin_turn(self, talk: Conversation, budget: int) -> None:
        """Nobody speaks next where the conversation is over; else the policy, at most `budget` tokens."""
        self.talk = talk
        if talk.ended:
            self.stage, self.turn = Stage.WHOLE, None
        else:
            self.stage, self.turn = Stage.DRAWING, PartialSample(talk.turn_key, budget)

    def request(self, prompt: Prompt) -> DrawRequest:
        """More of the turn, behind all that was said and what is drawn of it."""
        del prompt
        turn = self.spoken
        return DrawRequest((*self.talk.context, *turn.token_ids), turn.key, len(turn.token_ids), turn.left)

    def add(self, drawn: DrawnTokens) -> None:
        """Take new tokens of the turn in; at its end the environment is asked."""
        turn = self.spoken
        turn.add(drawn)
        if turn.is_whole:
            self.stage = Stage.ASKING

    def state(self) -> dict[str, Any]:
        """Plain JSON; `spans` are those of all that was sampled."""
        talk = self.talk
        return {
            "conversation": {
                **{name: list(getattr(talk, name)) for name in ("token_ids", "logprobs", "log_kept_mass", "spans")},
                "turns": [asdict(turn) for turn in talk.turns],
                **{name: getattr(talk, name) for name in ("num_spoken", "ended", "status", "detail")},
                "parts": dict(talk.parts),
            },
            "heard": [asdict(turn) for turn in talk.episode.turns],
            "seconds": talk.episode.seconds,
            "recorded": [asdict(one) for one in self.recorded],
            "turn": None if self.turn is None else self.turn.state(),
            "spans": [*talk.spans, *(self.turn.spans if self.turn is not None else ())],
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()` after JSON; the environment is walked to where it was before anything is drawn."""
        if not state["recorded"]:
            return  # nothing was said
        talk, held = self.talk, state["conversation"]
        for name in ("token_ids", "logprobs", "log_kept_mass"):
            setattr(talk, name, list(held[name]))
        talk.spans = [(int(version), int(number)) for version, number in held["spans"]]
        talk.turns = list(turns_from_json(held["turns"]))
        talk.num_spoken, talk.ended, talk.detail = int(held["num_spoken"]), held["ended"], held["detail"]
        talk.status, talk.parts = RewardStatus(held["status"]), dict(held["parts"])
        talk.episode.turns = [_turn(row) for row in state["heard"]]
        talk.episode.seconds = float(state["seconds"])
        self.recorded = [Recorded(row["messages"], float(row["reward"])) for row in state["recorded"]]
        self.turn = None if state["turn"] is None else PartialSample.of(state["turn"])
        self.stage = Stage.WHOLE if talk.ended else Stage.RESTORED

    def go_on(self) -> None:
        """The environment is where it was: draw on, or ask about the turn that was just over."""
        self.stage = Stage.ASKING if self.spoken.is_whole else Stage.DRAWING

    def begin_again(self, number: int) -> None:
        """Forget all that was said: the environment is not what it was. `number` is that of the new episode."""
        talk = self.talk
        self.talk = Conversation.about(talk.prompt, talk.index, talk.key, number)
        self.stage, self.turn, self.recorded = Stage.OPENING, None, []


def _turn(row: Mapping[str, Any]) -> AssistantTurn:
    calls: Sequence[Mapping[str, Any]] = row["calls"]
    return AssistantTurn(
        row["text"], tuple(ToolCall(call["name"], call["arguments"]) for call in calls), row["finish_reason"]
    )
