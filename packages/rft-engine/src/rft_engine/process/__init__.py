"""An engine in a child process: client, server, requests, base classes. May import `weight_sync` and `decoding`."""
