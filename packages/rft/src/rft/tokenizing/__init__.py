"""Tokens of rows for the data store, in this process or in workers. Imports no torch; may import `hub`."""
