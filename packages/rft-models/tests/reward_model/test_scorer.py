"""Text in, the reward model's own tokens: its template, its end of a text, and what it cannot take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft_models.reward_model.loading import new_reward_model
from rft_models.reward_model.scorer import RewardTextScorer, shared_lengths
from rft_models.reward_model.spec import RewardSpec
from rft_models.tiny_models.text import build_bpe_tokenizer, build_decoder

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QUESTION = ({"role": "system", "content": "add"}, {"role": "user", "content": "1+1"})


@pytest.fixture(scope="module")
def chat_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = build_bpe_tokenizer(["one and one is two", "1+1=2"], 300)
    tokenizer.chat_template = CHATML
    path = tmp_path_factory.mktemp("models") / "chat"
    return build_decoder(
        path, tokenizer, hidden=16, layers=1, heads=2, kv_heads=2, ffn=24, max_positions=128, seed=2, init_std=0.3
    )


def scorer(directory: Path, *, max_tokens: int = 8192, **spec: Any) -> RewardTextScorer:
    return RewardTextScorer(new_reward_model(directory, RewardSpec(**spec), seed=5), max_tokens=max_tokens)


def test_a_conversation_is_rendered_with_the_models_own_template(chat_directory: Path) -> None:
    made = scorer(chat_directory)
    tokenizer = made.model.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(made.token_ids("system: add\nuser: 1+1\nassistant: ", QUESTION, "2"))
    assert text == (
        "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )
    plain = tokenizer.decode(made.token_ids("1+1", (), "2"))
    assert plain == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"


def test_plain_text_ends_with_the_end_token_once(character_directory: Path) -> None:
    made = scorer(character_directory)
    tokenizer = made.model.tokenizer
    assert tokenizer is not None
    end = tokenizer.eos_ids[0]
    assert made.token_ids("1+1=", (), "2") == [*tokenizer.encode("1+1=2"), end]
    assert made.token_ids("1+1=", QUESTION, "2") == [*tokenizer.encode("1+1=2"), end], "without a template the text"
    assert made.token_ids("1+1=", (), "2<eos>") == [*tokenizer.encode("1+1=2"), end]


def test_scores_are_those_of_each_text_alone(character_directory: Path, chat_directory: Path) -> None:
    prompts = ["1+1="] * 3 + ["2+2+2="] * 2 + ["1+1="]
    responses = ["2", "3", "2222", "6", "", "2"]
    for directory in (character_directory, chat_directory):
        alone = scorer(directory, heads=("a", "b"), weights=(1.0, 1.0))
        expected = [alone.score([p], [()], [r])[0] for p, r in zip(prompts, responses, strict=True)]
        for max_tokens in (1, 24, 8192):
            made = scorer(directory, max_tokens=max_tokens, heads=("a", "b"), weights=(1.0, 1.0))
            found = made.score(prompts, [()] * 6, responses)
            for row, other in zip(found, expected, strict=True):
                assert isinstance(row, dict)
                assert row == pytest.approx(other, abs=1e-5)
        assert expected[0] == pytest.approx(expected[5], abs=1e-6)
        assert len({str(row) for row in expected}) > 3
    assert alone.score([], [], []) == []


def test_prompts_of_neighbours_run_once(character_directory: Path) -> None:
    made = scorer(character_directory)
    seen: list[int] = []
    made.model.model.register_forward_pre_hook(
        lambda module, arguments, options: seen.append(options["input_ids"].numel()), with_kwargs=True
    )
    made.score(["1+2+3+4="] * 4, [()] * 4, ["10", "11", "12", "9"])
    whole = sum(len(made.token_ids("1+2+3+4=", (), r)) for r in ("10", "11", "12", "9"))
    assert seen == [whole - 3 * 8]


def test_what_the_model_cannot_take_has_no_score_and_the_rest_has(character_directory: Path) -> None:
    made = scorer(character_directory)
    found = made.score(["1+1="] * 3, [()] * 3, ["2", "two", "1" * 60])
    assert isinstance(found[0], dict)
    assert isinstance(found[1], str)
    assert "cannot read" in found[1]
    assert "two"[0] in found[1]
    assert found[2] == "65 tokens, but the reward model takes at most 64"


@pytest.mark.parametrize(
    ("rows", "prompts", "expected"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 5]], "aa", [3, 3]),
        ([[1, 2], [1, 2, 3]], "aa", [1, 1]),  # a text that another begins with keeps a token of its own
        ([[1, 2, 3], [1, 2, 4]], "ab", [0, 0]),
        ([[1, 2, 3], [9, 2, 3], [9, 2, 4]], "abb", [0, 2, 2]),
        ([[1], [1]], "aa", [0, 0]),
    ],
)
def test_what_neighbours_share(rows: list[list[int]], prompts: str, expected: list[int]) -> None:
    assert shared_lengths(rows, list(prompts)) == expected


def test_scoring_keeps_no_graph(character_directory: Path) -> None:
    made = scorer(character_directory)
    with torch.enable_grad():
        made.score(["1+1="], [()], ["2"])
    assert all(p.grad is None for _, p in made.model.named_parameters())
