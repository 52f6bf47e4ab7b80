"""The store behind the saver, initial weights, moving averages, export. Imports no other room."""
