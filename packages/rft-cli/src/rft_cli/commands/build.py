"""`rft-train build`: a small decoder and its tokenizer, made from nothing, as a complete Hugging Face directory."""

from __future__ import annotations

from rft.tiny_models.new_model import new_model
from rft_cli.config.resolve import resolve
from rft_cli.pages.advice import after_model, next_lines
from rft_core.terminal_text import visible


def run(argv: list[str]) -> int:
    """Resolve, build, and say what was written."""
    settings = resolve("build", argv).settings
    made = new_model(settings)
    each = f"{made.num_characters / made.num_tokens:.2f} characters each"
    kind = "byte-level BPE" if made.has_merges else "byte-level, no merges"
    print(visible(f"texts      {made.num_texts:,} of {made.num_characters:,} characters in {settings.data.texts}"))
    print(f"tokenizer  {kind}, {made.vocab_size:,} tokens, {each}")
    print(f"decoder    {made.num_parameters:,} random weights of seed {settings.output.seed}")
    print(visible(f"written    {made.directory}"))
    print(visible("\n".join(["", *next_lines(after_model(made.directory))])))
    return 0
