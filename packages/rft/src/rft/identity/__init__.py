"""Identity of a run: all that decides its result, recorded, compared at resumes and over ranks. May import `hub`."""
