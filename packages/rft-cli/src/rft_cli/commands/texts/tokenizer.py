"""`rft-train tokenizer`: a tokenizer of characters, of bytes or byte-level BPE, learned from texts."""

from __future__ import annotations

from rft.tiny_models.new_tokenizer import new_tokenizer
from rft_cli.config.resolve import resolve
from rft_core.terminal_text import visible

_KINDS = {"bpe": "byte-level BPE", "characters": "one token a character", "bytes": "one token a byte"}


def run(argv: list[str]) -> int:
    """Resolve, learn, and say what was written."""
    settings = resolve("tokenizer", argv).settings
    made = new_tokenizer(settings)
    read = f"{made.num_characters:,} characters in {settings.data.prompt_data}"
    print(visible(f"texts      {read}" if made.num_characters else "texts      none are needed for bytes"))
    kind = "byte-level, no merges" if made.kind == "bpe" and not made.num_merges else _KINDS[made.kind]
    print(f"tokenizer  {kind}, {made.vocab_size:,} tokens")
    print(visible(f"written    {made.directory}"))
    return 0
