"""Recommenders that are no language model: counters, neighbours, SASRec; and semantic IDs dealt at random."""
