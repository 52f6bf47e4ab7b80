"""Protocol of an environment: its prompt, the policy's turns, and its answers.

```python
class Guess:                                         # in a file of your own: --environment guess.py:Guess
    def reset(self, prompt, key):                    # an episode begins
        self.secret = int(prompt.label)
        return []                                    # messages that follow the prompt's own, if any

    def step(self, turn):                            # after the policy's turn
        guess = int(turn.text)
        if guess == self.secret:
            return Answer(reward=1.0, done=True)
        return Answer(messages=["higher" if guess < self.secret else "lower"])
```

An environment is a function of its prompt, its key and the turns so far: where its process was killed it is
made anew and walked through the same turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]
"""`role` ("tool", "user" or "system") and `content`, as chat templates take them."""


@dataclass(frozen=True, slots=True)
class EnvironmentPrompt:
    """The data row of an episode: prompt id, text and label."""

    prompt_id: str
    text: str
    label: str | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One well-formed call, e.g. `ToolCall("calculator", {"expression": "47*25"})`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One turn of the policy, with the tool calls in it."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    """"stop", or "length" where the turn was cut at its limit."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An environment's answer to a turn: messages, reward, and whether the episode ends.

    A message may be a plain text: it then is a tool's where the turn called one, else the user's.
    """

    messages: Sequence[Message | str] = ()
    reward: float = 0.0
    """What this turn earned; a conversation's reward is the sum over its turns."""
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Parts of the reward by name, kept where the episode ends with this turn ("correctness" is the verdict)."""


class Environment(Protocol):
    """Environment of one episode at a time; a user's class needs these two methods and no constructor arguments.

    `tools`, where the class has it, is a list of JSON schemas that goes to the chat template.
    """

    def reset(self, prompt: EnvironmentPrompt, key: int) -> Sequence[Message | str] | None:
        """Begin an episode; `key` seeds all that is random in it."""
        ...

    def step(self, turn: AssistantTurn) -> Answer:
        """Answer a turn. An exception ends the conversation with a status and no reward."""
        ...


class ImageMessageError(TypeError):
    """Error of an environment's message with an image: the images of a conversation are those of the prompt."""


def as_messages(value: object, role: str) -> list[dict[str, Any]]:
    """Convert messages to dictionaries; texts get `role`.

    Raises:
        ImageMessageError: a part of a content is an image.
        TypeError: what is given is no list of messages.
    """
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"messages must be a list, not {type(value).__name__}")
    messages: list[dict[str, Any]] = []
    for message in value:
        if isinstance(message, str):
            message = {"role": role, "content": message}
        if isinstance(message, Mapping) and _has_image(message.get("content")):
            raise ImageMessageError(f"a message of the role {message.get('role')!r} with {message['content']!r:.100}")
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise TypeError(f"a message must have a role and a content of text, not {message!r:.100}")
        messages.append(dict(message))
    return messages


def _has_image(content: object) -> bool:
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    return any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)


def as_answer(answer: object, turn: AssistantTurn) -> Answer:
    """Check the return value of `step`, and convert its messages to dictionaries.

    Raises:
        TypeError: it is no `Answer`, or a field has another type.
        ValueError: a number that is not finite.
    """
    if not isinstance(answer, Answer):
        raise TypeError(f"step returned {type(answer).__name__}, expected an Answer")
    messages = as_messages(answer.messages, "tool" if turn.calls else "user")
    reward, parts = float(answer.reward), {str(name): float(value) for name, value in answer.parts.items()}
    wrong = [value for value in (reward, *parts.values()) if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"step returned the reward {wrong[0]}, expected a finite number")
    return Answer(messages, reward, bool(answer.done), parts)
