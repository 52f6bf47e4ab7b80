"""Names of MiniOneRec, for those who come from it. May import every other room."""
