"""Totals, phase timers, the protocol of a sink. Imports no other room."""
