"""Which format an output has, by its name, what it can hold, and whether it may be there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import PurePath

from ckptconv.convert.options import Request
from ckptconv.formats.hf_names import is_weights_name, named_like
from ckptconv.formats.target_format import (
    FOR_FOLDERS,
    TARGETS,
    Target,
    TargetFormat,
    claimant,
    target_named,
    target_of_suffix,
)
from ckptconv.io.location import Location
from ckptconv.io.open_files import OpenFile
from ckptconv.io.places import Output, place_of
from ckptconv.support.errors import CheckpointError, OptionRefused, OutputRefused, printable


def target(named: Location, request: Request, read: str) -> tuple[PurePath, TargetFormat]:
    """The file to write (of a sharded output the one that its shards and index are named after),
    and its format.

    The format is the one asked for, or the one that the name says; `CheckpointError` when it says
    nothing. In a folder the file has the name for which the library looks that wrote `read`, the
    first file of the source. An open file without a name gets the format that holds any tree.
    """
    output = named.path
    if isinstance(named, OpenFile):
        named.refuse_unwritable(is_folder=_is_of_several(request))
        if not output.suffix and request.to is None:
            return output, target_named("torch")
        return output, _target_format(output, request.to)
    if request.shard_bytes is None:
        return output, _target_format(output, request.to)
    if request.with_files:
        _refuse_no_folder(named, request.to)
    stem = _adapter_stem(named, request)
    if is_folder_of_set(named, request.to):
        found = target_named(request.to or FOR_FOLDERS)
        _refuse_unsplit(found, output, with_files=request.with_files)
        name = found.shards_named
        if stem and name:
            name = f"{stem}{PurePath(name).suffix}"
        elif name:
            name = named_like(read, name)
        return output / name, found
    found = _target_format(output, request.to)
    _refuse_unsplit(found, output, with_files=False)
    return output, found


def check_target(output: Output, request: Request) -> None:
    """Raise `CheckpointError` where neither a name nor the request says which format to write, or
    they contradict each other, whatever the source is.
    """
    named = place_of(output)
    target(named, for_folder(request, named), "")


def _is_of_several(request: Request) -> bool:
    """Whether an output is more than one file."""
    is_made_by_torch = request.to is not None and target_named(request.to).is_folder
    return is_made_by_torch or request.shard_bytes is not None


def for_folder(request: Request, named: Location) -> Request:
    """The request for the output `named`: where that is a folder, files of a set go into it."""
    if _is_of_several(request) or not names_folder(named):
        return request
    # a set of one file: there is no size at which it would be split
    return replace(request, max_shard_size=sys.maxsize)


def names_folder(named: Location) -> bool:
    """Whether a folder was named: by a slash at the end, or because it is there."""
    return named.says_folder or (not named.is_far() and named.is_folder())


def is_folder_of_set(named: Location, to: Target | None) -> bool:
    """Whether the files of an output of several go into a folder of its name: one that is there, or
    whose name does not end like that of a file. What follows the dot of ``llama-3.1-8b`` is such an
    end only where nothing else says the format.
    """
    suffix = named.path.suffix
    is_file_named = suffix and (to is None or target_of_suffix(suffix) is not None)
    return not is_file_named or named.says_folder or named.is_folder()


def _refuse_no_folder(named: Location, to: Target | None) -> None:
    """Refuse a file as the place of files that go together, unless a library looks for weights of
    its name, and so for the others beside it.
    """
    if not is_folder_of_set(named, to) and not is_weights_name(named.path.name):
        raise OutputRefused(
            "is the name of a file, but --with-files puts several files beside each other",
            path=named.path,
            hint="name a folder, which may be new, or a file in it that a library looks for, such "
            "as model.safetensors",
        )


# the stems of files of adapters: `SAFETENSORS_WEIGHTS_NAME` of peft, that of diffusers
_ADAPTER_FILES = {"lora-peft": "adapter_model", "lora-diffusers": "pytorch_lora_weights"}


def _adapter_stem(named: Location, request: Request) -> str | None:
    """The stem of the file that a library looks for in the folder of an adapter; None for what is
    not an adapter. Raises `OutputRefused` where a folder was named and no library looks into one,
    or peft could not find the config beside a file.
    """
    preset = request.of_adapters
    if not preset:
        return None
    stem = _ADAPTER_FILES.get(preset)
    is_folder = is_folder_of_set(named, request.to)
    if is_folder and stem is None:
        hint = f"name the file: {printable(str(named.path))}/lora.safetensors"
        raise OutputRefused(f"is a folder, and {preset} makes one file", path=named.path, hint=hint)
    if preset == "lora-peft" and not is_folder and named.path.stem != stem:
        what = (
            "is a file, and peft reads a folder: adapter_model with adapter_config.json beside it"
        )
        hint = f"end the name of a new folder with a slash: {printable(named.path.stem)}/"
        raise OutputRefused(what, path=named.path, hint=hint)
    return stem


def _refuse_unsplit(found: TargetFormat, output: PurePath, *, with_files: bool) -> None:
    if found.shards_named:
        return
    if with_files:
        what = f"{found.noun} does not stand in a folder of a model"
        raise CheckpointError(what, path=output, hint="leave --with-files out")
    what = f"{found.noun} is not split by size"
    raise CheckpointError(what, path=output, hint="leave --max-shard-size out")


def _target_format(output: PurePath, to: Target | None) -> TargetFormat:
    if to is not None:
        asked = target_named(to)
        _refuse_misnamed(output, asked)
        return asked
    found = target_of_suffix(output.suffix)
    if found is not None:
        return found
    first, second, *others = (item.name for item in TARGETS)
    hint = f"add --to {first} or --to {second} (or {', '.join(others)})"
    if not output.suffix:
        hint = f"{hint}; for a new folder, end the name with a slash"
    raise CheckpointError("its name does not say which format to write", path=output, hint=hint)


def _refuse_misnamed(output: PurePath, asked: TargetFormat) -> None:
    """Refuse a file whose name says another format than the one that was asked for."""
    if asked.is_folder or output.suffix == asked.suffix:
        return
    said = claimant(output.suffix)
    if said in (None, asked.name):
        return
    stem = output.stem.removesuffix(asked.suffix)  # of out.safetensors.gz: out
    hint = f"write {printable(stem + asked.suffix)}"
    if any(said == one.name for one in TARGETS):
        hint = f"{hint}, or leave --to out"
    what = f"its name says {said}, but --to says {asked.name}"
    raise CheckpointError(what, path=output, hint=hint)


def keeps_modules(to: TargetFormat, request: Request) -> bool:
    """Whether whole modules stay as they are, where they are to be kept and the format can."""
    return request.unknown == "keep" and request.shard_bytes is None and to.keeps_modules


def refuse_unheld(to: TargetFormat, request: Request) -> None:
    """Raise `OptionRefused` where metadata or training states are asked for and the output cannot
    hold any, or a name is chosen of tied tensors that all keep theirs.
    """
    if request.with_training and (not to.holds_trees or request.shard_bytes is not None):
        kind = to.name if request.shard_bytes is None else "sharded"
        raise OptionRefused(
            f"a {kind} output holds weights only",
            hint="leave --with-training out, or write a .pt or a DCP folder",
        )
    if to.shares_storages and request.tied not in ("alias", "duplicate"):
        raise OptionRefused(
            f"tied={request.tied!r:.100}: all names of a tied tensor stay in a {to.name} output",
            hint="leave --tied out, or write safetensors",
        )
    if request.metadata and not to.holds_metadata:
        raise OptionRefused(
            f"a {to.name} output cannot hold metadata",
            hint="leave --metadata out, or write safetensors",
        )


def check_place(output: Output, request: Request, *, force: bool) -> None:
    """Raise `OutputRefused` where the one file or folder of an output may not be made. Shards are
    looked at when it is known which there will be.
    """
    from ckptconv.io.outputs import check_place_free  # not for what is planned on trial

    place = place_of(output)
    if isinstance(place, OpenFile):
        place.refuse_unwritable(is_folder=_is_of_several(request))
    elif for_folder(request, place).shard_bytes is None:
        is_folder = request.to is not None and target_named(request.to).is_folder
        check_place_free(place, is_folder=is_folder, force=force)
