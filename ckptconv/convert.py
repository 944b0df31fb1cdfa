"""Conversions: a plan executed as a stream, checked, and put in its place when it is whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ckptconv.casting import cast
from ckptconv.checkpoint import StateDict
from ckptconv.devices import tag_map
from ckptconv.dtypes import DType, floating_dtype
from ckptconv.encodings import flat
from ckptconv.errors import VerificationFailed
from ckptconv.formats.detect import open_checkpoint
from ckptconv.keys import KeyRules
from ckptconv.layout import Layout, WriteItem
from ckptconv.outputs import OutputStream, atomic_output, check_output
from ckptconv.planning import ConversionPlan, Options, Target, Tied, keeps_modules, plan_conversion
from ckptconv.settling import Unknown
from ckptconv.sources import SMALL, crc32
from ckptconv.tensors import (
    Storage,
    TensorRef,
    check_storage,
    iter_cast_chunks,
    iter_chunks,
    refuse_crc,
    verbatim_range,
)


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """What an executed plan did: seconds, tensors verified (None: not asked), and by tensor the values to be told of.

    `overflowed` counts finite values that a cast made infinite or NaN; `odd_bools` bools that are neither 0 nor 1.
    """

    plan: ConversionPlan
    seconds: float
    verified: int | None
    overflowed: Mapping[str, int] = field(default_factory=dict)
    odd_bools: Mapping[str, int] = field(default_factory=dict)


def convert_checkpoint(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: Target | None = None,
    keys: Literal["strip", "keep"] | KeyRules = "strip",
    device: str | None = None,
    map_location: Mapping[str, str] | None = None,
    dtype: str | None = None,
    only: str | None = None,
    tied: Tied = "alias",
    unknown: Unknown = "refuse",
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
) -> ConversionResult:
    """Convert the checkpoint file `source` into the file `output`, without importing torch.

    `keys` are rules or the short words for the default ones; `device` is the location tag to write (``cpu`` by default,
    ``keep``, ``auto``, or any tag, whether this host has that device or not); `map_location` maps single tags; `dtype`
    casts floating tensors (``bf16``). The output is written to a temporary sibling and renamed; an existing one is
    replaced only with `force`. `verify` reads it back and compares every tensor first. Raises `CheckpointError`.

    >>> convert_checkpoint("in.pt", "out.safetensors", device="cuda:1")  # doctest: +SKIP
    """
    rules = keys if isinstance(keys, KeyRules) else KeyRules(wrappers=keys)
    pairs = [f"{old}={new}" for old, new in (map_location or {}).items()]
    options = Options(to, rules, tag_map(device, pairs), floating_dtype(dtype) if dtype else None, only, tied, unknown)
    check_output(Path(output), force=force)
    with open_checkpoint(source, whole_modules=keeps_modules(output, options)) as checkpoint:
        plan = plan_conversion(checkpoint, output, options)
        return execute_plan(plan, force=force, fsync=fsync, verify=verify)


def execute_plan(
    plan: ConversionPlan,
    *,
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> ConversionResult:
    """Write the output of a plan as a stream, and put it in its place when it is whole.

    `on_progress` is called with the bytes written so far, about once a MiB. `verify` reads the output back before it is
    renamed and compares every tensor with the source, bit for bit or after the cast. Raises `MalformedCheckpoint` when
    the source is damaged, `OutputRefused` when the output cannot be written, `VerificationFailed`; nothing is left behind.
    """
    begin = time.perf_counter()
    with atomic_output(plan.output, force=force, fsync=fsync, size=plan.nbytes, on_progress=on_progress) as (
        stream,
        temporary,
    ):
        tally = _write(plan.layout, stream)
        stream.finish()
        if plan.to == "safetensors":
            _open_with_library(temporary, plan)
        verified = _verify(plan, temporary) if verify else None
    seconds = time.perf_counter() - begin
    overflowed = _by_tensor(plan, tally.overflowed, lambda ref: _count_overflow(plan, ref))
    return ConversionResult(plan, seconds, verified, overflowed, _by_tensor(plan, tally.odd_bools, _count_odd_bools))


@dataclass(frozen=True, slots=True)
class _Tally:
    """Values that the user should know of, by item index: made infinite by the cast; bools that are neither 0 nor 1."""

    overflowed: dict[int, int] = field(default_factory=dict)
    odd_bools: dict[int, int] = field(default_factory=dict)


def _write(layout: Layout, stream: OutputStream) -> _Tally:
    crcs: list[int] = []
    tally = _Tally()
    checked: set[int] = set()
    between = b""
    for index, item in enumerate(layout.items):
        stream.write(between + item.lead)
        lost = [0]
        crc = _write_values(item, stream, checked, lost)
        if lost[0]:
            tally.overflowed[index] = lost[0]
        if item.dtype.kind == "bool" and isinstance(item.values, TensorRef) and (odd := _count_odd_bools(item.values)):
            tally.odd_bools[index] = odd
        crcs.append(crc)
        between = layout.trail(index, crc)
    stream.write(between)
    stream.write(layout.ending(crcs))
    return tally


def _write_values(item: WriteItem, stream: OutputStream, checked: set[int], overflowed: list[int]) -> int:
    """Write one payload and return its CRC-32; the source's own CRCs are checked on the way."""
    values = item.values
    if isinstance(values, bytes):
        stream.write(values)
        return crc32(values)
    if (verbatim := verbatim_range(values)) is not None:
        storage, first = verbatim
        if values.nbytes == storage.nbytes:
            return _write_whole(item, values, storage, stream, overflowed)
    for piece in values.pieces:
        if id(piece.storage) not in checked:
            checked.add(id(piece.storage))
            check_storage(piece.storage)
    if verbatim is not None and item.dtype is values.dtype:
        return stream.copy(storage.source, storage.offset + first, item.nbytes)
    crc = 0
    for chunk in iter_cast_chunks(values, item.dtype, overflowed):
        stream.write(chunk)
        crc = crc32(chunk, crc)
    return crc


