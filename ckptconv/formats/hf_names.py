"""How an output is split into shards: their sizes, their names, and the index that says which of
them holds a key.

Names and index are those of the Hugging Face libraries: ``model-00001-of-00005.safetensors`` beside
``model.safetensors.index.json``, an object of ``metadata.total_size`` (bytes) and ``weight_map``
(key → file name). Other metadata of a source's index goes along.
"""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from ckptconv.io.location import Location, read_small
from ckptconv.io.places import place_of
from ckptconv.support.errors import CheckpointError, OutputRefused


def split(sizes: Sequence[int], groups: Sequence[Hashable], limit: int) -> list[list[int]]:
    """Indices of tensors by shard: in order, at most `limit` bytes each, tensors of one group
    together. Without `groups`, each is one of its own.

    A group that is larger by itself is alone in its shard.

    >>> split([4, 4, 9, 4, 4], ["a", "b", "c", "d", "a"], 8)
    [[0, 4], [1, 3], [2]]
    """
    first: dict[Hashable, int] = {}
    together: dict[int, list[int]] = {}  # a list for each of a million would take 90 MB
    for index, group in enumerate(groups):
        at = first.setdefault(group, index)
        if at != index:
            together.setdefault(at, [at]).append(index)
    shards: list[list[int]] = []
    room = -1  # less than 0, so that also a tensor without bytes begins a shard
    alone: list[list[int]] = []
    order: Iterable[int] = range(len(sizes))
    if groups:
        order = first.values()
    for index in order:
        indices = together.get(index, (index,))
        size = sizes[index] if len(indices) == 1 else sum([sizes[at] for at in indices])
        if size > limit:
            alone.append(list(indices))
        elif size <= room:
            shards[-1] += indices
            room -= size
        else:
            shards.append(list(indices))
            room = limit - size
    return sorted(map(sorted, (*shards, *alone)), key=lambda indices: indices[0])


