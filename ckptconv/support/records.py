"""Records: dataclasses and named tuples that cost little to define, those that are made 100,000 at
a time, and what one says that is not as usual.

The standard library compiles up to six functions for each such class as its module is imported:
0.8 ms for a dataclass, which was a third of the start of `ckptconv inspect`, and most of these
classes make no record in one command, or few. Here a constructor is compiled when many are made;
the standard library makes the fields when they are asked for (so `fields`, `replace` and `asdict`
hold), and the rest is shared. A named tuple is that of `collections`: that of `typing` compiles the
types of its fields besides, for which nobody asks.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from functools import cache, partial
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

made = tuple.__new__
"""Makes a NamedTuple of a tuple of all its fields in half the time of its constructor, for what
there are 100,000 of.
"""


def given_fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as by default, in their order."""
    told = [(name, getattr(record, name), default) for name, default in _declared(type(record))]
    return {name: value for name, value, default in told if value != default}


_declared: Callable[[Any], list[tuple[str, Any]]]
_declared = cache(lambda kind: [(item.name, item.default) for item in fields(kind)])
"""The fields of a class with their defaults; the library goes through 40 of them each time that it
is asked, which a batch does four times for each job that it sends to a worker.
"""


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from typing import NamedTuple as NamedTuple
else:

    def dataclass(
        *,
        frozen: bool = False,
        slots: bool = False,
        eq: bool = True,
        repr: bool = True,
        kw_only: bool = False,
    ) -> Callable[[type], type]:
        """As `dataclasses.dataclass`, of which these are the settings in use. What a class has as
        `_init_by` is given its constructor, and gives the one that is called.
        """

        def made_of(cls: type) -> type:
            bases = [base for base in cls.__mro__[:0:-1] if "__dataclass_fields__" in vars(base)]
            inherited = [vars(base).get("_declared") for base in bases]
            if not slots or any(base is None or base.kw_only != kw_only for base in inherited):
                # few are so, or derived from others, and the standard library has all rules
                told = {"frozen": frozen, "slots": slots, "kw_only": kw_only}
                return dataclasses.dataclass(eq=eq, repr=repr, **told)(cls)
            declared = _Declared(cls, inherited, frozen=frozen, kw_only=kw_only)
            methods = declared.methods()
            if frozen:
                methods |= _FROZEN
            if repr:
                methods["__repr__"] = _represented
            if eq:
                compared = declared.that_are("compare", declared.names)
                methods |= _compared(compared, is_hashed=frozen)
            return declared.with_slots(cls, methods)

        return made_of

    class _NamedTuples(type):
        """What makes a named tuple of a class as it is written."""

        def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, space)
            names = space.get("__annotations__", ())
            defaults = [space.pop(name) for name in names if name in space]
            kind = namedtuple(name, names, defaults=defaults, module=space["__module__"])
            for key, value in space.items():
                setattr(kind, key, value)
            return kind

    class NamedTuple(metaclass=_NamedTuples):
        """As `typing.NamedTuple`."""


