"""Damaged files: what is given is what torch has of the whole file, and nothing that is damaged."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckptconv import CheckpointError, recover_checkpoint
from helpers.examples import some
from helpers.program import SAMPLES, run

MODEL = {
    "a": torch.arange(100.0),
    "tied": None,
    "b": torch.randn(7, 9),
    "half": torch.randn(33).half(),
    "empty": torch.empty(0, 3),
    "c": torch.arange(20),
}
MODEL["tied"] = MODEL["a"]
TRAIN = {
    "state_dict": {"w": torch.randn(4, 4), "view": torch.arange(50.0)[5:20:3]},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "avg": torch.randn(4, 4)}}},
    "list": [torch.ones(3), torch.zeros(5)],
    "epoch": 4,
}


def flat(tree, prefix="") -> dict[str, torch.Tensor]:
    """The tensors of a tree by their paths."""
    found = {}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        path = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif isinstance(value, (dict, list)):
            found |= flat(value, f"{path}.")
    return found


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def recovered(path, tree) -> tuple[set[str], set[str]] | None:
    """The tensors that are given, each of which is the one of the whole file, and those that are
    told as lost; None where all of it is refused.
    """
    output = path.parent / "saved.pt"
    output.unlink(missing_ok=True)
    try:
        found = recover_checkpoint(path, output)
    except CheckpointError as error:
        assert not output.exists() and "\n" not in str(error)
        return None
    whole, given = flat(tree), flat(torch.load(output, weights_only=True))
    assert all(equal(value, whole[name]) for name, value in given.items())
    assert set(found.whole) == given.keys() and not set(found.lost) & given.keys()
    assert set(found.whole) | set(found.lost) == whole.keys()
    return set(found.whole), set(found.lost)


def ends_in(raw: bytes) -> dict[str, int]:
    """The byte behind the payload and the data descriptor of each storage of a torch zip."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        infos = archive.infolist()
    ends = {}
    for info in infos:
        name_size, extra_size = struct.unpack_from("<HH", raw, info.header_offset + 26)
        payload = info.header_offset + 30 + name_size + extra_size
        end = payload + info.file_size + (16 if info.file_size else 0)
        ends[info.filename.partition("/")[2]] = end
    return ends


@pytest.mark.parametrize("step", [997, pytest.param(7, marks=pytest.mark.trust)])
@pytest.mark.parametrize("tree", [MODEL, TRAIN], ids=["model", "train"])
def test_a_zip_that_is_cut_off_anywhere_gives_the_storages_before_the_cut(tmp_path, tree, step):
    whole = tmp_path / "whole.pt"
    torch.save(tree, whole)
    raw, ends = whole.read_bytes(), ends_in(whole.read_bytes())
    storages = {name: end for name, end in ends.items() if name.startswith("data/")}
    path, sizes = tmp_path / "cut.pt", set()
    boundaries = {at + off for at in [*ends.values()] for off in (-17, -1, 0)}
    for size in sorted({*boundaries, *range(0, len(raw), step), len(raw) - 1}):
        path.write_bytes(raw[:size])
        got = recovered(path, tree)
        there = sum(end <= size for end in storages.values())
        sizes.add((there, None if got is None else len(got[0])))
        assert (got is None) == (there == 0), size
    assert len(sizes) > 3
    by_storages = {there: count for there, count in sizes if count is not None}
    assert [*dict(sorted(by_storages.items())).values()] == sorted(by_storages.values())
    assert max(by_storages.values()) == len(flat(tree))


def test_a_zip_without_its_directory_alone_is_complete(tmp_path):
    torch.save(TRAIN, tmp_path / "m.pt")
    raw = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(raw[: raw.index(b"PK\1\2")])
    done = run("recover", "m.pt", "out.pt", cwd=tmp_path)
    assert done.exit == 0 and "6 of 6 tensors whole" in done.out, done.out
    assert "damage" in done.out and "  whole" not in done.out, "a model may have thousands"
    assert torch.load(tmp_path / "out.pt", weights_only=True)["epoch"] == 4


