"""Language of a response, by its script and, where several languages share one, by frequent words.

This tells languages of a short list apart; it is no model of language. Its cost is linear in the length, so that no
process is needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rewards.rules.table import RuleContext

_LATIN = ((0x41, 0x24F), (0x1E00, 0x1EFF))
_HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF))
_SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("en", "de", "fr", "es", "it", "pt", "nl"), _LATIN),
    "zh": _HAN,
    "ja": (*_HAN, (0x3040, 0x30FF), (0x31F0, 0x31FF)),
    "ko": ((0xAC00, 0xD7AF), (0x1100, 0x11FF), (0x3130, 0x318F)),
    "ru": ((0x400, 0x52F),),
    "el": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "ar": ((0x600, 0x6FF), (0x750, 0x77F)),
    "he": ((0x590, 0x5FF),),
    "hi": ((0x900, 0x97F),),
    "th": ((0xE00, 0xE7F),),
}
"""First and last code point of the letters of each language."""

_WORDS = {
    "en": "the and of to is that it was for with are this be as have not you which we so they there if then what from",
    "de": "der die das und ist nicht ein eine zu den von mit sich auf für wir es dass wenn dann auch als aus sind wird",
    "fr": "le les et est une des du pas que qui dans pour sur nous il elle ce cette avec sont au donc je vous par plus",
    "es": "el los las y es una que del por para con se su no lo como más pero son este esta hay entonces si al muy",
    "it": "il lo gli e è un una di che non per con sono del della nel ci questo questa si anche come più ma se quindi",
    "pt": "o os e é um uma que não do da em para com por se mais como são isso este esta ao você então mas na no",
    "nl": "de het een en is van niet dat op te zijn met voor er we als dan ook maar aan door dit deze wordt uit wij",
}
_FREQUENT = {language: frozenset(words.split()) for language, words in _WORDS.items()}
_LEFT_OUT = re.compile(r"\\[A-Za-z]{1,40}|</?[A-Za-z]{1,40}>")
_TOKENS = re.compile(r"[^\W\d_]+")


class LanguageReward:
    """Reward s * h / m in [0, 1] of a response in a language.

    s is the share of its letters that belong to the language's script, h the number of its words that are frequent
    words of the language, and m the largest such number over all languages with this script (en, de, fr, es, it, pt,
    nl); h / m is 1 where no frequent word stands, or where the script is of one language. Commands of LaTeX and tags
    are no words. A response without letters shows no language: 0. Japanese without kana counts as Chinese too.
    """

    def __init__(self, language: str) -> None:
        """`language`: a code of ISO 639-1 that `_SCRIPTS` holds."""
        self._language = language

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self._score(item.response_text) for item in items]

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    def _score(self, text: str) -> Score:
        words = _TOKENS.findall(_LEFT_OUT.sub(" ", text))
        script, frequent = self._script_share(words), self._frequent_share(words)
        return Score(script * frequent, breakdown={"script": script, "words": frequent})

    def _script_share(self, words: Sequence[str]) -> float:
        ranges = _SCRIPTS[self._language]
        letters = [ord(letter) for word in words for letter in word]
        inside = sum(any(first <= letter <= last for first, last in ranges) for letter in letters)
        return inside / len(letters) if letters else 0.0

    def _frequent_share(self, words: Sequence[str]) -> float:
        if self._language not in _FREQUENT:
            return 1.0
        lower = [word.lower() for word in words]
        counts = {language: sum(word in known for word in lower) for language, known in _FREQUENT.items()}
        most = max(counts.values())
        return counts[self._language] / most if most else 1.0


def build(context: RuleContext) -> LanguageReward:
    """Return the rule with the language of the settings."""
    return LanguageReward(context.options["response_language"])


def languages() -> tuple[str, ...]:
    """Return the codes of the languages that are told apart."""
    return tuple(_SCRIPTS)
