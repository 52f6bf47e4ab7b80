"""One optimizer step, the critic, monitors. May import `scoring` and `batches`."""
