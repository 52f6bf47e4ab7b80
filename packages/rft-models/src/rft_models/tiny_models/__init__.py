"""Small models and tokenizers made on the spot. May import `loading` and `tokenization`."""
