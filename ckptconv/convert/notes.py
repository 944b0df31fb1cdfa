"""The notes that a plan gives to the user, and what it counts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING

from ckptconv.convert.plan import ConversionPlan
from ckptconv.formats.hf_names import index_path
from ckptconv.keys.key_map import KEEP, STRIP, KeyRules
from ckptconv.keys.rules import UNMISTAKABLE
from ckptconv.pickles.nodes import Node, mapping_pairs
from ckptconv.support.errors import printable
from ckptconv.support.limits import in_force
from ckptconv.support.text import agreeing, count_text, size_text, some_text
from ckptconv.tensors.compaction import CastRule, count_parted
from ckptconv.tensors.refs import Storage, TensorRef
from ckptconv.tree.candidates import is_random_state
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.labels import LORA_OF_PEFT, offered_prefix, producer_of
from ckptconv.tree.renaming import RenamedKeys
from ckptconv.tree.reshaping import Applied
from ckptconv.tree.settling import Settled
from ckptconv.tree.state_dicts import StateDict
from ckptconv.tree.walk import label_text, place_text, tensor_of

if TYPE_CHECKING:
    from ckptconv.devices.mapping import TagMap
    from ckptconv.tree.fitted_keys import KeyTarget
    from ckptconv.tree.optimizer_names import RenamedStates
    from ckptconv.tree.optimizer_states import LeftBehind


def tree_notes(settled: Settled) -> Iterator[str]:
    """What is unusual in a tree."""
    if settled.cycles:
        count, first = len(settled.cycles), printable(place_text(settled.cycles[0]))
        yield f"{count} containers contain themselves ({first}, …); they are kept like that"


def key_notes(state_dicts: Sequence[RenamedKeys], rules: KeyRules) -> Iterator[str]:
    """Keys with control characters, and wrappers that the rules leave on them."""
    odd = [key for item in state_dicts for key in item.odd]
    if odd:
        keys = f"{count_text(len(odd), 'key')} {agreeing(len(odd), 'hold')}"
        yield f"{keys} control characters, e.g. {printable(odd[0])}"
    for item in state_dicts:
        for key, twin in item.filled:
            yield (
                f"{printable(key)}{_of(item.path)} is missing and filled from {printable(twin)}, "
                "its other name in the target"
            )
    left = sorted({name for item in state_dicts for name in item.wrappers if name in UNMISTAKABLE})
    if left and rules.wrappers in ("module", "add-module"):
        yield (
            f"the keys still carry {', '.join(left)}; `ckptconv convert` strips these wrappers too"
        )


_MOST = 5  # optimizer states that are told of one by one


def optimizer_notes(
    root: Node,
    overlay: Mapping[int, Node],
    before: Sequence[StateDict],
    after: Sequence[tuple[StateDict, RenamedKeys]],
    followed: Sequence[RenamedStates] = (),
) -> Iterator[str]:
    """Tell of optimizer states that stay in the output, and whose parameters have other keys now or
    are left out; in those of `followed`, names have become those keys.
    """
    if before == [item for item, _ in after] and not any(
        done.changed or done.left_out or done.made for _, done in after
    ):
        return
    from ckptconv.tree.optimizer_states import left_behind  # seldom needed

    found = left_behind(root, overlay, before, after)
    yield from _in_short([[_followed_text(item)] for item in followed if item.names])
    yield from _in_short([[_unclear_text(item)] for item in followed if item.unclear])
    settled = {
        (item.path, name) for item in followed for name in (*dict(item.names), *item.unclear)
    }
    consumed = {key for _, done in after for key in done.consumed}
    left = (_left_texts(item, settled, consumed) for item in found)
    yield from _in_short([texts for texts in map(list, left) if texts])


def _in_short(told: Sequence[Sequence[str]]) -> Iterator[str]:
    """What is to be told of each optimizer state, of many of them in one line."""
    for texts in told[:_MOST]:
        yield from texts
    more = told[_MOST:]
    if more:
        yield f"the same is true of {count_text(len(more), 'more optimizer state')}"


def _followed_text(item: RenamedStates) -> str:
    old, new = item.names[0]
    where = printable(item.path) or "the optimizer state"
    of = "name of 1 parameter"
    if len(item.names) > 1:
        of = f"names of {len(item.names):,} parameters"
    return f"{where} has the new {of} too, e.g. {printable(old)} → {printable(new)}"


def _unclear_text(item: RenamedStates) -> str:
    where = printable(item.path) or "the optimizer state"
    count = count_text(len(item.unclear), "parameter")
    first = printable(item.unclear[0])
    why = "it is not clear which keys are theirs"
    return f"{where} still names {count} as before, e.g. {first}: {why}"


def _left_texts(
    item: LeftBehind, settled: Collection[tuple[str, str]], consumed: Collection[str]
) -> Iterator[str]:
    from ckptconv.tree.optimizer_states import bare_name  # seldom needed

    where = printable(item.state.path) or "the optimizer state"
    renamed = [name for name in item.renamed if (item.state.path, name) not in settled]
    if renamed:
        count, first = len(renamed), printable(renamed[0])
        names = "its old name" if count == 1 else "their old names"
        yield f"{where} still names {count:,} of the renamed parameters by {names}, e.g. {first}"
    bare = {bare_name(key) for key in consumed}
    made = [name for name in item.gone if bare_name(name) in bare]
    gone = [name for name in item.gone if bare_name(name) not in bare]
    if made:
        held, first = count_text(len(made), "parameter"), printable(made[0])
        yield f"{where} still holds {held} of which rules made other tensors, e.g. {first}"
    if gone:
        held, first = count_text(len(gone), "parameter"), printable(gone[0])
        yield f"{where} still holds {held} that {agreeing(len(gone), 'are')} left out, e.g. {first}"
    if item.is_short and not item.gone:
        yield (
            f"{where} knows its {count_text(len(item.state.shapes), 'parameter')} by number "
            "only, and some of them are left out: it no longer fits the model"
        )


def text_notes(found: StateDict) -> Iterator[str]:
    """Tell of keys that are numbers, bytes or the like, and become text."""
    pairs = mapping_pairs(found.node) or ()
    own = pairs if found.own is None else [pairs[at] for at in found.own if at < len(pairs)]
    other = [key for key, value in own if type(key) is not str and tensor_of(value) is not None]
    if other:
        named = ", ".join(_key_text(key) for key in other[:3])
        keys, are = count_text(len(other), "key"), agreeing(len(other), "are")
        yield f"{keys} that {are} not text {are} written as text: {named}"


def prefix_notes(
    checkpoint: Checkpoint, found: Sequence[StateDict], rules: KeyRules, fit_to: KeyTarget | None
) -> Iterator[str]:
    """Offer what the framework put around the model, where no rule of the user's is on prefixes; an
    adapter is loaded with them.
    """
    if rules not in (STRIP, KEEP) or fit_to or producer_of(checkpoint.root) == LORA_OF_PEFT:
        return
    for item in found:
        prefix = offered_prefix(checkpoint.root, item.keys)
        if prefix:
            yield (
                f"all keys{_of(item.path)} start with {printable(prefix)}; --strip-prefix "
                f"{quote(printable(prefix))} removes it"
            )


def tied_notes(applied: Iterable[Applied], fit_to: KeyTarget | None) -> Iterator[str]:
    """Tell of tensors that differ where the target has one tensor under their names: torch loads
    all into it without a word, and the last one stays.
    """
    if fit_to is None or not fit_to.ties:
        return
    from ckptconv.tensors.layouts import are_alike  # seldom needed

    for each in applied:
        tensors = {
            key: ref
            for key, value in zip(each.keys.new, each.item.values, strict=True)
            if key is not None and (ref := tensor_of(value)) is not None
        }
        for names in fit_to.ties:
            met = [key for key in names if key in tensors]
            for key in met[1:]:
                if not are_alike([tensors[met[0]], tensors[key]]):
                    yield (
                        f"{printable(met[0])} and {printable(key)}{_of(each.item.path)} differ, "
                        f"and are one tensor of {printable(fit_to.name)}: a model that ties them "
                        "keeps the values of one alone"
                    )


def _of(path: str) -> str:
    """The part that keys are in; nothing for the root."""
    return f" of {printable(path)}" if path else ""


def parted_notes(before: Sequence[RenamedKeys], after: Sequence[RenamedKeys]) -> Iterator[str]:
    """Tell of tensors that share no bytes in the output, because their casts differ."""
    parted = sum(item.shared for item in before) - sum(item.shared for item in after)
    if parted:
        keys = f"{count_text(parted, 'key')} no longer {agreeing(parted, 'share')}"
        yield f"{keys} the storage of another, which has another dtype now"


def still_shared(applied: Applied, done: RenamedKeys, cast: CastRule) -> RenamedKeys:
    """The keys of an output that keeps sharing, as far as casts let it."""
    kept = applied.kept()
    refs = [ref for key, ref in applied.item.tensors() if key in kept]
    return replace(done, shared=max(0, done.shared - count_parted(refs, cast)))


def sharing_notes(refs: Sequence[TensorRef], storages: Sequence[Storage]) -> Iterator[str]:
    """Tell of tensors that would take far more bytes than the storages that they share."""
    claimed = sum([ref.nbytes for ref in refs])
    most = in_force()
    if claimed <= most.view_free:
        return
    stored = sum([storage.nbytes for storage in storages])
    if claimed > most.view_ratio * stored:
        yield f"{len(refs)} tensors of {claimed} bytes share {stored} bytes of storage"


def shard_notes(keys: Sequence[str], sizes: Sequence[int], limit: int | None) -> Iterator[str]:
    """Tell of tensors that are larger than a file should be: each has one of its own."""
    if limit is None:
        return
    large = [key for key, size in zip(keys, sizes, strict=True) if size > limit]
    if large:
        tensors = f"{count_text(len(large), 'tensor')} {agreeing(len(large), 'are')}"
        yield (
            f"{tensors} larger than --max-shard-size {size_text(limit)}, and not split: "
            f"{some_text(large)}"
        )


def beside_notes(plan: ConversionPlan) -> Iterator[str]:
    """Tell of an index beside an output of one file, whose shards a reader may take for it."""
    index = index_path(plan.output)
    if plan.is_sharded or plan.target.is_folder:
        return
    if os.path.isfile(index):  # noqa: PTH113 (False for a name too long)
        yield (
            f"{printable(index.name)} is beside it and names other files; a program that opens "
            "the folder may take those"
        )


def count_locations(
    storages: Sequence[Storage], retag: Callable[[str], str]
) -> dict[tuple[str, str], int]:
    """Storages by device tag before and after."""
    counted = Counter([storage.location for storage in storages])
    return {(before, retag(before)): count for before, count in counted.items()}


def idle_tag_notes(locations: Iterable[tuple[str, str]], tags: TagMap) -> Iterator[str]:
    """Tell of the tags to be changed that no storage has: one may be mistyped."""
    there = dict.fromkeys(before for before, _ in locations)
    for old, _ in tags.pairs if there else ():
        if old not in there:
            yield f"no storage has the tag {old} of --map-location; they have {some_text([*there])}"


def random_state_notes(
    tensors: Callable[[], Iterator[tuple[str, TensorRef]]], tags: TagMap
) -> Iterator[str]:
    """Tell of states of random generators that leave the CPU: `set_rng_state` of torch.cuda too
    takes them from there alone (torch 2.13).
    """
    if not tags.pairs and tags.device in (None, "cpu"):
        return
    moved = [
        printable(path)
        for path, ref in tensors()
        if is_random_state(ref, path)
        and tags(ref.pieces[0].storage.location) not in ("cpu", ref.pieces[0].storage.location)
    ]
    if moved:
        yield (
            f"{some_text(moved)}: torch takes states of random generators from the CPU alone; "
            "call .cpu() on what is loaded"
        )


def count_casts(refs: Iterable[TensorRef], cast: CastRule) -> dict[tuple[str, str], int]:
    """Tensors by dtype before and after, of those that are cast, or are made of codes."""
    changed = Counter[tuple[str, str]]()
    for ref in refs:
        target = cast(ref)
        if target is ref.dtype and not ref.pieces[0].storage.source.is_derived:
            continue  # as nearly always
        before, after = codes_text(ref) or ref.dtype.name, target.name
        if before != after:
            changed[before, after] += 1
    return dict(changed)


def codes_text(ref: TensorRef) -> str:
    """The codes that values are made of, in words; empty for what is stored as values."""
    if not ref.storage.source.is_derived:  # as nearly always
        return ""
    from ckptconv.tensors.computed import computed_value

    value = computed_value(ref)
    if value is None or value.operation not in _OF_CODES:
        return ""
    return value.inputs[0].dtype.name + _OF_CODES[value.operation]


_OF_CODES = {"decode": " codes", "unblock": " blocks"}


def is_codes(before: str) -> bool:
    """Whether what `count_casts` says of before are codes."""
    return before.endswith((*_OF_CODES.values(),))


def _key_text(key: Node) -> str:
    """A key that is not text, in a few words; of an int of millions of digits its size."""
    if type(key) in (float, bool, bytes):
        return printable(repr(key))
    return printable(label_text(key))
