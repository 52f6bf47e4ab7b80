"""Where a name may lead: to a machine of the internet or of one's own network, and there again after a redirect."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from rft_trainer.rewards.servers.resolved_addresses import address_of, fault_of

INSIDE = ("127.0.0.1", "10.0.0.5", "192.168.1.1", "172.16.0.1", "169.254.169.254", "::1", "fc00::1", "fe80::1")
NOWHERE = (
    "169.254.169.254",
    "169.254.1.1",
    "fe80::1",
    "224.0.0.1",
    "0.0.0.0",
    "::",
    "fd00:ec2::254",
    "100.100.100.200",
)


@pytest.mark.parametrize("name", ["rm.example.com", "localhost", "rm", "10.0.0.5", "169.254.169.254", "::1"])
@pytest.mark.parametrize("found", ["8.8.8.8", "10.0.0.5", "127.0.0.1", "2001:4860:4860::8888", "fc00::1"])
def test_a_name_may_lead_outside_and_into_one_s_own_network(name: str, found: str) -> None:
    assert fault_of(name, ip_address(found)) == ""


@pytest.mark.parametrize("found", NOWHERE)
def test_a_name_leads_to_no_metadata_and_to_no_neighbour(found: str) -> None:
    assert found in fault_of("rm.example.com", ip_address(found))
    assert fault_of(found, ip_address(found)) == "", "what is typed is meant"


@pytest.mark.parametrize("found", INSIDE)
def test_a_redirect_leads_from_outside_to_nowhere_inside(found: str) -> None:
    assert found in fault_of("rm.example.com", ip_address(found), ip_address("93.184.216.34"))


def test_a_redirect_within_one_s_own_network_is_followed() -> None:
    assert fault_of("rm", ip_address("10.0.0.6"), ip_address("10.0.0.5")) == ""
    assert fault_of("rm.example.com", ip_address("8.8.4.4"), ip_address("8.8.8.8")) == ""


def test_addresses_of_sockets() -> None:
    assert address_of(("::ffff:10.0.0.1", 80, 0, 0)) == ip_address("10.0.0.1")
    assert address_of(("fe80::1%eth0", 80, 0, 2)) == ip_address("fe80::1")
    assert address_of(("10.0.0.1", 80)) == ip_address("10.0.0.1")
    assert address_of("") is None
