"""What a state dict is fitted to: the keys and shapes of another checkpoint, of an index, or of a
list of keys.

A list is a text with one key per line (UTF-8; empty lines count for nothing). Of an index whose
shards are not beside it, and of a list, only the keys are known. The folder of a pipeline of
diffusers has the keys of its components, each with its name before them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptconv.convert.named_models import model_parameters, model_shapes
from ckptconv.formats.registry import open_certain
from ckptconv.io.location import Location, read_small
from ckptconv.io.places import place_of
from ckptconv.keys.fits import Shape, Shapes, Ties
from ckptconv.support.choices import refuse_no_path
from ckptconv.support.errors import (
    AmbiguousStateDict,
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
)
from ckptconv.support.json_text import read_object
from ckptconv.tree.fitted_keys import KeyTarget, shapes_of, ties_of

if TYPE_CHECKING:
    from ckptconv.tree.optimizer_forms import ParameterOrder

_INDEX = ".index.json"
_PART = "write the part that you mean to a file of its own first: ckptconv convert --only PATH"


def key_target(
    like: str | os.PathLike[str] | None, model: str | None, *, drop_unexpected: bool = False
) -> KeyTarget | None:
    """What the user named with `like` or `model` (see `named_models`), one of them; or None."""
    if like is not None and model is not None:
        raise CheckpointError(
            "like and model are both given, but the keys can fit only one",
            hint="leave one of them out",
        )
    if drop_unexpected and like is None and model is None:
        raise CheckpointError(
            "there is no target in which keys could be unexpected",
            hint="add --like OTHER or --model NAME",
        )
    if model is not None:
        shapes, ties = model_shapes(model)
        return KeyTarget(model, shapes, drop_unexpected, ties)
    if like is None:
        return None
    shapes, ties = shapes_like(like)
    return KeyTarget(str(like), shapes, drop_unexpected, ties)


def shapes_like(path: str | os.PathLike[str]) -> tuple[Shapes, Ties]:
    """The keys and shapes of the state dict in `path`, and those of its keys that are tied.

    `path` is whatever `open_checkpoint` reads, an index, or a list of keys; the last two tell of no
    ties.

    Raises `CheckpointError`: when it is none of these, holds no key or one twice, or more than one
    state dict.
    """
    refuse_no_path(like=path)
    file = place_of(path)
    if is_pipeline(file):
        return _of_pipeline(file), ()
    if file.name.endswith(_INDEX) and file.is_file() and not _has_shards(file):
        return _distinct(_weight_map(file), file), ()
    try:
        with open_certain(file) as checkpoint:
            checkpoint.refuse_part()
            found = checkpoint.state_dict()
    except AmbiguousStateDict as error:
        raise AmbiguousStateDict(
            error.what, path=error.path, where=error.where, hint=_PART
        ) from None
    except UnsupportedCheckpoint:
        keys = _listed_keys(file)
        if keys is None:
            raise
        return _distinct(keys, file), ()
    _distinct(found.keys, file)
    return shapes_of(found), ties_of(found)


def parameter_order(
    path: str | os.PathLike[str] | None, model: str | None
) -> ParameterOrder | None:
    """The parameters in the order of ``model.parameters()``, as a torch file or a text of keys at
    `path` has them, or else the model that is named; None for neither.

    Raises `CheckpointError` for what has another order: safetensors sorts its keys, an index too.
    """
    if path is None and model is None:
        return None
    from ckptconv.tree.optimizer_forms import Parameter, ParameterOrder, order_of  # seldom needed

    if path is None:
        assert model is not None
        return ParameterOrder(model, [Parameter(*item) for item in model_parameters(model)])
    refuse_no_path(order_from=path)
    file = place_of(path)
    try:
        with open_certain(file) as checkpoint:
            if not checkpoint.container.is_torch or checkpoint.container.is_index:
                what = f"({checkpoint.format}) does not keep the order of model.parameters()"
                raise CheckpointError(what, path=file, hint=_ORDERED)
            return order_of(checkpoint.state_dict(), str(path))
    except AmbiguousStateDict as error:
        raise AmbiguousStateDict(
            error.what, path=error.path, where=error.where, hint=_ORDERED
        ) from None
    except UnsupportedCheckpoint:
        keys = _listed_keys(file)
        if keys is None:
            raise
    return ParameterOrder(str(path), [Parameter(key) for key in _distinct(keys, file)])


_ORDERED = "name a file of torch.save(model.state_dict()), or a text with one key per line"


def is_pipeline(folder: Location) -> bool:
    """Whether a folder is that of a pipeline of diffusers, with a folder for each component."""
    return folder.is_folder() and folder.child(_PIPELINE).is_file()


_PIPELINE = "model_index.json"
_COMPONENTS = ("unet", "transformer", "text_encoder", "text_encoder_2")


def _of_pipeline(folder: Location) -> Shapes:
    """The keys of the components that adapters are for. Source: diffusers, `from_pretrained`."""
    shapes: dict[str, Shape] = {}
    for name in _COMPONENTS:
        component = folder.child(name)
        if component.is_folder():
            own, _ = shapes_like(component.path)
            shapes |= {f"{name}.{key}": shape for key, shape in own.items()}
    if not shapes:
        what = f"names components of a pipeline, of which none of {', '.join(_COMPONENTS)} is there"
        raise UnsupportedCheckpoint(what, path=folder.path, where=_PIPELINE)
    return shapes


def _has_shards(index: Location) -> bool:
    """Whether a file that an index names is there: then a missing one is an error."""
    names = {name for name in _weight_map(index).values() if isinstance(name, str)}
    return any(name and index.beside(name).is_file() for name in names)


def _weight_map(index: Location) -> dict[str, object]:
    found = read_object(read_small(index, "index_bytes"), index.path, "index").get("weight_map")
    if not isinstance(found, dict) or not found:
        what = "is missing or names no keys"
        raise MalformedCheckpoint(what, path=index.path, where="weight_map")
    return found


_MOST_KEYS = 2_000_000  # in a text; the largest checkpoints have some 100,000
_LONGEST_KEY = 1 << 20  # characters


def _listed_keys(file: Location) -> list[str] | None:
    """The lines of a text; None for anything that is not text of keys."""
    try:
        text = read_small(file, "text_bytes").decode("utf-8-sig")
    except (CheckpointError, UnicodeDecodeError):
        return None
    if text.count("\n") > _MOST_KEYS:
        return None
    keys = [*filter(None, map(str.strip, text.splitlines()))]
    # a key may hold anything, but prose, HTML and JSON are not what anybody means by a list of keys
    plain = all(
        len(key) <= _LONGEST_KEY and key.isprintable() and " " not in key and key[0] not in "<{["
        for key in keys
    )
    return keys if keys and plain else None


def _distinct(keys: Iterable[str], file: Location) -> Shapes:
    shapes: dict[str, Shape] = {}
    for key in keys:
        if key in shapes:
            raise MalformedCheckpoint("occurs twice in it", path=file, where=key)
        shapes[key] = None
    return shapes
