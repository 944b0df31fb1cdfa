"""Manifests: what is hashed, held against torch, numpy and hashlib; the text, against sha256sum."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckptconv import (
    CheckpointError,
    convert_checkpoint,
    manifest_checkpoint,
    verify_checkpoint,
)
from helpers.paths import NUMBERS
from helpers.program import SAMPLES, run
from helpers.reads import counted_reads

ODD = {
    "f32": torch.arange(12.0).reshape(3, 4),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "part": torch.arange(100.0)[10:20:3],
    "bf16": torch.randn(5).bfloat16(),
    "f8": torch.randn(7).to(torch.float8_e4m3fn),
    "c64": torch.randn(3, dtype=torch.complex64),
    "conj": torch.randn(3, dtype=torch.complex64).conj(),
    "neg": torch.randn(3, dtype=torch.complex64).imag.neg(),
    "c128": torch.randn(2, dtype=torch.complex128),
    "bool": torch.tensor([True, False, True]),
    "i64": torch.tensor(7),
    "u16": torch.arange(5).to(torch.uint16),
    "empty": torch.empty(0, 3),
    "expanded": torch.ones(1, 3).expand(4, 3),
    "zero_d": torch.tensor(2.5),
}


def values_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's values as docs/proof.md says them, by torch and numpy alone."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.numel() == 0:
        return b""
    plain = plain.reshape(-1).view(torch.uint8)
    return np.ascontiguousarray(plain.numpy()).tobytes()


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def told(path) -> dict[str, str]:
    return {tensor.name: tensor.sha256 for tensor in manifest_checkpoint(path).tensors or ()}


@pytest.fixture
def odd(tmp_path):
    torch.save(ODD, tmp_path / "odd.pt")
    return tmp_path / "odd.pt"


def test_each_digest_is_that_of_the_values_that_torch_has(odd):
    made = manifest_checkpoint(odd)
    assert {tensor.name: tensor.sha256 for tensor in made.tensors} == {
        name: sha256(values_of(tensor)) for name, tensor in ODD.items()
    }
    forms = {tensor.name: (tensor.dtype, tensor.shape) for tensor in made.tensors}
    assert forms == {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in ODD.items()
    }
    [file] = made.files
    assert (file.name, file.digest) == ("odd.pt", sha256(odd.read_bytes()))


@pytest.mark.parametrize("name", ["legacy.pt", "a.safetensors", "a.npz", "shards/", "dcp"])
def test_every_container_of_the_same_values_has_the_same_digests(odd, name):
    output = odd.parent / name
    kept = {key: value for key, value in ODD.items() if key not in ("c128", "f8", "bf16")}
    if name == "legacy.pt":
        torch.save(kept, output, _use_new_zipfile_serialization=False)
    else:
        options = {"max_shard_size": "1KB"} if name == "shards/" else {}
        to = {"dcp": "dcp", "a.npz": "npz"}.get(name)
        excluded = ["c128", "f8", "bf16"]
        convert_checkpoint(odd, f"{odd.parent}/{name}", exclude=excluded, to=to, **options)
    assert told(output) == {key: sha256(values_of(value)) for key, value in kept.items()}


def test_a_big_endian_file_has_the_digests_of_the_values(tmp_path):
    values = torch.arange(6, dtype=torch.float32), torch.randn(3, dtype=torch.complex64)
    torch.save({"real": values[0], "complex": values[1]}, tmp_path / "little.pt")
    with (
        zipfile.ZipFile(tmp_path / "little.pt") as little,
        zipfile.ZipFile(tmp_path / "big.pt", "w") as big,
    ):
        for name in little.namelist():
            raw = little.read(name)
            if name.endswith("/byteorder"):
                raw = b"big"
            elif "/data/" in name:
                raw = np.frombuffer(raw, "<u4").astype(">u4").tobytes()
            big.writestr(name, raw)
    digests = [sha256(values_of(each)) for each in values]
    assert [*told(tmp_path / "big.pt").values()] == digests[::-1]


def test_arrays_have_the_names_and_digests_of_the_tensors_that_they_become(tmp_path):
    arrays = {"c128": np.array([1j, 2]), "big": np.arange(3, dtype=">i4"), "f4": np.ones((2, 0))}
    torch.save(arrays, tmp_path / "in.pt")
    kept = manifest_checkpoint(tmp_path / "in.pt", tmp_path / "in.sha256")
    digests = {name: hashlib.sha256(values.astype(values.dtype.newbyteorder("<")).tobytes())
               for name, values in arrays.items()}  # fmt: skip
    assert {one.name: one.sha256 for one in kept.tensors} == {
        name: digest.hexdigest() for name, digest in digests.items()
    }
    for name in ("out.pt", "out.safetensors"):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / name)
        assert verify_checkpoint(tmp_path / name, tmp_path / "in.sha256").same


def test_tied_and_nested_names_are_all_told(tmp_path):
    weight = torch.randn(2, 2)
    torch.save({"a": weight, "b": {"c": weight, "list": [torch.ones(1)]}}, tmp_path / "m.pt")
    found = told(tmp_path / "m.pt")
    assert found["a"] == found["b.c"] == sha256(values_of(weight))
    assert found["b.list.0"] == sha256(values_of(torch.ones(1)))


def test_two_tensors_of_one_name_are_refused_for_an_exchange_would_not_be_seen(tmp_path):
    one, other, path = torch.rand(3), torch.rand(3), tmp_path / "m.pt"
    torch.save({"a.b": one, "a": {"b": one}}, path)
    made = manifest_checkpoint(path, tmp_path / "m.sha256")
    assert [each.name for each in made.tensors] == ["a.b", "a.b"]
    torch.save({"a.b": one, "a": {"b": other}}, path)
    for call in (
        lambda: manifest_checkpoint(path),
        lambda: verify_checkpoint(path, tmp_path / "m.sha256"),
        lambda: convert_checkpoint(path, tmp_path / "o.pt", manifest=tmp_path / "o.sha256"),
    ):
        with pytest.raises(CheckpointError, match=r"a\.b: two tensors have this name"):
            call()
    assert {item.name for item in tmp_path.iterdir()} == {"m.pt", "m.sha256"}
    (only,) = manifest_checkpoint(path, only="a").tensors
    assert only.name == "b"


def test_the_parts_of_quantised_and_sparse_tensors_are_told_with_what_they_are_read_with(tmp_path):
    codes = torch.quantize_per_tensor(torch.randn(4), 0.5, 3, torch.qint8)
    sparse = torch.eye(3).to_sparse()
    torch.save({"q": codes, "s": sparse}, tmp_path / "m.pt")
    convert_checkpoint(tmp_path / "m.pt", tmp_path / "m.safetensors")
    made = manifest_checkpoint(tmp_path / "m.pt")
    assert made.tensors == manifest_checkpoint(tmp_path / "m.safetensors").tensors
    by_name = {tensor.name: tensor for tensor in made.tensors}
    assert by_name["q.integers"].sha256 == sha256(values_of(codes.int_repr()))
    assert by_name["q.integers"].recipe["scale"] == 0.5
    assert by_name["s.values"].sha256 == sha256(values_of(sparse.coalesce().values()))
    assert by_name["s.indices"].recipe["size"] == [3, 3]


def test_the_text_is_one_that_sha256sum_takes_and_that_names_odd_files(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "odd\\name\nof a file").write_bytes(b"1")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "é").write_bytes(b"2")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_bytes(b"3")
    done = run("manifest", tmp_path, "-o", tmp_path / "m.sha256", cwd=tmp_path)
    assert (done.exit, done.err) == (0, f"{tmp_path}/m.sha256: 1 tensor, 3 files\n")
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--strict", "-c", "m.sha256"], cwd=tmp_path, check=True)
    lines = (tmp_path / "m.sha256").read_text("utf-8").splitlines()
    assert lines[0] == "# ckptconv manifest 1: 1 tensor, 3 files (a folder)"
    assert json.loads(lines[1][1:])["sha256"] == sha256(np.ones(2, "<f4").tobytes())
    assert run("verify", tmp_path, "m.sha256", "--files", cwd=tmp_path).exit == 0
    again = run("manifest", tmp_path, "-o", tmp_path / "m.sha256", "--force", cwd=tmp_path)
    assert again.exit == 0 and (tmp_path / "m.sha256").read_text("utf-8").splitlines() == lines


@pytest.mark.parametrize(
    ("of", "over"),
    [("model.pt", "model.pt"), (".", "model.pt"), (".", "config.json"), ("model.pt", "link.pt")],
)
def test_a_file_of_the_checkpoint_is_never_replaced_by_its_manifest(of, over, tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text("{}")
    if over == "link.pt":
        (tmp_path / over).symlink_to("model.pt")
    before = (tmp_path / over).read_bytes()
    done = run("manifest", of, "-o", over, "--force", cwd=tmp_path)
    told = "is a file of the checkpoint, so it cannot also be the manifest; name another file"
    assert done.exit == 1 and done.err.endswith(f": {told}\n")
    assert (tmp_path / over).read_bytes() == before


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_each_file_is_read_once(save, tmp_path):
    tensors = {key: torch.randn(1 << 18) for key in "abc"}
    if save is torch.save:
        tensors["again"] = tensors["a"]
    save(tensors, tmp_path / "model")
    with counted_reads() as reads:
        manifest_checkpoint(tmp_path / "model")
    assert reads.nbytes < 1.1 * (tmp_path / "model").stat().st_size


def test_tensors_that_lie_over_each_other_have_their_own_digests(tmp_path):
    values = torch.randn(10)
    tree = {"all": values[:6], "over": values[4:], "same": values[:6], "inside": values[1:3]}
    torch.save(tree, tmp_path / "model.pt")
    found = {each.name: each.sha256 for each in manifest_checkpoint(tmp_path / "model.pt").tensors}
    told = {key: hashlib.sha256(ref.numpy().tobytes()).hexdigest() for key, ref in tree.items()}
    assert found == told


def test_a_link_back_to_a_folder_is_not_followed_into_it_again(tmp_path):
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    torch.save({"a": torch.ones(2)}, folder / "model.pt")
    (folder / "more" / "notes.txt").write_text("x")
    (folder / "more" / "up").symlink_to("..")
    files = {item.name for item in manifest_checkpoint(folder).files}
    assert files == {"model.pt", "more/notes.txt"}


def test_an_existing_manifest_is_not_replaced_and_nothing_is_left_where_it_fails(tmp_path):
    (tmp_path / "m").write_text("mine")
    done = run("manifest", SAMPLES / "tied.pt", "-o", "m", cwd=tmp_path)
    assert (done.exit, done.err) == (1, "error: m: exists; add --force to replace it\n")
    damaged = tmp_path / "damaged.pt"
    torch.save({"a": torch.ones(99)}, damaged)
    raw = bytearray(damaged.read_bytes())
    raw[raw.index(np.ones(99, "<f4").tobytes()) + 5] ^= 1
    damaged.write_bytes(raw)
    done = run("manifest", damaged, "-o", "new", cwd=tmp_path)
    assert done.exit == 1 and "CRC-32" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.pt", "m"]


def test_every_byte_of_a_payload_is_held_against_the_checksum_of_the_file(tmp_path):
    """Also of a storage of which only a part belongs to a tensor."""
    base = torch.arange(3000.0)
    torch.save({"part": base[5:40], "other": base[100:200:2]}, tmp_path / "m.pt")
    raw = bytearray((tmp_path / "m.pt").read_bytes())
    at = raw.index(base.numpy().tobytes())
    raw[at + 4 * 2500] ^= 1
    (tmp_path / "m.pt").write_bytes(raw)
    with pytest.raises(CheckpointError, match="CRC-32"):
        manifest_checkpoint(tmp_path / "m.pt")


@pytest.mark.parametrize("name", ["ddp_cuda3_train.pt", "tied.pt", "rnn_classifier.pt", "fp16.pt"])
@pytest.mark.parametrize("to", ["o.pt", "o.safetensors", "o.npz", "o/"])
def test_the_manifest_of_a_conversion_is_the_one_of_its_output(tmp_path, name, to):
    options = {"max_shard_size": "2KB"} if to == "o/" else {}
    output, manifest = f"{tmp_path}/{to}", tmp_path / "m.sha256"
    convert_checkpoint(SAMPLES / name, output, manifest=manifest, **options)
    assert manifest.read_text("utf-8") == manifest_checkpoint(output).text()


def test_the_manifest_of_casts_in_threads_and_of_strided_values_is_the_one_of_the_output(tmp_path):
    big = torch.randn(3000, 1500)
    torch.save({"a": big, "b": big.t()[:7], "c": torch.randn(2000, 1000)}, tmp_path / "m.pt")
    for name in ("o.pt", "o.safetensors"):
        made = tmp_path / f"{name}.sha256"
        convert_checkpoint(tmp_path / "m.pt", tmp_path / name, dtype="bf16", manifest=made)
        assert made.read_text("utf-8") == manifest_checkpoint(tmp_path / name).text()
    digests = told(tmp_path / "o.pt")
    assert digests["a"] == sha256(values_of(big.bfloat16()))


def test_companions_and_the_index_are_in_the_manifest_of_a_conversion(tmp_path):
    (tmp_path / "in").mkdir()
    save_file({"a": torch.ones(300), "b": torch.ones(300)}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text('{"torch_dtype": "float32"}')
    words = ("--max-shard-size", "1500", "--with-files", "--dtype", "f16", "--manifest", "m.sha256")
    done = run("convert", "in", "out/", *words, cwd=tmp_path)
    assert done.exit == 0, done.err
    assert (tmp_path / "m.sha256").read_text() == manifest_checkpoint(tmp_path / "out").text()
    subprocess.run(["sha256sum", "--strict", "-c", "../m.sha256"], cwd=tmp_path / "out", check=True)


def test_files_that_workers_make_are_in_the_manifest(tmp_path):
    torch.save({str(at): torch.randn(500) for at in range(8)}, tmp_path / "m.pt")
    words = ("--max-shard-size", "5KB", "--jobs", "2", "--manifest", "m.sha256", "-q")
    done = run("convert", "m.pt", "out/", *words, cwd=tmp_path)
    assert done.exit == 0, done.err
    assert (tmp_path / "m.sha256").read_text() == manifest_checkpoint(tmp_path / "out").text()


def test_a_manifest_may_not_stand_in_the_place_of_anything_else(tmp_path):
    shutil.copy(SAMPLES / "tied.pt", tmp_path)
    for name in ("tied.pt", "out.pt", "map.json"):
        words = ("--manifest", name, "--force", "--save-mapping", "map.json")
        done = run("convert", "tied.pt", "out.pt", *words, cwd=tmp_path)
        assert (done.exit, "cannot also be the manifest" in done.err) == (1, True), done.err
    (tmp_path / "there").touch()
    done = run("convert", "tied.pt", "out.pt", "--manifest", "there", cwd=tmp_path)
    assert (done.exit, done.err) == (1, "error: there: exists; add --force to replace it\n")
    done = run("convert", "tied.pt", "-", "--to", "torch", "--manifest", "m", cwd=tmp_path)
    assert done.exit == 2 and "cannot be used with --manifest" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there", "tied.pt"]


def test_codes_and_scales_are_hashed_as_they_are():
    path = next((NUMBERS / "fp8_block_deepseek").glob("*.safetensors"))
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    assert told(path) == {
        name: sha256(raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
        for name, entry in header.items()
    }
