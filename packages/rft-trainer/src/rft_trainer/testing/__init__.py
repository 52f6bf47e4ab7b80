"""Test doubles of this package's own protocols."""