@pytest.mark.parametrize("step", [229, pytest.param(3, marks=pytest.mark.trust)])
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole directory", "no directory"])
def test_a_flipped_bit_anywhere_in_a_zip_never_gives_a_damaged_tensor(tmp_path, is_cut, step):
    torch.save(MODEL, tmp_path / "m.pt")
    raw = (tmp_path / "m.pt").read_bytes()
    if is_cut:
        raw = raw[: raw.index(b"PK\1\2")]
    counts = set()
    for at in range(3, len(raw), step):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "m.pt").write_bytes(damaged)
        got = recovered(tmp_path / "m.pt", MODEL)
        counts.add(None if got is None else len(got[0]))
    assert {None, len(flat(MODEL))} < counts


def test_a_tensor_in_the_middle_is_lost_alone(tmp_path):
    torch.save(MODEL, tmp_path / "m.pt")
    raw = bytearray((tmp_path / "m.pt").read_bytes())
    raw[raw.index(MODEL["b"].numpy().tobytes()) + 9] ^= 4
    for cut in (len(raw), raw.index(b"PK\1\2")):
        (tmp_path / "m.pt").write_bytes(raw[:cut])
        assert recovered(tmp_path / "m.pt", MODEL) == ({*MODEL} - {"b"}, {"b"})
    done = run("recover", "m.pt", "o.safetensors", "--json", cwd=tmp_path)
    assert (done.exit, json.loads(done.out)["lost"]) == (1, ["b"])


def test_all_names_of_a_lost_storage_are_lost_and_a_list_goes_as_a_whole(tmp_path):
    for tree, key, lost in (
        (MODEL, "a", {"a", "tied"}),
        (TRAIN, "list", {"list.0", "list.1"}),
    ):
        torch.save(tree, tmp_path / "m.pt")
        value = tree[key][1] if key == "list" else tree[key]
        with zipfile.ZipFile(tmp_path / "m.pt") as archive:
            raw = bytearray((tmp_path / "m.pt").read_bytes())
            [info] = [
                info for info in archive.infolist()
                if "/data/" in info.filename and archive.read(info) == value.numpy().tobytes()
            ]  # fmt: skip
        name_size, extra_size = struct.unpack_from("<HH", raw, info.header_offset + 26)
        raw[info.header_offset + 30 + name_size + extra_size] ^= 1
        (tmp_path / "m.pt").write_bytes(raw)
        got = recovered(tmp_path / "m.pt", tree)
        assert got is not None and got[1] == lost


