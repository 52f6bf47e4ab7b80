"""A package of its own: the verb `repeat` trains a model to repeat a word, on rows that it makes up."""

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from rft.settings import SftSettings
from rft_cli.commands.table import SFT


@dataclass(frozen=True, kw_only=True)
class WordSettings:
    """The word and its copies."""

    word: str = "a"
    """Word that is repeated."""
    copies: int = field(default=3, metadata={"minimum": 1})
    """Longest row of copies."""


@dataclass(frozen=True, kw_only=True)
class RepeatSettings(SftSettings):
    """Train a model to repeat a word."""

    words: WordSettings = field(default_factory=WordSettings)


def with_rows(settings: RepeatSettings) -> RepeatSettings:
    """Write a row for each number of copies, and train on them."""
    file, word = Path(tempfile.mkdtemp()) / "rows.jsonl", settings.words.word
    rows = [{"input": word * n, "output": word * (n + 1)} for n in range(1, settings.words.copies + 1)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(settings, data=replace(settings.data, prompt_data=str(file)))


def train(resolved, words, **more):
    """Train as `sft` does, on the rows above."""
    from rft.stages import sft  # here, so that pages do not wait for torch

    return sft.train(replace(resolved, settings=with_rows(resolved.settings)), words, **more)


def check(settings, world_size):
    """Check as `sft` does."""
    from rft.check import check_sft

    return check_sft(with_rows(settings), world_size)


REPEAT = replace(
    SFT,
    name="repeat",
    summary="train a model to repeat a word",
    settings="repeat_command:RepeatSettings",
    essential=f"word copies {SFT.essential}",
    training=replace(SFT.training, train="repeat_command:train", check="repeat_command:check"),
)
