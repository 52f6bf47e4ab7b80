"""Estimates and tests of an evaluation: votes, two models in pairs, ranked lists, resamples. Imports `statistics`."""
