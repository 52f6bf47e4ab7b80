"""Training of recommenders: rows and models of a catalogue, supervised fine-tuning, reinforcement learning."""
