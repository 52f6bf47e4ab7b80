"""Records of the commands, which entry points name; no torch."""
