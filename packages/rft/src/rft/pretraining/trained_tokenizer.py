"""The tokenizer of a new model, where it is trained on the texts of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from rft.process.cache import written_once
from rft.settings import PretrainSettings, TokenizerOutputSettings, TrainTokenizerSettings
from rft.tiny_models.new_tokenizer import new_tokenizer
from rft.tokenizing.pretraining_windows import text_sources
from rft_models.settings import TokenizerSettings
from rft_trainer.data.token_shards.text_files import text_files
from rft_trainer.settings.pretraining import PretrainDataSettings, TokenizerDataSettings

KINDS: Mapping[str, Literal["bpe", "characters", "bytes"]] = {"char": "characters", "byte": "bytes", "bpe": "bpe"}
"""Values of `--tokenizer` that are trained, with the type of `rft-train tokenizer` that each is."""


def tokenizer_directory(settings: PretrainSettings) -> Path:
    """Return the directory of a tokenizer trained on the training text; it is written where it is not there yet.

    Raises:
        DataError: a text cannot be read, or there is none.
    """
    kind, data = settings.model.tokenizer, settings.data
    size = settings.model.tokenizer_size if kind == "bpe" else None
    texts = [] if kind == "byte" else list(_digests(data))
    content = {"kind": kind, "size": size, "texts": texts, "key": data.text_key, "separator": data.text_separator}

    def write(target: Path) -> None:
        new_tokenizer(
            TrainTokenizerSettings(
                data=TokenizerDataSettings(
                    prompt_data="" if kind == "byte" else data.prompt_data,
                    prompt_split=data.prompt_split,
                    text_key=data.text_key,
                    text_separator=data.text_separator,
                ),
                tokenizer=TokenizerSettings(tokenizer_type=KINDS[kind], vocab_size=size),
                output=TokenizerOutputSettings(save_path=str(target)),
            )
        )

    return written_once("tokenizers", content, write)


def _digests(data: PretrainDataSettings) -> Iterator[str]:
    """Yield the SHA-256 of every training file."""
    for spec in text_sources(data).training:
        for file in spec.files or text_files(spec.path, split=data.prompt_split or None):
            with file.open("rb") as opened:
                yield hashlib.file_digest(opened, "sha256").hexdigest()
