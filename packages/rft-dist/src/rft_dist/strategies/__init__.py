"""How the weights of one model lie on the ranks, and how each form takes the same optimizer step."""
