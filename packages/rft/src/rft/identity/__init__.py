"""Identity of a run: all that decides its result, recorded, compared at a resume and over the ranks. No other room."""
