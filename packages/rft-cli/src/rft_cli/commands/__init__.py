"""The verbs of `rft-train`; each module has `run(argv) -> exit code` and is imported when it is called."""
