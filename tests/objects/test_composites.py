"""Sparse, quantized and nested tensors: what torch would rebuild without a look is held against its
sizes first.

The oracle is torch's own check, which it leaves out when it loads
(`check_sparse_tensor_invariants`), and its buffers.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptconv import convert_checkpoint, load_portable
from ckptconv.objects.composites import _is_ascending
from ckptconv.objects.encodings import ENCODINGS
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint
from helpers import oracle
from helpers.examples import examples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Parts = dict[str, torch.Tensor]
LONG = torch.int64


def coo(
    indices: list[list[int]],
    size: list[int],
    values: torch.Tensor | None = None,
    coalesced: bool = False,
) -> Any:
    given = torch.ones(len(indices[0])) if values is None else values
    recipe = {
        "encoding": "sparse",
        "layout": "torch.sparse_coo",
        "size": size,
        "coalesced": coalesced,
    }
    return recipe, {"indices": torch.tensor(indices, dtype=LONG), "values": given}


def compressed(
    layout: str, crow: Any, col: Any, size: list[int], values: torch.Tensor | None = None
) -> Any:
    columns = torch.as_tensor(col, dtype=LONG)
    parts = {"compressed_indices": torch.as_tensor(crow, dtype=LONG), "plain_indices": columns}
    return (
        {"encoding": "sparse", "layout": f"torch.sparse_{layout}", "size": size},
        {**parts, "values": torch.ones(columns.shape) if values is None else values},
    )


def channels(axis: Any, scales: int, zeros: list[int], dtype: str = "qint8") -> Any:
    recipe = {"encoding": "quantized", "dtype": dtype, "scheme": "per_channel_affine", "axis": axis}
    integers = torch.ones(2, 3, dtype=torch.int8 if dtype == "qint8" else torch.uint8)
    parts = {
        "integers": integers,
        "scales": torch.ones(scales, dtype=torch.float64),
        "zero_points": torch.tensor(zeros),
    }
    return recipe, parts


def whole(zero_point: int, dtype: str = "qint8") -> Any:
    recipe = {
        "encoding": "quantized",
        "dtype": dtype,
        "scheme": "per_tensor_affine",
        "scale": 0.5,
        "zero_point": zero_point,
    }
    return recipe, {
        "integers": torch.ones(3, dtype={"qint8": torch.int8, "quint8": torch.uint8}[dtype])
    }


def nested(sizes: Any, strides: Any, offsets: Any, count: int = 6) -> Any:
    given = {"sizes": sizes, "strides": strides, "offsets": offsets}
    return {"encoding": "nested"}, {
        "buffer": torch.ones(count),
        **{name: torch.tensor(part) for name, part in given.items()},
    }


FAR = 1 << 40
HUGE_SCALE = whole(0, "quint8")
HUGE_SCALE[0]["scale"] = 10**400
INTEGER_SCALES = channels(1, 3, [0, 0, 0])
INTEGER_SCALES[1]["scales"] = torch.ones(3, dtype=LONG)
BAD: dict[str, tuple[Any, str]] = {
    "coo, too large": (coo([[0, 5], [0, 0]], [2, 2]), "an index of a sparse tensor is 5, where "
                                                      "its size is 2"),
    "coo, far": (coo([[FAR], [0]], [2, 2]), "an index"),
    "coo, negative": (coo([[0], [-1]], [2, 2]), "an index of a sparse tensor is -1"),
    "coo, into an empty size": (coo([[0]], [0]), "an index"),
    "coo, values of another count": (coo([[0], [0]], [2, 2], torch.ones(3)), "do not fit"),
    "coo, values of another shape": (coo([[0]], [2, 3], torch.ones(1, 4)), "do not fit"),
    "coo, size overflows": (coo([[0], [0], [0]], [1 << 62, 1 << 62, 4]), "its size"),
    "coo, not coalesced": (coo([[1, 0], [0, 1]], [2, 2], coalesced=True), "says that it is "
                                                                          "coalesced"),
    "coo, twice": (coo([[1, 1], [0, 0]], [2, 2], coalesced=True), "says that it is coalesced"),
    "csr, column too large": (compressed("csr", [0, 1, 2], [0, 7], [2, 2]), "an index of a sparse "
                                                                            "tensor is 7"),
    "csr, column negative": (compressed("csr", [0, 1, 2], [0, -1], [2, 2]), "an index"),
    "csr, not from 0": (compressed("csr", [1, 1, 2], [0, 1], [2, 2]), "rise from 0 to 2"),
    "csr, not to the end": (compressed("csr", [0, 1, 1], [0, 1], [2, 2]), "rise from 0 to 2"),
    "csr, beyond the end": (compressed("csr", [0, 1, FAR], [0, 1], [2, 2]), "rise from 0 to 2"),
    "csr, falling": (compressed("csr", [0, 2, 1, 2], [0, 1], [3, 2]), "rise from 0 to 2"),
    "csr, too few rows": (compressed("csr", [0, 2], [0, 1], [2, 2]), "do not fit"),
    "csr, of a vector": (compressed("csr", [0, 2], [0, 1], [2]), "do not fit"),
    "csr, second of a batch": (compressed("csr", [[0, 1], [0, 2]], [[0], [0]], [2, 1, 1]),
        "rise from 0 to 1"),
    "csc, row too large": (compressed("csc", [0, 1, 2, 2], [0, 2], [2, 3]), "an index of a sparse "
                                                                            "tensor is 2"),
    "bsr, block does not divide": (compressed("bsr", [0, 1], [0], [2, 3], torch.ones(1, 2, 2)),
        "do not fit"),
    "bsr, values without blocks": (compressed("bsr", [0, 1, 2], [0, 1], [2, 2]), "do not fit"),
    "bsr, empty block": (compressed("bsr", [0, 1], [0], [2, 2], torch.ones(1, 0, 2)), "do not fit"),
    "bsr, column too large": (compressed("bsr", [0, 1], [1], [2, 2], torch.ones(1, 2, 2)),
        "an index"),
    "bsc, row too large": (compressed("bsc", [0, 1], [2], [4, 2], torch.ones(1, 2, 2)), "an index"),
    "per tensor, zero point": (whole(128),
        r"its zero point is not a value of qint8 \(-128 to 127\)"),
    "per tensor, unsigned": (whole(-1, "quint8"), "its zero point is not a value of quint8"),
    "per channel, scales of integers": (INTEGER_SCALES, "its scales are not floating numbers"),
    "per channel, too few scales": (channels(1, 2, [0, 0, 0]), "for each of its 3 channels"),
    "per channel, too many zero points": (channels(0, 2, [0, 0, 0]), "for each of its 2 channels"),
    "per channel, zero point": (channels(0, 2, [0, 300]), "a zero point is not a number from -128 "
                                                          "to 127"),
    "nested, beyond the buffer": (nested([[2, 3]], [[3, 1]], [1]), "reaches beyond its buffer of "
                                                                   "6 elements"),
    "nested, far": (nested([[2, 3]], [[FAR, 1]], [0]), "reaches beyond"),
    "nested, overflowing": (nested([[1 << 62, 2]], [[4, 1 << 61]], [0]), "sizes or strides that "
                                                                         "are too large"),
    "nested, negative size": (nested([[-1, 3]], [[3, 1]], [0]), "negative"),
    "nested, negative stride": (nested([[2, 3]], [[-3, 1]], [3]), "negative"),
    "nested, negative offset": (nested([[2, 3]], [[3, 1]], [-8]), "negative"),
    "nested, more than there is": (nested([[1000, 6]], [[0, 1]], [0]), "claims 6000 elements"),
    "nested, strides of others": (nested([[2, 3]], [[3]], [0]), "a nested tensor has sizes of"),
    "nested, offsets of others": (nested([[2, 3]], [[3, 1]], [0, 0]),
        "a nested tensor has sizes of"),
    "nested, no tensors with sizes": (nested(torch.zeros(0, 1), torch.zeros(0, 1), [], 0),
        "a nested tensor without tensors"),
    "nested, floats": (nested([[2.0, 3.0]], [[3.0, 1.0]], [0.0]), "not int64"),
}  # fmt: skip


def recipe_file(folder: Path, recipe: dict[str, Any], parts: Parts) -> Path:
    """A safetensors file with the tensor `odd` in components."""
    path = folder / "odd.safetensors"
    save_file({"w": torch.ones(2), **{f"odd.{name}": part for name, part in parts.items()}}, path,
              {"format": "pt", ENCODINGS: json.dumps({"odd": recipe})})  # fmt: skip
    return path


class Rebuilt:
    """Pickles as a call of one of torch's rebuild functions, as `torch.save` would write it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def torch_file(folder: Path, recipe: dict[str, Any], parts: Parts) -> Path:
    """The same tensor in a torch file, where torch.save puts such tensors."""
    tensors = tuple(parts.values())
    if recipe["encoding"] == "sparse":
        layout = Rebuilt(torch.serialization._get_layout, (recipe["layout"],))
        flags = (recipe["coalesced"],) if "coalesced" in recipe else ()
        value = Rebuilt(
            torch._utils._rebuild_sparse_tensor,
            (layout, (*tensors, torch.Size(recipe["size"]), *flags)),
        )
    elif recipe["encoding"] == "nested":
        value = Rebuilt(torch._utils._rebuild_nested_tensor, tensors)
    else:
        made = torch.quantize_per_tensor(
            parts["integers"].float(), 1.0, 0, getattr(torch, recipe["dtype"])
        )
        scheme = getattr(torch, recipe["scheme"])
        params = (
            (scheme, recipe["scale"], recipe["zero_point"])
            if len(parts) == 1
            else (scheme, *tensors[1:], recipe["axis"])
        )
        shape = tuple(made.shape)
        args = (made._typed_storage(), 0, shape, made.stride(), params, False, OrderedDict())
        value = Rebuilt(torch._utils._rebuild_qtensor, args)
    torch.save({"w": torch.ones(2), "odd": value}, folder / "odd.pt")
    return folder / "odd.pt"


