"""`rft-train tokenizer`: tokenizers from texts."""
