"""Addresses of this machine alone."""

from __future__ import annotations

import pytest

from rft.serving.addresses import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.5", "localhost.evil.example", "2130706433", "", "127.0.0.1.nip.io"]
)
def test_every_other_name_is_none_of_this_machine_alone(host: str) -> None:
    assert not is_loopback(host)
