"""Conversations with an environment, all of a step at once: in waves of one turn through the engine.

```
prompt ─► opening ─► turn 0 ─► observation ─► turn 1 ─► observation ─► ... ─► turn n
          masked     sampled   masked          sampled   masked                sampled
```

What was sampled stays as it was sampled: the next context is the prompt, the tokens so far and the tokens of the
rendered observation, and no text of the policy is ever tokenised again. Which other conversations are in a wave
changes nothing: turn t of a sample is drawn under a key of (the sample's key, t), turn 0 under the sample's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from rft_algos.errors import OptionsError
from rft_algos.keyed_random import derive_key
from rft_trainer.data.media_store import load_media
from rft_trainer.environments.episodes import Episode, EpisodeRunner, Reply
from rft_trainer.environments.records import Answer, AssistantTurn, EnvironmentPrompt
from rft_trainer.environments.tool_calls import ParsedTurn, ToolCallFormat
from rft_trainer.protocols import Engine, ResponseDecoder, SampledCompletion
from rft_trainer.records import Prompt, Rollout, Sampling
from rft_trainer.rewards.records import RewardStatus
from rft_trainer.throughput import Phase, PhaseTimer
from rft_trainer.turns import Turn, turn_rewards


class TurnText(Protocol):
    """What the chat template puts between the policy's turns, as tokens."""

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """From the end of the prompt's last message to where the policy speaks, `messages` between."""
        ...

    def observation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """From behind the token that ended the policy's turn to where it speaks again."""
        ...


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """How long a conversation may be, besides its tokens in all (`Sampling.max_new_tokens`)."""

    max_turns: int
    turn_max_len: int | None = None
    """Tokens of one turn; None = what is left of the whole."""
    room: int | None = None
    """Tokens that the engine holds for a context and a turn; None = for the longest prompt and `max_new_tokens`."""


