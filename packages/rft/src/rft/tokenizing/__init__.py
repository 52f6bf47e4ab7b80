"""Tokens of rows for the data store, here or in workers, which import no torch; may import `hub`."""