def test_a_scale_that_is_text_is_refused(tmp_path):
    recipe, parts = whole(0)
    path = torch_file(tmp_path, recipe | {"scale": "half"}, parts)
    for attempt in (
        lambda: load_portable(path),
        lambda: convert_checkpoint(path, tmp_path / "out.pt", fsync=False),
    ):
        with pytest.raises(MalformedCheckpoint, match="its scale is not a number"):
            attempt()


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("file", [recipe_file, torch_file])
def test_parts_that_do_not_fit_are_refused_before_they_are_loaded_or_converted(
    file, name, tmp_path
):
    (recipe, parts), told = BAD[name]
    path = file(tmp_path, recipe, parts)
    for attempt in (
        lambda: load_portable(path),
        lambda: load_portable(path, mmap=False, whole=True),
        lambda: convert_checkpoint(path, tmp_path / "out.pt", fsync=False),
        lambda: convert_checkpoint(path, tmp_path / "out.safetensors", fsync=False),
    ):
        with pytest.raises(MalformedCheckpoint, match=told) as caught:
            attempt()
        assert (caught.value.path, caught.value.where) == (str(path), "odd")
    assert {item.name for item in tmp_path.iterdir()} == {path.name}


def test_an_axis_that_is_none_is_refused(tmp_path):
    path = torch_file(tmp_path, *channels(2, 3, [0, 0, 0]))
    with pytest.raises(
        MalformedCheckpoint, match=r"odd: its axis 2 is not one of the 2 of its shape"
    ):
        convert_checkpoint(path, tmp_path / "out.pt")
    with pytest.raises(MalformedCheckpoint, match="odd"):
        load_portable(recipe_file(tmp_path, *channels(2, 3, [0, 0, 0])))


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda made: torch.nn.Parameter(made, requires_grad=False),
        lambda made: torch.nn.Buffer(made),
    ],
)
def test_a_sparse_tensor_within_a_parameter_or_a_subclass_is_checked_too(wrapped, tmp_path):
    bad = torch.sparse_coo_tensor(
        torch.tensor([[7], [0]]), torch.ones(1), (2, 2), check_invariants=False
    )
    torch.save({"w": torch.ones(1), "odd": wrapped(bad)}, tmp_path / "odd.pt")
    for output in ("out.pt", "out.safetensors"):
        with pytest.raises(CheckpointError, match=r"odd(\.<argument 0>)?: "):
            convert_checkpoint(tmp_path / "odd.pt", tmp_path / output)
        assert not (tmp_path / output).exists()