def shard_paths(output: PurePath, count: int) -> list[PurePath]:
    """The paths of `count` shards of the output `output`; one is the output itself.

    >>> [path.name for path in shard_paths(PurePath("model.safetensors"), 2)]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if count == 1:
        return [output]
    of = f"of-{count:05}{output.suffix}"
    return [output.with_name(f"{output.stem}-{number + 1:05}-{of}") for number in range(count)]


def index_path(output: PurePath) -> PurePath:
    """Where the index of the output `output` stands; that of a variant is named as its library
    looks for it.

    >>> index_path(PurePath("diffusion_pytorch_model.fp16.safetensors")).name
    'diffusion_pytorch_model.safetensors.index.fp16.json'
    """
    found = _LIBRARY(output.name)
    if found is None or not found["variant"]:
        return output.with_name(f"{output.name}.index.json")
    stem, variant = found["stem"], found["variant"]
    return output.with_name(f"{stem}{output.suffix}.index.{variant}.json")


# The names of weights for which transformers, peft and diffusers look. Source: `_add_variant`.
_LIBRARY = partial(
    re.fullmatch,
    r"(?P<stem>(?:pytorch_|adapter_|diffusion_pytorch_)?model)(?:\.(?P<variant>[^./]+?))?"
    r"(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)",
)


def named_like(read: str, usual: str) -> str:
    """The name of weights in a folder, `usual` for their format, that the library looks for which
    wrote the file `read`.

    >>> named_like("adapter_model.bin", "model.safetensors")
    'adapter_model.safetensors'
    >>> named_like("model.fp16-00001-of-00002.safetensors", "pytorch_model.bin")
    'pytorch_model.fp16.bin'
    """
    found = _LIBRARY(read)
    if found is None:
        return usual
    stem, _, suffix = usual.rpartition(".")
    if found["stem"] in ("adapter_model", "diffusion_pytorch_model"):
        stem = found["stem"]
    return ".".join(filter(None, (stem, found["variant"], suffix)))


def is_weights_name(name: str) -> bool:
    """Whether a library looks for weights of this name."""
    return _LIBRARY(name) is not None


def refuse_dcp_folder(folder: Location) -> None:
    """Refuse a folder for the files of a set in which a DCP checkpoint is."""
    if folder.child(".metadata").is_file():
        what = "is a DCP folder, whose readers would not take what is put into it"
        raise OutputRefused(what, path=folder.path, hint="name another folder")


def earlier_files(output: PurePath, *, others: bool) -> list[PurePath]:
    """The files of a sharded output `output` that are there already: itself, its index, and shards
    of any number; with `others` those in another format too, which a library may take instead.

    Whoever opens the folder may take any of them for the checkpoint. `OutputRefused` when the
    folder cannot be listed.
    """
    is_shard = re.compile(
        rf"{re.escape(output.stem)}-\d{{5}}-of-\d{{5}}{re.escape(output.suffix)}"
    ).fullmatch
    looked_for = others and _looked_for(output.name)
    own = (output.name, index_path(output).name)
    folder = place_of(output.parent)
    from ckptconv.io.destination import output_errors  # with all that writes

    with output_errors(output):
        names = folder.names() if folder.is_folder() else []
        found = [
            name
            for name in names
            if is_shard(name) or (looked_for and _looked_for(name) == looked_for)
        ]
        found = [name for name in found if name not in own]
        return [output.with_name(name) for name in (*own, *found) if folder.child(name).is_file()]


def _looked_for(name: str) -> tuple[str, str] | None:
    """What a library looks for when it takes a file of this name, weights or an index: those of a
    model or of an adapter, and of which variant. None for a name that it does not know.
    """
    plain = re.sub(_INDEX_WORDS, r"\g<variant>\g<suffix>", name)
    found = _LIBRARY(plain)
    return found and (found["stem"].removeprefix("pytorch_"), found["variant"] or "")


_INDEX_WORDS = r"(?P<suffix>\.[^.]+)\.index(?P<variant>\.[^.]+)?\.json$"


def index_text(
    shards: Iterable[tuple[str, str]], nbytes: int, metadata: Mapping[str, Any] | None = None
) -> bytes:
    """The index for `nbytes` of tensors, each with its shard, and other `metadata`;
    `CheckpointError` for no JSON.
    """
    import json

    quoted = json.encoder.encode_basestring
    document = {"metadata": {**(metadata or {}), "total_size": nbytes}, "weight_map": {}}
    try:
        around = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        # json indents in Python, entry by entry; what this gives is not copied, and may be 100 MB
        text = io.BytesIO()
        text.write(around.removesuffix(_NO_ENTRIES).encode())
        ends: dict[str, str] = {}
        before = "{"
        for key, name in shards:
            end = ends.get(name) or ends.setdefault(name, f": {quoted(name)}")
            text.write(f"{before}\n    {quoted(key)}{end}".encode())
            before = ","
        text.write(b"\n  }\n}\n" if ends else f"{_NO_ENTRIES}\n".encode())
        return text.getvalue()
    except ValueError as error:  # a number beyond any float, half a character
        what, hint = f"cannot be written as JSON ({error})", "correct the index of the source"
        raise CheckpointError(what, where="index", hint=hint) from None


_NO_ENTRIES = "{}\n}"


def moved_index(raw: bytes, folder: str) -> bytes:
    """The index `raw` of the same shards in `folder`, which lies beside it."""
    import json

    document = json.loads(raw)
    named = ((key, f"{folder}/{name}") for key, name in document["weight_map"].items())
    return index_text(named, document["metadata"]["total_size"], document["metadata"])


def indexes_naming(place: Location) -> list[Location]:
    """The indexes in the folder of a file, and in the one around it, that name it as one of their
    shards; those of variants too (``….index.fp16.json``).

    Raises `MalformedCheckpoint` for one that cannot be read.
    """
    from ckptconv.support.json_text import read_object

    found = []
    folder = place.absolute.parent
    for home, path in ((folder, place.name), (folder.parent, f"{folder.name}/{place.name}")):
        try:
            names = home.names()
        except OSError:  # a folder that may not be listed
            continue
        for name in filter(IS_INDEX, names):
            index = home.child(name)
            if not index.is_file():
                continue
            document = read_object(read_small(index, "index_bytes"), index.path, "index")
            named = document.get("weight_map")
            values = named.values() if isinstance(named, dict) else ()
            if any(isinstance(one, str) and posixpath.normpath(one) == path for one in values):
                found.append(index)
    return found


IS_INDEX = partial(re.fullmatch, r".*\.index(\.[^.]+)?\.json", flags=re.DOTALL)