def _write_whole(item: WriteItem, values: TensorRef, storage: Storage, stream: OutputStream, overflowed: list[int]) -> int:
    """Write a whole storage, copied or cast, checking its CRC-32 in the same pass."""
    if item.dtype is values.dtype:
        if item.nbytes <= SMALL:
            data = storage.source.read(storage.offset, item.nbytes)
            stream.write(data)
            crc = crc32(data)
        else:
            crc = stream.copy(storage.source, storage.offset, item.nbytes)
        if crc != storage.crc32:
            refuse_crc(storage, crc)
        return crc
    crc, source_crc = 0, 0
    for chunk in iter_chunks(values):
        source_crc = crc32(chunk, source_crc)
        result = cast(chunk, values.dtype, item.dtype)
        overflowed[0] += result.overflowed
        stream.write(result.data)
        crc = crc32(result.data, crc)
    refuse_crc(storage, source_crc)
    return crc


def _by_tensor(plan: ConversionPlan, items: Mapping[int, int], count: Callable[[TensorRef], int]) -> dict[str, int]:
    """Counts by the path of each tensor over the storages of `items`: tensors may share one, and not all are touched."""
    layout = plan.layout.items
    values = [layout[index].values for index in items]
    touched = {id(piece.storage) for ref in values if not isinstance(ref, bytes) for piece in ref.pieces}
    found = {}
    for path, ref in plan.tensors() if touched else ():
        if any(id(piece.storage) in touched for piece in ref.pieces) and (number := count(ref)):
            found[path] = number
    return found


def _count_overflow(plan: ConversionPlan, ref: TensorRef) -> int:
    lost = [0]
    for _ in iter_cast_chunks(ref, plan.cast(ref), lost):
        pass
    return lost[0]


def _count_odd_bools(ref: TensorRef) -> int:
    """Bytes of a bool tensor that are neither 0 nor 1: what they mean depends on who reads them."""
    if ref.dtype.kind != "bool":
        return 0
    return sum(len(bytes(chunk).translate(None, b"\0\1")) for chunk in iter_chunks(ref))


def _open_with_library(path: Path, plan: ConversionPlan) -> None:
    """Let the safetensors library read the header that was written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            count = len(opened.keys())
    except SafetensorError as error:
        raise VerificationFailed(f"the safetensors library does not open it: {error}", path=plan.output) from error
    if count != len(plan.layout.items):
        raise VerificationFailed(f"the safetensors library sees {count} tensors in it", path=plan.output)


def _verify(plan: ConversionPlan, written: Path) -> int:
    """Compare every tensor of the written file with its source; returns how many there are."""
    count = 0
    with open_checkpoint(written, whole_modules=plan.to == "torch") as output:
        found = output.state_dict() if plan.to == "safetensors" else None
        actual = _flat_tensors(found) if found is not None else None
        there = iter(()) if actual is not None else output.tensors()
        for path, ref in plan.tensors():
            name, other = (path, actual.get(path)) if actual is not None else next(there, (path, None))
            if other is None or name != path or not _equal(ref, other, plan.cast(ref)):
                raise VerificationFailed("the output differs from the source", path=plan.output, where=path)
            count += 1
    return count


def _flat_tensors(found: StateDict) -> dict[str, TensorRef]:
    """The tensors of a state dict as safetensors holds them: those that are encoded by their components."""
    made = (flat(key, value) for key, value in zip(found.keys, found.values, strict=True))
    return {name: ref for item in made if item is not None for name, ref in item.tensors}


def _equal(ref: TensorRef, other: TensorRef, dtype: DType) -> bool:
    if other.dtype is not dtype or other.shape != ref.shape:
        return False
    expected, found = b"", b""
    theirs = iter_chunks(other)
    for chunk in iter_cast_chunks(ref, dtype, [0]):
        expected += chunk
        while len(found) < len(expected):
            found += next(theirs, b"\0" * (len(expected) + 1))
        if not found.startswith(expected):
            return False
        expected, found = b"", found[len(expected) :]
    return not found and next(theirs, None) is None
