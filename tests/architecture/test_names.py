"""Names are of the field and say one thing: no private words, one public class and few modules of one name."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
from architecture.source_tree import (
    INIT,
    PACKAGES,
    FunctionNode,
    Module,
    Sources,
    Violation,
    of_package,
    planted,
    real_sources,
    require_at_most,
)

PRIVATE_WORDS = {
    *("told", "talk", "talks", "errand", "errands", "lane", "lanes", "shelf", "shelves", "shelved"),
    *("alone", "spoken", "heard", "ahead"),
}
"""Words of this project's own, which no one of the field would look for."""
PRIVATE_PAIRS = {("in", "step")}
STATE_WORDS = {"held", "whole", "spread"}
"""Words that say nothing of a tensor: `local`, `full` and `sharded` do."""
WEIGHT_WORDS = {
    *("tensor", "tensors", "weight", "weights", "parameter", "parameters", "param", "params", "shard", "shards"),
    *("gradient", "gradients", "grad", "grads", "master", "masters", "model", "policy", "critic", "optimizer"),
}

CEILINGS: dict[str, int] = {
    "rft": 1,
    "rft_algos": 2,
    "rft_cli": 0,
    "rft_core": 0,
    "rft_dist": 1,
    "rft_engine": 3,
    "rft_genrec": 0,
    "rft_models": 6,
    "rft_trainer": 2,
    "rft_kernels": 2,
}
"""Private words that each package still binds; the number may only fall (`python count_violations.py`)."""

MOST_OF_ONE_NAME = 2
COMMON_STEMS = {INIT, "protocols", "registry", "settings"}
SHARED_CLASSES: dict[str, int] = {
    "Collectives": 3,
    "DecodableModel": 2,
    "DecodeCache": 2,
    "RowSums": 2,
    "SlabSums": 2,
}
"""Public classes with one name and so many definitions; each is to get a name of its own."""
COMMAND_ROOMS = ("rft_genrec.commands", "rft_genrec.settings")
"""Rooms whose modules have the names of commands."""
SHARED_STEMS: dict[str, int] = {
    "build": 3,
    "conformance": 3,
    "engine": 4,
    "environment": 4,
    "images": 5,
    "lora": 3,
    "names": 3,
    "process": 3,
    "rewards": 3,
    "rl": 4,
    "run": 3,
    "sft": 5,
    "vocab_slabs": 3,
    "worker": 3,
}
"""Modules with one name and so many files."""


def words_of(name: str) -> list[str]:
    """The words of an identifier: of `WeightShelf`, weight and shelf."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def is_private_word(name: str) -> bool:
    """Whether an identifier uses a word that has another name in the field."""
    words = words_of(name)
    if PRIVATE_WORDS & {*words} or any(pair in PRIVATE_PAIRS for pair in itertools.pairwise(words)):
        return True
    return bool(STATE_WORDS & {*words}) and (len(words) == 1 or bool(WEIGHT_WORDS & {*words}))


def bound_names(module: Module) -> Iterator[tuple[int, str]]:
    """(line, name) of the module and of its variables, arguments, attributes, functions and classes."""
    yield 1, module.stem
    for node in module.nodes:
        if isinstance(node, FunctionNode | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield node.lineno, node.asname
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
            yield node.lineno, node.name


def private_names(sources: Sources) -> list[Violation]:
    """Every place where a name with a private word is bound."""
    return [
        Violation(module.name, line, name)
        for module in sources.values()
        for line, name in bound_names(module)
        if is_private_word(name)
    ]


def public_classes(module: Module) -> Iterator[tuple[str, bool]]:
    """(name, whether it is a protocol) of the public classes at the top of a module."""
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
            yield node.name, "Protocol" in bases


def shared_class_names(sources: Sources) -> dict[str, list[str]]:
    """Where each class name stands that is defined twice or more.

    A protocol is the consumer's view of a class of another package and may have its name.
    """
    concrete: dict[str, list[str]] = defaultdict(list)
    protocols: dict[str, list[str]] = defaultdict(list)
    for module in sources.values():
        for name, is_protocol in public_classes(module):
            (protocols if is_protocol else concrete)[name].append(module.name)
    shared: dict[str, list[str]] = {}
    for name in {*concrete, *protocols}:
        owners = {place.split(".")[0] for place in concrete[name]}
        own_views = [place for place in protocols[name] if not owners or place.split(".")[0] in owners]
        places = concrete[name] + own_views
        if len(places) > 1:
            shared[name] = sorted(places)
    return dict(sorted(shared.items()))


def shared_stems(sources: Sources, most: int = MOST_OF_ONE_NAME) -> dict[str, list[str]]:
    """Where each module name stands that more than `most` files have."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in sources.values():
        if module.stem not in COMMON_STEMS and module.folder not in COMMAND_ROOMS:
            places[module.stem].append(module.name)
    return {stem: sorted(names) for stem, names in sorted(places.items()) if len(names) > most}


