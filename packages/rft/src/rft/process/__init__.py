"""This process: machine, ranks, determinism, log. Imports no other room."""
