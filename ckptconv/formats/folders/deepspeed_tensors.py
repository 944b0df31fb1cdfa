"""The tensor-parallel ranks of a step of DeepSpeed, joined as its model states say that they were
cut.

``universal_checkpoint_info`` there has lists of patterns, which the beginnings of the names of
parameters match: what is the same in all ranks, what is averaged, what was cut into columns, what
is several parameters one below the other, each of which was cut, and which rows fill up the
vocabulary. All other parameters were cut into rows. Megatron-DeepSpeed and AutoTP write it. Source:
`merge_tp_slices` in deepspeed/checkpoint/ds_to_universal.py, deepspeed/checkpoint/constants.py
(0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckptconv.formats.folders.alone import NOT_READ
from ckptconv.formats.folders.ranks import are_equal, end_to_end, varies
from ckptconv.formats.folders.zero import buffer_names, contradiction
from ckptconv.pickles.nodes import Dict, Node, entries, listed, mapping_pairs, ordered_dict
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, errors_at
from ckptconv.tensors.computed import elementwise
from ckptconv.tensors.refs import TensorRef, box_of
from ckptconv.tensors.views import cut
from ckptconv.tree.optimizer_states import read_number
from ckptconv.tree.walk import tensor_of

# The names are those of deepspeed/checkpoint/constants.py
INFO = "universal_checkpoint_info"
_SAME = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_COLUMNS = "parameter_with_row_parallelism_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_PARTS = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_VOCABULARY = "vocabulary_parameter_patterns"
_STAGES = "pipeline_replicated_parameter_patterns"
_WORDS = "original_vocab_size"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_KINDS = (_SAME, _AVERAGED, _COLUMNS, _HALVES, _VOCABULARY)
_OF_WIDTHS = 0.4  # the version from which on widths are told, and sizes are those of all ranks

_ATOM = r"(?:\\[^A-Za-z0-9]|\\d|\\w|\[[\w-]+\]|[^\\\[\](){}*+?|^$])"
_IS_SHORT = re.compile(rf"\^?(?:{_ATOM}[*+?]?)*\$?").fullmatch
# A file may be anybody's, and a pattern of many repeats takes time without end
_MOST_REPEATS, _LONGEST_NAME, _MOST_PATTERNS = 2, 500, 100


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A pattern, of which `kind` of parameters it is, and what its list says besides."""

    kind: str
    text: str
    said: Mapping[str, Node]


