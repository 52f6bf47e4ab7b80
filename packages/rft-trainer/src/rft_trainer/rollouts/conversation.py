"""State and turn order of one multi-turn rollout, for synchronous batches and for asynchronous rollouts.

```
prompt ─► opening ─► turn 0 ─► observation ─► turn 1 ─► observation ─► ... ─► turn n
          masked     sampled   masked          sampled   masked                sampled
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key
from rft_trainer.environments.episodes import Episode, Reply
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt
from rft_trainer.environments.tool_calls import ParsedTurn, ToolCallFormat
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn, turn_rewards


class TurnText(Protocol):
    """Tokens that the chat template puts between the policy's turns."""

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens from the end of the prompt to the policy's first turn, with `messages` between."""
        ...

    def observation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens from after the policy's end-of-turn token to the start of its next turn."""
        ...


class SampledTurn(Protocol):
    """A turn as it was sampled; the three sequences have one entry a token."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def log_kept_mass(self) -> Sequence[float]: ...
    @property
    def finish_reason(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """Length limits of a conversation, besides its total number of tokens (`SamplingOptions.max_new_tokens`)."""

    max_turns: int
    turn_max_len: int | None = None
    """Tokens of one turn; None = all that are left of `SamplingOptions.max_new_tokens`."""
    room: int | None = None
    """Tokens that the engine holds for a context and a turn; None = for the longest prompt and `max_new_tokens`."""


_LISTS = ("token_ids", "logprobs", "log_kept_mass", "turns", "spans")


@dataclass(slots=True)
class Conversation:
    """State of one multi-turn rollout in progress."""

    prompt: Prompt
    index: int
    key: int
    episode: Episode
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    log_kept_mass: list[float] = field(default_factory=list[float])
    turns: list[Turn] = field(default_factory=list[Turn])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(weight version, tokens that it sampled), in order; a version once where versions only grow."""
    num_sampled_turns: int = 0
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    ended: str = ""
    """Why it is over: stop, turns, length, or environment; empty while it goes on."""
    status: RewardStatus = RewardStatus.OK
    detail: str = ""

    @classmethod
    def start(cls, prompt: Prompt, index: int, key: int, number: int) -> Conversation:
        """Create a conversation without turns; `number` is that of its episode."""
        environment_prompt = EnvironmentPrompt(prompt.prompt_id, prompt.text, prompt.label)
        return cls(prompt, index, key, Episode(number, environment_prompt, derive_key(key, "environment")))

    def copy(self) -> Conversation:
        """Return a copy with its own lists and its own episode."""
        lists = {name: list(getattr(self, name)) for name in _LISTS}
        return replace(self, episode=replace(self.episode, turns=list(self.episode.turns)), **lists)

    @property
    def context(self) -> tuple[int, ...]:
        """Token ids before the next turn: the prompt, and all tokens so far."""
        return (*self.prompt.token_ids, *self.token_ids)

    @property
    def turn_key(self) -> int:
        """Random key of the next turn; the first has the sample's own key, so it is drawn as a single response."""
        return self.key if self.num_sampled_turns == 0 else derive_key(self.key, "turn", self.num_sampled_turns)

    def observe(self, tokens: Sequence[int], text: str) -> None:
        """Append observation tokens, which are masked out of the loss."""
        self.token_ids += tokens
        # one entry a token, also where nothing was sampled: lists of a rollout have one length
        self.logprobs += [0.0] * len(tokens)
        self.log_kept_mass += [0.0] * len(tokens)
        self.turns.append(Turn(False, len(tokens), text))

    def add_turn(self, sampled_turn: SampledTurn, spans: Sequence[tuple[int, int]], turn: Turn) -> None:
        """Append a sampled turn; `spans` are the (weight version, number of tokens) of this turn."""
        self.token_ids += sampled_turn.token_ids
        self.logprobs += sampled_turn.logprobs
        self.log_kept_mass += sampled_turn.log_kept_mass
        self.num_sampled_turns += 1
        self.turns.append(turn)
        for version, number in spans:
            # a version stands once, so the span that the last turn ended with is extended
            before = self.spans.pop()[1] if self.spans and self.spans[-1][0] == version else 0
            self.spans.append((version, before + number))

    def fail(self, reply: Reply) -> None:
        """End the conversation without a reward, because the environment gave no answer."""
        self.ended, self.status, self.detail = "environment", reply.status, reply.detail

    def rollout(self) -> Rollout:
        """Return the finished rollout, with its reward where the environment gave one."""
        ok = self.status is RewardStatus.OK
        sampled = [turn for turn in self.turns if turn.sampled]
        return Rollout(
            prompt_id=self.prompt.prompt_id,
            sample_index=self.index,
            completion_ids=tuple(self.token_ids),
            behaviour_logprobs=tuple(self.logprobs),
            log_kept_mass=tuple(self.log_kept_mass),
            finish_reason=self.ended,
            weight_version=self.spans[0][0] if self.spans else 0,
            version_spans=tuple(self.spans) if len(self.spans) > 1 else (),
            response_text=sampled[-1].text if sampled else "",
            reward=sum(turn.reward for turn in sampled) if ok else None,
            status=self.status,
            breakdown=dict(self.parts) if ok else {},
            steps=turn_rewards(self.turns),
            turns=tuple(self.turns),
            detail=self.detail,
        )


