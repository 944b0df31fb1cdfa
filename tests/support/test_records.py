"""Records: what the dataclasses of the standard library promise, for less."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError, InitVar, field
from typing import Any, ClassVar, NamedTuple

import pytest

from ckptconv.support import records
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


def plain_by(decorator: Decorator, **settings: bool) -> Any:
    """A class of which each field is a parameter."""

    @decorator(slots=True, **settings)
    class Record:
        """A record."""

        key: str
        shape: tuple[int, ...]
        dtype: str = "F32"
        notes: list[str] = field(default_factory=list)
        seen: int = field(default=0, repr=False, compare=False)
        read: str = "no"

        def __post_init__(self) -> None:
            object.__setattr__(self, "read", f"{self.key} {self.dtype}")

    return Record


def named_by(decorator: Decorator) -> Any:
    @decorator(frozen=True, slots=True, kw_only=True)
    class Named:
        key: str
        most: int = 7
        kind: ClassVar[str] = "named"

    return Named


SETTINGS = [
    {"frozen": True},
    {"frozen": True, "eq": False},
    {"frozen": True, "repr": False},
    {},
    {"eq": False, "repr": False},
]


@pytest.mark.parametrize("made", [made_by, plain_by])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_record_is_what_a_dataclass_of_the_standard_library_is(settings, made):
    ours, theirs = made(dataclass, **settings), made(dataclasses.dataclass, **settings)
    for _ in ("not compiled", "compiled"):
        told = [
            _facts(
                kind("w", (2, 3), "I8", notes=["a"], seen=4), kind("w", (2, 3), "I8", notes=["a"])
            )
            for kind in (ours, theirs)
        ]
        assert told[0] == told[1]
        assert ours("w", ()).notes is not ours("w", ()).notes
        assert ours("w", ()).read == theirs("w", ()).read
        for words in (["w"], ["w", (), "I8", [], 4, "no", "", 8], []):
            assert _wrong(ours, *words) == _wrong(theirs, *words)
        for given in ({"key": "v"}, {"shape": (), "odd": 1}):
            assert _wrong(ours, "w", **given) == _wrong(theirs, "w", **given)
        assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
    assert ours.__match_args__ == theirs.__match_args__
    assert ours.__slots__ == theirs.__slots__
    assert [item.name for item in dataclasses.fields(ours)] == list(ours.__slots__)


def test_what_is_only_a_parameter_is_handed_on():
    ours, theirs = made_by(dataclass, frozen=True), made_by(dataclasses.dataclass, frozen=True)
    assert ours("w", (), prefix="module.").read == theirs("w", (), prefix="module.").read


def _wrong(kind: Any, *words: Any, **given: Any) -> str:
    with pytest.raises(TypeError) as caught:
        kind(*words, **given)
    return str(caught.value)


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
    # `inspect` of Python 3.12.3 and later asks so, whether records were made before or not
    asked = [
        inspect.signature(vars(one)["__init__"].__get__(one, type)) for one in (kind, reference)
    ]
    assert str(asked[0]) == str(asked[1])
    assert str(inspect.signature(kind)) == str(inspect.signature(reference))
    with pytest.raises(TypeError):
        kind("a")


def test_a_constructor_is_compiled_only_for_many():
    kind = named_by(dataclass)
    made = [kind(key="a") for _ in range(50)]
    assert not inspect.isfunction(vars(kind)["__init__"])
    made += [kind(key="a") for _ in range(200)]
    assert inspect.isfunction(vars(kind)["__init__"])
    assert set(made) == {kind(key="a", most=7)}


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


def test_records_derive_from_records():
    kinds = []
    for decorator in (dataclasses.dataclass, dataclass):

        @decorator(frozen=True, slots=True, kw_only=True)
        class Derived(named_by(decorator)):
            most: int = 8
            seen: list[str] = field(default_factory=list, compare=False)

        kinds.append(Derived)
    theirs, ours = kinds
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
    assert ours.__slots__ == ("seen",)  # as theirs from Python 3.11 on
    assert repr(ours(key="a", seen=["b"])) == repr(theirs(key="a", seen=["b"]))
    assert ours(key="a", seen=["b"]) == ours(key="a")
    assert ours.__base__(key="a").most == 7
    assert [item.name for item in dataclasses.fields(ours)] == ["key", "most", "seen"]


def tuple_by(base: Any) -> Any:
    class Pair(base):
        """Two."""

        one: int
        other: str = "b"

        def swapped(self) -> tuple[str, int]:
            return self.other, self.one

    return Pair


def test_a_named_tuple_is_what_that_of_the_standard_library_is():
    ours, theirs = tuple_by(records.NamedTuple), tuple_by(NamedTuple)
    assert ours(1) == theirs(1) == (1, "b")
    assert repr(ours(1)) == repr(theirs(1))
    assert (ours(1)._replace(one=2).swapped(), ours.__doc__) == (("b", 2), "Two.")
    for name in ("_fields", "_field_defaults", "__match_args__", "__module__", "__bases__"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert str(inspect.signature(ours)).count("=") == 1
    with pytest.raises(TypeError, match="one"):
        ours()
