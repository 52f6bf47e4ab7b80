"""Display and record of failures; debug mode and injected faults. May import `config`."""
