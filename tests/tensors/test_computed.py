"""Computed tensors: every operation keeps the same promises; torch is the oracle of its values."""

from __future__ import annotations

import pickle
import zlib
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from ckptconv import VerificationFailed, average, convert_checkpoint, load_portable
from ckptconv.io.source import MemorySource
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint
from ckptconv.tensors import computed as computed_module
from ckptconv.tensors import stream
from ckptconv.tensors.ahead import runs_of
from ckptconv.tensors.casting import Cast
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.computed import Computed, Widener, computed, elementwise, iter_cast_chunks
from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.dtypes import BLOCKS, BY_NAME
from ckptconv.tensors.fold import RunningCrc, fold
from ckptconv.tensors.layouts import apart
from ckptconv.tensors.low_rank import Kron, LowRank, Product, Term
from ckptconv.tensors.operations import OPERATIONS
from ckptconv.tensors.packed import packed
from ckptconv.tensors.plain_check import other_element
from ckptconv.tensors.refs import Storage, TensorRef, box_of, origins, permuted, view_of, whole_view
from ckptconv.tensors.stream import iter_chunks
from ckptconv.tensors.views import in_order
from helpers import oracle
from helpers.examples import combined
from helpers.http_server import HttpServer
from helpers.program import run


class Counting(MemorySource):
    """Counts the bytes that are read of it."""

    count = 0

    def read_into(self, offset: int, view: memoryview) -> None:
        self.count += len(view)
        super().read_into(offset, view)


def stored(tensor: torch.Tensor, flipped: int | None = None) -> Storage:
    """A storage of the values of a tensor, whose record declares their checksum."""
    raw = bytearray(oracle.stored_bytes(tensor))
    crc = zlib.crc32(raw)
    if flipped is not None:
        raw[flipped] ^= 1
    name = str(tensor.dtype).removeprefix("torch.")
    source = Counting(b"before" + raw, Path("memory"))
    return Storage(source, 6, len(raw), "cpu", "a storage", BY_NAME[name], crc32=crc)


def bytes_of(ref: TensorRef) -> bytes:
    return b"".join(map(bytes, iter_chunks(ref)))


def folded(ref: TensorRef) -> None:
    checksums = Checksums()
    fold(ref, RunningCrc(), checksums=checksums)
    checksums.finish()


READINGS = {
    "read": lambda ref: ref.storage.source.read(3, 2),
    "read_into": lambda ref: ref.storage.source.read_into(0, memoryview(bytearray(1))),
    "read_many": lambda ref: ref.storage.source.read_many([(0, 1)]),
    "stream": lambda ref: list(ref.storage.source.stream([(0, 4)])),
    "iter_chunks": bytes_of,
    "transposed": lambda ref: bytes_of(
        ref._replace(
            shape=ref.shape[::-1],
            stride=ref.stride[::-1],
            pieces=tuple(
                piece._replace(shape=piece.shape[::-1], stride=piece.stride[::-1])
                for piece in ref.pieces
            ),
        )
    ),
    "fold": folded,
    "read for its checksum": lambda ref: Checksums().read(ref.storage),
}


