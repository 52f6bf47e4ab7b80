"""Memory and image tokens of a run before it starts. May import `build` and `process`."""
