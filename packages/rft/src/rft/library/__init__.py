"""The library's face for people who write Python: `import rft`. May import every other room."""
