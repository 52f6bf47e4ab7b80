"""Tasks of installed packages, and how they are found. Imports no torch and no other room."""
