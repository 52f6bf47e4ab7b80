"""Small tables of interactions, which several tests read."""

from __future__ import annotations

from rft_genrec.interactions.sources import InteractionTable, gathered


def table(*rows: str) -> InteractionTable:
    """Interactions from texts such as "ann saw 7": user, item, time."""
    return gathered((user, item, int(time)) for user, item, time in (row.split() for row in rows))


def as_texts(interactions: InteractionTable) -> list[str]:
    """Return the texts from which a table was made."""
    columns = (interactions.users_N.tolist(), interactions.items_N.tolist(), interactions.times_N.tolist())
    return [
        f"{interactions.user_names[user]} {interactions.item_names[item]} {time}"
        for user, item, time in zip(*columns, strict=True)
    ]
