"""Which architecture takes which path: patches, vision families, custom families. Imports no other room."""
