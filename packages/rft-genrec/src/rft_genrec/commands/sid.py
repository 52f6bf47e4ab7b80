"""The record of `rft-train genrec sid`, and what it says of settings without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rft.config.command_record import Command
from rft.config.rules.sourced_values import SourcedValues

SID = Command(
    name="genrec-sid",
    two_words=True,
    summary="give the items of a catalogue semantic IDs",
    act="rft_genrec.semantic_ids.give_ids:sid",
    settings="rft_genrec.settings.sid:SidSettings",
    notes="rft_genrec.commands.sid:idle_settings",
)

_OF_NETWORKS = (
    *("hidden_dims", "vae_epochs", "vae_batch_size", "vae_learning_rate"),
    *("commitment", "straight_through", "revive_epochs"),
)
_OF_FITS = ("method", "levels", "codes", "kmeans_iterations", "held_out_share", "neighbours")


def idle_settings(sourced: SourcedValues, defaults: Mapping[str, Any]) -> list[str]:
    """Return one line for each setting that was asked for and has no effect beside the others."""
    values = sourced.values
    method, reasons = str(values["method"]), dict[str, str]()
    if method in ("rqkmeans", "rqkmeans_balanced"):
        reasons |= dict.fromkeys((*_OF_NETWORKS, "latent_dim"), f"method is {method}")
    elif method == "rqkmeans_plus":
        reasons["latent_dim"] = "method is rqkmeans_plus"
    if method == "rqvae":
        reasons["codebooks"] = "method is rqvae, which starts from k-means"
    if method in ("rqkmeans", "rqkmeans_balanced"):
        reasons["codebooks"] = f"method is {method}"
    if values["collisions"] != "sinkhorn":
        reasons["sinkhorn_epsilon"] = f"collisions is {values['collisions']}"
    if values["new_items"]:
        reasons.pop("codebooks", None)
        reasons |= dict.fromkeys((*_OF_FITS, *_OF_NETWORKS, "latent_dim"), "new items are given codes that exist")
    return [
        f"{name} = {values[name]} ({sourced.origins[name]}) has no effect: {reason}"
        for name, reason in reasons.items()
        if values[name] != defaults[name]
    ]
