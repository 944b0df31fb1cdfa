"""Deltas, made and applied: slime's writer and sglang's reader, stated plainly, are the oracles."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptconv
from ckptconv import (
    CheckpointError,
    KeyConflict,
    KeyMismatch,
    MalformedCheckpoint,
    OptionRefused,
    RefusedObject,
    UnsupportedCheckpoint,
    apply_deltas,
    delta_checkpoints,
)
from ckptconv.convert import deltas
from helpers.deltas import (
    INDEX,
    SHARD,
    SUMS,
    apply_delta,
    difference,
    header_of,
    packed,
    tensors_in,
    write_delta,
    written,
)
from helpers.examples import crossed
from helpers.http_server import HttpServer
from helpers.paths import NUMBERS
from helpers.program import assert_one_error, run, run_bytes

SAMPLE = NUMBERS / "delta"
ENCODINGS = ("xor", "overwrite")


def drawn(seed: int) -> dict[str, np.ndarray]:
    """A state dict of many dtypes, of odd sizes; `large` is more than a chunk."""
    rng = np.random.default_rng(seed)
    return {
        "large": rng.standard_normal((700, 601), np.float32),
        "half": rng.standard_normal((33, 7)).astype(np.float16),
        "brain": rng.standard_normal((5, 300)).astype(ml_dtypes.bfloat16),
        "eighth": rng.standard_normal((64, 3)).astype(ml_dtypes.float8_e4m3fn),
        "counts": rng.integers(0, 1 << 60, 257),
        "mask": rng.integers(0, 2, 1001).astype(bool),
        "scalar": np.array(rng.standard_normal()),
        "same": np.arange(90, dtype=np.int32),
        "empty": np.zeros((0, 4), np.float32),
    }


def changed(tensors: Mapping[str, np.ndarray], seed: int = 1) -> dict[str, np.ndarray]:
    """Some values of each tensor changed, but for those of `same`; the first and the last too."""
    rng = np.random.default_rng(seed)
    found = {name: value.copy() for name, value in tensors.items()}
    other = drawn(seed + 100)
    for name, value in found.items():
        if name in ("same", "empty"):
            continue
        at = np.unique(np.r_[0, rng.integers(0, value.size, value.size // 20 + 1), value.size - 1])
        value.reshape(-1)[at] = other[name].reshape(-1)[at]
    return found


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A folder with a base, what became of it, and the next after that."""
    for number, name in enumerate(("base", "one", "two")):
        (tmp_path / name).mkdir()
        tensors = drawn(0)
        for seed in range(number):
            tensors = changed(tensors, seed + 1)
        save_file(tensors, tmp_path / name / "model.safetensors")
    return tmp_path


