"""Common parts of the stages that train on rows: their run, and the fields of their loops."""
