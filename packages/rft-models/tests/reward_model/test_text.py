"""The text of a reward model: what rows share, and the end that no text has twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rft_models.reward_model.text import ended, reward_text, shared_length


def test_what_rows_begin_with_alike_leaves_each_a_token_of_its_own() -> None:
    assert shared_length([(1, 2, 3), (1, 2, 4)]) == 2
    assert shared_length([(1, 2), (1, 2, 4)]) == 1
    assert shared_length([(5,), (6,)]) == 0


def test_a_text_without_a_template_ends_once_and_one_of_a_template_as_it_is() -> None:
    plain: Any = SimpleNamespace(has_chat_template=False, eos_ids=(9, 8))
    assert reward_text(plain, "1+1=", (), "2") == "1+1=2"
    assert ended(plain, [1, 2]) == [1, 2, 9]
    assert ended(plain, [1, 9]) == [1, 9]
    chat: Any = SimpleNamespace(
        has_chat_template=True, eos_ids=(9,), render_chat=lambda turns, add_generation_prompt: str(turns)
    )
    assert reward_text(chat, "q", (), "r") == str(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    )
    assert ended(chat, [1, 2]) == [1, 2]
