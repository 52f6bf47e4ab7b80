"""Decoder weights for RFT: Hugging Face loading, packed log-probabilities, the decode forward, tokenizers."""

__version__ = "0.1.0"
