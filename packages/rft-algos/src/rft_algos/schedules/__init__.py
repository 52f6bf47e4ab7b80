"""Learning rates and coefficients as functions of the step. Imports no other room."""
