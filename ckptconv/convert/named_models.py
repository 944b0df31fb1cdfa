"""Models that the user names, built without memory: the only place where the user's own code is
imported.

A name is ``PACKAGE.MODULE:CALLABLE``; the callable takes no arguments and gives a `torch.nn.Module`
(a class, a function, a method reached by dots). It is called under ``torch.device("meta")``, so
that no parameter takes memory.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from importlib import import_module
from typing import Any

from ckptconv.keys.fits import Shape, Shapes, Ties
from ckptconv.support.errors import UnsupportedCheckpoint, printable

_FORM = "name it as PACKAGE.MODULE:CALLABLE"


def model_shapes(name: str) -> tuple[Shapes, Ties]:
    """The keys and shapes in the state dict of the model that `name` builds (None for what has no
    shape), and its tied keys.

    The current folder is looked in too, as `python -m` does. Raises `CheckpointError` when the name
    cannot be imported, or what it names gives no module.
    """
    model = _built(name)
    shapes = live_shapes(model)
    return shapes, live_ties(model, shapes)


def model_parameters(name: str) -> list[tuple[str, Shape | None]]:
    """The names and shapes in ``model.parameters()`` of what `name` builds; a tied one once."""
    return [(key, live_shape(value)) for key, value in _built(name).named_parameters()]


def _built(name: str) -> Any:
    """The model on the meta device."""
    from ckptconv.devices.host import require_torch  # seldom needed

    require_torch("building a model")
    import torch

    build = _named(name)
    try:
        with torch.device("meta"):
            model = build()
        if isinstance(model, torch.nn.Module):
            return model
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UnsupportedCheckpoint(
            f"cannot be built on the meta device ({_told(error)})",
            path=name,
            hint="name a callable that takes no arguments and builds the model, without reading "
            "or moving tensors",
        ) from error
    raise UnsupportedCheckpoint(
        f"returns {type(model).__name__}, not a torch.nn.Module", path=name, hint=_FORM
    )


def live_shapes(model: Any) -> Shapes:
    """The keys and shapes in the state dict of a module; None: extra state, lazy parameters."""
    return {key: live_shape(value) for key, value in model.state_dict().items()}


def live_ties(model: Any, keys: Collection[str]) -> Ties:
    """The names of parameters and buffers that a module has for one and the same tensor; `keys` are
    those of its state dict.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for key, value in live_tensors(model, keys):
        names[id(value)].append(key)
    return [group for group in names.values() if len(group) > 1]


def live_tensors(model: Any, keys: Collection[str]) -> Iterator[tuple[str, Any]]:
    """All names of parameters and buffers, as in `keys`, those of the state dict."""
    for named in (model.named_parameters, model.named_buffers):
        yield from saved_names(named(remove_duplicate=False), keys)


def saved_names(
    named: Iterable[tuple[str, Any]], keys: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """What a module names, by the `keys` of its state dict: `checkpoint_wrapper` takes its segment
    out of them (torch 2.13, `ActivationWrapper._post_state_dict_hook`), but not out of the names.
    """
    for name, value in named:
        key = name if name in keys else name.replace("_checkpoint_wrapped_module.", "")
        yield key, value


def live_shape(value: Any) -> Shape:
    """The shape of a tensor; None for a lazy parameter and for what is not a tensor."""
    from torch.nn.parameter import is_lazy

    return tuple(value.shape) if hasattr(type(value), "shape") and not is_lazy(value) else None


def _named(name: str) -> Any:
    """The callable of a name; its module is imported."""
    module, colon, path = name.partition(":")
    if not colon or not module or not path:
        raise UnsupportedCheckpoint(
            "is not a name of a callable", path=name, hint=f"{_FORM}, e.g. my_package.models:build"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 (as python itself has it)
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (
        Exception,
        SystemExit,
    ) as error:  # importing runs the user's code, which may raise anything
        raise UnsupportedCheckpoint(
            f"cannot be imported ({_told(error)})", path=name, hint=_FORM
        ) from error
    if not callable(found):
        raise UnsupportedCheckpoint(
            f"is {type(found).__name__}, which is not callable", path=name, hint=_FORM
        )
    return found


def _told(error: BaseException) -> str:
    return printable(f"{type(error).__name__}: {error}", 300)