@dataclass(slots=True)
class _Conversation:
    """One sample while it is talked over."""

    prompt: Prompt
    index: int
    key: int
    episode: Episode
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    log_kept_mass: list[float] = field(default_factory=list[float])
    turns: list[Turn] = field(default_factory=list[Turn])
    weight_version: int = 0
    num_spoken: int = 0
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    ended: str = ""
    """Why it is over: stop, turns, length, or environment; empty while it goes on."""
    status: RewardStatus = RewardStatus.OK
    detail: str = ""

    def observe(self, tokens: Sequence[int], text: str) -> None:
        self.token_ids += tokens
        self.logprobs += [0.0] * len(tokens)
        self.log_kept_mass += [0.0] * len(tokens)
        self.turns.append(Turn(False, len(tokens), text))

    def fail(self, reply: Reply) -> None:
        self.ended, self.status, self.detail = "environment", reply.status, reply.detail

    def rollout(self) -> Rollout:
        ok = self.status is RewardStatus.OK
        spoken = [turn for turn in self.turns if turn.sampled]
        return Rollout(
            prompt_id=self.prompt.prompt_id,
            sample_index=self.index,
            completion_ids=tuple(self.token_ids),
            behaviour_logprobs=tuple(self.logprobs),
            log_kept_mass=tuple(self.log_kept_mass),
            finish_reason=self.ended,
            weight_version=self.weight_version,
            response_text=spoken[-1].text if spoken else "",
            reward=sum(turn.reward for turn in spoken) if ok else None,
            status=self.status,
            breakdown=dict(self.parts) if ok else {},
            steps=turn_rewards(self.turns),
            turns=tuple(self.turns),
            detail=self.detail,
        )


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
        self._text, self._calls, self._limits = text, calls, limits
        self._timer = timer
        self._numbers = itertools.count()

    def sample(
        self, prompts: Sequence[Prompt], keys: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Rollout]]:
        """One list a prompt, one rollout a key, with rewards where the environment gave them."""
        grouped = [
            [self._begin(prompt, index, key) for index, key in enumerate(own)]
            for prompt, own in zip(prompts, keys, strict=True)
        ]
        talks = [talk for group in grouped for talk in group]
        self._open(talks, sampling)
        while going := [talk for talk in talks if not talk.ended]:
            spoken = self._speak(going, sampling)
            self._listen(going, spoken, sampling)
        return [[talk.rollout() for talk in group] for group in grouped]

    def _begin(self, prompt: Prompt, index: int, key: int) -> _Conversation:
        about = EnvironmentPrompt(prompt.prompt_id, prompt.text, prompt.label)
        return _Conversation(prompt, index, key, Episode(next(self._numbers), about, derive_key(key, "environment")))

    def _tools(self) -> Any:
        return self._timer.phase(Phase.TOOLS) if self._timer is not None else nullcontext()

    def _open(self, talks: Sequence[_Conversation], sampling: Sampling) -> None:
        with self._tools():
            replies = self._episodes.reset([talk.episode for talk in talks])
        for talk, reply in zip(talks, replies, strict=True):
            messages = reply.answer.messages if reply.answer is not None else ()
            tokens = self._text.opening([_as_mapping(message) for message in messages])
            if len(tokens) >= sampling.max_new_tokens:
                raise _no_room(talk.prompt, len(tokens), sampling.max_new_tokens)
            talk.observe(tokens, _shown(messages))
            if reply.status is not RewardStatus.OK:
                talk.fail(reply)

    def _speak(self, talks: Sequence[_Conversation], sampling: Sampling) -> list[SampledCompletion]:
        """The next turn of every conversation."""
        budgets = [self._budget(talk, sampling) for talk in talks]
        lengths = [len(talk.prompt.token_ids) + len(talk.token_ids) for talk in talks]
        room = self._limits.room or max(len(t.prompt.token_ids) for t in talks) + sampling.max_new_tokens
        found: dict[int, SampledCompletion] = {}
        for wave in waves(lengths, budgets, room):
            found |= self._wave(talks, wave, budgets, sampling)
        return [found[place] for place in range(len(talks))]

    def _budget(self, talk: _Conversation, sampling: Sampling) -> int:
        left = sampling.max_new_tokens - len(talk.token_ids)
        return left if self._limits.turn_max_len is None else min(left, self._limits.turn_max_len)

    def _wave(
        self, talks: Sequence[_Conversation], wave: Sequence[int], budgets: Sequence[int], sampling: Sampling
    ) -> dict[int, SampledCompletion]:
        """One call of the engine; equal contexts are one prompt of it, so that they are read once."""
        places: dict[tuple[object, ...], list[int]] = {}
        for place in wave:
            talk = talks[place]
            context = (*talk.prompt.token_ids, *talk.token_ids)
            places.setdefault((id(talk.prompt.media), *context), []).append(place)
        owners = list(places.values())
        images = [talks[own[0]].prompt.media for own in owners]
        media = {} if all(one is None for one in images) else {"media": [load_media(one) for one in images]}
        completions = self._engine.generate(
            [[*talks[own[0]].prompt.token_ids, *talks[own[0]].token_ids] for own in owners],
            [[_turn_key(talks[place]) for place in own] for own in owners],
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

    def _listen(self, talks: Sequence[_Conversation], spoken: Sequence[SampledCompletion], sampling: Sampling) -> None:
        """Take the turns in, ask the environment, and put what it answers behind them."""
        texts = self._decoder.decode_batch([one.token_ids for one in spoken])
        parsed = [self._calls.parse(text) for text in texts]
        asked = [place for place, one in enumerate(parsed) if not one.problems]
        for place in asked:
            turn = AssistantTurn(texts[place], parsed[place].calls, str(spoken[place].finish_reason))
            talks[place].episode.turns.append(turn)
        with self._tools():
            replies = dict(zip(asked, self._episodes.step([talks[place].episode for place in asked]), strict=True))
        for place, talk in enumerate(talks):
            reply = replies.get(place) or _malformed(parsed[place])
            talk.episode.seconds += reply.seconds
            self._take(talk, spoken[place], texts[place], parsed[place], reply, sampling)

    def _take(
        self,
        talk: _Conversation,
        spoken: SampledCompletion,
        text: str,
        parsed: ParsedTurn,
        reply: Reply,
        sampling: Sampling,
    ) -> None:
        answer = reply.answer or Answer()
        talk.token_ids += spoken.token_ids
        talk.logprobs += spoken.logprobs
        talk.log_kept_mass += spoken.log_kept_mass
        oldest = min(talk.weight_version, spoken.weight_version)
        talk.weight_version = oldest if talk.num_spoken else spoken.weight_version
        talk.num_spoken += 1
        counts = len(parsed.calls), len(parsed.problems)
        talk.turns.append(Turn(True, len(spoken.token_ids), text, answer.reward, *counts, reply.seconds))
        if reply.status is not RewardStatus.OK:
            talk.fail(reply)
            return
        was_cut = spoken.finish_reason == "length"
        if answer.done:
            talk.ended, talk.parts = "length" if was_cut else "stop", answer.parts
        elif was_cut or talk.num_spoken >= self._limits.max_turns:
            talk.ended = "length" if was_cut else "turns"
        else:
            tokens = self._text.observation([_as_mapping(message) for message in answer.messages])
            if len(talk.token_ids) + len(tokens) < sampling.max_new_tokens:
                talk.observe(tokens, _shown(answer.messages))
            else:
                talk.ended = "length"


def waves(lengths: Sequence[int], budgets: Sequence[int], room: int) -> list[list[int]]:
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


def _turn_key(talk: _Conversation) -> int:
    return talk.key if talk.num_spoken == 0 else derive_key(talk.key, "turn", talk.num_spoken)


def _malformed(parsed: ParsedTurn) -> Reply:
    """What the environment need not be asked about."""
    told = [
        {"role": "tool", "content": f"error: the tool call cannot be read: {problem}"} for problem in parsed.problems
    ]
    return Reply(RewardStatus.OK, Answer(told))


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
        why="with an environment it bounds all tokens after the prompt: those that open it, turns and observations",
        state="nothing was sampled",
        do=f"--generate_max_len {4 * length}",
    )
