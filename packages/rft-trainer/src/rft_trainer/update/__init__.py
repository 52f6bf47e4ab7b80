"""Optimizer steps of policy and critic, and monitors. May import `scoring` and `batches`."""
