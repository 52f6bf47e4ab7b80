"""A directory opened with transformers. May import `vision`, `layers`, `attention` and `files`."""
