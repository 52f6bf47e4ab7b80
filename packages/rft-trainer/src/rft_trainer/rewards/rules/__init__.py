"""Rules on the response alone, one module each, and the table of all rewards by name. May import `workers`."""
