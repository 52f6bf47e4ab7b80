"""Heartbeats of the ranks, the diagnosis of a stalled or dead one, the end of all. Imports no other room."""
