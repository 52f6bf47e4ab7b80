"""A prompt keeps the conversation that its text renders, for models that render it in their own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rft_trainer.data.prompts import Message, PromptRow
from rft_trainer.data.rendering import PromptRenderer
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rollouts.collector import score_rollouts


class FakeTokenizer:
    """One token a character; a turn is its role's first letter and its text."""

    has_chat_template = True
    pad_id, eos_ids, vocab_size = 0, (1,), 1000

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        return "|".join(f"{message['role'][0]}:{message['content']}" for message in messages)


TURNS = (Message("system", "old"), Message("user", "a"), Message("assistant", "b"), Message("user", "c"))


def a_row(text: str | None, messages: tuple[Message, ...] | None = None) -> PromptRow:
    return PromptRow("train:0", text, messages, None, None, "train", 0)


def test_the_conversation_is_what_the_text_renders() -> None:
    renderer = PromptRenderer(FakeTokenizer(), system_prompt="new", apply_chat_template=True)
    for row in (a_row(None, TURNS), a_row("a")):
        rendered = renderer.render(row)
        assert rendered.text == FakeTokenizer().render_chat(rendered.messages, add_generation_prompt=True)
        assert rendered.messages[0] == {"role": "system", "content": "new"}
    assert [turn["content"] for turn in renderer.render(a_row(None, TURNS)).messages] == ["new", "a", "b", "c"]
    wrapped = PromptRenderer(FakeTokenizer(), input_template="Q: {}", apply_chat_template=True).render(a_row("a"))
    assert wrapped.messages == ({"role": "user", "content": "Q: a"},)


def test_plain_text_is_no_conversation() -> None:
    assert PromptRenderer(FakeTokenizer(), input_template="Q: {}").render(a_row("a")).messages == ()


def test_rewards_are_given_the_conversation() -> None:
    turns = ({"role": "user", "content": "a"},)
    seen: list[RewardItem] = []

    def reward(items: Sequence[RewardItem]) -> list[Score]:
        seen.extend(items)
        return [Score(1.0)] * len(items)

    rollout = Rollout("p", 0, (5,), (0.0,), (0.0,), "stop", 0, "x", None, RewardStatus.UNSCORED)
    prompts = [Prompt("p", (1,), "u:a", None, "train", messages=turns), Prompt("q", (1,), "a", None, "train")]
    score_rollouts(reward, prompts, [[rollout], [rollout]])
    assert [item.messages for item in seen] == [turns, ()]