def test_a_lost_tensor_that_no_dict_holds_is_not_left_out(tmp_path):
    """The others of a list would get other numbers without it."""
    torch.save([torch.ones(300), torch.zeros(300)], tmp_path / "m.pt")
    raw = bytearray((tmp_path / "m.pt").read_bytes())
    raw[raw.rindex(torch.ones(1).numpy().tobytes())] ^= 1
    (tmp_path / "m.pt").write_bytes(raw)
    with pytest.raises(CheckpointError, match="what is lost is not in a dict, and cannot be left"):
        recover_checkpoint(tmp_path / "m.pt", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_records_of_a_file_that_lies_in_a_tensor_are_not_taken(tmp_path):
    """A tensor that holds a whole archive with the same names; its own header is destroyed."""
    inner = io.BytesIO()
    torch.save({"x": torch.full((50,), 7.0), "a": torch.full((100,), 7.0)}, inner)
    raw = bytearray(inner.getvalue().replace(b"archive", b"m" * 7))
    packed = torch.frombuffer(raw, dtype=torch.uint8)
    tree = {"packed": packed, "a": torch.arange(100.0), "x": torch.arange(50.0)}
    torch.save(tree, tmp_path / f"{'m' * 7}.pt")
    path = tmp_path / f"{'m' * 7}.pt"
    raw = bytearray(path.read_bytes())
    raw = raw[: raw.rindex(b"PK\5\6") - 500]
    with_tail = bytes(raw)
    at = with_tail.index(b"data/0") - 7 - 1 - 30
    assert with_tail[at : at + 4] == b"PK\3\4"
    raw[at] ^= 1
    path.write_bytes(raw)
    assert recovered(path, tree) is None


def test_a_zip_whose_pickle_is_lost_is_refused_and_says_why(tmp_path):
    torch.save(MODEL, tmp_path / "m.pt")
    raw = bytearray((tmp_path / "m.pt").read_bytes())
    raw[raw.index(b"data.pkl") + 80] ^= 1
    for cut in (len(raw), raw.index(b"PK\1\2")):
        (tmp_path / "m.pt").write_bytes(raw[:cut])
        done = run("recover", "m.pt", "out.pt", cwd=tmp_path)
        assert (done.exit, done.out) == (1, "")
        assert "its data.pkl is lost, which says the names" in done.err
        assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_that_another_program_packed_again(tmp_path, method):
    """Sizes and checksums stand in its local headers; what is deflated is given up."""
    torch.save(MODEL, tmp_path / "m.pt")
    with (
        zipfile.ZipFile(tmp_path / "m.pt") as old,
        zipfile.ZipFile(tmp_path / "new.pt", "w") as new,
    ):
        for info in old.infolist():
            kind = method if "/data/" in info.filename else zipfile.ZIP_STORED
            new.writestr(info.filename, old.read(info), kind)
    raw = (tmp_path / "new.pt").read_bytes()
    (tmp_path / "new.pt").write_bytes(raw[: raw.index(b"PK\1\2")])
    got = recovered(tmp_path / "new.pt", MODEL)
    assert got == (({*MODEL}, set()) if method == zipfile.ZIP_STORED else None)


@pytest.mark.parametrize("step", [97, pytest.param(7, marks=pytest.mark.trust)])
@pytest.mark.parametrize("tree", [MODEL, TRAIN], ids=["model", "train"])
def test_a_legacy_file_that_is_cut_off_anywhere(tmp_path, tree, step):
    torch.save(tree, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    raw = (tmp_path / "m.pt").read_bytes()
    counts = []
    for size in range(0, len(raw) + 1, step):
        (tmp_path / "m.pt").write_bytes(raw[:size])
        got = recovered(tmp_path / "m.pt", tree)
        counts.append(0 if got is None else len(got[0]))
    assert counts == sorted(counts) and len({*counts}) > 2 - (step > 1)
    (tmp_path / "m.pt").write_bytes(raw)
    assert recovered(tmp_path / "m.pt", tree) == ({*flat(tree)}, set())
    (tmp_path / "m.pt").write_bytes(raw[:-9])
    damage = recover_checkpoint(tmp_path / "m.pt", tmp_path / "again.pt").damage
    assert re.fullmatch(r"storage \d+: its \d+ bytes at \d+ lie beyond the end .*", damage)


@pytest.mark.parametrize("step", [23, pytest.param(7, marks=pytest.mark.trust)])
def test_a_legacy_file_whose_end_is_zeros_gives_nothing_that_may_be_damaged(tmp_path, step):
    """As a download does that had reserved its place."""
    tree = {str(at): torch.randn(10 * (at % 3 > 0)) for at in range(9)}
    torch.save(tree, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    raw = (tmp_path / "m.pt").read_bytes()
    counts = set()
    # of the last storage with elements nothing tells
    last = max(raw.index(each.numpy().tobytes()) for each in tree.values() if each.numel()) - 8
    for size in range(len(raw) - 6 * 48 - 3 * 8, last + 1, step):
        (tmp_path / "m.pt").write_bytes(raw[:size] + bytes(len(raw) - size))
        got = recovered(tmp_path / "m.pt", tree)
        counts.add(0 if got is None else sum(tree[name].numel() > 0 for name in got[0]))
    assert counts <= {0, 1, 2, 3, 4} and {3, 4} & counts and len(counts) > 2


@pytest.mark.parametrize("step", [61, pytest.param(7, marks=pytest.mark.trust)])
def test_a_safetensors_file_that_is_cut_off_anywhere(tmp_path, step):
    model = {key: value.clone() for key, value in MODEL.items()}
    save_file(model, tmp_path / "m.safetensors", {"format": "pt"})
    raw = (tmp_path / "m.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:start])
    entries.pop("__metadata__")
    for size in sorted({*range(0, len(raw) + 1, step), *range(start - 2, start + 3), len(raw)}):
        (tmp_path / "m.safetensors").write_bytes(raw[:size])
        got = recovered(tmp_path / "m.safetensors", model)
        if size < start:
            assert got is None
            continue
        whole = {name for name, at in entries.items() if start + at["data_offsets"][1] <= size}
        assert got == ((whole, {*model} - whole) if whole else None)
    (tmp_path / "m.safetensors").write_bytes(raw[:-100])
    done = run("recover", "m.safetensors", "o.safetensors", cwd=tmp_path)
    assert done.exit == 1, done.out
    with safe_open(tmp_path / "o.safetensors", "pt") as file:
        assert all(equal(file.get_tensor(name), model[name]) for name in file.keys())  # noqa: SIM118


def test_a_big_endian_zip_whose_byte_order_is_lost_is_refused(tmp_path):
    torch.save(MODEL, tmp_path / "m.pt")
    with (
        zipfile.ZipFile(tmp_path / "m.pt") as old,
        zipfile.ZipFile(tmp_path / "big.pt", "w") as new,
    ):
        for info in old.infolist():
            raw = b"big" if info.filename.endswith("byteorder") else old.read(info)
            new.writestr(info.filename, raw)
    raw = bytearray((tmp_path / "big.pt").read_bytes())
    raw[raw.index(b"byteorderbig") + 10] ^= 1
    for cut in (len(raw), raw.index(b"PK\1\2")):
        (tmp_path / "big.pt").write_bytes(raw[:cut])
        done = run("recover", "big.pt", "out.pt", cwd=tmp_path)
        assert done.exit == 1 and "byteorder" in done.err and not (tmp_path / "out.pt").exists()


def packed_again(tmp_path, change=lambda files: files, *, kind=zipfile.ZIP_STORED, wide=False):
    """A zip of MODEL as `zipfile` writes it, with other records; where its directory begins."""
    torch.save(MODEL, tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt") as old:
        files = change({info.filename: old.read(info) for info in old.infolist()})
    with zipfile.ZipFile(tmp_path / "new.pt", "w") as new:
        for name, raw in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = kind if "/data/" in name else zipfile.ZIP_STORED
            with new.open(info, "w", force_zip64=wide) as record:
                record.write(raw)
    raw = (tmp_path / "new.pt").read_bytes()
    return tmp_path / "new.pt", raw, raw.index(b"PK\1\2")


def test_sizes_of_64_bits_in_the_headers_of_a_cut_zip(tmp_path):
    path, raw, directory = packed_again(tmp_path, wide=True)
    assert struct.unpack_from("<2I", raw, 18) == (0xFFFFFFFF, 0xFFFFFFFF)
    path.write_bytes(raw[:directory])
    assert recovered(path, MODEL) == ({*MODEL}, set())


def test_a_deflated_storage_that_is_damaged_is_lost_alone(tmp_path):
    path, raw, _ = packed_again(tmp_path, kind=zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path) as archive:
        (info,) = [
            info for info in archive.infolist()
            if "/data/" in info.filename and archive.read(info) == MODEL["b"].numpy().tobytes()
        ]  # fmt: skip
    damaged = bytearray(raw)
    damaged[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 4
    path.write_bytes(damaged)
    assert recovered(path, MODEL) == ({*MODEL} - {"b"}, {"b"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other/data.pkl", b"}.", "holds two checkpoints, m/ and other/"),
        ("m/constants.pkl", b"}.", "is a damaged TorchScript archive"),
        ("m/byteorder", b"middle", "has the unknown byte order b'middle'"),
    ],
)
def test_a_cut_zip_that_does_not_say_what_its_bytes_are_is_refused(
    tmp_path, name, content, message
):
    path, raw, directory = packed_again(tmp_path, lambda files: files | {name: content})
    path.write_bytes(raw[:directory])
    with pytest.raises(CheckpointError, match=message):
        recover_checkpoint(path, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("name", some(3, sorted(path.name for path in SAMPLES.glob("*.pt"))))
def test_a_file_that_is_not_damaged_is_complete(tmp_path, name):
    done = run("recover", SAMPLES / name, "out.pt", "--unknown", "drop", cwd=tmp_path)
    assert done.exit == 0, done.out + done.err
    assert "damage" not in done.out and " lost " not in done.out


@pytest.mark.parametrize("kind", ["cut zip", "flipped zip", "cut legacy", "cut safetensors"])
def test_commands_that_meet_such_damage_name_it(tmp_path, kind):
    name = "in.safetensors" if "safetensors" in kind else "in.pt"
    tree = {"first": torch.ones(4), "last": torch.arange(500.0)}
    torch.save(tree, tmp_path / name, _use_new_zipfile_serialization="legacy" not in kind)
    if "safetensors" in kind:
        save_file(tree, tmp_path / name)
    raw = bytearray((tmp_path / name).read_bytes())
    if "cut" in kind:
        del raw[raw.index(tree["last"].numpy().tobytes()) + 40 :]
    else:
        raw[raw.index(tree["last"].numpy().tobytes()) + 7] ^= 1
    (tmp_path / name).write_bytes(raw)
    told = "or save the tensors that are whole: ckptconv recover IN OUT"
    assert told in run("convert", name, "out.pt", cwd=tmp_path).err
    assert told in run("doctor", "--values", name, cwd=tmp_path).out


def test_what_recover_is_not_for_is_an_error_of_one_line(tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zip").write_bytes(b"PK\3\4" + bytes(1000))
    for name in ("text", "folder", "zip", "not-there"):
        done = run("recover", name, "out.pt", cwd=tmp_path)
        assert (done.exit, done.out, done.err.count("\n")) == (1, "", 1), done.err
    assert run("recover", "text", cwd=tmp_path).exit == 2
    (tmp_path / "out.pt").write_text("mine")
    done = run("recover", SAMPLES / "tied.pt", "out.pt", cwd=tmp_path)
    assert done.exit == 1 and done.err == "error: out.pt: exists; add --force to replace it\n"
    assert (tmp_path / "out.pt").read_text() == "mine"
    done = run("recover", "zip", "./zip", "--force", cwd=tmp_path)
    assert done.exit == 1 and "is the damaged file itself" in done.err


def test_what_is_not_a_tensor_and_device_tags_stay_as_they_are(tmp_path):
    raw = (SAMPLES / "ddp_cuda3_train.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(raw[: raw.index(b"PK\1\2")])
    recover_checkpoint(tmp_path / "m.pt", tmp_path / "out.pt")
    tags = set()
    before, after = (
        torch.load(path, map_location=lambda storage, tag: (tags.add(tag), storage)[1])
        for path in (SAMPLES / "ddp_cuda3_train.pt", tmp_path / "out.pt")
    )
    assert tags == {"cuda:3"} or "cuda:3" in tags
    assert after.keys() == before.keys() and after["epoch"] == before["epoch"]


@pytest.mark.trust
def test_a_pickle_of_any_length_is_found(tmp_path):
    """Its end is looked for in a window that grows; a descriptor in the pickle is not its end."""
    tree = {f"{'long' * 20}.PK\7\x08.{at}": torch.ones(1) for at in range(3000)}
    torch.save(tree, tmp_path / "m.pt")
    raw = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(raw[: raw.index(b"PK\1\2")])
    assert recovered(tmp_path / "m.pt", tree) == ({*tree}, set())


def test_a_hostile_archive_is_walked_once(tmp_path):
    """Headers without end, each with a descriptor far away: the time grows with the file."""
    lead = struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0x0808, 0, 0, 0, 0, 0, 0, 10, 0)
    raw = b"".join(lead + b"m/data.pkl" + b"PK\7\x08" for _ in range(100_000))
    (tmp_path / "m.pt").write_bytes(raw)
    done = run("recover", "m.pt", "out.pt", cwd=tmp_path, limit=20)
    assert done.exit == 1 and "data.pkl is lost" in done.err
