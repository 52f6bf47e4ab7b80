"""What ranks check and compare before a model loads. May import `launch` and `planning`."""
