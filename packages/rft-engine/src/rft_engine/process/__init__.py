"""An engine in a child process: client, server, requests. Imports no other room."""
