"""What differs between two checkpoints of any formats: keys, dtypes, shapes, tags, values.

Both are opened as indexes and walked together; only tensors that both have, with one dtype and
shape, are read. Keys are compared by name, not by order; the class of a mapping (`OrderedDict` or
dict), the `_metadata` of a state dict, `requires_grad`, strides and the sharing of storages do not
count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ckptconv.diff.report import Difference, ValueChange
from ckptconv.diff.walk import Differences, walk_together
from ckptconv.formats.registry import Named, open_certain
from ckptconv.io.guarded import check_places
from ckptconv.keys.key_map import (
    KEEP,
    STRIP,
    KeyMap,
    KeyRules,
    Keys,
    hint_of_starts,
    map_keys,
    refuse_idle,
    rules_of,
)
from ckptconv.pickles.nodes import Dict, Node
from ckptconv.support.choices import refuse_no_flag, refuse_no_text, spelling_checked
from ckptconv.support.errors import (
    AmbiguousStateDict,
    CheckpointError,
    KeyConflict,
    OptionRefused,
    warn,
)
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.records import NamedTuple
from ckptconv.support.settings import collector_paused
from ckptconv.support.text import count_text, some_text
from ckptconv.tensors.ahead import read_soon
from ckptconv.tensors.comparison import Pair, compare_bytes, damaged_storages
from ckptconv.tensors.element_pairs import Tolerance
from ckptconv.tensors.refs import TensorRef, view_identity
from ckptconv.tensors.scaled_weights import codes_note
from ckptconv.tree.checkpoint import Checkpoint, Edit, refuse_no_edits
from ckptconv.tree.renaming import apply_rules, with_filled
from ckptconv.tree.reshaping import Applied, with_config
from ckptconv.tree.state_dicts import StateDict, find
from ckptconv.tree.walk import tensors_of

Part = TypeVar("Part")
Both = tuple[str, TensorRef, TensorRef]
"""A path, and what each of two files has there."""


@spelling_checked
def diff_checkpoints(
    a: Named,
    b: Named,
    *,
    keys: Keys = "keep",
    only: str | None = None,
    only_b: str | None = None,
    whole: bool = False,
    tolerance: Tolerance | None = None,
    ignore_dtype: bool = False,
    strict_device: bool = False,
    tag: str | None = None,
    tag_b: str | None = None,
    edits: Sequence[Edit] = (),
    edits_b: Sequence[Edit] | None = None,
    on_progress: OnProgress | None = None,
) -> Difference:
    """Compare the state dict of checkpoint `a`, its keys renamed by `keys`, with that of `b`, and
    by path the tensors beside them that both have (a note tells of the others). Where neither has
    a single state dict, everything is compared by path.

    Values must be the same bit for bit (NaN of the same bits included, -0.0 is not 0.0), or equal
    within `tolerance`. `only` is the path of the part to compare in both, `only_b` that in `b`
    where it is another (empty: all of it). `whole` compares everything in the files, by path. With
    `ignore_dtype`, tensors of different dtypes are compared as numbers. The globs of `keys` choose
    keys of both, and without other rules wrappers are stripped from both; a rule that meets no key
    is an error. `tag` and `tag_b` pick the step of a folder
    of several. `edits` are made to both first, or to `a` alone where there are `edits_b` for `b`.
    `on_progress` is called with a `Progress`, about once for every 16 MB that were
    read. Warns with a `CheckpointWarning` where a framework's own rule chose a state dict. Raises
    `CheckpointError` when one of them cannot be read, or only one holds no single state dict.
    """
    rules = rules_of(keys)
    refuse_no_text(only=only, only_b=only_b or None, tag=tag, tag_b=tag_b)
    refuse_no_flag(whole=whole, ignore_dtype=ignore_dtype, strict_device=strict_device)
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise OptionRefused(
            f"tolerance={tolerance!r:.100} is not a tolerance", hint="give Tolerance(atol, rtol)"
        )
    refuse_no_edits(edits)
    if edits_b is None:
        edits_b = edits
    else:
        refuse_no_edits(edits_b, "edits_b")
    if only_b is None:
        only_b = only
    # an empty text is all of B: None is what says that nothing was given
    elif not only_b:
        only_b = None
    with (
        open_certain(a, tag=tag, edits=edits) as first,
        open_certain(b, tag=tag_b, edits=edits_b) as second,
    ):
        compared = compare(
            first,
            second,
            rules,
            (only, only_b),
            whole=whole,
            tolerance=tolerance,
            ignore_dtype=ignore_dtype,
            strict_device=strict_device,
            on_progress=on_progress,
        )
    warn(compared.chosen)
    return compared.difference


class Compared(NamedTuple):
    """The differences of two open checkpoints, the two trees that were compared, the first with its
    keys renamed, and what was chosen in them.
    """

    difference: Difference
    ours: Node
    theirs: Node
    chosen: Sequence[str]


def compare(
    first: Checkpoint,
    second: Checkpoint,
    rules: KeyRules,
    only: tuple[str | None, str | None] = (None, None),
    *,
    whole: bool = False,
    tolerance: Tolerance | None = None,
    ignore_dtype: bool = False,
    strict_device: bool = False,
    on_progress: OnProgress | None = None,
) -> Compared:
    """Compare two open checkpoints, as `diff_checkpoints` does; `only` are the parts of both."""
    # before anything is compared: a header that contradicts its directory is not a difference, but
    # damage
    check_places((*first.sources, *second.sources))
    differences = Differences()
    with collector_paused():
        ours, theirs, rest, chosen, left_out = _parts(first, second, rules, only, whole=whole)
        for path, one, other in (*walk_together(ours, theirs, differences), *rest):
            differences.compare(path, one, other, ignore_dtype=ignore_dtype)
    values, damaged = _compare_values(differences.pairs, tolerance, on_progress)
    parts = [f"{item.path.name} {item.part.what}" for item in (first, second) if item.part]
    found = Difference(
        a=str(first.path),
        b=str(second.path),
        a_format=first.format,
        b_format=second.format,
        tensors=differences.tensors,
        nbytes=sum(ours.nbytes for _, ours, _ in differences.pairs),
        only_a=tuple(differences.only_a),
        only_b=tuple(differences.only_b),
        dtypes=tuple(differences.dtypes),
        shapes=tuple(differences.shapes),
        locations=tuple(differences.locations),
        values=tuple(sorted(values, key=lambda item: item.deviation.badness, reverse=True)),
        others=tuple(differences.others),
        notes=(*parts, *chosen, *left_out, *_notes(differences), *_codes_notes(first, second)),
        strict_device=strict_device,
        ignore_dtype=ignore_dtype,
        damaged=tuple(damaged),
    )
    return Compared(found, ours, theirs, chosen)


def _parts(
    first: Checkpoint,
    second: Checkpoint,
    keys: KeyRules,
    only: tuple[str | None, str | None],
    *,
    whole: bool,
) -> tuple[Node, Node, list[Both], list[str], list[str]]:
    """The two nodes to compare, the tensors beside them that both files have, what is to be said of
    the choice of the nodes, and of what is not compared: keys that the rules leave out, tensors
    that one file has.
    """
    if whole:
        ours = find(first.root, only[0] or "", first.path)
        theirs = _second_part(lambda: find(second.root, only[1] or "", second.path), only)
        return ours, theirs, [], [], []
    if only == (None, None) and keys == KEEP and _is_open(first) and _is_open(second):
        return first.root, second.root, [], [], [_ALL]
    ours, theirs = first.state_dict(only[0]), _second_part(lambda: second.state_dict(only[1]), only)
    # globs choose keys of both, names change in the first alone; wrappers are not part of a name
    theirs_too = keys if keys.globs.rules == keys.rules else keys.globs
    renamed, others = _mapped(ours, keys, first), _mapped(theirs, theirs_too, second)
    _refuse_idle(renamed.keys, others.keys, keys, first)
    chosen = [f"A: {note}" for note in ours.notes] + [f"B: {note}" for note in theirs.notes]
    left_out = [*_left_out(renamed.keys, "A"), *_left_out(others.keys, "B")]
    rest: list[Both] = []
    if only == (None, None):
        rest, notes = _compared_beside(first, ours, second, theirs)
        left_out += notes
    return _under(renamed), _under(others), rest, chosen, left_out


_ALL = "neither file has a single state dict: everything in them was compared, by path"


def _is_open(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds tensors, but leaves open which state dict is meant."""
    try:
        checkpoint.state_dict()
    except AmbiguousStateDict:
        # with no tensor at all there is nothing to compare by path either
        return next(checkpoint.tensors(), None) is not None
    return False


