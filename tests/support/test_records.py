"""Records: what the dataclasses of the standard library promise, for less."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError, InitVar, field
from typing import Any

import pytest

from ckptconv.support.records import dataclass

Decorator = Callable[..., Any]


def made_by(decorator: Decorator, **settings: bool) -> Any:
    """A class with each kind of field that the program has."""

    @decorator(slots=True, **settings)
    class Record:
        """A record."""

        key: str
        shape: tuple[int, ...]
        dtype: str = "F32"
        notes: list[str] = field(default_factory=list)
        seen: int = field(default=0, repr=False, compare=False)
        read: str = field(init=False, default="no")
        state: object = field(init=False, default=None)
        prefix: InitVar[str] = ""

        def __post_init__(self, prefix: str) -> None:
            object.__setattr__(self, "read", f"{prefix}{self.key} {self.dtype}")

    return Record


def named_by(decorator: Decorator) -> Any:
    @decorator(frozen=True, slots=True, kw_only=True)
    class Named:
        key: str
        most: int = 7

    return Named


SETTINGS = [
    {"frozen": True},
    {"frozen": True, "eq": False},
    {"frozen": True, "repr": False},
    {},
    {"eq": False, "repr": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_record_is_what_a_dataclass_of_the_standard_library_is(settings):
    ours, theirs = made_by(dataclass, **settings), made_by(dataclasses.dataclass, **settings)
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
    assert ours.__match_args__ == theirs.__match_args__
    assert ours.__slots__ == theirs.__slots__
    assert [item.name for item in dataclasses.fields(ours)] == list(ours.__slots__)
    told = [
        _facts(kind("w", (2, 3), "I8", notes=["a"], seen=4), kind("w", (2, 3), "I8", notes=["a"]))
        for kind in (ours, theirs)
    ]
    assert told[0] == told[1]
    assert ours("w", (), prefix="module.").read == theirs("w", (), prefix="module.").read
    assert ours("w", ()).notes is not ours("w", ()).notes
    with pytest.raises(TypeError, match="shape"):
        ours("w")


def _facts(record: Any, like: Any) -> list[Any]:
    """What can be told of a record, and of one that differs in what is not compared."""
    has_repr = type(record).__repr__ is not object.__repr__
    shown = repr(record) if has_repr else ""
    again = copy.copy(record)
    return [
        dataclasses.asdict(record),
        dataclasses.asdict(dataclasses.replace(record, shape=(1,))),
        shown,
        record == like,
        record == again,
        record == dataclasses.replace(record, key="v"),
        record == dataclasses.astuple(record),
        type(record).__hash__ is None,
        [_error(setattr, record, "key", "v"), _error(delattr, record, "key")],
        dataclasses.asdict(again),
    ]


def _error(call: Callable[..., None], *words: Any) -> str | None:
    try:
        call(*words)
    except FrozenInstanceError as error:
        return str(error)
    return None


def test_records_that_are_equal_have_one_hash():
    kind, reference = named_by(dataclass), named_by(dataclasses.dataclass)
    assert hash(kind(key="a")) == hash(kind(key="a", most=7)) == hash(reference(key="a"))
    assert str(inspect.signature(kind)) == str(inspect.signature(reference))
    with pytest.raises(TypeError):
        kind("a")


def test_a_constructor_is_compiled_only_when_it_is_asked_for():
    kind = named_by(dataclass)
    assert not inspect.isfunction(vars(kind)["__init__"])
    kind(key="a")
    assert inspect.isfunction(vars(kind)["__init__"])


def test_others_derive_their_records_from_ours():
    reference = dataclasses.dataclass(frozen=True, slots=True)
    for decorator in (reference, dataclass(frozen=True, slots=True)):

        @decorator
        class Derived(named_by(dataclass)):
            more: str = "m"

        assert Derived(key="k") == Derived("m", key="k", most=7)
        with pytest.raises(FrozenInstanceError):
            Derived(key="k").key = "other"
        with pytest.raises(TypeError, match="frozen"):
            dataclasses.dataclass(type("Other", (named_by(dataclass),), {}))
