"""AdamW, moving averages and loss scaling over local shards. Imports no other room."""
