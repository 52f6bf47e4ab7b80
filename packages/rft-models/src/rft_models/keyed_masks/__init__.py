"""Dropout and the words that its masks are drawn from, functions of keys. Imports no other room."""
