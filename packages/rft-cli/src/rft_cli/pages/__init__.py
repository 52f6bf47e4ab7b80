"""Pages of the terminal before, during and after a run. May import `config` and `diagnostics`."""
