"""Items, their semantic IDs, samples and sequences, and the files that hold them; no model."""
