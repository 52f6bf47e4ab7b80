"""Conformance of the equations of reinforcement fine-tuning: cases as data, and adapters that put them to trainers.

`cases/*.json` hold inputs and what the papers' arithmetic gives for them; `twins` computes that
arithmetic in decimals of 50 digits, with nothing but the standard library; `adapters` put the cases
to this project and to others. docs/conformance.md is the outcome.
"""
