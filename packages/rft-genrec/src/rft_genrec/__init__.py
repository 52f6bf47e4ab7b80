"""Generative recommendation: catalogues, semantic IDs, histories, ranking."""

__version__ = "0.1.0"
