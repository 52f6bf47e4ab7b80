"""A decoder family of ours: Qwen3's attention, with a gate or without, and dropout. May import `keyed_masks`."""
