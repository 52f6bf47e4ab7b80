"""The records of one step: rollouts, scores, turns. Imports no other room."""
