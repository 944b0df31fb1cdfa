"""Deltas as slime writes them and sglang applies them, stated plainly with numpy and zstandard.

What ckptconv makes and takes is held against that.

Source: slime/utils/disk_delta.py, update_weight_from_disk_delta.py; sglang's
srt/weight_sync/local_checkpoint.py. A state dict is the bytes of each tensor, by its name.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard

INDEX = "model.safetensors.index.json"
SHARD = "model-00000-of-00001.safetensors"

SUMS = {
    "adler32": lambda raw: f"{zlib.adler32(raw):08x}",
    "xxh3-128": lambda raw: xxhash.xxh3_128_hexdigest(raw),
    "blake3": lambda raw: blake3.blake3(raw).hexdigest(),
}


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def tensors_in(place: Path) -> dict[str, bytes]:
    """The bytes of the tensors of a safetensors file, or of all such files of a folder."""
    found = {}
    for path in sorted(place.glob("*.safetensors")) if place.is_dir() else [place]:
        header, data = header_of(path)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = data[begin:end]
    return found


def written(path: Path, tensors: Mapping[str, bytes], metadata: Mapping[str, str]) -> None:
    """A safetensors file of runs of bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, raw in tensors.items():
        entry = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [at, at + len(raw)]}
        header[name], at = entry, at + len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def difference(old: bytes, new: bytes, encoding: str) -> bytes:
    """What a frame holds."""
    one, two = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        return (one ^ two).tobytes()
    places = np.flatnonzero(one != two).astype("<u4")
    return struct.pack("<I", len(places)) + places.tobytes() + two[places].tobytes()


def packed(raw: bytes) -> bytes:
    """One frame, as slime makes it."""
    return zstandard.ZstdCompressor(level=1).compress(raw)


def write_delta(
    folder: Path,
    old: Mapping[str, bytes],
    new: Mapping[str, bytes],
    *,
    encoding: str = "xor",
    algorithm: str = "xxh3-128",
    version: int = 1,
    frames: Mapping[str, bytes] | None = None,
    sums: Mapping[str, str] | None = None,
    **told: Any,
) -> Path:
    """A delta as slime publishes it; `frames`, `sums` and `told` stand for what it would say of
    tensors and in the index.
    """
    changed = [name for name in new if old[name] != new[name]]
    made = {name: packed(difference(old[name], new[name], encoding)) for name in changed}
    checksums = {name: SUMS[algorithm](new[name]) for name in changed}
    made, checksums = made | dict(frames or {}), checksums | dict(sums or {})
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": algorithm,
    } | told
    folder.mkdir(parents=True)
    if made:
        written(folder / SHARD, made, checksums)
    index = {"metadata": metadata, "weight_map": dict.fromkeys(made, SHARD)}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def apply_frame(base: bytes, frame: bytes, told: Mapping[str, Any], wanted: str) -> bytes:
    """One tensor with its frame applied; raises where it has another checksum than is `wanted`."""
    raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    region = np.frombuffer(base, np.uint8).copy()
    if told["delta_encoding"] == "xor":
        assert len(raw) == len(region)
        region ^= raw
    else:
        count = int.from_bytes(raw[:4].tobytes(), "little")
        places = np.frombuffer(raw[4 : 4 + 4 * count].tobytes(), "<u4")
        region[places] = raw[4 + 4 * count :]
    assert SUMS[told["checksum_format"]](region.tobytes()) == wanted
    return region.tobytes()


def apply_delta(base: Mapping[str, bytes], folder: Path) -> dict[str, bytes]:
    """What sglang makes of its local checkpoint: it takes each frame in one go, of all files that
    are there.
    """
    told = json.loads((folder / INDEX).read_text())["metadata"]
    assert told["compression_format"] == "zstd"
    assert int(told["version"]) > int(told["base_version"])
    found = dict(base)
    for path in sorted(folder.glob("*.safetensors")):
        header, data = header_of(path)
        sums = header.pop("__metadata__")
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = apply_frame(base[name], data[begin:end], told, sums[name])
    return found
