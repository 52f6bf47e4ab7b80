"""Old and reference log-probs, values, advantages. May import `batches`."""
