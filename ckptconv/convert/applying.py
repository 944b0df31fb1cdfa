"""What is applied to a base, as a conversion: LoRA adapters to the weights that they were trained
for, deltas to the version that they were made from.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.convert.execute import ConversionResult, execute_plan
from ckptconv.convert.options import Options, Request
from ckptconv.convert.plan import ConversionPlan
from ckptconv.convert.planner import plan_conversion, refuse_taken_over, request_of
from ckptconv.convert.targets import check_place
from ckptconv.formats.deltas import Delta, open_deltas, version_of
from ckptconv.formats.registry import open_certain
from ckptconv.formats.target_format import Target
from ckptconv.io.files import one_run
from ckptconv.io.guarded import check_places
from ckptconv.io.inflate import require_zstd
from ckptconv.io.open_files import Readable
from ckptconv.io.places import Output, Place, place_of
from ckptconv.pickles.nodes import Node, substituted
from ckptconv.support.choices import (
    one_or_several,
    refuse_no_callback,
    refuse_no_flag,
    refuse_no_output,
    refuse_no_paths,
    refuse_no_text,
    spelling_checked,
)
from ckptconv.support.errors import (
    KeyConflict,
    KeyMismatch,
    MalformedCheckpoint,
    OptionRefused,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.support.progress import OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text
from ckptconv.tensors.patched import Change, digest, patched
from ckptconv.tensors.refs import TensorObject, TensorRef, view_identity
from ckptconv.tree.checkpoint import Checkpoint, Edit, refuse_no_edits
from ckptconv.tree.merging_lora import MergeLora
from ckptconv.tree.walk import tensor_of


@one_run()
def merge_lora_checkpoint(
    base: Place | Readable,
    adapters: Place | Readable | Sequence[Place | Readable],
    output: Output,
    *,
    scale: float | Sequence[float] = 1.0,
    tag: str | None = None,
    edits: Sequence[Edit] = (),
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> ConversionResult:
    """Add what LoRA adapters say to the weights of their base, and write the result.

    `adapters` is one or several of them: files, or folders with ``adapter_config.json``; `scale`
    multiplies what is added (one number for all, or one for each). `tag` and `edits` are for the
    base, which is edited first; the other options are those of `Options`. `MergeLora` says what is
    computed. Raises `CheckpointError`; a part of an adapter that finds no tensor in the base is an
    error, and nothing is written.

    >>> merge_lora_checkpoint("llama", "my-adapter", "merged", scale=0.8,
    ...                       max_shard_size="5GB", with_files=True)  # doctest: +SKIP
    """
    begin = time.perf_counter()
    refuse_no_flag(force=force, fsync=fsync, verify=verify)
    refuse_no_callback(on_progress)
    refuse_no_text(tag=tag)
    request = request_of(Options(**options))
    with lora_plan(
        base, adapters, output, request, scale=scale, tag=tag, force=force, edits=edits
    ) as plan:
        return execute_plan(
            plan, force=force, fsync=fsync, verify=verify, on_progress=on_progress
        ).since(begin)


@contextlib.contextmanager
def lora_plan(
    base: Place | Readable,
    adapters: Place | Readable | Iterable[Place | Readable],
    output: Output,
    request: Request,
    *,
    scale: float | Sequence[float],
    tag: str | None,
    force: bool,
    edits: Sequence[Edit] = (),
) -> Iterator[ConversionPlan]:
    """The plan of merging adapters into a base; the files are open within the block."""
    refuse_no_output(output)
    refuse_no_edits(edits)
    check_place(output, request, force=force)
    named = one_or_several(adapters)
    if not named:
        raise OptionRefused("there is no adapter", hint="name one or more")
    with contextlib.ExitStack() as leaving:
        checkpoint = leaving.enter_context(open_certain(base, tag=tag, whole_modules=True))
        opened = [leaving.enter_context(open_certain(each)) for each in named]
        for each in opened:
            # now: their values are read when they are needed, in the middle of the output
            check_places(each.sources)
        merge = MergeLora(opened, scale, request.only)
        wanted = replace(request, edits=(*edits, *request.edits, merge))
        plan = plan_conversion(checkpoint, output, wanted)
        refuse_taken_over(plan, (base, *named))
        yield plan


# ------------------------------------------------------------------------------------------ deltas


@one_run()
@spelling_checked
def apply_deltas(
    base: Place,
    deltas: Place | Sequence[Place],
    output: Output,
    *,
    to: Target | None = None,
    max_shard_size: int | str | None = None,
    with_files: bool = False,
    only: str | None = None,
    tag: str | None = None,
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
) -> ConversionResult:
    """Apply the changes of one delta, or of several in their order, to the checkpoint `base` that
    the first was made from, and write the result.

    `deltas` are folders as `delta_checkpoints` and RL trainers (slime, miles) write them, or a
    folder of such versions. Each tensor that a delta changes is held against the checksum of its
    new bytes, and against that of the old ones where the delta has them; nothing is in place before
    all are right. `only` and `tag` choose in `base`; the other options are those of `Options`. Keys
    stay as they are. Raises `CheckpointError`: `MalformedCheckpoint` for a delta or a base that is
    another one, `UnsupportedCheckpoint` for versions that do not follow each other, `KeyMismatch`
    for a tensor that the base does not have; `MissingDependency` without zstd.

    >>> apply_deltas("base", ["weight_v000001", "weight_v000002"], "new/")  # doctest: +SKIP
    """
    begin = time.perf_counter()
    refuse_no_flag(force=force, fsync=fsync, verify=verify)
    refuse_no_callback(on_progress)
    request = request_of(
        Options(keys="keep", to=to, max_shard_size=max_shard_size, with_files=with_files, only=only)
    )
    with applied_plan(base, deltas, output, request, tag=tag, force=force) as plan:
        return execute_plan(
            plan, force=force, fsync=fsync, verify=verify, on_progress=on_progress
        ).since(begin)


@contextlib.contextmanager
def applied_plan(
    base: Place,
    deltas: Place | Iterable[Place],
    output: Output,
    request: Request,
    *,
    tag: str | None,
    force: bool,
) -> Iterator[ConversionPlan]:
    """The plan of applying deltas; the files are open within the block."""
    refuse_no_output(output)
    refuse_no_paths("base", base)
    named = one_or_several(deltas)
    refuse_no_paths("deltas", named)
    if not named:
        raise OptionRefused("there is no delta", hint="name one or more")
    require_zstd()
    check_place(output, request, force=force)
    with contextlib.ExitStack() as leaving:
        checkpoint = leaving.enter_context(open_certain(base, tag=tag, whole_modules=True))
        version = version_of(place_of(base))
        opened = open_deltas([place_of(one) for one in named], version, leaving)
        for each in opened:
            digest(each.algorithm)  # its package is missed now, not in the middle
            check_places(each.checkpoint.sources)
        edit = _Applying(tuple(opened), request.only)
        plan = plan_conversion(checkpoint, output, replace(request, edits=(edit,)))
        refuse_taken_over(plan, (base, *(each.path for each in opened)))
        yield plan


MOST_CHANGES = 100
"""Of a tensor: each reads the one before in some six calls, and Python allows 1,000 in all."""


@dataclass(frozen=True, slots=True)
class _Applying:
    """An edit: the tensors of a state dict with the changes of some deltas in them."""

    deltas: tuple[Delta, ...]
    only: str | None

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        checkpoint.refuse_part()
        found = checkpoint.state_dict(self.only)
        named = zip(found.keys, found.values, strict=True)
        nodes = {key: node for key, node in named if tensor_of(node) is not None}
        patching = _Patching({key: _tensor(node) for key, node in nodes.items()})
        for delta in self.deltas:
            patching.add(delta)
        stand_ins = {
            id(node): _with_tensor(node, patching.now(key))
            for key, node in nodes.items()
            if view_identity(patching.now(key)) != view_identity(_tensor(node))
        }
        notes = [*checkpoint.notes, *patching.notes]
        if found.path:  # an optimizer's state is of the version before
            notes.append(f"only {printable(found.path)} is changed, nothing else of BASE")
        # stored as they are, where a delta changes nothing
        root = substituted(checkpoint.root, stand_ins)
        opened = [delta.checkpoint for delta in self.deltas]
        return replace(
            checkpoint,
            root=root,
            nbytes=checkpoint.nbytes + sum(one.nbytes for one in opened),
            sources=(*checkpoint.sources, *(one for each in opened for one in each.sources)),
            notes=tuple(notes),
            # --verify counts what the files of the deltas name, and finds it here
            dropped=(*checkpoint.dropped, *(one.root for one in opened)),
            reread=None,
        )


def _tensor(node: Node) -> TensorRef:
    ref = tensor_of(node)
    assert ref is not None
    return ref


def _with_tensor(node: Node, ref: TensorRef) -> Node:
    # a tensor of its own: --verify counts those that share a storage, too
    ref = ref._replace(requires_grad=_tensor(node).requires_grad)
    return replace(node, tensor=ref) if isinstance(node, TensorObject) else ref


class _Patching:
    """The tensors of the base by their names, and what became of them. Names of one tensor share
    its changes: whoever made the delta may have known it by any of them.
    """

    def __init__(self, tensors: Mapping[str, TensorRef]) -> None:
        self._views = {key: view_identity(ref) for key, ref in tensors.items()}
        self._now = {self._views[key]: ref for key, ref in tensors.items()}
        self._checksums: dict[object, tuple[str, str]] = {}
        self._changes: Counter[object] = Counter()
        self.notes: list[str] = []

    def now(self, key: str) -> TensorRef:
        """The tensor of that name, with all changes so far."""
        return self._now[self._views[key]]

    def add(self, delta: Delta) -> None:
        """Change the tensors as a delta says, or raise `CheckpointError`."""
        changed = self._by_view(delta, delta.frames)
        checked = self._by_view(delta, delta.before)
        if delta.before:
            self._refuse_unknown(delta, checked)
        for view in {**checked, **changed}:
            self._change(delta, view, changed.get(view), checked.get(view))
        self.notes.append(self._told(delta, len(changed)))

    def _by_view(self, delta: Delta, names: Iterable[str]) -> dict[object, str]:
        """The tensors that a delta names, with the name that it has for each."""
        found: dict[object, str] = {}
        for key in names:
            if key not in self._views and key in delta.tied:
                continue
            if key not in self._views:
                what = "is in the delta, but not in BASE"
                hint = "name the BASE that the delta was made from"
                raise KeyMismatch(what, path=delta.path, where=key, hint=hint)
            other = found.setdefault(self._views[key], key)
            # before too: only one of the names is held against the bytes
            if any(told.get(other) != told.get(key) for told in (delta.before, delta.after)):
                what = f"is the same tensor as {printable(other)} in BASE, but not in the delta"
                hint = "write BASE as safetensors with --tied duplicate first"
                raise KeyConflict(what, path=delta.path, where=key, hint=hint)
        return found

    def _refuse_unknown(self, delta: Delta, checked: Mapping[object, str]) -> None:
        for key, view in self._views.items():
            if view not in checked:
                what = "is in BASE, but not in what the delta was made from"
                hint = "name the BASE that the delta was made from"
                raise KeyMismatch(what, path=delta.path, where=key, hint=hint)

    def _change(self, delta: Delta, view: object, changed: str | None, checked: str | None) -> None:
        base, key = self._now[view], changed or checked or ""
        before = None if checked is None else delta.before[checked]
        after = before if changed is None else delta.after[changed]
        if not base.nbytes:
            if changed is not None:
                what = "is changed, but the tensor has no bytes"
                raise MalformedCheckpoint(what, path=delta.path, where=key)
            return
        known, now = self._checksums.get(view, (None, ""))
        if known == delta.algorithm and before is not None:
            if before != now:
                what = f"was made from a tensor with the {known} {before}, not {now}"
                raise MalformedCheckpoint(what, path=delta.path, where=key, code="checksum")
            before = None  # it is made now, and held against this very checksum
        frame = None if changed is None else delta.frames[changed]
        if frame is not None or before is not None:
            self._changes[view] += 1
            if self._changes[view] > MOST_CHANGES:
                what = f"is changed by more than {MOST_CHANGES} deltas in one go"
                hint = "apply the first of them, and the others to what comes out"
                raise UnsupportedCheckpoint(what, path=delta.path, where=key, hint=hint)
            change = Change(delta.path, delta.encoding, delta.algorithm, frame, before, after)
            self._now[view] = patched(base, change, key)
        if after is not None:
            self._checksums[view] = delta.algorithm, after

    def _told(self, delta: Delta, changed: int) -> str:
        whole = len(set(self._views.values()))
        versions = f"version {delta.base_version} → {delta.version}"
        told = f"{versions}: {changed:,} of {count_text(whole, 'tensor')} changed"
        if delta.before or changed == whole:
            return told
        return f"{told}; the delta has no checksums of the others, which are copied as they are"
