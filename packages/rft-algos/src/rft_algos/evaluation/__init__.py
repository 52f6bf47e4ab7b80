"""Estimates and tests of an evaluation: the vote of several answers, two models in pairs. Imports no other room."""
