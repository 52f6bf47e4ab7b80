"""Vectors of items as semantic IDs: quantisers, collisions, files of codebooks, and what is measured of them."""
