"""Token streams of texts on disk, and windows over them; may import `data.readers`, `data.sources` and `records`."""
