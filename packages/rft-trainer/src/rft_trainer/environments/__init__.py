"""Environments, which answer the turns of a conversation, run the tools that they call, and give the rewards."""