def test_a_large_one_is_read_to_its_end(tmp_path):
    """Several chunks of indices, the last of which is wrong."""
    count = 400_000
    indices = torch.stack([torch.arange(count), torch.zeros(count, dtype=LONG)])
    made = torch.sparse_coo_tensor(indices, torch.ones(count), (count, 1), is_coalesced=True)
    crow = made.to_sparse_csr()
    torch.save({"coo": made, "csr": crow}, tmp_path / "good.pt")
    assert torch.equal(load_portable(tmp_path / "good.pt")["csr"].values(), crow.values())
    indices[0, -1] = count
    torch.save({"coo": made}, tmp_path / "bad.pt")
    with pytest.raises(MalformedCheckpoint, match=f"coo: an index of a sparse tensor is {count}"):
        load_portable(tmp_path / "bad.pt")
    indices[0, -1] = count - 2
    torch.save({"coo": made}, tmp_path / "bad.pt")
    with pytest.raises(MalformedCheckpoint, match="coo: says that it is coalesced"):
        load_portable(tmp_path / "bad.pt")
    crow.crow_indices()[-2] = 3
    torch.save({"csr": crow}, tmp_path / "bad.pt")
    with pytest.raises(MalformedCheckpoint, match="csr: the compressed indices"):
        load_portable(tmp_path / "bad.pt")