class ComputedConformance(ABC):
    """What any operation promises of the tensors that it makes."""

    @abstractmethod
    def inputs(self) -> list[torch.Tensor]:
        """Live tensors, of two dimensions and more than one chunk."""

    @abstractmethod
    def made(self, inputs: list[TensorRef]) -> TensorRef:
        """The tensor that the operation makes of these."""

    @abstractmethod
    def expected(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """The same by torch."""

    def small(self) -> list[torch.Tensor]:
        """Inputs of which many ranges are read."""
        return [tensor[:9, :11].contiguous() for tensor in self.inputs()]

    def of(self, tensors: list[torch.Tensor], flipped: tuple[int, int] | None = None) -> TensorRef:
        refs = []
        for number, tensor in enumerate(tensors):
            at = flipped[1] if flipped is not None and flipped[0] == number else None
            storage = stored(tensor, at)
            refs.append(whole_view(storage, storage.dtype, tuple(tensor.shape)))
        return self.made(refs)

    def test_it_has_the_values_that_torch_computes(self):
        tensors = self.inputs()
        assert bytes_of(self.of(tensors)) == oracle.stored_bytes(self.expected(tensors))

    @pytest.mark.property
    def test_a_flipped_byte_in_any_input_fails_in_every_way_of_reading_it(self):
        """Each way, and each of the bytes; every pair of them in `make trust`."""
        tensors = self.inputs()
        for way in READINGS.values():
            way(self.of(tensors))
        places = [(number, at) for number, one in enumerate(tensors) for at in (0, one.nbytes - 1)]
        for name, place in combined(READINGS, places):
            with pytest.raises(MalformedCheckpoint, match="CRC-32"):
                READINGS[name](self.of(tensors, place))

    def test_each_input_is_read_once_for_its_values_and_its_checksum(self):
        tensors = self.inputs()
        ref = self.of(tensors)
        folded(ref)
        for storage, tensor in zip(origins([ref]), tensors, strict=True):
            assert storage.source.count == tensor.nbytes

    def test_any_range_equals_the_whole(self):
        ref = self.of(self.small())
        whole = bytes_of(ref)
        chance = Random(4)
        for _ in range(200):
            first, stop = sorted(chance.randrange(len(whole) + 1) for _ in range(2))
            assert ref.storage.source.read(first, stop - first) == whole[first:stop]
            with pytest.raises(MalformedCheckpoint, match="beyond its end"):
                ref.storage.source.read(first, len(whole) + 1 - first)

    def test_another_process_computes_the_same(self):
        ref = self.of(self.inputs())
        [again] = pickle.loads(pickle.dumps(packed([ref]))).opened(None)
        assert bytes_of(again) == bytes_of(ref)

    def test_another_process_finds_a_flipped_byte_too(self):
        packed_ref = packed([self.of(self.inputs(), (0, 5))])
        [again] = pickle.loads(pickle.dumps(packed_ref)).opened(None)
        with pytest.raises(MalformedCheckpoint, match="CRC-32"):
            bytes_of(again)

    def test_its_fingerprint_is_that_of_its_inputs(self):
        tensors = self.inputs()
        one, same = self.of(tensors), self.of(tensors)
        other = self.of(tensors, (len(tensors) - 1, 3))
        fingerprints = [ref.storage.source.fingerprint() for ref in (one, same, other)]
        assert fingerprints[0] == fingerprints[1] != fingerprints[2]

    def test_what_is_read_ahead_are_all_bytes_of_all_inputs(self):
        ref = self.of(self.inputs())
        read: dict[int, int] = {}
        for source, _, nbytes in runs_of(ref):
            read[id(source)] = read.get(id(source), 0) + nbytes
        assert read == {id(one.source): one.nbytes for one in origins([ref])}

    def test_the_plain_statement_says_the_same(self):
        ref = self.of(self.inputs())
        storage = Storage(MemorySource(bytes_of(ref), Path("out")), 0, ref.nbytes, "cpu", "out")
        assert other_element(ref, ref.dtype, whole_view(storage, ref.dtype, ref.shape), 64) is None

    @pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
    def test_the_plain_statement_sees_a_wrong_edge(self, place):
        ref = self.of(self.inputs())
        raw = bytearray(bytes_of(ref))
        raw[0 if place == (0, 0) else -ref.dtype.itemsize] ^= 1
        storage = Storage(MemorySource(bytes(raw), Path("out")), 0, ref.nbytes, "cpu", "out")
        wrong = tuple(size - 1 if at < 0 else at for at, size in zip(place, ref.shape, strict=True))
        found = other_element(ref, ref.dtype, whole_view(storage, ref.dtype, ref.shape), 64)
        assert found == wrong


class TestCast(ComputedConformance):
    def inputs(self):
        torch.manual_seed(1)
        return [(torch.rand(601, 997) - 0.5).to(torch.bfloat16)]

    def made(self, inputs):
        return Widener(BY_NAME["float32"])(inputs[0])

    def expected(self, inputs):
        return inputs[0].float()


class TestMean(ComputedConformance):
    WEIGHTS = (1.0, 2.5, 0.25)
    DTYPE = torch.float32

    def inputs(self):
        torch.manual_seed(2)
        return [(torch.rand(601, 997) - 0.5).to(self.DTYPE) for _ in self.WEIGHTS]

    def made(self, inputs):
        return elementwise("mean", inputs, self.WEIGHTS, inputs[0].dtype, "a mean")

    def expected(self, inputs):
        weighted = (one.double() * weight for one, weight in zip(inputs, self.WEIGHTS, strict=True))
        return (sum(weighted) / sum(self.WEIGHTS)).to(self.DTYPE)


class TestMeanOfHalves(TestMean):
    DTYPE = torch.float16


class TestMeanOfComplex(TestMean):
    DTYPE = torch.complex64

    def inputs(self):
        return [torch.complex(torch.rand(300, 997), torch.rand(300, 997)) for _ in self.WEIGHTS]

    def expected(self, inputs):
        parts = [torch.view_as_real(one) for one in inputs]
        weighted = (one.double() * weight for one, weight in zip(parts, self.WEIGHTS, strict=True))
        return torch.view_as_complex((sum(weighted) / sum(self.WEIGHTS)).float())


class TestMeanOfTransposed(TestMean):
    """Inputs that do not lie in order are gathered."""

    def of(self, tensors, flipped=None):
        refs = []
        for number, tensor in enumerate(tensors):
            at = flipped[1] if flipped is not None and flipped[0] == number else None
            storage, (rows, columns) = stored(tensor.T.contiguous(), at), tensor.shape
            refs.append(view_of(storage, storage.dtype, 0, (rows, columns), (1, rows)))
        return self.made(refs)

    def test_each_input_is_read_once_for_its_values_and_its_checksum(self):
        """Not those: their bytes are not read in order, so a checksum takes a pass of its own."""


class TestCastOfAMean(TestMean):
    """Operations over operations."""

    DTYPE = torch.bfloat16

    def made(self, inputs):
        return Widener(BY_NAME["float32"])(super().made(inputs))

    def expected(self, inputs):
        return super().expected(inputs).float()


class TestAdd(ComputedConformance):
    """Norms of a gemma in GGUF, less 1; around 1 and near 0, where the sum is rounded."""

    DTYPE = torch.float32

    def inputs(self):
        torch.manual_seed(3)
        powers = torch.randint(-30, 3, (601, 997))
        return [(torch.randn(601, 997) * 2.0**powers).to(self.DTYPE)]

    def made(self, inputs):
        return elementwise("add", inputs, (-1.0,), inputs[0].dtype, "a norm")

    def expected(self, inputs):
        return inputs[0] - 1


class TestAddToBfloat16(TestAdd):
    DTYPE = torch.bfloat16


@pytest.mark.parametrize("shape", [(60, 90), (5, 40, 30), (3, 4, 50, 6)])
def test_threads_share_the_strips_of_what_is_gathered_of_what_is_gathered(monkeypatch, shape):
    """In small strips, of which few are kept, and small spans; numpy is the oracle."""
    few = {"_STRIP": 1 << 11, "_KEPT": 1 << 12, "_STEP": 200}
    small = {"_SMALL": 64, "A_READ": 64, "_SPAN": 1 << 10, "_IN_CACHE": 16}
    small |= {"_TILE": 8, "_TILES": 400}
    for module, numbers in ((computed_module, few), (stream, small)):
        for name, number in numbers.items():
            monkeypatch.setattr(module, name, number)
    array = np.random.default_rng(0).integers(0, 1 << 16, shape, "u2")
    stored_ref = whole_view(stored(torch.from_numpy(array)), BY_NAME["uint16"], shape)
    orders = [*permutations(range(len(shape)))][1 :: len(shape) ** 2 // 4]
    with ThreadPoolExecutor(4) as pool:
        for one, other in zip(orders, [*orders[1:], orders[0]], strict=True):
            ref = in_order(permuted(in_order(permuted(stored_ref, one)), other))
            whole = array.transpose(one).transpose(other).tobytes()
            ranges = [(first, min(999, len(whole) - first)) for first in range(0, len(whole), 700)]
            for (first, nbytes), raw in zip(
                ranges, pool.map(ref.storage.source.read, *zip(*ranges, strict=True)), strict=True
            ):
                assert raw == whole[first : first + nbytes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_number_is_added_in_other_types(dtype):
    values = torch.randn(40, 30) * 2.0 ** torch.randint(-30, 3, (40, 30))
    storage = stored(values.to(dtype))
    ref = whole_view(storage, storage.dtype, (40, 30))
    made = elementwise("add", [ref], (-1.0,), ref.dtype, "a norm")
    assert bytes_of(made) == oracle.stored_bytes(values.to(dtype) - 1)


def test_what_is_rounded_once_is_not_rounded_twice_nor_are_turned_parts_of_it():
    values = torch.randn(997, 601).bfloat16()  # more than one chunk, and not one run
    storage = stored(values)
    ref = permuted(whole_view(storage, storage.dtype, (997, 601)), (1, 0))
    made = elementwise("add", [ref], (-1.0,), ref.dtype, "a norm")
    part = permuted(apart(box_of(made, (20, 0), (30, 997))), (1, 0))
    expected = (values.T.float() - 1).half()
    for one, wanted in ((made, expected), (part, expected[20:50].T)):
        cast = b"".join(map(bytes, iter_cast_chunks(one, BY_NAME["float16"], [0])))
        assert cast == oracle.stored_bytes(wanted.contiguous())


class TestDecodeByBlocks(ComputedConformance):
    """fp8 with a scale for each block, of which those at the edges are cut."""

    BLOCK = (128, 128)
    HOW = Decoding(("codes", "scale"), "float8_e4m3fn", BLOCK)

    def inputs(self):
        torch.manual_seed(5)
        codes = (torch.randn(601, 997) * 100).to(torch.float8_e4m3fn)
        return [codes, torch.rand(*self.grid(codes.shape)) + 0.5]

    AGAIN = 1.0
    """How often codes are read: a word that two runs need is read again, and all of the later run
    for the checksum of its record (which the files of such codes, safetensors, do not have).
    """

    def small(self):
        """As they are: a part of the codes would not fit the scales."""
        return self.inputs()

    def grid(self, shape):
        return [-(-size // block) for size, block in zip(shape, self.BLOCK, strict=True)]

    def made(self, inputs):
        value = Computed("decode", tuple(inputs), self.HOW, BY_NAME["bfloat16"], (601, 997))
        return computed(value, "a weight")

    def spread(self, each, shape):
        for at, size in enumerate(self.BLOCK):
            each = each.repeat_interleave(size, at)
        return each[: shape[0], : shape[1]]

    def expected(self, inputs):
        codes, scale = inputs
        return (codes.float() * self.spread(scale, codes.shape)).to(torch.bfloat16)

    def test_each_input_is_read_once_for_its_values_and_its_checksum(self):
        """The scales of a row of blocks are read with each run of rows: they are few."""
        tensors = self.inputs()
        ref = self.of(tensors)
        folded(ref)
        codes, *others = origins([ref])
        assert codes.source.count <= self.AGAIN * tensors[0].nbytes
        for other, tensor in zip(others, tensors[1:], strict=True):
            assert other.source.count <= 8 * tensor.nbytes

    def test_what_is_read_ahead_are_all_bytes_of_all_inputs(self):
        tensors = self.inputs()
        ref = self.of(tensors)
        read: dict[int, set[int]] = {}
        for source, first, nbytes in runs_of(ref):
            read.setdefault(id(source), set()).update(range(first, first + nbytes))
        for one in origins([ref]):
            assert read[id(one.source)] == set(range(one.offset, one.offset + one.nbytes))


class TestDecodeByRows(TestDecodeByBlocks):
    """Small blocks are multiplied, not looked up."""

    BLOCK = (1, 64)
    HOW = Decoding(("codes", "scale"), "float8_e4m3fn", BLOCK)


def chained(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A product whose sums are fused multiply-adds in the order of the rank."""
    total = torch.zeros(up.shape[0], down.shape[1])
    for k in range(up.shape[1]):
        total = (total.double() + up[:, k, None].double() * down[k].double()).float()
    return total


class TestLowRank(ComputedConformance):
    """Two adapters merged into a weight of 16 bits."""

    RANKS, SCALES = (16, 3), (2.0, 0.3)
    DTYPE = torch.bfloat16
    HOW = LowRank(tuple(map(Term, RANKS, SCALES)))

    def inputs(self):
        torch.manual_seed(8)
        shapes = [(601, 997)]
        for rank in self.RANKS:
            shapes += [(601, rank), (rank, 997)]
        return [torch.randn(shape).mul(0.1).to(self.DTYPE) for shape in shapes]

    def small(self):
        weight, *factors = self.inputs()
        for at in range(0, len(factors), 2):
            factors[at], factors[at + 1] = factors[at][:9], factors[at + 1][:, :11]
        return [one.contiguous() for one in (weight[:9, :11], *factors)]

    def made(self, inputs):
        weight = inputs[0]
        value = Computed("low-rank", tuple(inputs), self.HOW, weight.dtype, weight.shape)
        return computed(value, "a weight")

    def summed(self, inputs):
        weight, *factors = inputs
        whole = weight.float()
        for scale, at in zip(self.SCALES, range(0, len(factors), 2), strict=True):
            whole += chained(factors[at].float(), factors[at + 1].float()) * scale
        return whole

    def expected(self, inputs):
        return self.summed(inputs).to(self.DTYPE)

    test_each_input_is_read_once_for_its_values_and_its_checksum = (
        TestDecodeByBlocks.test_each_input_is_read_once_for_its_values_and_its_checksum
    )
    AGAIN = 1.0
    test_what_is_read_ahead_are_all_bytes_of_all_inputs = (
        TestDecodeByBlocks.test_what_is_read_ahead_are_all_bytes_of_all_inputs
    )


class TestLowRankInFloat16(TestLowRank):
    DTYPE = torch.float16


class TestLowRankInFloat32(TestLowRank):
    DTYPE = torch.float32


class TestLowRankWithMagnitude(TestLowRank):
    """DoRA: rows of the sum have a length of their own."""

    RANKS, SCALES = (4,), (0.7,)
    AGAIN = 2.0  # rows that are computed in two parts are needed for both
    HOW = LowRank((Term(4, 0.7),), row=(997,))

    def inputs(self):
        return [*super().inputs(), torch.rand(601) + 0.5]

    def small(self):
        """As they are: the parameters name the whole row."""
        return self.inputs()

    def expected(self, inputs):
        whole = self.summed(inputs[:-1])
        norm = torch.linalg.norm(whole, dim=1)
        return ((inputs[-1].float() / norm)[:, None] * whole).to(self.DTYPE)


class TestDecodeOfStraddlingCodes(TestDecodeByBlocks):
    """Three bits end to end in words, with zeros packed along the rows."""

    BLOCK = (1, 32)
    AGAIN = 1.5
    HOW = Decoding(
        ("codes", "scale", "zero"), "uint", BLOCK, bits=3, offset=4, word=4, packed_zero=True
    )

    def inputs(self):
        torch.manual_seed(6)
        words = [
            torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64)
            for shape in ((601, 94), (57, 32))
        ]
        codes, zero = (one.to(torch.int32) for one in words)
        return [codes, torch.rand(601, 32) + 0.5, zero]

    def fields(self, words):
        """The codes of rows, by what packing means: one long number for each row."""
        out = []
        for row in words.tolist():
            number = int.from_bytes(
                b"".join(word.to_bytes(4, "little", signed=True) for word in row), "little"
            )
            out.append([number >> 3 * at & 7 for at in range(len(row) * 32 // 3)])
        return torch.tensor(out, dtype=torch.float32)

    def expected(self, inputs):
        codes, scale, zero = inputs
        made = self.fields(codes)[:, :997] - 4
        zeros = self.fields(zero.T.contiguous()).T[:601] - 4
        spread = self.spread(zeros, made.shape)
        return ((made - spread) * self.spread(scale, made.shape)).to(torch.bfloat16)


class TestDecodeOfTransposedWords(TestDecodeOfStraddlingCodes):
    """GPTQ: words down the inputs, seen transposed, of 4 bits, in act order."""

    HOW = Decoding(
        ("codes", "scale", "groups"), "uint", (1, 32), bits=4, offset=8, word=4, groups=32
    )

    def inputs(self):
        torch.manual_seed(7)
        codes = torch.randint(-(1 << 31), 1 << 31, (601, 125), dtype=torch.int64)
        scale, groups = torch.rand(601, 32), torch.randint(0, 32, (997,), dtype=torch.int32)
        return [codes.to(torch.int32), scale, groups]

    def of(self, tensors, flipped=None):
        refs = []
        for number, tensor in enumerate(tensors):
            at = flipped[1] if flipped is not None and flipped[0] == number else None
            if number == 2:
                storage = stored(tensor, at)
                refs.append(whole_view(storage, storage.dtype, tuple(tensor.shape)))
                continue
            storage, (rows, columns) = stored(tensor.T.contiguous(), at), tensor.shape
            refs.append(view_of(storage, storage.dtype, 0, (rows, columns), (1, rows)))
        return self.made(refs)

    def expected(self, inputs):
        codes, scale, groups = inputs
        octets = codes.contiguous().view(torch.uint8)
        nibbles = torch.stack([octets & 15, octets >> 4], -1).reshape(601, -1)[:, :997]
        return ((nibbles.float() - 8) * scale[:, groups.long()]).to(torch.bfloat16)

    def test_each_input_is_read_once_for_its_values_and_its_checksum(self):
        """Not those: their bytes are not read in order, so a checksum takes a pass of its own."""


class TestUnblock(ComputedConformance):
    """Blocks of Q8_0: a scale in float16 and 32 codes of int8."""

    SHAPE = (600, 31 * 32)

    def inputs(self):
        torch.manual_seed(8)
        scale = torch.rand(600, 31, 1).to(torch.float16).view(torch.uint8)
        codes = torch.randint(0, 256, (600, 31, 32), dtype=torch.uint8)
        return [torch.cat([scale, codes], -1).reshape(600, 31 * 34)]

    def small(self):
        return self.inputs()

    def made(self, inputs):
        [octets] = inputs
        blocks = next(dtype for dtype in BLOCKS if dtype.name == "Q8_0")
        ref = whole_view(octets.storage, blocks, (600, 31))
        value = Computed("unblock", (ref,), ("Q8_0",), BY_NAME["float32"], self.SHAPE)
        return computed(value, "a weight")

    def expected(self, inputs):
        blocks = inputs[0].reshape(600, 31, 34)
        scale = blocks[..., :2].contiguous().view(torch.float16).float()
        return (scale * blocks[..., 2:].contiguous().view(torch.int8).float()).reshape(self.SHAPE)

    def test_each_input_is_read_once_for_its_values_and_its_checksum(self):
        """A block that two runs need is read again, as codes are that straddle words."""


class TestMatmul(TestLowRank):
    """A product alone, in float32."""

    HOW = Product(16)
    DTYPE = torch.float32

    def inputs(self):
        return super().inputs()[1:3]

    def small(self):
        up, down = self.inputs()
        return [up[:9].contiguous(), down[:, :11].contiguous()]

    def made(self, inputs):
        shape = (inputs[0].shape[0], inputs[1].shape[1])
        return computed(Computed("matmul", tuple(inputs), self.HOW, inputs[0].dtype, shape), "one")

    def expected(self, inputs):
        return chained(*inputs)

    AGAIN = 2.0


class TestMultiply(ComputedConformance):
    def inputs(self):
        torch.manual_seed(9)
        return [torch.randn(601, 997) for _ in range(2)]

    def made(self, inputs):
        return elementwise("multiply", inputs, (), inputs[0].dtype, "a product")

    def expected(self, inputs):
        return inputs[0] * inputs[1]


class TestKron(TestLowRank):
    """The second input is read once for each row and column of the first."""

    def inputs(self):
        torch.manual_seed(10)
        return [torch.randn(3, 7), torch.randn(201, 143)]

    def small(self):
        return [one[:5, :4].contiguous() for one in self.inputs()]

    def made(self, inputs):
        rows, columns = inputs[1].shape
        shape = (inputs[0].shape[0] * rows, inputs[0].shape[1] * columns)
        value = Computed("kron", tuple(inputs), Kron(rows, columns), inputs[0].dtype, shape)
        return computed(value, "a product")

    def expected(self, inputs):
        return torch.kron(*inputs)

    AGAIN = 30.0


def test_every_operation_has_a_class_here():
    assert set(OPERATIONS) == {
        *("cast", "mean", "add", "decode", "unblock"),
        *("low-rank", "matmul", "multiply", "kron"),
    }


# ------------------------------------------------------------------------------- as a whole program


@pytest.fixture
def two(tmp_path) -> list[Path]:
    torch.manual_seed(3)
    paths = [tmp_path / f"{name}.pt" for name in "ab"]
    for path in paths:
        torch.save({f"l{number}.weight": torch.rand(300, 1000) for number in range(4)}, path)
    return paths


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("to", ["pt", "safetensors"])
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_mean_of_a_damaged_file_is_refused(two, tmp_path, verify, to, damaged):
    raw = bytearray(two[damaged].read_bytes())
    raw[len(raw) // 2] ^= 1
    two[damaged].write_bytes(raw)
    out = tmp_path / f"mean.{to}"
    with pytest.raises(CheckpointError, match="CRC-32"):
        average(two, out, verify=verify)
    assert not out.exists()


def test_a_mean_is_made_by_threads_as_by_one(two, tmp_path):
    average(two, tmp_path / "one.safetensors", verify=True)
    one_thread = {"CKPTCONV_THREADS": "1"}
    done = run("average", *two, "two.safetensors", cwd=tmp_path, env=one_thread)
    assert done.exit == 0
    one, other = (tmp_path / f"{name}.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == other.read_bytes()
    expected = [torch.load(path) for path in two]
    for key, value in load_portable(one).items():
        mean = (expected[0][key].double() + expected[1][key].double()) / 2
        assert torch.equal(value, mean.float())


def test_a_mean_over_a_network_asks_as_a_conversion_does(two, tmp_path):
    files = {f"/{path.name}": path.read_bytes() for path in two}
    with HttpServer(files) as server:
        urls = [f"{server.url}/{path.name}" for path in two]
        for number, url in enumerate(urls):
            assert run("convert", url, f"{number}.safetensors", cwd=tmp_path).exit == 0
        asked, sent = len(server.requests), server.sent
        server.forget()
        done = run("average", *urls, "mean.safetensors", cwd=tmp_path)
        assert done.exit == 0, done.err
        assert len(server.requests) <= 1.1 * asked
        assert server.sent <= 1.02 * sent


def test_verify_sees_a_cast_that_is_wrong_in_the_same_way_each_time(tmp_path, monkeypatch):
    """The output is compared with a cast that is made again: both may be wrong."""

    def truncated(values, source, target):
        leading = np.frombuffer(values, "<u4") >> 16
        return Cast(leading.astype("<u2").view(np.uint8).data, 0)

    torch.save({"w": torch.rand(100, 100)}, tmp_path / "in.pt")
    monkeypatch.setattr("ckptconv.tensors.computed.cast", truncated)
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "a.safetensors", dtype="bf16")
    with pytest.raises(VerificationFailed, match="worked out once more"):
        convert_checkpoint(
            tmp_path / "in.pt", tmp_path / "b.safetensors", dtype="bf16", verify=True
        )