class _Declared:
    """The fields of a class and of those that it is derived from, as they are written: their types,
    which are texts as in all modules here, and the defaults of some.
    """

    def __init__(
        self, cls: type, inherited: list[_Declared], *, frozen: bool, kw_only: bool
    ) -> None:
        own: dict[str, str] = vars(cls).get("__annotations__", {})
        self.types: dict[str, str] = {}
        self.defaults: dict[str, Any] = {}
        for base in inherited:
            self.types |= base.types
            self.defaults |= base.defaults
        self.types |= {name: kind for name, kind in own.items() if "ClassVar" not in kind}
        self.defaults |= {name: vars(cls)[name] for name in own if name in vars(cls)}
        self.names = [name for name, kind in self.types.items() if "InitVar" not in kind]
        self.frozen, self.kw_only = frozen, kw_only

    def that_are(self, setting: str, names: Iterable[str]) -> list[str]:
        """The fields of which a setting of `dataclasses.field` holds, as it does by default."""
        given = ((name, self.defaults.get(name)) for name in names)
        return [name for name, it in given if not isinstance(it, Field) or getattr(it, setting)]

    def with_slots(self, cls: type, methods: dict[str, Any]) -> type:
        """The class once more, with a slot for each field that it adds, and the methods that it
        does not have itself.
        """
        space = {**methods, **vars(cls)}
        for name in (*self.names, "__dict__", "__weakref__"):
            space.pop(name, None)
        there = {name for base in cls.__mro__[1:] for name in getattr(base, "__slots__", ())}
        space["__slots__"] = tuple(name for name in self.names if name not in there)
        made = type(cls)(cls.__name__, cls.__bases__, space)
        made.__qualname__ = cls.__qualname__
        return made

    def methods(self) -> dict[str, Any]:
        """What a class has by its fields."""
        named = [] if self.kw_only else self.that_are("init", self.types)
        return {
            "_declared": self,
            "__match_args__": tuple(named),
            "__init__": _Constructor(self),
            "__dataclass_fields__": _OfLibrary(self),
            "__dataclass_params__": _OfLibrary(self),
        }

    def in_library(self, cls: Any, *, init: bool) -> Any:
        """A class of the standard library with the same fields and nothing else."""
        space = {
            **self.defaults,
            "__annotations__": self.types,
            "__doc__": cls.__doc__ or "",
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        if hasattr(cls, "__post_init__"):
            space["__post_init__"] = cls.__post_init__
        return dataclasses.dataclass(
            init=init,
            frozen=init and self.frozen,
            slots=init,  # fields that are not parameters are set then
            kw_only=self.kw_only,
            eq=False,
            repr=False,
        )(type(cls.__name__, (), space))

    def bound(self, args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any] | None:
        """The values of the fields, and of what is only a parameter, in their order, as a
        constructor is called with them; None where it may not be.
        """
        told = {**dict(zip(self.types, args, strict=False)), **given}
        if len(told) < len(args) + len(given) or (args and self.kw_only):
            return None
        values = {}
        for name in self.types:
            value = self.defaults.get(name, MISSING)
            if isinstance(value, Field):
                if name in told and not value.init:
                    return None
                made = value.default_factory
                value = value.default if made is MISSING or name in told else made()
            values[name] = value = told.pop(name, value)
            if value is MISSING:
                return None
        return None if told else values


class _OfLibrary:
    """An attribute that the standard library makes for a class when it is first asked for."""

    def __init__(self, declared: _Declared) -> None:
        self._declared = declared

    def __set_name__(self, owner: type, name: str) -> None:
        self._cls, self._name = owner, name

    def __get__(self, record: object, owner: type) -> Any:
        alike = self._declared.in_library(self._cls, init=False)
        alike.__dataclass_params__.frozen = self._declared.frozen  # for what is derived from it
        found = getattr(alike, self._name)
        setattr(self._cls, self._name, found)
        return found


_FEW = 100  # records that are made before it pays to compile a constructor, which takes 0.4 ms


class _Constructor:
    """The `__init__` of a class until many records are made, or it is asked what it takes."""

    def __init__(self, declared: _Declared) -> None:
        self._declared, self._count = declared, 0

    def __set_name__(self, owner: type, name: str) -> None:
        self._cls: Any = owner

    def __get__(self, record: object, owner: type) -> Any:
        # from Python 3.12.3 on `inspect` passes the class as the record, to see what a call takes
        if isinstance(record, self._cls) and self._count < _FEW:
            self._count += 1
            return partial(self._fill, record)
        return self._compiled().__get__(record, owner)

    def _compiled(self) -> Any:
        compiled = self._declared.in_library(self._cls, init=True).__init__
        if hasattr(self._cls, "_init_by"):
            compiled = self._cls._init_by(compiled)
        self._cls.__init__ = compiled
        return compiled

    def _fill(self, record: Any, *args: Any, **given: Any) -> None:
        values = self._declared.bound(args, given)
        if values is None:
            self._compiled()(record, *args, **given)  # which says what is wrong with a call
            return
        for name in self._declared.names:
            object.__setattr__(record, name, values.pop(name))
        if hasattr(record, "__post_init__"):
            record.__post_init__(*values.values())


def _refuse_to_set(record: object, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(record: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(record: Any) -> list[Any]:
    return [getattr(record, name) for name, _ in _declared(type(record))]


def _set_state(record: Any, state: list[Any]) -> None:
    for put, value in zip(_setters(type(record)), state, strict=True):
        put(record, value)


_setters: Callable[[Any], list[Callable[[Any, Any], None]]]
_setters = cache(lambda kind: [getattr(kind, name).__set__ for name, _ in _declared(kind)])
"""What sets the slots of a class, in a fifth of the time of `object.__setattr__`."""


# the methods of a class whose records cannot be changed, not even by `pickle`
_FROZEN = {
    "__setattr__": _refuse_to_set,
    "__delattr__": _refuse_to_delete,
    "__getstate__": _state,
    "__setstate__": _set_state,
}


@recursive_repr()
def _represented(record: Any) -> str:
    told = (f"{item.name}={getattr(record, item.name)!r}" for item in fields(record) if item.repr)
    return f"{type(record).__qualname__}({', '.join(told)})"


def _compared(names: list[str], *, is_hashed: bool) -> dict[str, Any]:
    """`__eq__` and `__hash__` by the values of some fields."""
    if len(names) > 1:
        values: Callable[[Any], Any] = attrgetter(*names)
    else:

        def values(record: Any) -> Any:
            return tuple(getattr(record, name) for name in names)

    def eq(record: object, other: object) -> Any:
        if type(other) is type(record):
            return values(record) == values(other)
        return NotImplemented

    def hashed(record: object) -> int:
        return hash(values(record))

    return {"__eq__": eq, "__hash__": hashed if is_hashed else None}