def test_what_is_odd_but_right_is_taken(tmp_path):
    """Empty ones, columns that are not sorted, views of a nested tensor: what torch itself saves
    and computes with.
    """
    two = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    scales, numbers = torch.rand(4) + 0.1, torch.rand(4, 6)
    tree = {
        "coo, of no dimensions": torch.sparse_coo_tensor(torch.empty(0, 1, dtype=LONG),
            torch.ones(1), ()),
        "coo, empty size": torch.sparse_coo_tensor(torch.empty(2, 0, dtype=LONG), torch.empty(0),
            (0, 1 << 40)),
        "csr, no rows": torch.sparse_csr_tensor(torch.tensor([0]), torch.empty(0, dtype=LONG),
            torch.empty(0), (0, 3)),
        "csr, unsorted": torch.sparse_csr_tensor(torch.tensor([0, 2]), torch.tensor([1, 0]),
            torch.ones(2), (1, 2),
                                                 check_invariants=False),
        "csr, batch": torch.stack([torch.eye(3), torch.eye(3)]).to_sparse_csr(),
        "bsr, batch of blocks": torch.ones(2, 4, 6).to_sparse_bsr((2, 3)),
        "nested, of scalars": torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2.0)]),
        "nested, of empty ones": torch.nested.nested_tensor([torch.ones(0, 3), torch.ones(2, 3)]),
        "nested, transposed": two.transpose(1, 2),
        "float zero points": torch.quantize_per_channel(numbers, scales, torch.rand(4), 0,
            torch.quint4x2),
        "two bits": torch.quantize_per_channel(numbers, scales, torch.rand(4), 0, torch.quint2x4),
    }  # fmt: skip
    torch.save(tree, tmp_path / "in.pt")
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", fsync=False, verify=True)
    assert (
        load_portable(tmp_path / "in.pt").keys()
        == oracle.load(tmp_path / "out.pt").keys()
        == tree.keys()
    )
    # which torch does not load itself
    torch.save({"empty": torch.nested.nested_tensor([])}, tmp_path / "empty.pt")
    convert_checkpoint(tmp_path / "empty.pt", tmp_path / "again.pt", fsync=False, verify=True)


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    size=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    indices=st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 4)), max_size=4),
    coalesced=st.booleans(),
)
def test_coo_indices_are_refused_just_where_torch_s_own_check_refuses(
    tmp_path, size, indices, coalesced
):
    pairs = [[row for row, _ in indices], [column for _, column in indices]]
    recipe, parts = coo(pairs, size, torch.ones(len(indices)), coalesced)
    agrees(tmp_path, recipe, parts, lambda: torch.sparse_coo_tensor(
        parts["indices"], parts["values"], size, check_invariants=True,
        is_coalesced=coalesced))  # fmt: skip


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    crow=st.lists(st.integers(-1, 3), min_size=3, max_size=3),
    col=st.sets(st.integers(-1, 3), max_size=3),
    layout=st.sampled_from(["csr", "csc"]),
)  # fmt: skip
def test_compressed_indices_are_refused_just_where_they_are_wrong(tmp_path, crow, col, layout):
    """torch's own check reads where these point before it refuses, and dies of it: it is asked of
    the right ones only.
    """
    columns = sorted(col)
    right = crow[0] == 0 and crow == sorted(crow) and crow[-1] == len(columns) and col <= {0, 1, 2}
    size = [2, 3] if layout == "csr" else [3, 2]
    recipe, parts = compressed(layout, crow, columns, size, torch.ones(len(columns)))

    def make() -> torch.Tensor:
        if not right:
            raise RuntimeError
        return torch.sparse_compressed_tensor(
            *parts.values(), size, layout=getattr(torch, f"sparse_{layout}"), check_invariants=True
        )

    agrees(tmp_path, recipe, parts, make)


def agrees(
    folder: Path, recipe: dict[str, Any], parts: Parts, make: Callable[[], torch.Tensor]
) -> None:
    """Loading is refused where `make`, which has torch check, raises; and else gives the same
    values.
    """
    path = recipe_file(folder, recipe, parts)
    try:
        expected = make()
    except RuntimeError:
        with pytest.raises(MalformedCheckpoint):
            load_portable(path)
        return
    assert torch.equal(load_portable(path)["odd"].to_dense(), expected.to_dense())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5))
def test_columns_are_ascending_as_tuples_are(columns):
    rows = torch.tensor(columns, dtype=LONG).reshape(-1, 2).t().numpy()
    assert _is_ascending(rows) == all(a < b for a, b in pairwise(columns))


def test_a_scale_that_no_float_holds_is_refused(tmp_path):
    recipe, parts = HUGE_SCALE
    source = recipe_file(tmp_path, recipe, parts)
    for attempt in (
        lambda: load_portable(source),
        lambda: convert_checkpoint(source, tmp_path / "out.pt"),
    ):
        with pytest.raises(MalformedCheckpoint, match="do not fit the recipe"):
            attempt()
