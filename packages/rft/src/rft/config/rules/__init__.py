"""Contradictions between settings, found before anything is imported. Imports no other room."""
