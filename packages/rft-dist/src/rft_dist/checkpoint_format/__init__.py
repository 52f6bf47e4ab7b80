"""The format of a checkpoint on disk: names, manifest, shards, resharding. Imports no other room."""
