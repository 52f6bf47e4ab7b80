"""Environments: what answers the turns of a conversation, runs the tools that they call, and says what they earn."""
