"""A tokenizer of characters without any library, and texts of windows."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rft_trainer.data.token_shards.windows import TokenWindows

END = 1


class Characters:
    """One token a character: its code point and two; 1 is the end token."""

    def __init__(self, vocab_size: int = 1000, eos_ids: Sequence[int] = (END,)) -> None:
        self.vocab_size, self.eos_ids, self.where = vocab_size, eos_ids, "characters"
        self.encoded: list[str] = []

    @property
    def digest(self) -> str:
        """Of its vocabulary."""
        return hashlib.sha256(f"{self.vocab_size}".encode()).hexdigest()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the code points, and two."""
        self.encoded.append(text)
        return [ord(character) + 2 for character in text]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Encode each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text, with | for the end token."""
        return "".join(("" if skip_special_tokens else "|") if token == END else chr(token - 2) for token in ids)


def joined_ids(windows: TokenWindows) -> list[int]:
    """Return the tokens that all windows predict, with the first one of each stream."""
    ids: list[int] = []
    for number, samples in enumerate(windows):
        for part, sample in enumerate(samples):
            first = sample.sample_id.endswith((":0", ":0#0")) and part == 0
            assert sample.prompt_length == 0, number
            ids += sample.token_ids if first else sample.token_ids[1:]
    return ids


def joined_text(windows: TokenWindows) -> str:
    """Return the text of all windows, with | for the end token."""
    return Characters().decode(joined_ids(windows))


@contextmanager
def mapped(file: Path, raw: bytes) -> Generator[mmap.mmap]:
    """Write a file and give it as a memory map."""
    file.write_bytes(raw)
    with file.open("rb") as stream, closing(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)) as text:
        yield text
