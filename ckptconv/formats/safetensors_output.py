"""The safetensors file as an output format: the tensors of one state dict, and strings beside them.

Tensors of one and the same view are written once; the metadata names the others as aliases of the
one that is kept, as the library's `save_model` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from ckptconv.formats.layout import Layout
from ckptconv.formats.safetensors import lay_out_safetensors
from ckptconv.formats.target_format import NamedTensor, Retag, TargetFormat
from ckptconv.support.errors import DeviceUnavailable, VerificationFailed, printable
from ckptconv.tensors.refs import TensorRef, view_identity
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.flattening import refuse_unholdable


class SafetensorsFile(TargetFormat):
    """What the safetensors library writes."""

    name = "safetensors"
    noun = "safetensors"
    suffix = ".safetensors"
    suffixes = (".safetensors",)
    claimed = (".safetensors",)
    shards_named = "model.safetensors"
    holds_metadata = True
    encodes = True

    def refuse(self, named: Iterable[NamedTensor]) -> None:
        for key, ref, dtype in named:
            refuse_unholdable(key, ref, dtype)

    def aliases(
        self, named: Sequence[tuple[str, TensorRef]], checkpoint: Checkpoint
    ) -> dict[str, str]:
        """The first name of a view in sorted order is kept, as the library does.

        A name that the file's metadata needs for something else is not dropped.
        """
        views: dict[Hashable, list[str]] = {}
        for key, ref in named:
            if ref.numel:
                views.setdefault(view_identity(ref), []).append(key)
        aliases = _aliases_in(checkpoint)
        others = (name for name in checkpoint.metadata if name not in aliases)
        taken = {"format", "device", *others}
        return {
            name: names[0]
            for names in [sorted(names) for names in views.values() if len(names) > 1]
            for name in names[1:]
            if name not in taken
        }

    def metadata(
        self, named: Mapping[str, TensorRef], checkpoint: Checkpoint, retag: Retag
    ) -> dict[str, str]:
        aliases = _aliases_in(checkpoint)
        metadata = {
            name: value
            for name, value in checkpoint.metadata.items()
            # would read as an alias
            if name not in aliases and name != "device" and (name == "format" or value not in named)
        }
        metadata["format"] = "pt"
        tags = {retag(ref.location) for ref in named.values()}
        if bad := next((tag for tag in tags if not tag.isascii()), None):
            raise DeviceUnavailable(
                f"the location tag '{printable(bad)}' is not a device",
                hint="name one with --device",
            )
        if len(tags) == 1:
            metadata["device"] = tags.pop()
        return metadata

    def lay_out(
        self, tensors: Sequence[NamedTensor], metadata: Mapping[str, str], retag: Retag
    ) -> Layout:
        return lay_out_safetensors(tensors, metadata)

    def check_written(self, written: Path, name: PurePath, count: int) -> None:
        """Let the safetensors library read the header that was written."""
        with _opened(written, name) as opened:
            seen = len(opened.keys())
        if seen != count:
            raise VerificationFailed(
                f"the safetensors library sees {seen} tensors in it", path=name
            )


def entries_seen(
    written: Path, name: PurePath
) -> tuple[dict[str, str] | None, dict[str, tuple[str, tuple[int, ...]]]]:
    """What the safetensors library sees in a file that will be `name`: its metadata, and the dtype
    and the shape of each tensor.

    Raises `VerificationFailed` when it does not open it.
    """
    with _opened(written, name) as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return opened.metadata(), {
            key: (item.get_dtype(), tuple(item.get_shape())) for key, item in slices.items()
        }


@contextlib.contextmanager
def _opened(written: Path, name: PurePath) -> Iterator[Any]:
    """A file as the safetensors library has it; `VerificationFailed` where it does not open it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(written, framework="np") as opened:
            yield opened
    except SafetensorError as error:
        raise VerificationFailed(
            f"the safetensors library does not open it: {error}", path=name
        ) from error


def _aliases_in(checkpoint: Checkpoint) -> set[str]:
    """The metadata entries of a safetensors source that name a tensor, and so became keys."""
    if not checkpoint.metadata:
        return set()
    keys = {key for found in checkpoint.state_dicts() for key in found.keys}
    return {name for name, kept in checkpoint.metadata.items() if name in keys and kept in keys}


SAFETENSORS = SafetensorsFile()
