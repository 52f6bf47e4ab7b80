"""Torch references: what each kernel must equal, and what runs where Triton cannot."""