def _compared_beside(
    first: Checkpoint, ours: StateDict, second: Checkpoint, theirs: StateDict
) -> tuple[list[Both], list[str]]:
    """The tensors beside the state dicts at one path in both, and what is said of the others."""
    walked = Differences()
    rest: list[Both] = []
    apart: list[str] = []
    own, own_b = _views(ours), _views(theirs)
    # what has one key in both state dicts was compared with them
    met = {ours.prefix + key for key in ours.keys} & {theirs.prefix + key for key in theirs.keys}
    for path, one, other in walk_together(first.root, second.root, walked):
        if type(one) is not TensorRef or type(other) is not TensorRef:
            apart.append(path)
        elif (view_identity(one) not in own or view_identity(other) not in own_b) and not any(
            above in met for above in _paths_to(path)
        ):
            rest.append((path, one, other))
    notes = [
        *_alone(first, own, {*walked.only_a, *apart}, "A", "B"),
        *_alone(second, own_b, {*walked.only_b, *apart}, "B", "A"),
    ]
    return rest, notes


def _views(chosen: StateDict) -> set[Hashable]:
    """What the tensors of a state dict are views of."""
    pairs = list(zip(chosen.keys, chosen.values, strict=True))
    return {view_identity(ref) for _, ref in tensors_of(Dict(pairs))}


