"""What the stages that train on rows have in common: their run, and the parts of their loops."""
