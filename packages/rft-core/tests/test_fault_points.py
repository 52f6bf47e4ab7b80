from __future__ import annotations

from collections.abc import Iterator

import pytest

from rft_core import fault_points
from rft_core.fault_points import declare, declared, fault_point, install


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fault_points, "_declared", {})
    yield
    install(None)


def test_without_a_hook_a_point_does_nothing():
    seen: list[str] = []
    install(seen.append)
    install(None)
    fault_point(declare("store.before_rename", "the file is written and not yet named"))
    assert seen == []
    assert list(declared()) == ["store.before_rename"], "passing a point does not take it off the list"


def test_a_hook_sees_every_point_in_order_until_it_is_removed():
    first, second = declare("a.first", "one"), declare("a.second", "two")
    seen: list[str] = []
    install(seen.append)
    fault_point(first)
    fault_point(second)
    install(None)
    fault_point(first)
    assert seen == ["a.first", "a.second"]


def test_a_hook_may_fail_the_operation():
    def full_disk(name: str) -> None:
        raise OSError(28, name)

    name = declare("store.write", "bytes go out")
    install(full_disk)
    with pytest.raises(OSError, match=r"store\.write"):
        fault_point(name)


def test_declared_points_are_listed_with_their_meaning():
    declare("b.x", "meaning of x")
    listing = declared()
    assert listing == {"b.x": "meaning of x"}
    listing.clear()
    assert declared() == {"b.x": "meaning of x"}


def test_a_second_declaration_and_an_undeclared_point_are_bugs():
    declare("c.x", "once")
    with pytest.raises(AssertionError, match="declared twice"):
        declare("c.x", "again")
    install(lambda name: None)
    with pytest.raises(AssertionError, match="never declared"):
        fault_point("c.y")
