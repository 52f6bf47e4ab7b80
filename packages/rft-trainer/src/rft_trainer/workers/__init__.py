"""Processes that can be killed, for user code. Imports no other room."""
