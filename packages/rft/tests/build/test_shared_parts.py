"""Parts that commands build alike: the order of prompts, and the learning rate over a run."""

from __future__ import annotations

import pytest

from rft.build.shared_parts import learning_rate_schedule, make_ledger, sampling_options
from rft_dist.settings import AdamSettings
from rft_engine.settings import SamplingSettings
from rft_trainer.batches.prompt_ledger import EntryState
from rft_trainer.data.mixture import Mixture


def visits(seed: int, num_epochs: int = 3) -> list[list[int]]:
    """The prompts of each epoch in their order."""
    ledger = make_ledger(Mixture([12]), "hash", 12, num_epochs, seed)
    epochs: list[list[int]] = []
    while not ledger.finished:
        entries = ledger.reserve(12)
        for state in (EntryState.GENERATED, EntryState.SCORED, EntryState.TRAINED):
            ledger.advance(entries, state)
        epochs.append([entry.prompt_index for entry in entries])
    return epochs


def test_every_epoch_visits_all_prompts_in_an_order_of_its_own_that_follows_from_the_seed() -> None:
    first, again, other = visits(7), visits(7), visits(8)
    assert all(sorted(order) == list(range(12)) for order in first)
    assert len({tuple(order) for order in first}) == 3
    assert first == again
    assert not {tuple(order) for order in first} & {tuple(order) for order in other}


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_the_learning_rate_rises_falls_and_reaches_its_end_with_the_last_update(shape: str) -> None:
    settings = AdamSettings(lr_warmup_ratio=0.2, lr_schedule=shape, min_lr_ratio=0.1)  # pyright: ignore[reportArgumentType]
    schedule = learning_rate_schedule(settings, 1.0, 20)
    rates = [schedule(update) for update in range(20)]
    assert rates[:5] == sorted(rates[:5])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert max(rates) == pytest.approx(1.0)
    assert rates[18] > rates[19]
    assert 0.1 <= rates[-1] < 0.2


def test_a_constant_rate_stays_at_its_peak_after_the_warm_up() -> None:
    schedule = learning_rate_schedule(AdamSettings(lr_warmup_ratio=0.1, lr_schedule="constant"), 0.5, 20)
    assert [schedule(update) for update in (2, 10, 19)] == [0.5] * 3
    assert schedule(0) < 0.5


@pytest.mark.parametrize(("flag", "top_k"), [(-1, 0), (0, 0), (40, 40)])
def test_completions_are_sampled_as_the_settings_say_and_no_top_k_is_none(flag: int, top_k: int) -> None:
    settings = SamplingSettings(temperature=0.7, top_p=0.9, top_k=flag, min_p=0.05)
    options = sampling_options(settings, 12, (1, 2))
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.7, 0.9, top_k, 0.05)
    assert (options.max_new_tokens, options.stop_token_ids) == (12, (1, 2))
