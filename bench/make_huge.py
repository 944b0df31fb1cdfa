"""Make huge checkpoints that take hardly any disk: their values are holes in sparse files.

    python bench/make_huge.py dcp OUT [--tensors N] [--bytes N] [--files RANKS] [--chunks N]
    python bench/make_huge.py hf OUT [--tensors N] [--bytes N] [--files SHARDS]

`dcp` is a folder of torch.distributed.checkpoint: a `.metadata` of torch's own classes and a file
of each rank. Seven of eight tensors are split by rows into chunks, which lie in the files of
neighbouring ranks. Each chunk is an archive that torch.save made of a chunk like it. `hf` are
safetensors files and their index. A value that is not 0 stands at the start of each chunk of a DCP
folder, and of each shard, so that what reads them can be told from what does not.

A chunk takes 4 to 8 KB of disk, a tensor in a shard what its entry in the header takes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ckptconv.io.crc import combined_crc

COLUMNS = 1024
ROW = 4 * COLUMNS  # bytes: all tensors are float32
LAYER = (
    ("attention.wq.weight", 1), ("attention.wk.weight", 1), ("attention.wv.weight", 1),
    ("attention.wo.weight", 1), ("feed_forward.w1.weight", 4), ("feed_forward.w2.weight", 4),
    ("feed_forward.w3.weight", 4), ("norm.weight", 0),
)  # fmt: skip
"""The tensors of a layer, and the rows of each in heights; that of the last is a vector."""
_HEIGHTS = sum(height for _, height in LAYER)


class Tensor(NamedTuple):
    """A tensor: the paths of its two keys in one, and its shape."""

    key: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return 4 * COLUMNS * (self.shape[0] if len(self.shape) > 1 else 1)


def tensors_of(count: int, nbytes: int, least_rows: int = 1) -> Iterator[Tensor]:
    """So many tensors, of some `nbytes` bytes together."""
    rows = max(least_rows, round(nbytes / (count / len(LAYER)) / _HEIGHTS / ROW))
    for number in range(count):
        layer, place = divmod(number, len(LAYER))
        name, height = LAYER[place]
        shape = (rows * height, COLUMNS) if height else (COLUMNS,)
        yield Tensor(f"model.layers.{layer}.{name}", shape)


def first_value(number: int) -> bytes:
    """The float32 at the start of the chunk or shard of this number."""
    return struct.pack("<f", number + 1)


# --------------------------------------------------------------------------------------------- DCP


class Chunk(NamedTuple):
    """A chunk of a tensor, and where it lies."""

    key: str
    number: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    offset: int
    nbytes: int


def write_dcp(folder: Path, count: int, nbytes: int, ranks: int, chunks: int) -> None:
    """A DCP folder of `count` tensors, most of them in `chunks` chunks."""
    folder.mkdir(parents=True)
    tensors = list(tensors_of(count, nbytes, least_rows=chunks))
    ends = [0] * ranks
    placed: list[list[Chunk]] = [[] for _ in range(ranks)]
    number = 0
    for at, tensor in enumerate(tensors):
        for start, shape in _boxes(tensor.shape, chunks):
            rank = (at + number) % ranks
            size = _item(shape).nbytes
            made = Chunk(tensor.key, number, start, shape, rank, ends[rank], size)
            placed[rank].append(made)
            ends[rank] += size
            number += 1
    for rank, items in enumerate(placed):
        _write_rank(folder / f"__{rank}_0.distcp", items)
    (folder / ".metadata").write_bytes(_metadata(tensors, chunks, placed))


def _boxes(shape: tuple[int, ...], chunks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The start and the shape of each chunk; a vector has one."""
    if len(shape) == 1:
        return [((0,), shape)]
    rows = shape[0]
    cuts = [rows * number // chunks for number in range(chunks + 1)]
    return [((a, 0), (b - a, shape[1])) for a, b in pairwise(cuts)]


class Item:
    """What torch.save makes of a chunk of one shape, with room for its first value.

    The CRC-32 of the values is linear in the bits of the first: `_lines` has what each byte of it
    adds. Torch derives an id in the archive from the checksums; here it is the number of the chunk.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        import torch

        file = io.BytesIO()
        torch.save(torch.zeros(shape), file)
        raw = file.getvalue()
        self.nbytes = len(raw)
        with zipfile.ZipFile(file) as archive:
            places = {}
            for info in archive.infolist():
                name_size, extra_size = struct.unpack_from("<2H", raw, info.header_offset + 26)
                begin = info.header_offset + 30 + name_size + extra_size
                places[info.filename.partition("/")[2]] = begin, info.file_size, info.CRC
        begin, size, crc = places["data/0"]
        id_at, id_size, id_crc = places[".data/serialization_id"]
        self.head, self.tail_at = raw[:begin], begin + size
        tail = raw[self.tail_at :]
        self._tail = tail
        self._id = id_at - self.tail_at, id_size
        self._crc, self._crc_at = crc, _all_places(tail, struct.pack("<I", crc))
        self._id_crc_at = _all_places(tail, struct.pack("<I", id_crc))
        if len(self._crc_at) != 2 or len(self._id_crc_at) != 2:
            raise ValueError(f"torch.save writes something else now for {shape}")
        zeros = zlib.crc32(bytes(size - 4))
        bits = [
            combined_crc(zlib.crc32(struct.pack("<I", 1 << bit)), zeros, size - 4) ^ crc
            for bit in range(32)
        ]
        self._lines = [_sums(bits[8 * byte : 8 * byte + 8]) for byte in range(4)]

    def around(self, number: int) -> tuple[bytes, bytes]:
        """What stands before the values, with the first of them, and behind them."""
        first = first_value(number)
        crc = self._crc
        for line, byte in zip(self._lines, first, strict=True):
            crc ^= line[byte]
        tail = bytearray(self._tail)
        at, size = self._id
        digits = b"%0*d" % (size, number)
        tail[at : at + size] = digits
        for places, value in ((self._crc_at, crc), (self._id_crc_at, zlib.crc32(digits))):
            for place in places:
                struct.pack_into("<I", tail, place, value)
        return self.head + first, bytes(tail)


def _all_places(raw: bytes, wanted: bytes) -> list[int]:
    found, at = [], raw.find(wanted)
    while at >= 0:
        found.append(at)
        at = raw.find(wanted, at + 1)
    return found


def _sums(bits: list[int]) -> list[int]:
    """For each byte, the sum (exclusive or) of what its bits stand for."""
    sums = [0]
    for bit in bits:
        sums += [known ^ bit for known in sums]
    return sums


_item = lru_cache(maxsize=64)(Item)


def _write_rank(path: Path, items: list[Chunk]) -> None:
    """The file of a rank: what lies between the values of two chunks is written in one go."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        pending, at = b"", 0
        for chunk in items:
            item = _item(chunk.shape)
            head, tail = item.around(chunk.number)
            os.pwrite(fd, pending + head, at)
            pending, at = tail, chunk.offset + item.tail_at
        os.pwrite(fd, pending, at)
    finally:
        os.close(fd)


def _metadata(tensors: list[Tensor], chunks: int, placed: list[list[Chunk]]) -> bytes:
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    size = torch.Size
    entries = {
        tensor.key: TensorStorageMetadata(
            TensorProperties(dtype=torch.float32),
            size(tensor.shape),
            [
                ChunkStorageMetadata(size(start), size(shape))
                for start, shape in _boxes(tensor.shape, chunks)
            ],
        )
        for tensor in tensors
    }
    places = {}
    for rank, items in enumerate(placed):
        name = f"__{rank}_0.distcp"
        for chunk in items:
            # of another process, so a text of its own, as from a pickle
            key = chunk.key[:1] + chunk.key[1:]
            places[MetadataIndex(key, size(chunk.start), 0)] = _StorageInfo(
                name, chunk.offset, chunk.nbytes
            )
    paths = {tensor.key: ("model", tensor.key.partition(".")[2]) for tensor in tensors}
    metadata = Metadata(entries, paths, places, StorageMeta(), "1.0.0")
    return pickle.dumps(metadata)


# ---------------------------------------------------------------------------------------------- HF


def write_hf(folder: Path, count: int, nbytes: int, shards: int) -> None:
    """Safetensors files and their index, as transformers writes them."""
    folder.mkdir(parents=True)
    tensors = list(tensors_of(count, nbytes))
    where: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = tensors[count * number // shards : count * (number + 1) // shards]
        _write_shard(folder / name, part, number)
        where.update(dict.fromkeys((tensor.key for tensor in part), name))
    total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
    index = json.dumps({"metadata": total, "weight_map": where}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index + "\n")


def _write_shard(path: Path, tensors: list[Tensor], number: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.nbytes]
        header[tensor.key] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(first_value(number)[: 4 * bool(tensors)])
        file.truncate(8 + len(text) + at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("dcp", "hf"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--bytes", type=float, default=1e12)
    parser.add_argument("--files", type=int, default=1000, help="ranks, or shards")
    parser.add_argument("--chunks", type=int, default=1, help="of a tensor")
    given = parser.parse_args()
    if given.kind == "dcp":
        write_dcp(given.out, given.tensors, int(given.bytes), given.files, given.chunks)
    else:
        write_hf(given.out, given.tensors, int(given.bytes), given.files)
    blocks = sum(file.stat().st_blocks for file in given.out.iterdir())
    size = sum(file.stat().st_size for file in given.out.iterdir())
    print(f"{size / 1e9:,.1f} GB, {blocks * 512 / 1e6:,.1f} MB on disk", file=sys.stderr)


if __name__ == "__main__":
    main()
