"""The tokenizer of a new model, where it is trained on the texts of the run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rft.settings import PretrainSettings
from rft.stages.pretraining.written_once import written_once
from rft.tiny_models.new_model import read_texts
from rft_models.tiny_models.text import build_bpe_tokenizer, build_character_tokenizer

KINDS = ("char", "byte", "bpe")
_BYTES = 258


def tokenizer_directory(settings: PretrainSettings) -> Path:
    """Return the directory of a tokenizer trained on the training text; it is written where it is not there yet."""
    kind = settings.model.tokenizer
    files = [Path(part).expanduser() for part in settings.data.prompt_data.split(",")]
    size = settings.model.tokenizer_size if kind == "bpe" else 0
    content = {"kind": kind, "size": size, "texts": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]}

    def write(target: Path) -> None:
        texts = list(read_texts(settings.data.prompt_data, settings.data.text_key))
        if kind == "char":
            made = build_character_tokenizer("".join(sorted(set("".join(texts)))))
        else:
            made = build_bpe_tokenizer(texts, size or _BYTES)
        made.save_pretrained(str(target))

    return written_once("tokenizers", content, write)
