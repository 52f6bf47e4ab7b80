"""Recipes: files of settings that are known to work, and `catalog`, which finds and describes them."""
