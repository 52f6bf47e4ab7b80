"""A decoder family of this project: Qwen3's attention, a feed-forward part without a gate or with one, and dropout."""
