"""From files on disk to token ids of prompts: reading, selecting, rendering, mixing, preparing ahead."""
