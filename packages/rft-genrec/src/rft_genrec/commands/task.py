"""The installed task `genrec`: `--constraint genrec:CATALOGUE`, `--reward genrec`, `--eval_metrics genrec`."""

from __future__ import annotations

from rft_trainer.installed_tasks.record import InstalledTask

GENREC = InstalledTask(
    name="genrec",
    reward="rft_genrec.rewards.task:score",
    constraint="rft_genrec.training.task_functions:item_sequences",
    evaluation="rft_genrec.training.task_functions:held_out_metrics",
)
