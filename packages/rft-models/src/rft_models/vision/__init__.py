"""Vision-language models: images of prompts, the vision tower, and where its features stand in a packed row."""
