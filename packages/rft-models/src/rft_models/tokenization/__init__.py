"""Tokenizers and chat templates. May import `files`."""
