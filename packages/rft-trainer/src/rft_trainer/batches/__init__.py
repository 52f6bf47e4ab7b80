"""Batch plan, prompt ledger, packing. May import `data` and `records`."""
