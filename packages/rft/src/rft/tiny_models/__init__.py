"""Models and data made from nothing: the small decoder of `rft-train build`, and the tasks of the quickstart."""
