"""Dicts that a pickle makes of arguments: what torch loads of them is what is converted, loaded and
compared, item by item.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptconv import convert_checkpoint, diff_checkpoints, load_portable, open_checkpoint
from ckptconv.pickles.nodes import mapping_pairs
from ckptconv.pickles.reader import read_pickle
from ckptconv.support.errors import (
    CheckpointError,
    LimitExceeded,
    MalformedCheckpoint,
    RefusedObject,
)
from ckptconv.support.limits import limits
from fuzzing.structures import call_op, global_op, int_op, storage_op, text_op, torch_zip, tuple_op
from helpers.old_torch import write

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ORDERED = global_op("collections.OrderedDict")


def tensor(offset: int) -> bytes:
    """Two values of the first storage, other ones for each offset."""
    hooks = call_op("collections.OrderedDict")
    numbers = int_op(offset), tuple_op(int_op(2)), tuple_op(int_op(1))
    return call_op("torch._utils._rebuild_tensor_v2", storage_op("0"), *numbers, b"\x89", hooks)


def pairs(*names: str, container: bytes = b"]", pair: str = "tuple") -> bytes:
    """A list (or with `container` a tuple) of pairs: tuples, or the lists that python 2 wrote."""
    made = []
    for offset, name in enumerate(names):
        inside = text_op(name) + tensor(offset)
        made.append(inside + b"\x86" if pair == "tuple" else b"](" + inside + b"e")
    return b"](" + b"".join(made) + b"e" if container == b"]" else tuple_op(*made)


def filled(*names: str, at: int = 0) -> bytes:
    """A dict, or what fills one: the SETITEMS of these names."""
    return (
        b"("
        + b"".join(text_op(name) + tensor(offset) for offset, name in enumerate(names, at))
        + b"u"
    )


def reduced(cls: str, *arguments: bytes) -> bytes:
    return call_op(cls, *arguments)


OD, DD = "collections.OrderedDict", "collections.defaultdict"
INT = global_op("builtins.int")
SHAPES = {
    "a list of tuples": reduced(OD, pairs("a", "b")),
    "a list of lists, as python 2 wrote them": reduced(OD, pairs("a", "b", pair="list")),
    "a tuple of pairs": reduced(OD, pairs("a", "b", container=b"(")),
    "a dict": reduced(OD, b"}" + filled("a", "b")),
    "another OrderedDict": reduced(OD, reduced(OD) + filled("a", "b")),
    "an OrderedDict of pairs in one of them": reduced(OD, reduced(OD, pairs("a", "b"))),
    "a defaultdict": reduced(OD, reduced(DD, INT, b"}" + filled("a")) + filled("b", at=1)),
    "a key twice": reduced(OD, pairs("a", "b", "a")),
    "an argument, and items behind it": reduced(OD, pairs("a", "b")) + filled("c", at=2),
    "an argument, and items that replace some": reduced(OD, pairs("a", "b")) + filled("a", at=2),
    "an argument that grows afterwards": b"]q\x07("
    + text_op("a")
    + tensor(0)
    + b"\x86e0"
    + reduced(OD, b"h\x07")
    + b"q\x080"
    + b"h\x07("
    + text_op("b")
    + tensor(1)
    + b"\x86e0",
    "NEWOBJ, which ignores its arguments": ORDERED
    + tuple_op(b"}(" + text_op("x") + b"Nu")
    + b"\x81"
    + filled("a"),
    "OBJ": b"(" + ORDERED + pairs("a", "b") + b"o",
    "INST": b"(" + pairs("a", "b") + b"icollections\nOrderedDict\n",
    "defaultdict of a dict": reduced(DD, INT, b"}" + filled("a", "b")),
    "defaultdict of pairs, and items": reduced(DD, b"N", pairs("a")) + filled("b", at=1),
    "dict of pairs": reduced("builtins.dict", pairs("a", "b")),
    "dict of a dict, by its name in python 2": reduced("__builtin__.dict", b"}" + filled("a", "b")),
    "Counter of a dict": reduced("collections.Counter", b"}" + filled("a", "b")),
}
REPLACED = ("a key twice", "an argument, and items that replace some")
"""Here one of the tensors that the pickle makes is in no output, and --verify says so."""


def saved(folder: Path, op: bytes) -> Path:
    return write(folder / "in.pt", torch_zip(b"\x80\x02" + op + b"."))


def seen_by_torch(path: Path) -> dict[str, list[float]]:
    loaded = torch.load(path, map_location="cpu", weights_only=False)
    return {key: value.tolist() for key, value in loaded.items()}


@pytest.mark.parametrize("shape", [name for name in SHAPES if "grows" not in name])
def test_items_that_are_an_argument_are_items(shape, tmp_path):
    path = saved(tmp_path, SHAPES[shape])
    expected = seen_by_torch(path)
    assert expected, "nothing is compared"
    whole = load_portable(path, whole=True, keys="keep")
    assert [(key, value.tolist()) for key, value in whole.items()] == [*expected.items()]
    assert {
        key: value.tolist() for key, value in load_portable(path, keys="keep").items()
    } == expected
    verify = shape not in REPLACED
    made = convert_checkpoint(path, tmp_path / "out.pt", keys="keep", verify=verify).plan.output
    loaded = torch.load(made, weights_only=True)
    assert [(key, value.tolist()) for key, value in loaded.items()] == [*expected.items()]
    made = convert_checkpoint(
        path, tmp_path / "out.safetensors", keys="keep", verify=verify
    ).plan.output
    assert {key: value.tolist() for key, value in load_file(made).items()} == expected


def test_a_dict_has_the_items_that_its_argument_had_when_it_was_made(tmp_path):
    path = saved(tmp_path, SHAPES["an argument that grows afterwards"] + b"h\x08")
    assert seen_by_torch(path) == {"a": [*load_portable(path)["a"].tolist()]}
    assert list(load_portable(path)) == ["a"]


@pytest.mark.parametrize(
    "shape", ["a list of tuples", "a dict", "defaultdict of a dict", "Counter of a dict"]
)
def test_diff_sees_the_items_that_are_an_argument(shape, tmp_path):
    (tmp_path / "less").mkdir()
    path, less = (
        saved(tmp_path, SHAPES[shape]),
        write(tmp_path / "less" / "in.pt", torch_zip(b"\x80\x02}" + filled("a") + b".")),
    )
    for whole in (False, True):
        found = diff_checkpoints(path, less, whole=whole)
        assert found.only_a == ("b",)


def test_the_kind_of_dict_survives_where_torch_knows_it(tmp_path):
    stream = (
        b"\x80\x02"
        + reduced("collections.Counter", b"](" + text_op("x") + text_op("y") + text_op("x") + b"e")
        + b"."
    )
    assert pickle.loads(stream) == Counter(x=2, y=1)
    assert mapping_pairs(read_pickle(stream)) is None
    assert dict(read_pickle(stream).pairs) == {"x": 2, "y": 1}
    tree = b"}(" + text_op("w") + tensor(0) + text_op("n") + stream[2:-1] + b"u"
    path = saved(tmp_path, tree)
    made = convert_checkpoint(path, tmp_path / "out.pt").plan.output
    for loaded in (load_portable(path, whole=True), torch.load(made, weights_only=True)):
        assert type(loaded["n"]) is Counter
        assert loaded["n"] == Counter(x=2, y=1)


WRONG = {
    "elements that are not pairs": reduced(
        OD, b"](" + text_op("a") + tensor(0) + b"\x86" + int_op(3) + b"e"
    ),
    "three parts": reduced(OD, b"](" + tuple_op(text_op("a"), tensor(0), tensor(1)) + b"e"),
    "a number": reduced(OD, int_op(3)),
    "None": reduced(OD, b"N"),
    "two arguments": reduced(OD, b"}", b"}"),
    "a factory that is a dict": reduced(DD, b"}" + filled("a")),
    "three arguments of a defaultdict": reduced(DD, INT, b"}", b"}"),
    "items appended": reduced(OD) + filled("a") + b"(" + tensor(1) + b"e",
    "a number counted": reduced("collections.Counter", int_op(5)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_python_does_not_make_a_dict_of_is_an_error(what, tmp_path):
    path = saved(tmp_path, b"}(" + text_op("w") + tensor(0) + text_op("x") + WRONG[what] + b"u")
    with pytest.raises((TypeError, ValueError, AttributeError)):
        torch.load(path, map_location="cpu", weights_only=False)
    with pytest.raises(MalformedCheckpoint):
        open_checkpoint(path)


UNTOLD = {
    "the items of an unknown object": reduced(OD, call_op("somewhere.Items")),
    "a pair that is an unknown object": reduced(OD, b"](" + call_op("somewhere.Pair") + b"e"),
    "an OrderedDict whose base was filled behind its back": reduced(
        "copyreg._reconstructor", ORDERED, global_op("builtins.dict"), b"}" + filled("x")
    ),
    "a defaultdict of an unknown object": reduced(DD, INT, call_op("somewhere.Items")),
    "a set with items": reduced("builtins.set") + b"(" + text_op("a") + tensor(1) + b"u",
    "a frozenset with a state": reduced("builtins.frozenset") + b"}" + filled("x") + b"b",
    "a namespace with items": global_op("argparse.Namespace") + b")\x81" + filled("x"),
    "a path with a state": call_op("pathlib.PosixPath", text_op("a")) + b"}" + filled("x") + b"b",
    "a size with a state": call_op("torch.Size", tuple_op(int_op(1))) + b"}" + filled("x") + b"b",
    "a deque of something else": call_op("collections.deque", b"}" + filled("x")),
    "attributes of a dict that are not its items":
    global_op("easydict.EasyDict") + b")\x81" + filled("x")
    + b"}" + filled("x", at=1) + b"b",
}  # fmt: skip


@pytest.mark.parametrize("what", UNTOLD)
def test_what_cannot_be_told_is_refused_and_listed_when_it_is_dropped(what, tmp_path):
    path = saved(tmp_path, b"}(" + text_op("w") + tensor(0) + text_op("odd") + UNTOLD[what] + b"u")
    with pytest.raises(RefusedObject, match="odd"):
        convert_checkpoint(path, tmp_path / "out.pt")
    with pytest.raises(RefusedObject, match="odd"):
        load_portable(path, whole=True)
    plan = convert_checkpoint(path, tmp_path / "out.pt", unknown="drop", verify=True).plan
    assert [item.path for item in plan.skipped] == ["odd"]
    assert torch.load(plan.output, weights_only=True)["odd"] is None


def test_a_deque_keeps_the_last_of_what_it_is_given(tmp_path):
    op = (
        call_op("collections.deque", b"](" + b"".join(map(int_op, range(5))) + b"e", int_op(3))
        + b"("
        + int_op(5)
        + b"e"
    )
    path = saved(tmp_path, b"}(" + text_op("w") + tensor(0) + text_op("d") + op + b"u")
    expected = torch.load(path, map_location="cpu", weights_only=False)["d"]
    assert load_portable(path, whole=True)["d"] == list(expected) == [3, 4, 5]


def attributed(folder: Path, *more: str) -> Path:
    """A state dict with attributes of its own: the usual `_metadata`, and tensors."""
    made = OrderedDict(w=torch.ones(2), b=torch.zeros(2))
    made._metadata = OrderedDict({"": {"version": 1}})
    for name in more:
        setattr(made, name, torch.full((3,), 7.0))
    torch.save(made, folder / "in.pt")
    return folder / "in.pt"


def test_attributes_of_a_dict_are_loaded_listed_and_compared(tmp_path):
    (tmp_path / "less").mkdir()
    path, less = attributed(tmp_path, "kept"), attributed(tmp_path / "less")
    expected = torch.load(path, weights_only=True)
    loaded = load_portable(path, whole=True)
    assert torch.equal(loaded.kept, expected.kept)
    assert loaded._metadata == expected._metadata
    plan = convert_checkpoint(path, tmp_path / "out.safetensors").plan
    assert [item.path for item in plan.skipped] == ["<state>.kept"]
    assert not convert_checkpoint(less, tmp_path / "less.safetensors").plan.skipped
    assert diff_checkpoints(path, less, whole=True).only_a == ("<attributes>",)


def test_copies_of_dicts_are_held_against_a_limit():
    many = b"}(" + b"".join(int_op(index) + b"N" for index in range(1000)) + b"uq\0"
    stream = b"\x80\x02](" + many + (ORDERED + b"q\x010" + (b"h\x01h\0\x85R") * 50) + b"e."
    assert len(pickle.loads(stream)) == 51
    assert len(read_pickle(stream)) == 51
    with limits(nodes=300_000), pytest.raises(LimitExceeded):
        read_pickle(stream)


class Odd(torch.nn.Linear):
    """A child that pickles as a call that makes it: no state tells its parameters."""

    def __reduce__(self):
        return make_odd, (self.weight.detach(), self.bias.detach())


def make_odd(weight: torch.Tensor, bias: torch.Tensor) -> Odd:
    made = Odd(weight.shape[1], weight.shape[0])
    made.load_state_dict({"weight": weight, "bias": bias})
    return made


def test_a_child_of_a_module_that_is_no_module_does_not_vanish(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), Odd(3, 1))
    torch.save(module, tmp_path / "in.pt")
    assert len(torch.load(tmp_path / "in.pt", weights_only=False).state_dict()) == 4
    with pytest.raises(RefusedObject, match="make_odd"):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt")
    for convert in (
        lambda: load_portable(tmp_path / "in.pt"),
        lambda: convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors"),
    ):
        with pytest.raises(CheckpointError):
            convert()
    assert [item.name for item in tmp_path.iterdir()] == ["in.pt"]
