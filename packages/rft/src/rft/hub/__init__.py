"""The Hugging Face Hub: files of a name, the commits of a run, uploads. The only place of huggingface_hub."""
