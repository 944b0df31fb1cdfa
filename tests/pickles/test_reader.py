"""The pickle reader and writer: what a stream says is what comes out, quick ways and slow ways
alike.
"""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from collections import OrderedDict, deque
from pathlib import Path

import pytest
import torch

from ckptconv.io.source import MemorySource
from ckptconv.pickles import memo
from ckptconv.pickles import reader as unpickling
from ckptconv.pickles.nodes import ABSENT, Call, Dict, Global, PersistentId, mapping_pairs
from ckptconv.pickles.opcodes import read_pickles
from ckptconv.pickles.reader import read_pickle
from ckptconv.pickles.writer import integer, write_pickle
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint, RefusedObject
from helpers.examples import some


def plain(node):
    """A node as plain comparable Python, sharing left aside."""
    if isinstance(node, Dict):
        return {"dict": [(plain(key), plain(value)) for key, value in node.pairs]}
    if isinstance(node, Call):
        rest = [
            plain(part)
            for part in (node.func, node.args, node.kwargs, list(node.items), list(node.pairs))
        ]
        return {
            "call": [
                *rest,
                plain(node.state) if node.state is not ABSENT else "no state",
            ]
        }
    if isinstance(node, Global):
        return f"global {node.path}"
    if isinstance(node, PersistentId):
        return {"pid": plain(node.pid)}
    if isinstance(node, (list, tuple)):
        return (type(node).__name__, [plain(item) for item in node])
    return (type(node).__name__, node)


