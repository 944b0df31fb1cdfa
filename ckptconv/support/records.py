"""Records: dataclasses that cost little to define, those that are made 100,000 at a time, and what
one says that is not as usual.

The standard library compiles six functions for each dataclass as its module is imported: 0.8 ms,
which was a third of the start of `ckptconv inspect`, and most of these classes are never used by
one command. Here the fields are those of the standard library (so `fields`, `replace` and `asdict`
hold), the constructor is compiled when it is first asked for, and the rest is shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

made = tuple.__new__
"""Makes a NamedTuple of a tuple of all its fields in half the time of its constructor, for what
there are 100,000 of.
"""


def given_fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as by default, in their order."""
    told = ((item.name, getattr(record, item.name), item.default) for item in fields(record))
    return {name: value for name, value, default in told if value != default}


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        *,
        frozen: bool = False,
        slots: bool = False,
        eq: bool = True,
        repr: bool = True,
        **more: bool,
    ) -> Callable[[type], type]:
        """As `dataclasses.dataclass`, of which these are the settings in use."""

        def made_of(cls: type) -> type:
            told = {"slots": slots, **more}
            if any(map(dataclasses.is_dataclass, cls.__bases__)):  # few are, and it has all rules
                return dataclasses.dataclass(frozen=frozen, eq=eq, repr=repr, **told)(cls)
            own = set(cls.__dict__)
            cls = dataclasses.dataclass(init=False, eq=False, repr=False, **told)(cls)
            cls.__dataclass_params__.frozen = frozen  # for what is derived from it
            methods: dict[str, Any] = {"__init__": _Constructor(cls)}
            if frozen:
                methods |= _FROZEN
            if repr:
                methods["__repr__"] = _represented
            if eq:
                named = [item.name for item in fields(cls) if item.compare]
                methods |= _compared(named, is_hashed=frozen)
            for name in methods.keys() - own:
                setattr(cls, name, methods[name])
            return cls

        return made_of


class _Constructor:
    """The `__init__` of a class until it is first asked for."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __get__(self, record: object, owner: type) -> Any:
        compiled = _constructor_of(self._cls)
        self._cls.__init__ = compiled  # type: ignore[misc]
        return compiled.__get__(record, owner)


def _constructor_of(cls: Any) -> Any:
    """An `__init__` with a parameter for each field, from a class that has nothing else."""
    members: dict[str, Any] = cls.__dataclass_fields__  # with those that are `InitVar`
    space = {
        **members,
        "__annotations__": {name: item.type for name, item in members.items()},
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    if hasattr(cls, "__post_init__"):
        space["__post_init__"] = cls.__post_init__
    alike: Any = dataclasses.dataclass(
        frozen=cls.__setattr__ is _refuse_to_set,
        slots="__slots__" in vars(cls),  # fields that are no parameters are set then
        eq=False,
        repr=False,
    )(type(cls.__name__, (), space))
    return alike.__init__


def _refuse_to_set(record: object, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(record: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(record: Any) -> list[Any]:
    return [getattr(record, item.name) for item in fields(record)]


def _set_state(record: Any, state: list[Any]) -> None:
    for item, value in zip(fields(record), state, strict=True):
        object.__setattr__(record, item.name, value)


_FROZEN = {
    "__setattr__": _refuse_to_set,
    "__delattr__": _refuse_to_delete,
    "__getstate__": _state,
    "__setstate__": _set_state,
}
"""The methods of a class whose records cannot be changed, not even by `pickle`."""


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
