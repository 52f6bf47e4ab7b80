"""Rows of JSON, CSV and Arrow files. Imports no other room."""