class ConversationStepper:
    """Turn logic of a conversation: parse a turn, append the observation, decide the end."""

    def __init__(self, text: TurnText, calls: ToolCallFormat, limits: ConversationLimits) -> None:
        """Store the template, the call format and the limits.

        Args:
            text: the chat template between the turns.
            calls: how tool calls are written.
            limits: besides the tokens after the prompt, `most` in the methods.
        """
        self._text, self._calls, self.limits = text, calls, limits

    def parse(self, text: str) -> ParsedTurn:
        """Parse the tool calls in the text of the policy's turn."""
        return self._calls.parse(text)

    def budget(self, conversation: Conversation, most: int) -> int:
        """Return the number of tokens that the next turn may have."""
        left = most - len(conversation.token_ids)
        return left if self.limits.turn_max_len is None else min(left, self.limits.turn_max_len)

    def open(self, conversation: Conversation, reply: Reply, most: int) -> None:
        """Append the messages that the environment opens with.

        Raises:
            OptionsError: no token is left for the policy.
        """
        messages = reply.answer.messages if reply.answer is not None else ()
        tokens = self._text.opening([_as_mapping(message) for message in messages])
        if len(tokens) >= most:
            raise _no_room(conversation.prompt, len(tokens), most)
        # also for a failed reply: a rollout without any turn would not count as a conversation
        conversation.observe(tokens, _shown(messages))
        if reply.status is not RewardStatus.OK:
            conversation.fail(reply)

    def answer_turns(
        self,
        conversations: Sequence[Conversation],
        turns: Sequence[SampledTurn],
        spans: Sequence[Sequence[tuple[int, int]]],
        texts: Sequence[str],
        step: Callable[[Sequence[Episode]], Sequence[Reply]],
        most: int,
    ) -> dict[int, Reply]:
        """Step the environment on sampled turns, and append turns and answers to their conversations.

        A turn with unreadable tool calls is answered with their errors, without a step of the environment.

        Args:
            conversations: one a turn; they are changed.
            turns: as they were sampled.
            spans: (weight version, number of tokens) of each turn.
            texts: the turns as text.
            step: the environment's answers to episodes whose last turn is new.
            most: tokens after the prompt.

        Returns:
            The environment's replies by index in `conversations`.
        """
        parsed = [self.parse(text) for text in texts]
        # a turn with one unreadable call is not stepped at all: its readable calls could act twice when it is repeated
        asked = [index for index, one in enumerate(parsed) if not one.problems]
        for index in asked:
            turn = AssistantTurn(texts[index], parsed[index].calls, str(turns[index].finish_reason))
            conversations[index].episode.turns.append(turn)
        answers = step([conversations[index].episode for index in asked]) if asked else []
        replies = dict(zip(asked, answers, strict=True))
        for index, conversation in enumerate(conversations):
            reply = replies.get(index) or malformed_call_reply(parsed[index])
            self.apply_turn(conversation, turns[index], spans[index], texts[index], parsed[index], reply, most)
        return replies

    def apply_turn(
        self,
        conversation: Conversation,
        sampled_turn: SampledTurn,
        spans: Sequence[tuple[int, int]],
        text: str,
        parsed: ParsedTurn,
        reply: Reply,
        most: int,
    ) -> None:
        """Append a sampled turn and the environment's answer, or end the conversation."""
        answer = reply.answer or Answer()
        counts = len(parsed.calls), len(parsed.problems)
        turn = Turn(True, len(sampled_turn.token_ids), text, answer.reward, *counts, reply.seconds)
        conversation.add_turn(sampled_turn, spans, turn)
        conversation.episode.seconds += reply.seconds
        if reply.status is not RewardStatus.OK:
            conversation.fail(reply)
            return
        # a turn cut at its limit has no end-of-turn token, so nothing can follow it
        was_cut = sampled_turn.finish_reason == "length"
        if answer.done:
            conversation.ended, conversation.parts = "length" if was_cut else "stop", answer.parts
        elif was_cut or conversation.num_sampled_turns >= self.limits.max_turns:
            conversation.ended = "length" if was_cut else "turns"
        else:
            self._answer(conversation, answer, most)

    def _answer(self, conversation: Conversation, answer: Answer, most: int) -> None:
        tokens = self._text.observation([_as_mapping(message) for message in answer.messages])
        # only where a token is left for the answer; an observation is never cut
        if len(conversation.token_ids) + len(tokens) < most:
            conversation.observe(tokens, _shown(answer.messages))
        else:
            conversation.ended = "length"


def malformed_call_reply(parsed: ParsedTurn) -> Reply:
    """Return the error messages that answer unreadable tool calls, without a step of the environment."""
    messages = [
        {"role": "tool", "content": f"error: the tool call cannot be read: {problem}"} for problem in parsed.problems
    ]
    return Reply(RewardStatus.OK, Answer(messages))


def _as_mapping(message: object) -> Mapping[str, Any]:
    assert isinstance(message, Mapping), f"the runner of an environment gives messages with roles, not {message!r}"
    return message


def _shown(messages: Sequence[object]) -> str:
    return "\n".join(str(_as_mapping(message)["content"]) for message in messages)


def _no_room(prompt: Prompt, length: int, limit: int) -> OptionsError:
    return OptionsError(
        code="environment.no_room",
        what=f"the conversation about {prompt.prompt_id} opens with {length} tokens, generate_max_len = {limit}",
        where="--generate_max_len",
        why="with an environment it limits all tokens after the prompt: opening messages, turns and observations",
        state="nothing was sampled",
        do=f"--generate_max_len {4 * length}",
    )
