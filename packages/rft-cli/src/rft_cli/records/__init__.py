"""Records of commands, and how they are found."""
