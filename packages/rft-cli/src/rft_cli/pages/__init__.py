"""What a person reads before, during and after a run. May import `config` and `diagnostics`."""
