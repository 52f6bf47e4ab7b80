"""Registry of architectures and their paths: patches, vision families, custom families. Imports no other room."""
