"""The weighted mean of several checkpoints of one model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from ckptconv.convert.combining import (
    SourcePart,
    combined_checkpoint,
    opened_parts,
    request_of_all,
    several,
    with_renamed,
)
from ckptconv.convert.execute import ConversionResult, execute_plan
from ckptconv.convert.options import Request
from ckptconv.convert.plan import ConversionPlan
from ckptconv.convert.planner import plan_conversion, refuse_taken_over
from ckptconv.io.files import one_run
from ckptconv.io.open_files import Readable
from ckptconv.io.places import Output, Place
from ckptconv.pickles.nodes import Node
from ckptconv.support.choices import refuse_no_callback, refuse_no_flag
from ckptconv.support.errors import (
    KeyMismatch,
    OptionRefused,
    RefusedObject,
    errors_at,
    printable,
)
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.text import count_text, first_few
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.comparison import compare_bytes
from ckptconv.tensors.computed import elementwise, unrounded
from ckptconv.tensors.operations import can_average
from ckptconv.tensors.refs import TensorRef, view_identity
from ckptconv.tensors.scaled_weights import refuse_mean
from ckptconv.tree.checkpoint import Edit
from ckptconv.tree.state_dicts import renamed_state_dict
from ckptconv.tree.walk import tensor_of

Integers = Literal["same", "first", "last"]


@one_run()
def average_checkpoints(
    sources: Iterable[Place | Readable],
    output: Output,
    *,
    weights: Iterable[float] | None = None,
    integers: Integers = "same",
    only: str | None = None,
    edits: Sequence[Edit] = (),
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> ConversionResult:
    """Write the weighted mean of the state dicts of several checkpoints of one model.

    `weights` are positive (None: all the same). The sum is kept in float64, divided by that of the
    weights, and cast to the type of the tensors. All must have the same keys, dtypes and shapes.
    Integers and bools have no mean: they must be the `same` in all, or are those of the ``first``
    or the ``last``. `edits` are made to each source first. The other
    options are those of `Options`, but for the rules of keys. Raises `CheckpointError`.

    >>> average_checkpoints(["epoch_8.pt", "epoch_9.pt"], "swa.pt",
    ...                     weights=[1, 2])  # doctest: +SKIP
    """
    begin = time.perf_counter()
    refuse_no_flag(force=force, fsync=fsync, verify=verify)
    refuse_no_callback(on_progress)
    request = request_of_all(options, only)
    with averaged_plan(
        sources, output, request, weights=weights, integers=integers, force=force, edits=edits
    ) as plan:
        return execute_plan(
            plan, force=force, fsync=fsync, verify=verify, on_progress=on_progress
        ).since(begin)


average = average_checkpoints  # the name that it had first


@contextlib.contextmanager
def averaged_plan(
    sources: Iterable[Place | Readable],
    output: Output,
    request: Request,
    *,
    weights: Iterable[float] | None,
    integers: Integers,
    force: bool,
    edits: Sequence[Edit] = (),
) -> Iterator[ConversionPlan]:
    """The plan of a mean; the sources are open within the block."""
    sources = several(sources)
    numbers = _checked_weights(weights, len(sources))
    if integers not in get_args(Integers):
        what = f"integers={integers!r:.50} is not one of {', '.join(get_args(Integers))}"
        raise OptionRefused(what)
    with opened_parts(sources, output, request, force=force, edits=edits) as (parts, common):
        for part in parts:
            with errors_at(path=part.path):
                refuse_mean(dict(part.found.tensors()))
        _refuse_other_keys(parts)
        checksums = Checksums()
        known: dict[object, TensorRef] = {}
        values: dict[str, Node] = {}
        for key in parts[0].values:
            refs = [_tensor(part, key) for part in parts]
            _refuse_others(key, refs, parts)
            # tied tensors stay tied: one view in all sources has one mean
            view = tuple(view_identity(ref) for ref in refs)
            if view not in known:
                known[view] = _mean(key, refs, numbers, integers, parts, checksums)
            values[key] = known[view]
        combined = combined_checkpoint(parts, _like(parts[0], values))
        plan = plan_conversion(combined, output, common)
        refuse_taken_over(plan, sources)
        yield with_renamed(plan, parts, [""] * len(parts))


def _checked_weights(weights: Iterable[float] | None, count: int) -> list[float]:
    """The weights, whose sum is a number."""
    if weights is None:
        return [1.0] * count
    given: list[float] = []
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        given = [] if isinstance(weights, str) else [float(weight) for weight in weights]
    if not given:
        raise OptionRefused(
            f"weights={weights!r:.100} are not numbers", hint="write them as weights=[1, 1, 2]"
        )
    if len(given) != count:
        found, wanted = count_text(len(given), "weight"), count_text(count, "checkpoint")
        raise OptionRefused(f"{found} for {wanted}", hint="give one for each")
    if not all(0 < weight < float("inf") for weight in given):
        raise OptionRefused("a weight is a positive number")
    if sum(given) == float("inf"):  # numbers near the largest float64 have no sum
        given = [weight / max(given) for weight in given]
    return given


def _like(part: SourcePart, values: Mapping[str, Node]) -> Node:
    """The state dict of a source under its new names, with other values."""
    kept = [
        values[key] if key is not None else value
        for key, value in zip(part.renamed.new, part.found.values, strict=True)
    ]
    state_dict = replace(part.found, values=tuple(kept))
    return renamed_state_dict(state_dict, part.renamed.new, part.renamed.renamed_modules)


def _refuse_other_keys(parts: Sequence[SourcePart]) -> None:
    first = parts[0]
    for other in parts[1:]:
        missing = [key for key in first.values if key not in other.values]
        more = [key for key in other.values if key not in first.values]
        told = []
        if missing:
            lacking = f"lacks {count_text(len(missing), 'key')} of {printable(first.path)}"
            told.append(f"{lacking} ({first_few(missing, 3)})")
        if more:
            further = f"has {count_text(len(more), 'key')} that it does not have"
            told.append(f"{further} ({first_few(more, 3)})")
        if told:
            hint = "an average needs checkpoints of one model"
            raise KeyMismatch(" and ".join(told), path=other.path, hint=hint)


def _tensor(part: SourcePart, key: str) -> TensorRef:
    ref = tensor_of(part.values[key])
    if ref is None:
        what = "is not a plain tensor, so it has no mean"
        hint = "leave it out before: ckptconv convert IN OUT --exclude"
        raise RefusedObject(what, path=part.path, where=key, hint=hint)
    return ref


def _refuse_others(key: str, refs: Sequence[TensorRef], parts: Sequence[SourcePart]) -> None:
    first = refs[0]
    for ref, part in zip(refs[1:], parts[1:], strict=True):
        for name, ours, theirs in (
            ("dtype", first.dtype.name, ref.dtype.name),
            ("shape", list(first.shape), list(ref.shape)),
        ):
            if ours != theirs:
                what = f"has the {name} {theirs}, but {ours} in {printable(parts[0].path)}"
                raise KeyMismatch(what, path=part.path, where=key)


def _mean(
    key: str,
    refs: Sequence[TensorRef],
    weights: Sequence[float],
    integers: Integers,
    parts: Sequence[SourcePart],
    checksums: Checksums,
) -> TensorRef:
    first = refs[0]
    if can_average(first.dtype):
        name = f"the mean of {first.storage.name}"
        refs = [*map(unrounded, refs)]  # what --dequantize makes is rounded in the mean alone
        return elementwise("mean", refs, tuple(weights), first.dtype, name, checksums)
    if integers == "same":
        _refuse_unequal(key, refs, parts, checksums)
    return refs[-1 if integers == "last" else 0]


def _refuse_unequal(
    key: str, refs: Sequence[TensorRef], parts: Sequence[SourcePart], checksums: Checksums
) -> None:
    """Refuse values without a mean that are not the same in all."""
    # first, for what is damaged is not another value
    for ref in refs:
        for piece in ref.pieces:
            checksums.read(piece.storage)
    pairs = [(refs[0], ref) for ref in refs[1:]]
    differing = compare_bytes(pairs, Meter("read", 0, None)).differing
    if differing:
        first = printable(parts[0].path)
        what = f"{refs[0].dtype.name} has no mean, and its values are others than in {first}"
        hint = "take those of one: --integers first or --integers last"
        raise KeyMismatch(what, path=parts[1 + min(differing)].path, where=key, hint=hint)
