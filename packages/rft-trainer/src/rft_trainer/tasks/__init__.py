"""Tasks with generated data: additions, dialogues, drawn images. May import `data` and `environments`."""