def require_as_listed(found: dict[str, list[str]], listed: dict[str, int]) -> None:
    """Fail where a name has more places than listed, and where a listed one has fewer."""
    more = {name: places for name, places in found.items() if len(places) > listed.get(name, 0)}
    assert not more, f"a second thing of one name: {more}"
    fewer = {name: len(found.get(name, [])) for name in listed if len(found.get(name, [])) < listed[name]}
    assert not fewer, f"present counts, 0 or 1 where the entry is to go: {fewer}"


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_of_the_field(package: str) -> None:
    require_at_most(private_names(of_package(package, real_sources())), CEILINGS[package])


def test_a_class_name_means_one_thing() -> None:
    require_as_listed(shared_class_names(real_sources()), SHARED_CLASSES)


def test_a_module_name_means_few_things() -> None:
    require_as_listed(shared_stems(real_sources()), SHARED_STEMS)


def names(violations: Iterable[Violation]) -> list[str]:
    """What was found, sorted."""
    return sorted(violation.what for violation in violations)


def test_planted_private_words_are_found() -> None:
    sources = planted(
        a__weight_shelf="""
class ToldEngine:
    in_step: bool = True
    def talk(self, lanes, *, steps_in): self.held = [spoken for spoken in lanes]
def spread_policy(whole, held_back):
    from b import c as alone
    try: pass
    except ValueError as heard: pass
    match whole:
        case {"a": ahead}: print(told, whole.spread_weights)
    whole_words = in_steps = talkative = 1
"""
    )
    expected = ["ToldEngine", "ahead", "alone", "heard", "held", "in_step", "lanes", "spoken", "spread_policy", "talk"]
    assert names(private_names(sources)) == sorted([*expected, "weight_shelf", "whole"])


def test_a_planted_second_class_is_found() -> None:
    sources = planted(
        a__one="class Engine: ...\nclass _Hidden: ...\nclass Plan: ...\nclass Cache: ...",
        b__two="class Engine(Protocol): ...\nclass _Hidden: ...\nclass Plan: ...\nclass Text(Protocol[T]): ...",
        c__three="class Text(typing.Protocol): ...\nclass Cache: ...\nclass Cached:\n    class Plan: ...",
        c__four="class Cache(Protocol): ...",
    )
    assert shared_class_names(sources) == {
        "Cache": ["a.one", "c.four", "c.three"],
        "Plan": ["a.one", "b.two"],
        "Text": ["b.two", "c.three"],
    }
    require_as_listed({"Plan": ["a", "b"]}, {"Plan": 2})
    for listed in ({}, {"Plan": 1}, {"Plan": 3}, {"Plan": 2, "Gone": 2}):
        with pytest.raises(AssertionError):
            require_as_listed({"Plan": ["a", "b"]}, listed)


def test_a_planted_third_module_of_one_name_is_found() -> None:
    stems = {f"{package}__plan": "" for package in "abc"} | {f"{package}__settings": "" for package in "abc"}
    assert shared_stems(planted(**stems, a__grid="", b__grid="")) == {"plan": ["a.plan", "b.plan", "c.plan"]}