def _alone(
    here: Checkpoint, own: Container[Hashable], apart: Container[str], a: str, b: str
) -> Iterator[str]:
    """What a checkpoint has beside its state dict and the other has not, by its parts: what stands
    at the paths `apart`, or below.
    """
    alone = Counter(
        path.partition(".")[0]
        for path, ref in here.tensors()
        if view_identity(ref) not in own and any(above in apart for above in _paths_to(path))
    )
    if alone:
        parts = some_text([f"{part} ({count:,})" for part, count in alone.items()])
        yield (
            f"{a} has {count_text(sum(alone.values()), 'tensor')} beside its state dict that {b} "
            f"does not have, which were not compared: {parts}"
        )


def _paths_to(path: str) -> Iterator[str]:
    """A path, and those of all that it is in."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _left_out(names: KeyMap, which: str) -> Iterator[str]:
    """How many keys of a checkpoint were not compared, by what left them out."""
    for why, count in Counter(names.why.values()).items():
        yield (
            f"{count:,} of {count_text(len(names.old), 'key')} of {which} {why}, and so were not "
            "compared"
        )


def _second_part(part: Callable[[], Part], only: tuple[str | None, str | None]) -> Part:
    """The part of the second checkpoint; without the path named for both, `only_b` is offered."""
    try:
        return part()
    except CheckpointError as error:
        if only[0] is not None and only[0] == only[1]:
            advice = "--only-b PATH names the part of B where it has another path; '' is all of it"
            error.hint = f"{error.hint}; {advice}" if error.hint else advice
        raise


def _mapped(state_dict: StateDict, rules: KeyRules, checkpoint: Checkpoint) -> Applied:
    try:
        return apply_rules(state_dict, with_config(rules, checkpoint), checkpoint)
    except CheckpointError as error:
        raise error.at(path=checkpoint.path) from error.__cause__


def _refuse_idle(ours: KeyMap, theirs: KeyMap, keys: KeyRules, first: Checkpoint) -> None:
    """Refuse a rule that meets no key, or a choice that leaves none to compare."""
    try:
        of_both = {words for rule in keys.globs.rules for words in rule.idle(())}
        # a rule for both may meet keys of one of them
        idle = tuple(words for words in ours.idle if words in theirs.idle or words not in of_both)
        refuse_idle([replace(ours, idle=idle)], keys)
        if ours.old and not any(key is not None for key in (*ours.new, *theirs.new)):
            raise KeyConflict(
                f"no key is left after {keys.leaving}", hint=hint_of_starts([ours], keys)
            )
    except KeyConflict as error:
        raise error.at(path=first.path) from error.__cause__


def _under(applied: Applied) -> Dict:
    pairs = zip(*with_filled(applied.item, applied.keys), strict=True)
    return Dict([(key, value) for key, value in pairs if key is not None])


def _codes_notes(first: Checkpoint, second: Checkpoint) -> Iterator[str]:
    """Tell of codes: two may differ, and stand for the same values."""
    for name, checkpoint in (("A", first), ("B", second)):
        found = codes_note(dict(item.tensors()) for item in checkpoint.state_dicts())
        if found is not None:
            yield f"{name}: {found}"


def _notes(differences: Differences) -> Iterator[str]:
    """Say what would make keys meet that do not."""
    if differences.tensors or not (differences.only_a and differences.only_b):
        return
    both = differences.only_a, differences.only_b
    for which, keys, others in zip(("first", "second"), both, both[::-1], strict=True):
        # advised only where it makes at least one key meet
        if _without_wrappers(keys) & set(others):
            what = f"the keys of the {which} carry wrapper prefixes"
            yield f"{what}; compare without them: --keys strip"


def _without_wrappers(keys: Sequence[str]) -> set[str]:
    """The keys as `--keys strip` would have them; none where it cannot."""
    try:
        return {key for key in map_keys(keys, STRIP).new if key is not None}
    except CheckpointError:
        return set()


def _compare_values(
    pairs: Sequence[tuple[str, TensorRef, TensorRef]],
    tolerance: Tolerance | None,
    tell: OnProgress | None,
) -> tuple[list[ValueChange], list[str]]:
    """The tensors whose values differ, and what is damaged of what was read.

    With a tolerance, those that hold NaN are looked at even where all bits are the same. What
    several keys name is compared once.
    """
    firsts: dict[Hashable, int] = {}
    stands_for = [
        firsts.setdefault((view_identity(ours), view_identity(theirs)), at)
        for at, (_, ours, theirs) in enumerate(pairs)
    ]
    exact = [at for at in firsts.values() if _by_bytes(pairs[at][1:], tolerance)]
    meter = Meter("read", sum(pairs[at][1].nbytes for at in exact), tell)
    # two rows: one tensor of each file is needed at a time
    with read_soon([pairs[at][1] for at in exact], [pairs[at][2] for at in exact]):
        compared = compare_bytes([pairs[at][1:] for at in exact], meter)
    meter.finish()
    same = {number for at, number in enumerate(exact) if at not in compared.differing}
    others = [at for at in firsts.values() if at not in same]
    unread = {exact[at] for at in compared.unread}
    read = [pairs[at][1:] for at in firsts.values() if at in unread or at not in same]
    # those that differ are read once more, as numbers: of all others their bytes were enough
    nbytes = sum(pairs[at][1].nbytes for at in others) + sum(ours.nbytes for ours, _ in read)
    meter = Meter("measure", nbytes, tell)
    unlike = {}
    if others:
        from ckptconv.tensors.deviation import deviation

        measured = ((at, deviation(*pairs[at][1:], tolerance, meter)) for at in others)
        unlike = {at: change for at, change in measured if change is not None}
    firsts_of = zip(pairs, stands_for, strict=True)
    changes = [ValueChange(path, unlike[at]) for (path, _, _), at in firsts_of if at in unlike]
    damaged = damaged_storages(compared, read, meter)
    if read:
        meter.finish()
    return changes, damaged


def _by_bytes(pair: Pair, tolerance: Tolerance | None) -> bool:
    """Whether the same bytes are the same values, of two tensors of one shape."""
    first, second = pair
    if first.dtype is not second.dtype:
        return False
    return tolerance is None or tolerance.equal_nan or first.dtype.kind not in ("float", "complex")
