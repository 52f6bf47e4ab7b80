"""How a failure is shown and kept; debug mode and injected faults. May import `config`."""