def torch_pickle(value, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    if legacy:
        streams, _ = read_pickles(MemorySource(buffer.getvalue(), Path("old.pt")), 0, 5)
        return streams[3]
    return zipfile.ZipFile(buffer).read("archive/data.pkl")


@pytest.fixture
def slow(monkeypatch):
    def without_runs(stream, **given):
        with monkeypatch.context() as patch:
            patch.setattr(unpickling, "RUN", lambda *_: None)
            return read_pickle(stream, **given)

    return without_runs


TENSORS = OrderedDict(
    (f"layer.{index}.weight", torch.zeros(shape))
    for index, shape in enumerate(
        [(), (0,), (3,), (2, 300), (1, 2, 70000), (1, 1, 1, 2), (1,) * 9] * 40
    )
)


@pytest.mark.parametrize("legacy", [False, True])
def test_tensor_runs_read_as_the_opcodes_one_by_one(legacy, slow):
    stream = torch_pickle(
        {"a": TENSORS, "b": list(TENSORS.values()), "p": torch.nn.Parameter(torch.ones(3))}, legacy
    )
    matched = sum(1 for _ in memo.RUN.__self__.finditer(stream))
    assert matched > 100, "the quick way was not taken, so nothing was compared"
    assert plain(read_pickle(stream)) == plain(slow(stream))


@pytest.mark.parametrize("legacy", [False, True])
def test_values_that_a_run_has_put_can_be_fetched(legacy, slow):
    stream = torch_pickle([torch.zeros(5) for _ in range(60)], legacy)
    run = list(memo.RUN.__self__.finditer(stream))[-1]
    puts = [run[group] for group in (10, 14, 17, 19, 22, 23)]
    # a list that fetches the last run's six values by hand, behind the tensors
    fetches = b"".join(b"j" + put for put in puts)
    patched = b"\x80\x02](" + stream[2:-1] + fetches + b"e."
    assert plain(read_pickle(patched)) == plain(slow(patched))
    assert len(read_pickle(patched)) == 7


@pytest.mark.parametrize("index", [None, b"word", b"\xff\xff\0\1"])
def test_entries_read_as_the_opcodes_one_by_one(index, slow):
    stream = torch_pickle(TENSORS)
    entries = [run for run in memo.RUN.__self__.finditer(stream) if run[3] is not None]
    assert len(entries) > 100, "the quick way was not taken, so nothing was compared"
    entry = entries[90]
    # the key's memo index may look like a part of the key
    key_put = entry[4] if index is None else index
    patched = stream[: entry.start(4)] + key_put + stream[entry.end(4) :]
    # more items, which fetch what this entry and the end of the one before it have put
    puts = (key_put, entry[1], entry[10])
    fetches = b"".join(b"(K%cj%bu" % (number, put) for number, put in enumerate(puts))
    patched = patched[:-1] + fetches + b"."
    assert plain(read_pickle(patched)) == plain(slow(patched))


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_of_every_protocol(protocol):
    value = [None, True, False, 0, 255, 256, -1, 2**31, -(2**70), 10**50, 1.5, float("inf"), "text",
        "é\n", "", (), (1,),
             (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [[]],
             b"bytes" * 100 if protocol > 2 else None]  # fmt: skip
    assert read_pickle(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_dicts_keep_order_and_shared_objects_stay_one(protocol):
    shared = [1]
    root = read_pickle(pickle.dumps({"b": shared, "a": shared, 3: {}}, protocol))
    assert [key for key, _ in mapping_pairs(root)] == ["b", "a", 3]
    assert root.pairs[0][1] is root.pairs[1][1]


@pytest.mark.parametrize(
    ("protocol", "kept"),
    [(4, 300), (2, 300), (5, 300), pytest.param(2, memo._REMEMBERED, marks=pytest.mark.trust)],
)
def test_what_was_put_long_ago_is_fetched_however_many_values_were_put_since(
    protocol, kept, monkeypatch
):
    monkeypatch.setattr(memo, "_REMEMBERED", kept)
    monkeypatch.setattr(unpickling, "_LOOK", 1 << 12)
    chance = random.Random(protocol)
    known = [[index] for index in range(30_000 if kept > 300 else 3_000)]
    value = [(index, chance.choice(known[: index + 1])) for index in range(len(known))] + known
    root = read_pickle(pickle.dumps(value, protocol))
    assert root == value
    firsts = {pair[1][0]: pair[1] for pair in root[: len(known)]}
    assert all(firsts.get(item[0], item) is item for item in root[len(known) :])


def test_what_only_a_text_fetches_is_refused_once_it_was_let_go_of(monkeypatch):
    monkeypatch.setattr(memo, "_REMEMBERED", 300)
    monkeypatch.setattr(unpickling, "_LOOK", 1 << 12)
    stream = b"\x80\4" + b"N\x940" * 3_000 + b"g%d\n."
    assert read_pickle(stream % 299) is None
    with pytest.raises(MalformedCheckpoint, match="never written"):
        read_pickle(stream % 400)


PUT, MEMOIZE, GET = (
    (lambda index: b"q" + bytes([index])),
    (lambda _: b"\x94"),
    (lambda index: b"h" + bytes([index])),
)


@pytest.mark.parametrize("seed", some(50, range(300)))
def test_memo_entries_of_both_kinds_are_those_of_pickle(seed):
    chance = random.Random(seed)
    stream = b"\x80\4]("
    for value in range(chance.randrange(1, 12)):
        stream += (
            b"K" + bytes([value]) + chance.choice([PUT, MEMOIZE, MEMOIZE])(chance.randrange(6))
        )
        stream += GET(chance.randrange(6)) if chance.random() < 0.5 else b""
    stream += b"e."
    try:
        expected = pickle.loads(stream)
    except pickle.UnpicklingError:
        with pytest.raises(MalformedCheckpoint, match="never written"):
            read_pickle(stream)
    else:
        assert read_pickle(stream) == expected


class Plain:
    """An object with attributes."""

    def __init__(self, **given):
        self.__dict__.update(given)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_and_calls_in_runs_read_as_their_opcodes_one_by_one(protocol, monkeypatch):
    value = [
        Plain(size=torch.Size([index]), other=[index], same=torch.Size([1, 2]), none=torch.Size([]))
        for index in range(300)
    ]
    stream = pickle.dumps([*value, *value, Plain()], protocol)
    quick = read_pickle(stream)
    monkeypatch.setattr(unpickling, "_CALLED_WITH_TUPLE", b"never")
    monkeypatch.setattr(unpickling, "_NEW_WITH_STATE", b"never")
    assert plain(quick) == plain(read_pickle(stream))
    assert all(first is second for first, second in zip(quick[:300], quick[300:600], strict=True))


@pytest.mark.trust
def test_objects_without_end_on_the_stack_are_limited():
    with pytest.raises(LimitExceeded, match="side by side"):
        read_pickle(b"\x80\4N" + b")\x81\x94}\x94" * 500_001 + b".")


def test_written_streams_are_read_by_pickle_itself():
    value = {
        "x": [1, 2.5, "é", None, True, -(2**80), (1, (2, (3, 4, 5, 6)))],
        "y": OrderedDict([("k", b"\x00\xff")]),
        7: (),
    }
    stream = write_pickle(
        read_pickle(pickle.dumps(value, 4)), lambda node, writer: pytest.fail("no leaves here")
    )
    back = pickle.loads(stream)
    assert back == value and list(back) == list(value) and type(back["y"]) is OrderedDict


def test_sharing_and_cycles_survive_writing():
    value: dict = {"shared": [1]}
    value["again"] = value["shared"]
    value["self"] = value
    back = pickle.loads(
        write_pickle(read_pickle(pickle.dumps(value, 2)), lambda node, writer: node)
    )
    assert back["again"] is back["shared"] and back["self"] is back


def test_ten_thousand_items_in_batches():
    value = {"l": list(range(10_000)), "d": {str(i): i for i in range(10_000)}}
    assert (
        pickle.loads(write_pickle(read_pickle(pickle.dumps(value, 2)), lambda node, writer: node))
        == value
    )


def test_items_of_an_object_in_batches_are_all_kept():
    value = deque(range(2500))  # APPENDS each 1,000
    stream = write_pickle(read_pickle(pickle.dumps(value, 2)), lambda node, writer: node)
    assert pickle.loads(stream) == value


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b"", "no end"),
        (b"\x80\x02", "no end"),
        (b"\x80\x09N.", "protocol"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "declares"),
        (b"\x80\x04\x8e" + b"\xff" * 8 + b"x.", "declares"),
        (b"\x80\x02h\x05.", "never written"),
        (b"\x80\x02t.", "stack"),
        (b"\x80\x02(N.", "left on its stack"),
        (b"\x80\x02NN.", "left on its stack"),
        (b"\x80\x02\x82\x01.", "opcode"),
        (b"\x80\x02Pname\n.", "protocol 0"),
        (b"\x80\x02N}b.", "state"),
        (b"\x80\x02NNa.", "not a list"),
        (b"\x80\x02NNNs.", "not a dict"),
        (b"\x80\x02}(Nu.", "without a value"),
        (b"\x80\x04\x95\x04\0\0\0\0\0\0\0X\x04\0\0\0abcd.", "frame"),
        (b"\x80\x04\x95\xff\0\0\0\0\0\0\0N.", "declares"),
        (b"\x80\x02I99x\n.", "not a number"),
        (b"\x80\x02N.N", "follow the end"),
        (b"\x80\x06N.", "unknown protocol 6"),
        (b"\x80\x02cm\nC\nNR.", "calls something with arguments that are not a tuple"),
        (b"\x80\x02cm\nC\nN\x81.", "makes an object with arguments that are not a tuple"),
        (b"\x80\x04cm\nC\nN}\x92.", "makes an object with arguments that are not a tuple"),
        (b"\x80\x02cm\nC\n)R}b}b.", "sets the state of one object twice"),
        (b"\x80\x04](N\x90.", "adds to something that is not a set"),
        (b"\x80\x04\x95\x0c\0\0\0\0\0\0\0\x95\x01\0\0\0\0\0\0\0N0N.", "a frame within a frame"),
        (b"I010\n.", "begins with 0"),
        (b"L-0010L\n.", "begins with 0"),
        (b"S'a\n.", "string without quotes"),
        (b"S'\n.", "string without quotes"),
        (b"Sab\n.", "string without quotes"),
    ],
)
def test_broken_streams_are_named(stream, words):
    with pytest.raises(MalformedCheckpoint, match=words):
        read_pickle(stream)


