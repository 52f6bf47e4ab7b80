"""Processes that can be killed, for user code. May import `installed_tasks`."""
