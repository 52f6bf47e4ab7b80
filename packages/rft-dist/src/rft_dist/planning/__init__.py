"""Parallel dimensions and memory of a rank by formula, without torch, and byte counters. Imports no other room."""
