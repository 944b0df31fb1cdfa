"""What docs/api.md must say of each public name: how it is called, what it is made of, or what it
is a kind of.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import ckptconv


def signature_text(name: str) -> str:
    """The line of a name: a call without types, the fields of a result, the bases of an error."""
    thing = getattr(ckptconv, name)
    if not callable(thing):
        return name
    if isinstance(thing, type) and issubclass(thing, Exception):
        return f"{name}({', '.join(base.__name__ for base in thing.__bases__)})"
    if isinstance(thing, type) and name not in ("Options", "KeyRules", "Tolerance"):
        return f"{name}: {', '.join(facts(thing))}"
    return f"{name}{bare(inspect.signature(thing))}"


def facts(kind: Any) -> list[str]:
    """The fields of a result, and its properties and methods after them."""
    is_dataclass = dataclasses.is_dataclass(kind)
    fields = [item.name for item in dataclasses.fields(kind)] if is_dataclass else kind._fields
    own = [name for name in fields if not name.startswith("_")]
    more = [
        name for name, value in vars(kind).items() if not name.startswith("_") and name not in own
    ]
    return own + [f"{name}()" if callable(getattr(kind, name)) else name for name in more]


def bare(signature: inspect.Signature) -> str:
    """A signature without its types."""
    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(annotation=empty) for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=empty))
