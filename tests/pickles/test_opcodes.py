"""Where pickles end: the same byte at which `pickle` and `pickletools` stop, found through windows
of any size.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptconv import limits
from ckptconv.io.source import MemorySource
from ckptconv.pickles.opcodes import read_pickles
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint
from helpers.examples import examples

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sets(st.integers())
    | st.complex_numbers(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner, inner, inner)
    ),
)


def source(content: bytes) -> MemorySource:
    return MemorySource(content, Path("file"))


@pytest.mark.trust
@given(
    st.lists(st.tuples(VALUES, st.integers(0, 5)), min_size=1, max_size=4),
    st.binary(max_size=3),
    st.integers(1, 40),
)
@settings(max_examples=examples(300), deadline=None)
def test_pickles_back_to_back_are_cut_where_they_end(values, before, window):
    streams = [pickle.dumps(value, protocol) for value, protocol in values]
    content = before + b"".join(streams) + b"payload.\0("
    found, end = read_pickles(source(content), len(before), len(streams), window=window)
    assert found == streams
    assert end == len(before) + sum(map(len, streams))


ARGUMENTS = {
    "decimalnl_short": b"1\n",
    "decimalnl_long": b"1L\n",
    "floatnl": b"1.5\n",
    "stringnl": b"'a'\n",
    "stringnl_noescape": b"a\n",
    "stringnl_noescape_pair": b"a\nb\n",
    "unicodestringnl": b"a\n",
}
SIZED = {
    **dict.fromkeys(("string1", "bytes1", "unicodestring1", "long1"), 1),
    **dict.fromkeys(("string4", "bytes4", "unicodestring4", "long4"), 4),
    **dict.fromkeys(("bytes8", "bytearray8", "unicodestring8"), 8),
}
OPCODES = [opcode for opcode in pickletools.opcodes if opcode.name != "STOP"]


def argument_of(opcode: pickletools.OpcodeInfo) -> bytes:
    """An argument of the opcode, full of bytes that are STOP."""
    if opcode.arg is None:
        return b""
    if (width := SIZED.get(opcode.arg.name)) is not None:
        return (5).to_bytes(width, "little") + b"....."
    return ARGUMENTS.get(opcode.arg.name) or b"." * opcode.arg.n


@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: opcode.name)
def test_every_opcode_is_stepped_over_with_its_argument(opcode):
    stream = opcode.code.encode("latin1") + argument_of(opcode) + b"."
    list_of_opcodes(stream)
    for window in range(1, len(stream) + 1):
        assert read_pickles(source(stream + b"more"), 0, 1, window=window) == (
            [stream],
            len(stream),
        )
    for length in range(len(stream)):
        with pytest.raises(MalformedCheckpoint, match="ends in the middle of a pickle"):
            read_pickles(source(stream[:length]), 0, 1)


def list_of_opcodes(stream: bytes) -> None:
    """The oracle itself: python's own tool finds one opcode and a STOP."""
    found = []
    file = io.BytesIO(stream)
    for opcode, _, _ in pickletools.genops(file):
        found.append(opcode.name)
    assert len(found) == 2 and file.tell() == len(stream)


def test_other_bytes_are_no_opcodes():
    others = sorted(set(range(256)) - {ord(opcode.code) for opcode in pickletools.opcodes})
    for byte in others:
        with pytest.raises(MalformedCheckpoint, match="unknown opcode"):
            read_pickles(source(b"\x80\2" + bytes([byte]) * 9), 0, 1)
    assert len(others) == 256 - len(pickletools.opcodes)


def test_a_length_beyond_the_file_is_refused_at_once():
    with pytest.raises(MalformedCheckpoint, match="ends in the middle"):
        read_pickles(source(b"\x8e" + b"\xff" * 8 + b"."), 0, 1)
    with pytest.raises(MalformedCheckpoint, match="ends in the middle"):
        read_pickles(source(b"N."), 3, 1)


def test_pickles_that_are_too_long_are_refused():
    with limits(pickle_bytes=100):
        assert read_pickles(source(b"N" * 99 + b"."), 0, 1, window=7)[1] == 100
        with pytest.raises(LimitExceeded, match="longer than 100 bytes"):
            read_pickles(source(b"N" * 100 + b"."), 0, 1, window=7)
