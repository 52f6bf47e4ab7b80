"""A Hugging Face directory read without building a model. Imports no other room."""
