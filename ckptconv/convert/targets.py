"""Which format an output has, by its name."""

from __future__ import annotations

import os
from pathlib import Path

from ckptconv.convert.options import Options, Request, Target
from ckptconv.support.errors import CheckpointError, printable

_FOLDER_NAMES: dict[Target, str] = {
    "torch": "pytorch_model.bin",
    "safetensors": "model.safetensors",
}


_SUFFIXES: dict[str, Target] = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".tar", ".th", ".pkl", ".model"), "torch"),
}


def target(output: Path, options: Request) -> tuple[Path, Target]:
    """The file to write (of a sharded output the one that its shards and index are named after),
    and its format.

    The format is the one asked for, or the one that the name says; `CheckpointError` when it says
    nothing. A folder for shards gets the Hugging Face libraries' names.
    """
    if options.max_shard_size is not None and options.to == "dcp":
        raise CheckpointError(
            "a DCP folder is not split by size", path=output, hint="leave --max-shard-size out"
        )
    if options.max_shard_size is not None and (output.is_dir() or not output.suffix):
        to = options.to or "safetensors"
        return output / _FOLDER_NAMES[to], to
    return output, _target_format(output, options.to)


def _target_format(output: Path, to: Target | None) -> Target:
    if to is not None:
        _refuse_misnamed(output, to)
        return to
    if (found := _SUFFIXES.get(output.suffix.lower())) is not None:
        return found
    hint = "add --to torch or --to safetensors (or dcp); to= in code"
    raise CheckpointError("its name does not say which format to write", path=output, hint=hint)


_OF_ONE_FORMAT: dict[str, Target] = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"),
}
"""Endings of names that every reader takes for one format."""


def _refuse_misnamed(output: Path, to: Target) -> None:
    """Refuse a file whose name says another format than the one that was asked for."""
    said = _OF_ONE_FORMAT.get(output.suffix.lower(), to)
    if to == "dcp" or said == to:
        return
    better = printable(output.with_suffix(".pt" if to == "torch" else ".safetensors").name)
    what = f"its name says {said}, but --to says {to} (to= in code)"
    raise CheckpointError(what, path=output, hint=f"write {better}, or leave --to out")


def keeps_modules(output: str | os.PathLike[str], options: Options | Request) -> bool:
    """Whether an output keeps whole modules as they are, and so the checkpoint must be opened with
    `whole_modules`.
    """
    return (
        options.unknown == "keep"
        and options.max_shard_size is None
        and _target_format(Path(output), options.to) == "torch"
    )
