"""Rewards behind HTTP from Python: `rft.serve_reward`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rft.config.commands import SERVE_REWARD
from rft.config.origins import KEYWORD, GivenSetting
from rft.library.given_rewards import GivenReward, chosen_reward
from rft.library.keyword_settings import resolved
from rft.library.python_errors import python_words
from rft.library.training_calls import Config

if TYPE_CHECKING:
    from typing import Unpack

    from rft.library.keywords.inference_keywords import ServeRewardKeywords
    from rft.serving.server import RewardServer


@python_words()
def serve_reward(
    reward: GivenReward | None = None, *, config: Config = (), **settings: Unpack[ServeRewardKeywords]
) -> RewardServer:
    """Start a server of rewards and return it; it answers until it is closed.

    Example::

        with rft.serve_reward("math", port=0) as server:
            print(server.url)  # for remote_rm_url

    Args:
        reward: as `rft.rl` takes it; None with `reward_pretrain`, a judge, or for the default.
        config: files of settings; keywords win over them.
        **settings: those of `rft-train serve-reward` (docs/reference/serve-reward.md).

    Raises:
        SettingsError: with every problem of the settings.
        OptionsError: an address that cannot be used, or packages that are missing.
    """
    chosen = chosen_reward(reward)
    own = [GivenSetting("reward", "reward", (chosen.setting,), KEYWORD)] if chosen.setting else []
    prepared = resolved(SERVE_REWARD.name, settings, config, own)
    from rft.serving.server import start_server

    return start_server(prepared.settings, reward=chosen.function)
