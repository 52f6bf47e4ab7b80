"""Mutation testing of the equations: what is changed (`operators`), where (`tree`), and what notices (`running`)."""
