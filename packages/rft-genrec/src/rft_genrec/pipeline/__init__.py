"""The stages one after another, each only where its options or its inputs have changed."""
