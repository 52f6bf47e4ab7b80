"""Data pipeline from files to token ids of prompts: reading, selecting, rendering, mixing, prefetching."""
