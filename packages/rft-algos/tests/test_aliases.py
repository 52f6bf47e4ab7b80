from __future__ import annotations

import subprocess
import sys

import pytest

import rft_algos
from rft_algos import advantages, aliases, surrogates
from rft_algos.losses import off_policy


def test_common_names_are_the_functions_themselves() -> None:
    assert rft_algos.rloo is advantages.leave_one_out
    assert rft_algos.grpo is advantages.group_norm
    assert rft_algos.tis is off_policy.truncate_tokens
    assert rft_algos.icepop is rft_algos.mis is off_policy.mask_tokens
    assert rft_algos.gspo is surrogates.gspo
    assert rft_algos.cpgd is surrogates.cpgd


def test_every_name_is_given_and_listed() -> None:
    assert aliases.__all__ == sorted(set(aliases.__all__))
    for name in aliases.__all__:
        assert getattr(rft_algos, name) is getattr(aliases, name)
    assert set(aliases.__all__) <= set(dir(rft_algos))


def test_every_surrogate_and_advantage_of_a_room_has_its_name_at_the_root() -> None:
    own = {"Moments", "clip", "moments", "LOG_RATIO_LIMIT", "is_clamped", "policy_drift", "squared_log_ratio"}
    own |= {"token_covariances", "select_clip_cov", "select_kl_cov"}
    public = {name for name in [*advantages.__all__, *surrogates.__all__] if not name.endswith(("_clipped", "_kept"))}
    assert public - own - {"dual_clipped", "two_sided_clipped"} <= set(aliases.__all__)


def test_another_name_is_refused_and_rooms_load_alone() -> None:
    with pytest.raises(AttributeError, match="no attribute 'grpo_los'"):
        _ = rft_algos.grpo_los  # type: ignore[attr-defined]
    code = (
        "import sys\n"
        "import rft_algos\n"
        "from rft_algos import statistics\n"
        "from rft_algos.algorithms import published\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'rft_algos.aliases' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_star_import_gives_the_equations() -> None:
    names: dict[str, object] = {}
    exec("from rft_algos import *", names)
    assert {*aliases.__all__} <= {*names}
