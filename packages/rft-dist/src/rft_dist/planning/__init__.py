"""Parallel dimensions and memory of a rank by formula, without torch. Imports no other room."""
