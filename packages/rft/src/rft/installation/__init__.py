"""Installed packages and GPUs as facts with a verdict, and what a start says of them. Imports no other room."""
