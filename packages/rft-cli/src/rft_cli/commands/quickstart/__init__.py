"""`rft-train quickstart` and its tasks."""
