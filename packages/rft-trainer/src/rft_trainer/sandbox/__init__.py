"""A cage for programs that a model wrote: bubblewrap, limits, and what crosses its wall. Imports no other room."""