def facts(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The dtype, the shape and the bytes of each tensor of a file: numpy does not load all."""
    header, _ = header_of(path)
    raw = tensors_in(path)
    return {name: (header[name]["dtype"], header[name]["shape"], raw[name]) for name in raw}


def equal(found: Path, expected: Path) -> bool:
    """Whether two files hold the same tensors to the bit."""
    return facts(found) == facts(expected)


# ----------------------------------------------------------------------------------- both ways


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_sample_of_slime_gives_the_tensors_that_were_published(encoding, tmp_path):
    out = tmp_path / "out.safetensors"
    apply_deltas(SAMPLE / "base", SAMPLE / f"weight_v000001_{encoding}", out, verify=True)
    assert equal(out, SAMPLE / "full" / "model.safetensors")


@pytest.mark.parametrize("encoding, checksum", crossed(ENCODINGS, [*SUMS]))
def test_a_delta_is_what_sglang_applies(encoding, checksum, room):
    result = delta_checkpoints(
        room / "base", room / "one", room / "weight_v000001", encoding=encoding, checksum=checksum
    )
    base, new = tensors_in(room / "base"), tensors_in(room / "one")
    assert apply_delta(base, room / "weight_v000001") == new
    told = json.loads((room / "weight_v000001" / INDEX).read_text())
    sums = told["metadata"].pop("base_checksums")
    assert told["metadata"] == {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    assert sums == {name: SUMS[checksum](raw) for name, raw in base.items()}
    names = {name for name in base if base[name] != new[name]}
    assert told["weight_map"] == dict.fromkeys(told["weight_map"], SHARD)
    assert told["weight_map"].keys() == names and "same" not in names
    header, _ = header_of(room / "weight_v000001" / SHARD)
    assert header.pop("__metadata__") == {name: SUMS[checksum](new[name]) for name in names}
    assert {entry["dtype"] for entry in header.values()} == {"U8"}
    assert sorted(path.name for path in (room / "weight_v000001").iterdir()) == [SHARD, INDEX]
    assert (result.changed, result.tensors) == (len(names), len(base))
    assert (result.base_version, result.version) == (0, 1)


@pytest.mark.parametrize("encoding, checksum", crossed(ENCODINGS, [*SUMS]))
def test_what_slime_writes_is_applied(encoding, checksum, room):
    old, new = tensors_in(room / "base"), tensors_in(room / "one")
    write_delta(room / "d", old, new, encoding=encoding, algorithm=checksum)
    apply_deltas(room / "base", room / "d", room / "out.safetensors", verify=True)
    assert equal(room / "out.safetensors", room / "one" / "model.safetensors")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_each_container_takes_changes(encoding, room):
    for name in ("base", "one"):
        path = room / name / "model.safetensors"
        tensors = drawn(0) if name == "base" else changed(drawn(0))
        save_file({k: v for k, v in tensors.items() if k not in ("brain", "eighth")}, path)
        ckptconv.convert_checkpoint(room / name, room / f"{name}.npz")
        ckptconv.convert_checkpoint(room / name, room / f"{name}_shards", max_shard_size="500kB")
    delta_checkpoints(room / "base.npz", room / "one_shards", room / "d", encoding=encoding)
    assert apply_delta(tensors_in(room / "base"), room / "d") == tensors_in(room / "one")
    for base in ("base", "base.npz", "base_shards"):
        apply_deltas(room / base, room / "d", room / "out.safetensors", verify=True, force=True)
        assert equal(room / "out.safetensors", room / "one" / "model.safetensors")
    apply_deltas(room / "base_shards", [room / "d"], room / "new", max_shard_size="500kB")
    assert tensors_in(room / "new") == tensors_in(room / "one")


def test_a_delta_of_no_changes_is_an_index_alone_and_is_applied(room):
    result = delta_checkpoints(room / "base", room / "base", room / "weight_v000004")
    assert result.changed == 0 and result.version == 4
    assert [path.name for path in (room / "weight_v000004").iterdir()] == [INDEX]
    apply_deltas(room / "base", room / "weight_v000004", room / "out.safetensors")
    assert equal(room / "out.safetensors", room / "base" / "model.safetensors")


def test_an_index_of_no_changes_beside_changes_is_refused(room):
    delta_checkpoints(room / "base", room / "one", room / "d")
    told = json.loads((room / "d" / INDEX).read_text())
    (room / "d" / INDEX).write_text(json.dumps({**told, "weight_map": {}}))
    with pytest.raises(CheckpointError, match="tells of no changes, but model-00000"):
        apply_deltas(room / "base", room / "d", room / "out.safetensors")
    assert not (room / "out.safetensors").exists()


def test_the_bytes_of_a_delta_do_not_depend_on_the_cores(room):
    told = {}
    for cores in ("1", "4"):
        before = f"from ckptconv.support import platforms; platforms.cores = lambda: {cores}"
        run("delta", "base", "two", f"d{cores}", cwd=room, before=before)
        told[cores] = {path.name: path.read_bytes() for path in (room / f"d{cores}").iterdir()}
    assert told["1"] == told["4"] and len(told["1"]) == 2


def test_one_in_a_hundred_values_takes_two_in_a_hundred_bytes(tmp_path):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(1_000_000, np.float32)
    save_file({"w": weights}, tmp_path / "base.safetensors")
    at = rng.choice(weights.size, weights.size // 100, replace=False)
    weights[at] = rng.standard_normal(at.size, np.float32)
    save_file({"w": weights}, tmp_path / "new.safetensors")
    made = delta_checkpoints(
        tmp_path / "base.safetensors", tmp_path / "new.safetensors", tmp_path / "d"
    )
    assert made.nbytes <= made.whole_nbytes * 0.02


# ------------------------------------------------------------------------------------ versions


@pytest.fixture
def chain(room: Path) -> Path:
    """The room, with the deltas of both steps in a folder of versions."""
    (room / "updates").mkdir()
    delta_checkpoints(room / "base", room / "one", room / "updates" / "weight_v000001")
    delta_checkpoints(
        room / "one", room / "two", room / "updates" / "weight_v000002", encoding="overwrite"
    )
    return room


def test_deltas_are_applied_one_on_top_of_the_other(chain):
    out = chain / "out.safetensors"
    names = [chain / "updates" / f"weight_v00000{number}" for number in (1, 2)]
    apply_deltas(chain / "base", names, out, verify=True)
    assert equal(out, chain / "two" / "model.safetensors")
    apply_deltas(chain / "base", chain / "updates", out, force=True)
    assert equal(out, chain / "two" / "model.safetensors")


def test_a_hundred_versions_are_applied_in_one_go_and_more_in_turns(tmp_path):
    values = np.zeros(101, np.uint16)
    save_file({"w": values}, tmp_path / "base.safetensors")
    for version in range(1, 102):
        old = {"w": values.tobytes()}
        values[version - 1] = version
        place = tmp_path / "updates" / f"weight_v{version:06d}"
        write_delta(place, old, {"w": values.tobytes()}, version=version)
    places = sorted((tmp_path / "updates").iterdir())
    base, out = tmp_path / "base.safetensors", tmp_path / "out.safetensors"
    with pytest.raises(UnsupportedCheckpoint, match="w: is changed by more than 100 deltas"):
        apply_deltas(base, tmp_path / "updates", out)
    apply_deltas(base, places[:100], out, verify=True)
    apply_deltas(out, places[100:], tmp_path / "last.safetensors")
    assert tensors_in(tmp_path / "last.safetensors") == {"w": values.tobytes()}


def test_a_base_that_says_its_version_takes_only_what_comes_after(chain):
    (chain / "one" / ".weight_sync").mkdir()
    (chain / "one" / ".weight_sync" / "state.json").write_text('{"version": "000001"}')
    apply_deltas(chain / "one", chain / "updates", chain / "out.safetensors")
    assert equal(chain / "out.safetensors", chain / "two" / "model.safetensors")
    line = assert_one_error(run("apply", "one", "updates/weight_v000001", "no.pt", cwd=chain))
    assert "changes version 0, but BASE is version 1" in line
    made = delta_checkpoints(chain / "one", chain / "two", chain / "d")
    assert (made.base_version, made.version) == (1, 2)


def test_deltas_of_one_base_are_not_applied_one_on_top_of_the_other(chain):
    """The second one says that it follows the first, and its checksums are those of the base."""
    other = chain / "other"
    delta_checkpoints(chain / "base", chain / "two", other, version=2, base_version=1)
    deltas, out = [chain / "updates" / "weight_v000001", other], chain / "out.safetensors"
    with pytest.raises(MalformedCheckpoint, match=r"was made from a tensor with the xxh3-128 "):
        apply_deltas(chain / "base", deltas, out)
    with pytest.raises(OptionRefused, match="there is no delta; name one or more"):
        apply_deltas(chain / "base", [], out)
    with pytest.raises(OptionRefused, match="tag=3 is not "):
        apply_deltas(chain / "base", deltas[:1], out, tag=3)
    assert not out.exists()


def test_a_whole_version_among_deltas_is_named(chain):
    (chain / "one").rename(chain / "updates" / "weight_v000003")
    line = assert_one_error(run("apply", "base", "updates", "no.pt", cwd=chain))
    assert "weight_v000003 is a whole version, not a delta; name it as BASE" in line
    line = assert_one_error(run("apply", "updates/weight_v000003", "updates", "no.pt", cwd=chain))
    assert "holds no version after 3, which BASE is" in line


@pytest.mark.parametrize(
    "words, told",
    [
        (("base", "updates/weight_v000002"), "in BASE have the xxh3-128"),
        (("base", "updates/weight_v000002", "updates/weight_v000001"), "is version 2"),
        (("one", "updates/weight_v000001"), "name the BASE that the delta was made from"),
        (("two", "updates"), "name the BASE that the delta was made from"),
        (("base", "updates/weight_v000001", "updates/weight_v000001"), "is version 1"),
        (("base", "one"), "is not a delta"),
        (("base", f"updates/weight_v000001/{SHARD}"), "name its folder"),
        (("base", "nothing"), "no such file"),
    ],
)
def test_versions_that_do_not_follow_each_other_are_refused(words, told, chain):
    before = sorted(chain.rglob("*"))
    line = assert_one_error(run("apply", *words, "no.safetensors", cwd=chain))
    assert told in line
    assert sorted(chain.rglob("*")) == before


def test_versions_are_those_that_were_asked_for_and_grow(room):
    made = delta_checkpoints(room / "base", room / "one", room / "a", version=9, base_version=4)
    told = json.loads((room / "a" / INDEX).read_text())["metadata"]
    assert (told["version"], told["base_version"]) == ("000009", "000004")
    assert (made.version, made.base_version) == (9, 4)
    with pytest.raises(OptionRefused, match="does not come after"):
        delta_checkpoints(room / "base", room / "one", room / "b", version=2, base_version=2)
    for version in ("2", 10**18):  # which is read again as up to 18 digits
        with pytest.raises(OptionRefused, match="not the number of a version"):
            delta_checkpoints(room / "base", room / "one", room / "b", version=version)
    assert not (room / "b").exists()


# ---------------------------------------------------------------------------- what is refused


def forged(**how) -> dict[str, object]:
    return how


LARGE = 700 * 601 * 4
"""Bytes of the tensor `large`."""


def places(*at: int, count: int | None = None, values: int | None = None) -> bytes:
    """What an overwriting frame holds: places, and so many new bytes."""
    number = len(at) if count is None else count
    new = bytes(len(at) if values is None else values)
    return packed(struct.pack("<I", number) + np.array(at, "<u4").tobytes() + new)


FORGED = {
    "no frame": (forged(frames={"large": b"nonsense" * 9}), "does not inflate"),
    "nothing": (forged(frames={"large": packed(b"")}), "fewer bytes"),
    "half a frame": (forged(frames={"large": packed(bytes(LARGE))[:20]}), "fewer bytes"),
    "too few": (forged(frames={"large": packed(bytes(LARGE - 1))}), "fewer bytes"),
    "too many": (forged(frames={"large": packed(bytes(LARGE + 1))}), "more bytes"),
    "a bomb": (forged(frames={"large": packed(bytes(LARGE)) * 300}), "more bytes"),
    "something behind": (forged(frames={"large": packed(bytes(LARGE)) + b"xyz"}), "inflate"),
    "a lie": (forged(sums={"large": "0" * 32}), "not 00000000"),
    "no checksum": (forged(sums={"large": ""}), "is not 32 digits of xxh3-128"),
    "another checksum": (forged(sums={"large": "0" * 8}), "is not 32 digits of xxh3-128"),
    "an unknown encoding": (forged(delta_encoding="add"), "delta_encoding: add is not known"),
    "another compression": (forged(compression_format="lz4"), "lz4 is not known"),
    "another algorithm": (forged(checksum_format="md5"), "md5 is not known"),
    "no version": (forged(version_="x") | {"version": "new"}, "new is not a number"),
    "no base version": (forged(base_version=None), "base_version: is missing"),
    "another tensor": (
        forged(frames={"more": packed(b"x")}, sums={"more": "0" * 32}),
        "more: is in the delta, but not in BASE",
    ),
    "a tensor without bytes": (
        forged(frames={"empty": packed(b"")}, sums={"empty": "0" * 32}),
        "the tensor has no bytes",
    ),
    "checksums that are none": (forged(base_checksums=[1]), "base_checksums: is not an object"),
    "names that are none": (forged(base_tied=["large"]), "base_tied: is not an object"),
    "a name of no tensor": (
        forged(base_tied={"head": "large"}),
        "head: is not another name of a tensor of base_checksums",
    ),
    "checksums of another base": (
        forged(base_checksums={"large": "0" * 32}),
        "is in BASE, but not in what the delta was made from",
    ),
}
OVERWRITTEN = {
    "outside": (places(LARGE), f"overwrites byte {LARGE} of a tensor of {LARGE} bytes"),
    "far outside": (places(5, (1 << 32) - 1), "overwrites byte 4294967295"),
    "twice": (places(7, 7), "do not rise"),
    "falling": (places(9, 3), "do not rise"),
    "falling later": (places(*range(200_000), 150_000), "do not rise"),
    "too many": (places(count=LARGE + 1), "overwrites 1682801 bytes of a tensor of 1682800"),
    "fewer places": (places(1, count=2, values=0), "fewer bytes"),
    "fewer values": (places(1, 2, values=1), "fewer bytes"),
    "more values": (places(1, 2, values=3), "more bytes"),
    "no number": (packed(b"\1"), "fewer bytes"),
    "other values": (places(1, 2), "with the change have the xxh3-128"),
}


def refused(room: Path, told: str) -> str:
    """The line of the error of applying `d`, after which nothing is left."""
    before = sorted(room.rglob("*"))
    line = assert_one_error(run("apply", "base", "d", "no.safetensors", cwd=room))
    assert told in line, line
    assert sorted(room.rglob("*")) == before
    return line


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_delta_is_refused_in_one_line(name, room):
    how, told = FORGED[name]
    how = dict(how)
    how.pop("version_", None)
    telling = {"version": how.pop("version")} if "version" in how else {}
    write_delta(room / "d", tensors_in(room / "base"), tensors_in(room / "one"), **how)
    if telling:
        index = json.loads((room / "d" / INDEX).read_text())
        index["metadata"] |= telling
        (room / "d" / INDEX).write_text(json.dumps(index))
    refused(room, told)


@pytest.mark.parametrize("name", OVERWRITTEN)
def test_forged_places_are_refused_in_one_line(name, room):
    frame, told = OVERWRITTEN[name]
    old, new = tensors_in(room / "base"), tensors_in(room / "one")
    write_delta(room / "d", old, new, encoding="overwrite", frames={"large": frame})
    refused(room, told)


def test_a_frame_that_asks_for_much_memory_is_refused(room):
    import zstandard

    old, new = tensors_in(room / "base"), tensors_in(room / "one")
    raw = difference(old["large"], new["large"], "xor")
    wide = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=0)
    frame = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    made = frame.compress(raw) + frame.flush()
    write_delta(room / "d", old, new, frames={"large": made})
    assert "large: its zstd frame does not inflate" in refused(room, "memory")


def test_changes_that_are_no_bytes_are_refused(room):
    write_delta(room / "d", tensors_in(room / "base"), tensors_in(room / "one"))
    metadata, raw = {"large": "0" * 32}, np.zeros((2, 3), np.uint8)
    save_file({"large": raw}, room / "d" / SHARD, metadata)
    (room / "d" / INDEX).write_text(
        json.dumps(json.loads((room / "d" / INDEX).read_text()) | {"weight_map": {"large": SHARD}})
    )
    refused(room, "large: is not a run of bytes")


def test_another_base_is_named_even_where_the_delta_changes_nothing_in_it(room):
    delta_checkpoints(room / "base", room / "one", room / "d")
    other = drawn(0) | {"same": np.arange(1, 91, dtype=np.int32)}
    save_file(other, room / "base" / "model.safetensors")
    line = refused(room, "same: its bytes in BASE have the xxh3-128")
    assert "name the BASE that the delta was made from" in line


def test_what_slime_wrote_is_not_said_to_be_checked_where_it_is_not(room):
    write_delta(room / "d", tensors_in(room / "base"), tensors_in(room / "one"))
    told = run("apply", "base", "d", "out.safetensors", cwd=room).err
    assert "7 of 9 tensors changed; the delta has no checksums of the others" in told


@pytest.mark.parametrize(
    "change, kind, told",
    [
        ({"more": np.zeros(3)}, KeyMismatch, "more: is in NEW, but not in BASE"),
        ({"half": None}, KeyMismatch, "half: is in BASE, but not in NEW"),
        (
            {"half": np.zeros((33, 7), np.float32)},
            KeyMismatch,
            "dtype float32, but float16 .*--dty",
        ),
        ({"counts": np.zeros(257, np.int32)}, KeyMismatch, "dtype int32, but int64 .*as a whole"),
        ({"half": np.zeros((7, 33), np.float16)}, KeyMismatch, r"shape \[7, 33\], but \[33, 7\]"),
    ],
)
def test_what_a_delta_cannot_say_is_refused(change, kind, told, room):
    new = {**drawn(0), **change}
    path = room / "one" / "model.safetensors"
    save_file({name: value for name, value in new.items() if value is not None}, path)
    with pytest.raises(kind, match=told):
        delta_checkpoints(room / "base", room / "one", room / "d")
    assert not (room / "d").exists()


def test_places_that_do_not_fit_32_bits_are_not_written(room, monkeypatch):
    monkeypatch.setattr(deltas, "MOST_PLACES", LARGE - 1)
    with pytest.raises(RefusedObject, match=rf"^large: has {LARGE} bytes.*; use --encoding xor$"):
        delta_checkpoints(room / "base", room / "one", room / "d", encoding="overwrite")
    assert not (room / "d").exists()
    delta_checkpoints(room / "base", room / "one", room / "d", encoding="xor")
    assert apply_delta(tensors_in(room / "base"), room / "d") == tensors_in(room / "one")


def test_an_output_is_replaced_only_with_force_and_never_an_input(room):
    delta_checkpoints(room / "base", room / "one", room / "d")
    with pytest.raises(CheckpointError, match="exists"):
        delta_checkpoints(room / "base", room / "two", room / "d")
    delta_checkpoints(room / "base", room / "two", room / "d", force=True)
    assert apply_delta(tensors_in(room / "base"), room / "d") == tensors_in(room / "two")
    with pytest.raises(CheckpointError):
        delta_checkpoints(room / "base", room / "two", room / "base", force=True)
    assert tensors_in(room / "base") == {k: v.tobytes() for k, v in drawn(0).items()}


def test_a_base_is_not_replaced_by_what_is_made_of_it(room):
    delta_checkpoints(room / "base", room / "one", room / "d")
    path = room / "base" / "model.safetensors"
    with pytest.raises(CheckpointError, match="is one of the input files"):
        apply_deltas(path, room / "d", path, force=True)
    assert facts(path)["half"][2] == drawn(0)["half"].tobytes()


def test_names_of_one_tensor_are_changed_together(tmp_path):
    old, new = {"w": np.arange(40.0)}, {"w": np.arange(40.0) + 1}
    for name, tensors in (("base", old), ("new", new)):
        save_file(tensors, tmp_path / f"{name}.safetensors", {"head": "w", "format": "pt"})
    base, out = tmp_path / "base.safetensors", tmp_path / "out.safetensors"
    delta_checkpoints(base, tmp_path / "new.safetensors", tmp_path / "d")
    assert tensors_in(tmp_path / "d").keys() == {"w"}  # the name under which engines look for it
    apply_deltas(base, tmp_path / "d", out)
    applied = ckptconv.open_checkpoint(out)
    assert sorted(applied) == ["head", "w"]
    assert all((applied[name].numpy() == new["w"]).all() for name in applied)
    save_file({**new, "head": np.zeros(40)}, tmp_path / "apart.safetensors")
    told = r"apart.*head: is the same tensor as w in BASE, but not in NEW; write .* safetensors"
    with pytest.raises(KeyConflict, match=told):
        delta_checkpoints(base, tmp_path / "apart.safetensors", tmp_path / "e")
    ckptconv.convert_checkpoint(base, tmp_path / "two.safetensors", tied="duplicate")
    delta_checkpoints(tmp_path / "two.safetensors", tmp_path / "apart.safetensors", tmp_path / "e")
    apply_deltas(tmp_path / "two.safetensors", tmp_path / "e", out, force=True)
    assert equal(out, tmp_path / "apart.safetensors")


def test_tensors_may_have_the_names_of_metadata(tmp_path):
    """A delta has a checksum under the name of each tensor, among metadata with these names."""
    names = ("ckptconv.encodings", "format", "device", "base_checksums", "version")
    old = {name: np.arange(40.0) + at for at, name in enumerate(names)}
    base, new, out = (tmp_path / f"{name}.safetensors" for name in ("base", "new", "out"))
    save_file(old, base)
    save_file({name: value + 1 for name, value in old.items()}, new)
    delta_checkpoints(base, new, tmp_path / "d")
    assert apply_delta(tensors_in(base), tmp_path / "d") == tensors_in(new)
    apply_deltas(base, tmp_path / "d", out)
    assert equal(out, new)
    for made in ("d", f"d/{SHARD}"):
        assert "] on cpu" in run("inspect", made, cwd=tmp_path).out
        assert "was saved on" not in run("doctor", made, cwd=tmp_path).out


def test_wrappers_of_what_training_saved_are_stripped(room):
    tensors = {f"module.{name}": value for name, value in changed(drawn(0)).items()}
    save_file(tensors, room / "t.safetensors")
    made = delta_checkpoints(room / "base", room / "t.safetensors", room / "d")
    assert "the wrappers before the keys of NEW are stripped" in made.notes
    assert apply_delta(tensors_in(room / "base"), room / "d") == tensors_in(room / "one")


# ----------------------------------------------------------------- a delta is not a checkpoint

ELSE = {
    "convert": ("{}", "no.pt"),
    "strip-module": ("{}", "no.pt"),
    "add-module": ("{}", "no.pt"),
    "ls": ("{}",),
    "diff": ("base", "{}"),
    "stats": ("{}",),
    "report": ("{}", "-o", "no.html"),
    "show": ("{}", "large"),
    "merge": ("base", "{}", "no.pt"),
    "average": ("base", "{}", "no.pt"),
    "merge-lora": ("{}", "base", "no.safetensors"),
    "manifest": ("{}",),
    "delta": ("{}", "base", "no"),
    "apply": ("{}", "{}", "no.pt"),
}


@pytest.mark.parametrize("command, which", crossed([*ELSE], ["d", f"d/{INDEX}", f"d/{SHARD}"]))
def test_no_command_takes_changes_for_weights(command, which, room):
    write_delta(room / "d", tensors_in(room / "base"), tensors_in(room / "one"))
    before = sorted(room.rglob("*"))
    words = [word.format(which) for word in ELSE[command]]
    line = assert_one_error(run(command, *words, cwd=room), code=2 if command == "diff" else 1)
    assert "holds changes of tensors" in line and "ckptconv apply BASE d OUT" in line
    assert sorted(room.rglob("*")) == before


V1 = "updates/weight_v000001"


@pytest.mark.parametrize(
    "deltas, out",
    [
        (V1, f"{V1}/model.safetensors"),
        (f"{V1}/{INDEX}", f"{V1}/model.safetensors"),
        ("updates", f"{V1}/pytorch_model.bin"),
        (V1, "base/pytorch_model.bin"),
    ],
)
def test_what_is_applied_is_not_hidden_by_the_output(deltas, out, chain):
    before = sorted(chain.rglob("*"))
    line = assert_one_error(run("apply", "base", deltas, out, "--force", cwd=chain))
    assert line == (
        f"error: {out}: would be taken for the checkpoint in its folder, which is read here; name "
        "another folder"
    )
    assert sorted(chain.rglob("*")) == before


def test_a_file_of_a_delta_is_not_edited(room):
    write_delta(room / "d", tensors_in(room / "base"), tensors_in(room / "one"))
    raw = (room / "d" / SHARD).read_bytes()
    line = assert_one_error(run("edit", f"d/{SHARD}", "--rename", "large=small", cwd=room))
    assert "holds changes of tensors" in line and (room / "d" / SHARD).read_bytes() == raw


def test_what_is_left_of_a_file_of_changes_is_not_saved_as_weights(room):
    write_delta(room / "d", tensors_in(room / "base"), tensors_in(room / "one"))
    file, out = room / "d" / SHARD, room / "no.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UnsupportedCheckpoint, match=r"changes of tensors.*; fetch the delta again"):
        ckptconv.recover_checkpoint(file, out)
    assert not out.exists()


def test_a_batch_refuses_changes(room):
    write_delta(room / "d", tensors_in(room / "base"), tensors_in(room / "one"))
    done = run("batch", "d", "--out-dir", "out", "--to", "npz", cwd=room)
    assert done.exit == 1 and "holds changes of tensors" in done.out + done.err
    assert not list((room / "out").glob("*.npz"))


@pytest.mark.parametrize(
    "use",
    [
        ckptconv.open_checkpoint,
        ckptconv.stats_checkpoint,
        lambda path: ckptconv.diff_checkpoints(path, path),
        lambda path: ckptconv.convert_checkpoint(path, path.parent / "no.npz"),
    ],
)
def test_no_function_takes_changes_for_weights(use, room):
    write_delta(room / "d", tensors_in(room / "base"), tensors_in(room / "one"))
    with pytest.raises(UnsupportedCheckpoint, match="holds changes of tensors"):
        use(room / "d")


def test_inspect_and_doctor_say_what_it_is(room):
    delta_checkpoints(room / "base", room / "one", room / "d")
    done = run("inspect", "d", cwd=room)
    assert "delta (xor, zstd)" in done.out and "from version 000000 to 000001" in done.out
    assert "dtypes" not in done.out and "will not open everywhere" in done.out
    assert done.out.count("apply them: ckptconv apply BASE d OUT") == 1
    done = run("doctor", "d", cwd=room)
    assert done.exit == 1 and "apply them: ckptconv apply BASE d OUT" in done.out


def test_a_checkpoint_of_bytes_with_some_metadata_is_not_a_delta(tmp_path):
    raw = {"a": bytes(9), "b": bytes(9)}
    for metadata in ({"a": "0" * 8}, {"a": "0" * 8, "b": "0" * 7}, {"a": "0" * 8, "b": "x" * 8}):
        written(tmp_path / "m.safetensors", raw, metadata)
        assert len(ckptconv.open_checkpoint(tmp_path / "m.safetensors").state_dict().keys) == 2
    written(tmp_path / "m.safetensors", raw, {"a": "0" * 8, "b": "0" * 8})
    with pytest.raises(UnsupportedCheckpoint):
        ckptconv.open_checkpoint(tmp_path / "m.safetensors")


# -------------------------------------------------------------------------------- where it runs


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_base_and_delta_may_be_elsewhere(encoding, chain):
    write_delta(
        chain / "e", tensors_in(chain / "base"), tensors_in(chain / "one"), encoding=encoding
    )
    files = {
        f"/{path.relative_to(chain)}": path.read_bytes()
        for path in chain.rglob("*")
        if path.is_file()
    }
    with HttpServer(files) as server:
        out = chain / "out.safetensors"
        base, new = (f"{server.url}/{name}/model.safetensors" for name in ("base", "one"))
        done = run("apply", base, f"{server.url}/e/{INDEX}", out, "--verify", cwd=chain)
        assert done.exit == 0, done.err
        assert equal(out, chain / "one" / "model.safetensors")
        done = run("delta", base, new, "far", "--encoding", encoding, cwd=chain)
        assert done.exit == 0, done.err
    assert apply_delta(tensors_in(chain / "base"), chain / "far") == tensors_in(chain / "one")


def test_the_new_version_goes_to_standard_output(room):
    write_delta(room / "d", tensors_in(room / "base"), tensors_in(room / "one"))
    code, out, _ = run_bytes("apply", "base", "d", "-", "--to", "safetensors", cwd=room)
    (room / "out.safetensors").write_bytes(out)
    assert code == 0 and equal(room / "out.safetensors", room / "one" / "model.safetensors")


@pytest.mark.parametrize("lacking", ["zstandard", "xxhash"])
def test_a_missing_package_is_named(lacking, room):
    write_delta(room / "d", tensors_in(room / "base"), tensors_in(room / "one"))
    before = f"import sys; sys.modules[{lacking!r}] = sys.modules['compression'] = None"
    for words in (("apply", "base", "d", "no.pt"), ("delta", "base", "one", "no")):
        line = assert_one_error(run(*words, cwd=room, before=before))
        assert lacking in line and "pip install " in line and lacking in line.partition("pip ")[2]
    if lacking == "xxhash":
        done = run("delta", "base", "one", "e", "--checksum", "adler32", cwd=room, before=before)
        assert done.exit == 0
    assert not (room / "no").exists() and not (room / "no.pt").exists()


def test_a_terminal_is_told_what_was_made(room):
    done = run("delta", "base", "two", "weight_v000002", cwd=room)
    assert done.out == "" or "weight_v000002" in done.out
    told = done.out + done.err
    assert "1 → 2" in told and "7 of 9 tensors changed" in told and "xor, zstd, xxh3-128" in told
    found = json.loads(run("delta", "base", "two", "d", "--json", cwd=room).out)
    assert (found["version"], found["tensors"], found["changed"]) == (1, 9, 7)
    quiet = run("delta", "base", "two", "e", "-q", cwd=room)
    assert (quiet.out, quiet.err) == ("", "")
