"""Random tensor rules, each with what it does said plainly in torch: tensors by their place in the
list of patterns and the value of the variable that is joined or made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from ckptconv import KeyRules, convert_checkpoint, load_portable
from ckptconv.keys.tensor_rules import RuleOperation, TensorRule

Places = dict[tuple[int, int], torch.Tensor]
"""The tensors of one group: by number in the list, and by the value of the variable (0 for none).
"""
DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.complex64, torch.bool)


@dataclass
class Drawn:
    """A state dict, rules for it, and what they make of it."""

    before: dict[str, torch.Tensor] = field(default_factory=dict)
    rules: list[TensorRule] = field(default_factory=list)
    after: dict[str, torch.Tensor] = field(default_factory=dict)


def _values(draw: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    seed = draw(st.integers(0, 2**31))
    words = torch.randint(0, 256, (prod(shape) * dtype.itemsize,), generator=_seeded(seed))
    if dtype is torch.bool:
        return (words % 2).bool().reshape(shape)
    return words.to(torch.uint8).view(dtype).reshape(shape)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _dim(draw: Callable, count: int) -> int:
    return draw(st.integers(-count, count - 1))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0] or [1]


def _parted(draw: Callable, size: int, count: int) -> list[int]:
    ends = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
    return [stop - start for start, stop in zip([0, *ends], [*ends, size], strict=True)]


def _one_by_one(
    draw: Callable, groups: list[Places], name: str
) -> tuple[RuleOperation, list[Places]] | None:
    """An operation on each tensor; None where it does not fit them."""
    shapes = {ref.shape for group in groups for ref in group.values()}
    if len(shapes) > 1:
        return None
    [shape] = shapes
    if not shape:
        return None

    def each(operation: RuleOperation, make: Callable) -> tuple[RuleOperation, list[Places]]:
        return operation, [{at: make(t) for at, t in group.items()} for group in groups]

    if name == "transpose":
        dims = [_dim(draw, len(shape)), _dim(draw, len(shape))]
        return each(RuleOperation.of(name, dims), lambda t: t.transpose(*dims))
    if name == "permute":
        dims = draw(st.permutations(range(len(shape))))
        return each(RuleOperation.of(name, list(dims)), lambda t: t.permute(*dims))
    if name == "reshape":
        sizes, left = [], prod(shape)
        for _ in range(draw(st.integers(0, 3))):
            sizes.append(draw(st.sampled_from(_divisors(left))) if left else 1)
            left //= max(1, sizes[-1])
        sizes.append(-1 if left and draw(st.booleans()) else left)
        return each(RuleOperation.of(name, sizes), lambda t: t.reshape(sizes))
    if name == "unflatten":
        dim = _dim(draw, len(shape))
        one = draw(st.sampled_from(_divisors(shape[dim])))
        sizes = [one, shape[dim] // one]
        return each(RuleOperation.of(name, dim, sizes=sizes), lambda t: t.unflatten(dim, sizes))
    if name == "flatten":
        first = draw(st.integers(0, len(shape) - 1))
        last = draw(st.integers(first, len(shape) - 1))
        return each(RuleOperation.of(name, [first, last]), lambda t: t.flatten(first, last))
    if name in ("interleave", "deinterleave"):
        dim = _dim(draw, len(shape))
        parts = draw(st.sampled_from(_divisors(shape[dim])))

        def interleaved(t: torch.Tensor) -> torch.Tensor:
            return torch.stack(t.chunk(parts, dim), dim % t.dim() + 1).flatten(
                dim % t.dim(), dim % t.dim() + 1
            )

        def apart(t: torch.Tensor) -> torch.Tensor:
            lists = [
                t.index_select(dim, torch.arange(at, t.shape[dim], parts)) for at in range(parts)
            ]
            return torch.cat(lists, dim)

        make = interleaved if name == "interleave" else apart
        return each(RuleOperation.of(name, dim, parts=parts), make) if shape[dim] else None
    heads = draw(st.sampled_from(_divisors(shape[0])))
    if not shape[0] or shape[0] // heads % 2:
        return None

    def roped(t: torch.Tensor) -> torch.Tensor:
        rest = t.shape[1:]
        return t.view(heads, t.shape[0] // heads // 2, 2, *rest).transpose(1, 2).reshape(t.shape)

    def unroped(t: torch.Tensor) -> torch.Tensor:
        rest = t.shape[1:]
        return t.view(heads, 2, t.shape[0] // heads // 2, *rest).transpose(1, 2).reshape(t.shape)

    make = roped if name == "rope" else unroped
    return each(RuleOperation.of(name, heads), lambda t: make(t.contiguous()))


ONES = (
    *("transpose", "permute", "reshape", "unflatten", "flatten", "interleave", "deinterleave"),
    *("rope", "unrope"),
)


def _axis(group: Places, over: bool) -> list[int]:
    return sorted({at[1] if over else at[0] for at in group})


def _at(one: int, other: int, over: bool) -> tuple[int, int]:
    return (other, one) if over else (one, other)


def _joined(
    draw: Callable, groups: list[Places], name: str, over: bool
) -> tuple[RuleOperation, list[Places]] | None:
    variable = {"over": "e"} if over else {}
    for group in groups:
        shapes = {ref.shape for ref in group.values()}
        dims = {len(shape) for shape in shapes}
        if len(dims) > 1 or (name == "stack" and len(shapes) > 1):
            return None
    counts = {len(ref.shape) for group in groups for ref in group.values()}
    count = counts.pop()
    if counts or (name == "concat" and not count):
        return None
    dim = _dim(draw, count + (name == "stack"))
    join = torch.stack if name == "stack" else torch.cat
    made = []
    for group in groups:
        rest = _axis(group, not over)
        try:
            made.append(
                {
                    _at(0, other, over): join(
                        [group[_at(one, other, over)] for one in _axis(group, over)], dim
                    )
                    for other in rest
                }
            )
        except RuntimeError:
            return None
    # a join that is not of one variable alone has to have the same sizes in each run
    for group in groups:
        for one in _axis(group, over):
            sizes = {
                group[_at(one, other, over)].shape[dim] if name == "concat" else 0
                for other in _axis(group, not over)
            }
            if len(sizes) > 1:
                return None
    return RuleOperation.of(name, dim, **variable), made


def _taken_apart(
    draw: Callable, groups: list[Places], name: str, over: bool
) -> tuple[RuleOperation, list[Places]] | None:
    shapes = {ref.shape for group in groups for ref in group.values()}
    if len(shapes) > 1 or not (shape := shapes.pop()):
        return None
    dim = _dim(draw, len(shape))
    size = shape[dim]
    arguments: dict[str, object] = {"over": "e"} if over else {}
    if name == "unstack":
        if not 1 <= size <= 5:
            return None
        count = size
    else:
        count = draw(st.integers(1, 3))
        if size % count == 0 and draw(st.booleans()):
            sizes = [size // count] * count
            arguments["parts"] = count
        else:
            sizes = _parted(draw, size, count)
            arguments["sizes"] = sizes
    made = []
    for group in groups:
        places: Places = {}
        for (number, value), t in group.items():
            parts = t.unbind(dim) if name == "unstack" else t.split(sizes, dim)
            for at, part in enumerate(parts):
                place = (number, at) if over else (number * count + at, value)
                places[place] = part
        made.append(places)
    return RuleOperation.of(name, dim, **arguments), made


@st.composite
def drawn_rules(draw: Callable, most: int = 2, values: Callable = _values) -> Drawn:
    """A state dict with rules for it, of which a later one may take what an earlier one made.

    `values` makes the tensors of the rules.
    """
    found = Drawn()
    for number in range(draw(st.integers(1, most))):
        _draw_rule(draw, number, found, values)
    loose = {f"other.{at}": _values(draw, (2,), torch.float32) for at in range(2)}
    found.before |= loose
    found.after |= loose
    return found


def _draw_rule(draw: Callable, number: int, found: Drawn, values_of: Callable) -> None:
    dtype = draw(st.sampled_from(DTYPES))
    count, has_variable = draw(st.integers(1, 3)), draw(st.booleans())
    values = draw(st.integers(1, 4)) if has_variable else 1
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6, 8)), min_size=0, max_size=3)))
    layers = draw(st.integers(1, 2))
    spread = draw(st.booleans()) and shape
    groups: list[Places] = []
    for _ in range(layers):
        group: Places = {}
        for one in range(count):
            own = (shape[0] + one, *shape[1:]) if spread else shape
            for value in range(values):
                group[one, value] = values_of(draw, own, dtype)
        groups.append(group)
    sources = [
        f"r{number}.{{l}}.s{at}.{{e}}.w" if has_variable else f"r{number}.{{l}}.s{at}.w"
        for at in range(count)
    ]
    for layer, group in enumerate(groups):
        for (at, value), t in group.items():
            name = sources[at].replace("{l}", str(layer)).replace("{e}", str(value))
            found.before[name] = t
    operations: list[RuleOperation] = []
    was_joined, is_made = False, False
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(("one", "one", "join", "apart", "tie")))
        drawn = None
        if kind == "one":
            drawn = _one_by_one(draw, groups, draw(st.sampled_from(ONES)))
        elif kind == "join":
            over = has_variable and not was_joined and draw(st.booleans())
            if over or not has_variable or was_joined or len(_axis(groups[0], False)) > 1:
                drawn = _joined(draw, groups, draw(st.sampled_from(("stack", "concat"))), over)
                was_joined |= bool(drawn and over)
        elif kind == "apart":
            # a variable may be joined or made, not both under one name
            over = not has_variable and not is_made and draw(st.booleans())
            drawn = _taken_apart(draw, groups, draw(st.sampled_from(("split", "unstack"))), over)
            is_made |= bool(drawn and over)
            if drawn and not over and drawn[0].name == "unstack":
                drawn = None  # the number of targets alone would say how many
        if drawn is not None and len(drawn[1][0]) <= 24:
            operations.append(drawn[0])
            groups = drawn[1]
    # a variable that nothing joins stays in the names, and each of its values is a group
    targets_variable = is_made or (has_variable and not was_joined)
    if not operations:
        found.after |= {key: t for key, t in found.before.items() if key.startswith(f"r{number}.")}
        return
    total = len(_axis(groups[0], False))
    targets = [
        f"t{number}.{{l}}.{at}.{{e}}.x" if targets_variable else f"t{number}.{{l}}.{at}.x"
        for at in range(total)
    ]
    found.rules.append(TensorRule(tuple(sources), tuple(targets), tuple(operations)))
    for layer, group in enumerate(groups):
        for (at, value), t in group.items():
            name = targets[at].replace("{l}", str(layer)).replace("{e}", str(value))
            found.after[name] = t


def _bits(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype).copy_(t).reshape(-1).view(torch.uint8)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same keys, dtypes, shapes and bits."""
    assert {*found} == {*expected}
    for key, t in expected.items():
        assert found[key].dtype == t.dtype and found[key].shape == t.shape, key
        assert torch.equal(_bits(found[key]), _bits(t)), key


def forth_and_back(drawn: Drawn, folder: Path, to: str = "torch") -> None:
    """What rules make is what torch makes, and the mapping gives what there was before."""
    saved, made, back, mapping = (folder / name for name in ("a.pt", "b", "c.pt", "map.json"))
    torch.save(drawn.before, saved)
    rules = KeyRules("keep", rules=tuple(drawn.rules))
    options: dict[str, Any] = {"force": True, "fsync": False}
    convert_checkpoint(saved, made, to=to, keys=rules, save_mapping=mapping, **options)
    assert_same(load_portable(made), drawn.after)
    assert_same(load_portable(saved, keys=rules), drawn.after)
    convert_checkpoint(made, back, rules=mapping, reverse=True, verify=True, **options)
    before = torch.load(back, weights_only=True)
    assert not drawn.rules or list(before) == list(drawn.before)
    assert_same(before, drawn.before)
