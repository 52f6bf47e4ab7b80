"""The names of the pre-trainer's guide on this project's settings. May import every other room; no room imports it."""
