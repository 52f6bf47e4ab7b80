"""The language of a response by script and frequent words."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.registry import reward_by_name
from rft_trainer.rewards.rules.language import LanguageReward, languages
from rft_trainer.settings.rewards import ResponseLanguage

MakeItem = Callable[..., RewardItem]

SENTENCES = {
    "en": "We add the two numbers, and this is what they have.",
    "de": "Wir rechnen nun, und das ist nicht mit der ersten Zahl.",
    "fr": "Nous avons donc le nombre qui est dans la liste pour une fois.",
    "es": "Entonces el total de los libros es muy alto, y no hay más.",
    "it": "Quindi il numero della lista non è come questo, ma si somma.",
    "pt": "Então o número de livros não é mais alto, você soma os dois.",
    "nl": "Dan is het aantal van de boeken niet meer, maar wij zijn er.",
    "zh": "我们先把两个数相加",
    "ja": "まず二つの数を足します",
    "ko": "먼저 두 수를 더합니다",
    "ru": "Сначала сложим числа",
    "el": "Πρώτα προσθέτουμε",
    "ar": "نجمع العددين أولا",
    "he": "נחבר את המספרים",
    "hi": "पहले जोड़ते हैं",
    "th": "บวกเลขสองจำนวน",
}


def test_a_sentence_of_every_language_is_told_from_those_of_all_others(make_item: MakeItem) -> None:
    assert set(SENTENCES) == set(languages()) == set(get_args(ResponseLanguage)) - {""}
    for language in SENTENCES:
        reward = LanguageReward(language)
        values = {
            other: score.value or 0.0
            for other, score in zip(SENTENCES, reward(list(map(make_item, SENTENCES.values()))), strict=True)
        }
        assert values[language] == pytest.approx(1.0), language
        # Japanese holds Chinese characters, and Chinese no kana
        near = {("ja", "zh"), ("zh", "ja")}
        for other, value in values.items():
            assert other == language or (language, other) in near or value <= 0.5, (language, other, value)
    [score] = LanguageReward("zh")([make_item(SENTENCES["ja"])])
    assert score.value is not None
    assert score.value < 0.5


@pytest.mark.parametrize(
    ("language", "text", "script", "words"),
    [
        ("zh", "四 is four", 1 / 7, 1.0),
        ("zh", r"\boxed{四}<answer>五</answer>", 1.0, 1.0),
        ("en", "the und", 1.0, 1.0),
        ("en", "the und nicht", 1.0, 0.5),
        ("de", "Apfelbaum", 1.0, 1.0),
        ("en", "42 + 1", 0.0, 1.0),
        ("en", "", 0.0, 1.0),
    ],
)
def test_parts_are_the_share_of_letters_and_of_frequent_words(
    make_item: MakeItem, language: str, text: str, script: float, words: float
) -> None:
    [score] = reward_by_name("language", options={"response_language": language})([make_item(text)])
    assert score.breakdown == pytest.approx({"script": script, "words": words})
    assert score.value == pytest.approx(script * words)
