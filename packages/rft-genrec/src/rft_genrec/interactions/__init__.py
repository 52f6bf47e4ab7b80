"""Interactions of people with items: sources, filters, splits, checks, and the synthetic people; no model."""
