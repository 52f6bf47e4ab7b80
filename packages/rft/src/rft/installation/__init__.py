"""The installed packages and the GPUs of this machine, as facts with a verdict; and what a run says of them."""