@pytest.mark.parametrize(
    ("stream", "value"),
    [
        *((b"I%s\n." % digits, int(digits)) for digits in (b"0", b"-7", b"+12", b"100")),
        *((b"L%s\n." % digits, int(digits[:-1])) for digits in (b"0L", b"-70L")),
        (b"I00\n.", False),
        (b"I01\n.", True),
        (b"S''\n.", ""),
        (b"S'a\"'\n.", 'a"'),
    ],
)
def test_values_in_lines_are_those_of_pickle(stream, value):
    found = read_pickle(stream)
    assert (found, type(found)) == (value, type(value)) and pickle.loads(stream) == value


@pytest.mark.parametrize("bits", [0, 8, 16, 31, 32, 63, 64, 127, 128, 2031])
def test_integers_are_written_as_pickle_writes_them(bits):
    for value in {sign * ((1 << bits) + more) for sign in (1, -1) for more in (-1, 0, 1)}:
        written = b"\x80\x02" + integer(value) + b"."
        assert pickle.loads(written) == value
        if value != -(1 << bits):  # which may have a byte more
            assert written == pickle.dumps(value, 2)


def test_marks_without_end_are_limited():
    with pytest.raises(LimitExceeded):
        read_pickle(b"\x80\x02" + b"(" * 100_000)


def test_nothing_named_is_imported_or_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = read_pickle(b"\x80\x02cposix\nmkdir\nX\x03\0\0\0pwn\x85R.")
    assert root.name == "posix.mkdir" and root.args == ("pwn",)
    assert not (tmp_path / "pwn").exists()


def test_an_object_made_of_itself_is_refused_where_pickle_gives_up():
    class Itself:
        def __reduce__(self):
            return list, (self,)

    with pytest.raises(RecursionError):
        pickle.dumps(Itself())
    made = Call(Global("builtins", "list"), ())
    made.args = (made,)
    with pytest.raises(RefusedObject, match="contains itself"):
        write_pickle(made, lambda node, writer: b"N")