class TensorRanks:
    """How the parameters of a model were cut among tensor-parallel ranks, as `info` says.

    Raises `UnsupportedCheckpoint` for patterns that are not read.
    """

    def __init__(self, info: Node) -> None:
        self._said = entries(info)
        unsupported = entries(self._said.get(_UNSUPPORTED))
        if unsupported:
            what = "is cut in a way that AutoTP itself does not join"
            raise UnsupportedCheckpoint(what, where=min(unsupported))
        self._exact: dict[str, list[_Pattern]] = {}
        self._others: list[tuple[re.Pattern[str], _Pattern]] = []
        self._used: set[str] = set()
        self._joined: dict[tuple[int, ...], TensorRef] = {}
        for pattern in self._patterns():
            self._add(pattern)
        if len(self._others) > _MOST_PATTERNS:
            raise UnsupportedCheckpoint(f"has more than {_MOST_PATTERNS} patterns", where=INFO)

    def _patterns(self) -> Iterator[_Pattern]:
        for kind in _KINDS:
            for text in _texts(self._said.get(kind), kind):
                yield _Pattern(kind, text, {})
        parts: Node = self._said.get(_PARTS, [])
        for said in map(entries, parts if type(parts) in (list, tuple) else [None]):
            for text in _texts(said.get("patterns"), _PARTS):
                yield _Pattern(_PARTS, text, said)

    def _add(self, pattern: _Pattern) -> None:
        text = pattern.text
        _require_short(text, pattern.kind)
        plain = re.sub(r"\\(.)", r"\1", text.removeprefix("^").removesuffix("$"))
        if text[:1] == "^" and text[-1:] == "$" and re.escape(plain) == text[1:-1]:
            self._exact.setdefault(plain, []).append(pattern)  # AutoTP has one for each parameter
        else:
            self._others.append((re.compile(text), pattern))

    def _of(self, name: str) -> dict[str, _Pattern]:
        if len(name) > _LONGEST_NAME:
            raise UnsupportedCheckpoint("is a longer name than patterns are tried on", where=name)
        found: dict[str, _Pattern] = {}
        meant = [pattern for compiled, pattern in self._others if compiled.match(name)]
        for pattern in (*self._exact.get(name, ()), *meant):
            self._used.add(pattern.text)
            if found.setdefault(pattern.kind, pattern) is not pattern:
                what = f"matches several patterns of {pattern.kind}"
                raise UnsupportedCheckpoint(what, where=name)
        return found

    def joined(self, name: str, refs: Sequence[TensorRef]) -> TensorRef:
        """A parameter of which each rank has its part, or what lies as it does. Tied ones stay so.

        Raises `MalformedCheckpoint` where ranks have not what the patterns say.
        """
        key = tuple(map(id, refs))
        if key not in self._joined:
            with errors_at(where=name):
                self._joined[key] = self._made(name, refs)
        return self._joined[key]

    def _made(self, name: str, refs: Sequence[TensorRef]) -> TensorRef:
        found = self._of(name)
        made = refs[0]
        if _SAME in found:
            if not all(are_equal(made, ref) for ref in refs[1:]):
                raise MalformedCheckpoint("differs between the ranks that are to have the same")
        elif _AVERAGED in found:
            made = _mean(name, refs)
        elif _HALVES in found:
            widths = [[ref.shape[0] // 2 for ref in refs]] * 2 if refs[0].shape else []
            made = _of_parts(refs, 0, widths)
        elif _PARTS in found:
            made = self._of_named_parts(refs, found[_PARTS])
        else:
            _refuse_same(refs, _COLUMNS in found)
            made = _end_to_end(refs, int(_COLUMNS in found))
        return self._words(made) if _VOCABULARY in found else made

    def _of_named_parts(self, refs: Sequence[TensorRef], pattern: _Pattern) -> TensorRef:
        sizes, axis = listed(pattern.said.get("shape")), pattern.said.get("partition_dim")
        dimensions = len(refs[0].shape)
        if type(axis) is not int or len(sizes) != dimensions or not 0 <= axis < dimensions:
            raise UnsupportedCheckpoint(f"has other dimensions than {_PARTS} says")
        version = self._said.get("universal_checkpoint_version", 0.0)
        widths: Node
        if type(version) in (int, float) and version >= _OF_WIDTHS:
            widths = entries(self._said.get(_WIDTHS)).get(pattern.text)
        else:
            whole, parts = sum(ref.shape[axis] for ref in refs), sizes[axis]
            if type(parts) is int:
                parts = [whole // parts] * parts if 0 < parts <= whole else []
            widths = [[size // len(refs)] * len(refs) for size in parts]
        return _of_parts(refs, axis, widths)

    def _words(self, ref: TensorRef) -> TensorRef:
        """An embedding without the rows that fill it up."""
        words: Node = self._said.get(_WORDS)
        if type(words) is not int or not ref.shape or not 0 < words <= ref.shape[0]:
            raise contradiction(f"does not have the rows that {_WORDS} says")
        return cut(ref, (words, *ref.shape[1:]))

    def refuse_unused(self) -> None:
        """Raise where a pattern has matched no parameter: then it is not known what it is of."""
        every = {pattern.text for _, pattern in self._others}
        every |= {each.text for patterns in self._exact.values() for each in patterns}
        unused = every - self._used
        if unused:
            what = f"has a pattern that no parameter matches: {min(unused)!r:.100}"
            raise UnsupportedCheckpoint(what, where=INFO)


def _texts(node: Node, kind: str) -> list[str]:
    texts = listed(node)
    if type(node) not in (type(None), list, tuple) or {*map(type, texts)} - {str}:
        raise UnsupportedCheckpoint("is not a list of patterns", where=f"{INFO}.{kind}")
    return texts


def _require_short(text: str, kind: str) -> None:
    repeats = len(re.findall(r"(?<!\\)[*+?]", text))
    if not _IS_SHORT(text) or repeats > _MOST_REPEATS:
        what = f"has a pattern that is not read: {text!r:.100}"
        raise UnsupportedCheckpoint(what, where=f"{INFO}.{kind}")


def stages_have_the_same(info: Node, name: str) -> bool:
    """Whether `info` says that the stages of a pipeline which have a parameter have the same."""
    patterns = _texts(entries(info).get(_STAGES), _STAGES)[:_MOST_PATTERNS]
    for text in patterns:
        _require_short(text, _STAGES)
    return len(name) <= _LONGEST_NAME and any(re.match(text, name) for text in patterns)


def _refuse_same(refs: Sequence[TensorRef], is_told: bool) -> None:
    """Raise where no pattern tells how a parameter was cut, and all ranks have the same of it: it
    may be one that was not cut. What is one number all through tells nothing.
    """
    if is_told or not refs[0].shape:
        return
    first = [cut(ref, (1, *ref.shape[1:])) for ref in refs if ref.numel]
    alike = len(refs[0].shape) == 1 or all(are_equal(first[0], ref) for ref in first[1:])
    if alike and varies(refs[0]) and all(are_equal(refs[0], ref) for ref in refs[1:]):
        what = f"is the same in all tensor-parallel ranks, and {INFO} does not say that it is"
        raise UnsupportedCheckpoint(what)


def _mean(name: str, refs: Sequence[TensorRef]) -> TensorRef:
    if len({(ref.shape, ref.dtype) for ref in refs}) > 1:
        raise contradiction("has another shape in another rank")
    if all(are_equal(refs[0], ref) for ref in refs[1:]):
        return refs[0]
    return elementwise("mean", refs, (1.0,) * len(refs), refs[0].dtype, f"the mean of {name}")


def _end_to_end(refs: Sequence[TensorRef], axis: int) -> TensorRef:
    if any(len(ref.shape) != len(refs[0].shape) for ref in refs) or axis >= len(refs[0].shape):
        raise contradiction("does not have the dimension that it was cut in")
    return end_to_end(refs, axis)


def _of_parts(refs: Sequence[TensorRef], axis: int, widths: Node) -> TensorRef:
    """Several parameters one behind the other, of each of which each rank has so many (`widths`)
    rows or columns.
    """
    rows = [list(each) for each in widths or () if type(each) in (list, tuple)]
    if not rows or any(len(each) != len(refs) for each in rows):
        raise UnsupportedCheckpoint(f"is several parameters, and {INFO} does not say how wide")
    for rank, ref in enumerate(refs):
        own = [each[rank] for each in rows]
        if any(type(one) is not int or one < 0 for one in own) or sum(own) != ref.shape[axis]:
            what = f"has {ref.shape[axis]} rows or columns in rank {rank}, and is to have {own}"
            raise contradiction(what)
    ends = [list(accumulate((each[rank] for each in rows), initial=0)) for rank in range(len(refs))]
    boxes: list[TensorRef] = []
    for at, each in enumerate(rows):
        for rank, ref in enumerate(refs):
            start, shape = [0] * len(ref.shape), list(ref.shape)
            start[axis], shape[axis] = ends[rank][at], each[rank]
            boxes.append(box_of(ref, tuple(start), tuple(shape)))
    return _end_to_end(boxes, axis)


# ------------------------------------------------------------------------------------------- trees


def joined_trees(roots: Sequence[Node]) -> tuple[list[tuple[Node, Node]], list[str]]:
    """What the trees of all ranks are together: the items of the first, in which ``module`` and
    ``optimizer`` are joined; and what is told of it.

    Raises `UnsupportedCheckpoint` where no rank says how parameters were cut.
    """
    trees = [entries(root) for root in roots]
    count: Node = trees[0].get("mp_world_size", len(trees))
    if count != len(trees):
        what = f"has the files of {len(trees)} tensor-parallel ranks, but {count} wrote it"
        raise MalformedCheckpoint(what, hint="fetch the whole folder again")
    if mapping_pairs(trees[0].get(INFO)) is None:
        what = f"is a tensor-parallel checkpoint of {len(trees)} ranks (mp_rank_XX) of DeepSpeed"
        what += f", and its model states have no {INFO}, which says how parameters were cut"
        raise UnsupportedCheckpoint(what, hint=NOT_READ)
    cuts = TensorRanks(trees[0][INFO])
    buffers = {*buffer_names(trees[0])}
    module = _module([tree["module"] for tree in trees], cuts, buffers)
    made: dict[str, Node] = {**trees[0], "module": module}
    has_names = "param_shapes" not in made  # without partitions the optimizer numbers its own
    told = "the weights are joined"
    if "optimizer" in made and not has_names:
        del made["optimizer"]
        told += "; the optimizer's states are left out: each rank numbers its own"
    elif any("optimizer" in tree for tree in trees):
        if not all("optimizer" in tree for tree in trees):
            raise MalformedCheckpoint("is in some tensor-parallel ranks only", where="optimizer")
        told = "the weights and the optimizer's states are joined"
        made["optimizer"] = _optimizer([tree["optimizer"] for tree in trees], cuts)
    cuts.refuse_unused()
    del made[INFO]
    return list(made.items()), [f"{len(trees)} tensor-parallel ranks, cut as {INFO} says: {told}"]


def _refuse_other_names(found: Sequence[Mapping[str, Node]], where: str) -> None:
    for rank, each in enumerate(found):
        if odd := found[0].keys() ^ each.keys():
            what = f"is in one of the tensor-parallel ranks 0 and {rank} only"
            raise contradiction(what, where=f"{where}.{min(odd)}")


def _module(modules: Sequence[Node], cuts: TensorRanks, buffers: set[str]) -> Node:
    found = [entries(module) for module in modules]
    _refuse_other_names(found, "module")
    made: list[tuple[Node, Node]] = []
    for name, value in found[0].items():
        refs = [ref for each in found if (ref := tensor_of(each[name])) is not None]
        if name in buffers or len(refs) < len(found):
            if not all(are_equal(refs[0], ref) for ref in refs[1:]):
                what = f"is a buffer that differs between ranks, and {INFO} has parameters alone"
                raise UnsupportedCheckpoint(what, where=name)
            made.append((name, value))
        else:
            made.append((name, cuts.joined(name, refs)))
    return ordered_dict(made, like=modules[0])


def _optimizer(optimizers: Sequence[Node], cuts: TensorRanks) -> Node:
    parts = [entries(optimizer) for optimizer in optimizers]
    names = [[entries(group).get("params") for group in each["param_groups"]] for each in parts]
    if any(each != names[0] for each in names):
        what = "has other parameters in another tensor-parallel rank"
        raise contradiction(what, where="optimizer.param_groups")
    states = [entries(each["state"]) for each in parts]
    _refuse_other_names(states, "optimizer.state")
    made: list[tuple[Node, Node]] = []
    for name in states[0]:
        of_ranks = [entries(each[name]) for each in states]
        _refuse_other_names(of_ranks, f"optimizer.state.{name}")
        kept = [(key, _kept(name, key, of_ranks, cuts)) for key in of_ranks[0]]
        made.append((name, Dict(kept)))
    return Dict([("state", Dict(made)), ("param_groups", parts[0]["param_groups"])])


def _kept(name: str, key: str, of_ranks: Sequence[Mapping[str, Node]], cuts: TensorRanks) -> Node:
    values = [each[key] for each in of_ranks]
    refs = [ref for ref in map(tensor_of, values) if ref is not None]
    if len(refs) == len(values) and refs[0].shape:
        return cuts.joined(name, refs)
    if len({read_number(value) for value in values}) > 1:
        raise contradiction("differs between the tensor-parallel ranks", where=f"{name}.{key}")
    return values[0]
