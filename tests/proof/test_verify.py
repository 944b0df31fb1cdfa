"""Checkpoints held against manifests: what differs is named, and nothing that is wrong passes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import shutil
import time

import pytest
import torch
from safetensors.torch import save_file

from ckptconv import (
    CheckpointError,
    OptionRefused,
    convert_checkpoint,
    manifest_checkpoint,
    verify_checkpoint,
)
from helpers.program import SAMPLES, run

MODEL = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "a.bias": torch.randn(3).bfloat16(),
    "b": torch.arange(5),
    "empty": torch.empty(0, 2),
}


@pytest.fixture
def home(tmp_path):
    torch.save(MODEL, tmp_path / "model.pt")
    save_file(MODEL, tmp_path / "model.safetensors")
    manifest_checkpoint(tmp_path / "model.pt", tmp_path / "m.sha256")
    return tmp_path


def wrong(found) -> set[tuple[str, str]]:
    return {(each.name, each.what) for each in found.mismatches}


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "legacy.pt", "dcp", "o/"])
def test_the_same_values_in_any_container_pass(home, name):
    if name == "legacy.pt":
        torch.save(MODEL, home / name, _use_new_zipfile_serialization=False)
    elif name in ("dcp", "o/"):
        options = {"to": "dcp"} if name == "dcp" else {"max_shard_size": 100}
        convert_checkpoint(home / "model.pt", f"{home}/{name}", **options)
    found = verify_checkpoint(home / name, home / "m.sha256")
    assert (found.same, found.tensors, found.files) == (True, 4, None)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("key", ["a.weight", "a.bias", "b"])
def test_each_flipped_bit_of_values_is_named_by_its_tensor(home, name, key):
    path = home / name
    values = MODEL[key].reshape(-1).view(torch.uint8).numpy().tobytes()
    raw = path.read_bytes()
    start = raw.index(values)
    for at in (0, len(values) // 2, len(values) - 1):
        for bit in (1, 128):
            damaged = bytearray(raw)
            damaged[start + at] ^= bit
            path.write_bytes(damaged)
            assert wrong(verify_checkpoint(path, home / "m.sha256")) == {(key, "values")}
    path.write_bytes(raw)
    assert verify_checkpoint(path, home / "m.sha256").same


def test_a_record_that_cannot_be_inflated_is_named_and_the_others_are_compared(home):
    import zipfile

    with (
        zipfile.ZipFile(home / "model.pt") as stored,
        zipfile.ZipFile(home / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
        infos = {info.filename.rpartition("/")[2]: info for info in deflated.infolist()}
    assert verify_checkpoint(home / "deflated.pt", home / "m.sha256").same
    raw = bytearray((home / "deflated.pt").read_bytes())
    info = infos["0"]
    raw[info.header_offset + 30 + len(info.filename) + info.compress_size - 1] ^= 0xFF
    (home / "deflated.pt").write_bytes(raw)
    found = wrong(verify_checkpoint(home / "deflated.pt", home / "m.sha256"))
    assert len(found) == 1 and found <= {("a.weight", "unreadable"), ("a.weight", "values")}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"c": torch.ones(1)}, {("c", "unexpected")}),
        ({"b": None}, {("b", "missing")}),
        ({"b": None, "renamed": MODEL["b"]}, {("b", "missing"), ("renamed", "unexpected")}),
        ({"b": MODEL["b"].int()}, {("b", "dtype")}),
        ({"a.weight": MODEL["a.weight"].reshape(4, 3)}, {("a.weight", "shape")}),
        ({"empty": torch.empty(2, 0)}, {("empty", "shape")}),
    ],
)
def test_what_differs_is_named(home, change, expected):
    other = {key: value for key, value in {**MODEL, **change}.items() if value is not None}
    torch.save(other, home / "other.pt")
    assert wrong(verify_checkpoint(home / "other.pt", home / "m.sha256")) == expected
    done = run("verify", "other.pt", "m.sha256", cwd=home)
    assert done.exit == 1 and done.out.startswith("differs: other.pt, m.sha256 (manifest)")
    assert all(name in done.out for name, _ in expected)
    document = json.loads(run("verify", "other.pt", "m.sha256", "--json", cwd=home).out)
    assert {(each["name"], each["what"]) for each in document["mismatches"]} == expected


def test_a_tensor_that_has_one_name_twice_is_compared_as_often(tmp_path):
    one, two = torch.ones(2), torch.zeros(2)
    torch.save({"a.b": one, "a": {"b": one}}, tmp_path / "m.pt")
    manifest_checkpoint(tmp_path / "m.pt", tmp_path / "m")
    assert verify_checkpoint(tmp_path / "m.pt", tmp_path / "m").same
    torch.save({"a.b": two, "a": {"b": two}}, tmp_path / "m.pt")
    assert wrong(verify_checkpoint(tmp_path / "m.pt", tmp_path / "m")) == {("a.b", "values")}
    torch.save({"a.b": one}, tmp_path / "m.pt")
    assert wrong(verify_checkpoint(tmp_path / "m.pt", tmp_path / "m")) == {("a.b", "missing")}


def test_a_part_is_compared_by_its_names_in_there(tmp_path):
    torch.save({"state_dict": MODEL, "epoch": 3}, tmp_path / "train.pt")
    torch.save(MODEL, tmp_path / "model.pt")
    manifest_checkpoint(tmp_path / "model.pt", tmp_path / "m")
    found = verify_checkpoint(tmp_path / "train.pt", tmp_path / "m")
    assert not found.same and found.notes == (
        "the names of the manifest are those in state_dict: add --only state_dict",
    )
    assert verify_checkpoint(tmp_path / "train.pt", tmp_path / "m", only="state_dict").same
    manifest_checkpoint(tmp_path / "train.pt", tmp_path / "m2", only="state_dict")
    assert verify_checkpoint(tmp_path / "model.pt", tmp_path / "m2").same


PREFIXED = {
    "wrapped": ({f"module.{key}": value for key, value in MODEL.items()}, []),
    "compiled": ({f"_orig_mod.{key}": value for key, value in MODEL.items()}, []),
    "named": ({f"model.{key}": value for key, value in MODEL.items()}, []),
    "parted": (
        {"net": {f"module.{key}": value for key, value in MODEL.items()}, "epoch": 1},
        ["--only", "net"],
    ),
}


@pytest.mark.parametrize("name", PREFIXED)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_what_a_note_on_prefixes_advises_makes_both_the_same(home, name, is_reversed):
    tree, only = PREFIXED[name]
    torch.save(tree, home / "other.pt")
    ours, manifest = "other.pt", "m.sha256"
    if is_reversed:
        made = run("manifest", "other.pt", "-o", "other.sha256", *only, cwd=home)
        ours, manifest, only = "model.pt", "other.sha256", []
        assert made.exit == 0
    done = run("verify", ours, manifest, cwd=home)
    assert done.exit == 1
    [note] = [line for line in done.out.splitlines() if line.split()[:1] == ["note"]]
    assert "verify --only net what " in note if only else "verify what " in note
    command = re.search("ckptconv (.*) writes$", note)[1].replace(" IN OUT", f" {ours} new.pt")
    assert run(*shlex.split(command), cwd=home).exit == 0
    assert run("verify", "new.pt", manifest, *only, cwd=home).exit == 0


def test_names_that_are_there_need_no_other_prefix(home):
    torch.save({**MODEL, "weight": torch.ones(1)}, home / "other.pt")
    assert verify_checkpoint(home / "other.pt", home / "m.sha256").notes == ()


def test_a_note_on_prefixes_takes_no_time_that_grows_with_the_square_of_the_names(tmp_path):
    names = [f"layers.{number}.weight" for number in range(6000)]
    one = torch.ones(1)
    torch.save(dict.fromkeys(names, one), tmp_path / "a.pt")
    torch.save({f"model.{name}": one for name in names}, tmp_path / "b.pt")
    manifest_checkpoint(tmp_path / "a.pt", tmp_path / "m")
    begin = time.process_time()
    [note] = verify_checkpoint(tmp_path / "b.pt", tmp_path / "m").notes
    assert "--strip-prefix model." in note
    assert time.process_time() - begin < 2  # 36 million names compared took 4 s


def test_a_scale_of_codes_is_compared(tmp_path):
    for name, scale in (("a.pt", 0.5), ("b.pt", 0.25)):
        codes = torch.arange(4, dtype=torch.uint8)
        made = torch._make_per_tensor_quantized_tensor(codes, scale, 3)
        torch.save({"q": made}, tmp_path / name)
    manifest_checkpoint(tmp_path / "a.pt", tmp_path / "m")
    assert verify_checkpoint(tmp_path / "a.pt", tmp_path / "m").same
    assert wrong(verify_checkpoint(tmp_path / "b.pt", tmp_path / "m")) == {("q.integers", "recipe")}


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_json_does_not_have_is_compared(tmp_path, scale):
    codes = torch.arange(4, dtype=torch.uint8)
    for name, own in (("a.pt", scale), ("b.pt", 0.5)):
        torch.save({"q": torch._make_per_tensor_quantized_tensor(codes, own, 3)}, tmp_path / name)
    made = run("manifest", "a.pt", cwd=tmp_path).out
    json.loads(made.splitlines()[1][2:], parse_constant=pytest.fail)
    (tmp_path / "m").write_text(made)
    (tmp_path / "m.json").write_text(run("manifest", "a.pt", "--json", cwd=tmp_path).out)
    for manifest in ("m", "m.json"):
        assert verify_checkpoint(tmp_path / "a.pt", tmp_path / manifest).same
        found = verify_checkpoint(tmp_path / "b.pt", tmp_path / manifest)
        assert wrong(found) == {("q.integers", "recipe")}


def test_files_compares_bytes(home):
    found = verify_checkpoint(home / "model.pt", home / "m.sha256", files=True)
    assert (found.same, found.files, found.tensors) == (True, 1, None)
    raw = (home / "model.pt").read_bytes()
    (home / "model.pt").write_bytes(raw.replace(b"a.bias", b"a.bjas"))
    assert wrong(verify_checkpoint(home / "model.pt", home / "m.sha256", files=True)) == {
        ("model.pt", "bytes")
    }
    convert_checkpoint(home / "model.safetensors", f"{home}/o/", max_shard_size=50)
    index = home / "o" / "model.safetensors.index.json"
    made = manifest_checkpoint(index, home / "i.sha256")
    assert len(made.files) > 2 and not made.is_whole
    assert verify_checkpoint(index, home / "i.sha256", files=True).files == len(made.files)
    (home / "o" / made.files[0].name).unlink()
    assert wrong(verify_checkpoint(index, home / "i.sha256", files=True)) == {
        (made.files[0].name, "missing")
    }


def test_a_file_that_joined_or_left_a_folder_is_a_difference(tmp_path):
    (tmp_path / "m").mkdir()
    save_file(MODEL, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text("{}")
    manifest_checkpoint(tmp_path / "m", tmp_path / "m" / "sums")
    assert verify_checkpoint(tmp_path / "m", tmp_path / "m" / "sums", files=True).same
    (tmp_path / "m" / "modeling.py").write_text("")
    (tmp_path / "m" / "config.json").unlink()
    assert wrong(verify_checkpoint(tmp_path / "m", tmp_path / "m" / "sums", files=True)) == {
        ("modeling.py", "unexpected"),
        ("config.json", "missing"),
    }


# ------------------------------------------------------------------------- manifests of others


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def git_name(raw: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "repo"
    made.mkdir()
    save_file(MODEL, made / "model.safetensors")
    (made / "config.json").write_text('{"a": 1}')
    return made


def manifests_of(folder) -> dict[str, str]:
    raw = {path.name: path.read_bytes() for path in folder.iterdir()}
    large, small = raw["model.safetensors"], raw["config.json"]
    told = {"sha256": digest(large), "size": len(large), "pointerSize": 134}
    siblings = [
        {"rfilename": "model.safetensors", "blobId": "0" * 40, "lfs": told},
        {"rfilename": "config.json", "blobId": git_name(small), "size": len(small)},
    ]
    tree = [
        {"type": "directory", "oid": "1" * 40, "path": "sub"},
        {"type": "file", "path": "model.safetensors", "lfs": {"oid": digest(large)}},
        {"type": "file", "path": "config.json", "oid": git_name(small)},
    ]
    lines = [f"{digest(each)}  ./{name}" for name, each in raw.items()]
    bsd = [f"SHA256 ({name}) = {digest(each).upper()}" for name, each in raw.items()]
    return {
        "model info": json.dumps({"id": "org/name", "siblings": siblings}),
        "tree": json.dumps(tree),
        "sha256sum": "\n".join(["# a comment", *lines, ""]),
        "binary": "".join(f"{digest(each)} *{name}\r\n" for name, each in raw.items()),
        "bsd": "\n".join(bsd),
    }


KINDS = ["model info", "tree", "sha256sum", "binary", "bsd"]


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_others_are_manifests_of_files(folder, kind):
    manifest = folder.parent / "list"
    manifest.write_text(manifests_of(folder)[kind])
    found = verify_checkpoint(folder, manifest)
    assert (found.same, found.files, found.tensors) == (True, 2, None)
    assert verify_checkpoint(folder / "config.json", manifest).files == 1
    for name in ("model.safetensors", "config.json"):
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        assert wrong(verify_checkpoint(folder, manifest)) == {(name, "bytes")}
        assert not verify_checkpoint(folder / name, manifest).same
        (folder / name).write_bytes(raw)
    (folder / "more").touch()
    found = verify_checkpoint(folder, manifest)
    assert found.same and found.notes == ("the manifest does not tell of 1 file: more",)


def test_a_file_in_a_hidden_folder_is_compared_where_a_list_tells_of_it(folder):
    (folder / ".github").mkdir()
    (folder / ".github" / "x").write_bytes(b"1")
    (folder.parent / "list").write_text(f"{digest(b'1')}  .github/x\n")
    assert verify_checkpoint(folder, folder.parent / "list").same
    (folder / ".github" / "x").write_bytes(b"2")
    assert wrong(verify_checkpoint(folder, folder.parent / "list")) == {(".github/x", "bytes")}


def test_a_pointer_of_lfs_is_a_manifest_of_one_file(folder):
    path, pointer = folder / "model.safetensors", folder.parent / "pointer"
    raw = path.read_bytes()
    pointer.write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest(raw)}\nsize {len(raw)}\n"
    )
    assert verify_checkpoint(path, pointer).same
    path.write_bytes(raw + b"\0")
    assert not verify_checkpoint(path, pointer).same
    with pytest.raises(CheckpointError, match="of one file; name the file"):
        verify_checkpoint(folder, pointer)


def statement(folder, **changes) -> str:
    """A ``model.sig`` as model-signing writes it; its own suite is in tests/families."""
    resources = [
        {"name": path.name, "algorithm": "sha256", "digest": digest(path.read_bytes())}
        for path in sorted(folder.iterdir())
        if path.name != "model.sig"
    ]
    predicate = {
        "serialization": {"method": "files", "hash_type": "sha256", "ignore_paths": ["model.sig"]},
        "resources": resources,
        **changes.pop("predicate", {}),
    }
    payload = {
        "_type": "https://in-toto.io/Statement/v1",
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": predicate,
        **changes,
    }
    raw = base64.b64encode(json.dumps(payload).encode()).decode()
    envelope = {"payload": raw, "payloadType": "application/vnd.in-toto+json", "signatures": []}
    return json.dumps({"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
                       "dsseEnvelope": envelope})  # fmt: skip


def test_the_digests_of_a_signature_are_compared_and_it_says_that_the_signature_is_not(folder):
    (folder / "model.sig").write_text(statement(folder))
    found = verify_checkpoint(folder, folder / "model.sig")
    assert (found.same, found.files, found.signature) == (True, 2, "unverified")
    done = run("verify", folder, folder / "model.sig", cwd=folder)
    assert done.exit == 0 and "was NOT verified, only the digests" in done.out
    (folder / "more.py").touch()
    assert wrong(verify_checkpoint(folder, folder / "model.sig")) == {("more.py", "unexpected")}


def test_a_part_of_what_is_compared_as_files_is_refused(home):
    for manifest, files in (("m.sha256", True), ("list", False)):
        (home / "list").write_text(f"{digest((home / 'model.pt').read_bytes())}  model.pt\n")
        with pytest.raises(OptionRefused, match="--only picks tensors, and files are compared"):
            verify_checkpoint(home / "model.pt", home / manifest, only="a", files=files)


def test_a_key_for_what_has_no_signature_is_refused(home):
    with pytest.raises(CheckpointError, match="has no signature"):
        verify_checkpoint(home / "model.pt", home / "m.sha256", public_key=home / "key")


# ------------------------------------------------------------------------------- forged and cut

HEX = "0" * 64
FORGED = {
    "empty": "",
    "a text": "hello",
    "json without files": "{}",
    "no json": "{",
    "two names": '{"siblings": [], "siblings": []}',
    "deep json": "[" * 100_000,
    "a path that leads out": f"{HEX}  ../model.pt",
    "an absolute path": f"{HEX}  /etc/passwd",
    "a name with a zero byte": f"{HEX}  a\0b",
    "a short digest": f"{HEX[1:]}  model.pt",
    "a list with a line that is none": f"{HEX}  model.pt\nhello",
    "siblings without hashes": '{"siblings": [{"rfilename": "model.pt"}]}',
    "siblings that are none": '{"siblings": 3}',
    "an entry that is none": "[3]",
    "lfs without a digest": '[{"path": "model.pt", "lfs": {}}]',
    "a pointer without oid": "version https://git-lfs.github.com/spec/v1\nsize 3\n",
    "no base64": '{"dsseEnvelope": {"payload": "?"}}',
    "an envelope that is none": '{"dsseEnvelope": 3}',
    "a statement that is none": '{"dsseEnvelope": {"payload": "Mw=="}}',
    "another version": "# ckptconv manifest 2: ...\n",
    "a cut manifest": "# ckptconv manifest 1: 2 tensors, 1 file\n",
    "a tensor that is none": "# ckptconv manifest 1: 1 tensor, 0 files\n# 3\n",
    "a tensor without a shape": '# ckptconv manifest 1: 1 tensor, 0 files\n# {"name": "a"}\n',
    "a shape that is none": (
        "# ckptconv manifest 1: 1 tensor, 0 files\n"
        f'# {{"name": "a", "dtype": "x", "shape": [-1], "sha256": "{HEX}"}}\n'
    ),
    "a field that is not known": (
        "# ckptconv manifest 1: 1 tensor, 0 files\n"
        f'# {{"name": "a", "dtype": "x", "shape": [], "sha256": "{HEX}", "more": 1}}\n'
    ),
    "a recipe that is none": (
        "# ckptconv manifest 1: 1 tensor, 0 files\n"
        f'# {{"name": "a", "dtype": "x", "shape": [], "sha256": "{HEX}", "recipe": [1]}}\n'
    ),
    "a tensor in half": '# ckptconv manifest 1: 1 tensor, 0 files\n# {"name": "a"\n',
    "two documents": f'[{{"path": "model.pt", "lfs": {{"sha256": "{HEX}"}}}}] []',
    "two files of one name": f"{HEX}  a/model.pt\n{HEX}  b/model.pt\n",
    "a document without files": '{"tensors": []}',
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_an_error_of_one_line(home, name):
    (home / "forged").write_text(FORGED[name])
    done = run("verify", "model.pt", "forged", cwd=home)
    assert (done.exit, done.out, done.err.count("\n")) == (1, "", 1), done.err
    assert done.err.startswith("error: forged: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"predicateType": "https://else"},
        {"predicate": {"serialization": {"method": "shards"}}},
        {"predicate": {"resources": []}},
        {"predicate": {"resources": [{"name": "a", "algorithm": "blake3", "digest": HEX}]}},
        {"predicate": {"resources": [{"name": "../a", "algorithm": "sha256", "digest": HEX}]}},
        {"predicate": {"serialization": {"method": "files", "ignore_paths": [3]}}},
        {"predicate": {"serialization": {"method": "files", "ignore_paths": "model.sig"}}},
        {"predicate": None},
    ],
)
def test_a_statement_of_another_kind_is_refused(folder, changes):
    if changes.get("predicate", 0) is None:
        text = statement(folder).replace("x", "x")
        payload = json.loads(base64.b64decode(json.loads(text)["dsseEnvelope"]["payload"]))
        payload["predicate"] = None
        raw = base64.b64encode(json.dumps(payload).encode()).decode()
        text = json.dumps({"dsseEnvelope": {"payload": raw}})
    else:
        text = statement(folder, **changes)
    (folder / "model.sig").write_text(text)
    done = run("verify", folder, folder / "model.sig", cwd=folder)
    assert (done.exit, done.out, done.err.count("\n")) == (1, "", 1), done.err


def test_every_cut_of_a_manifest_is_an_error_or_a_difference(home):
    """It never passes for the whole one."""
    raw = (home / "m.sha256").read_bytes()
    for size in range(0, len(raw) - 1, 29):
        (home / "cut").write_bytes(raw[:size])
        try:
            found = verify_checkpoint(home / "model.pt", home / "cut")
        except CheckpointError:
            continue
        assert not found.same, size


def test_a_manifest_has_a_size_that_is_refused_before_it_is_read(home):
    with (home / "huge").open("wb") as file:
        file.truncate(1 << 40)
    done = run("verify", "model.pt", "huge", cwd=home)
    assert done.exit == 1 and "text_bytes" in done.err


def test_what_cannot_be_read_is_an_error(home):
    shutil.copy(SAMPLES / "tied.pt", home / "cut.pt")
    (home / "cut.pt").write_bytes((home / "cut.pt").read_bytes()[:-30])
    done = run("verify", "cut.pt", "m.sha256", cwd=home)
    assert (done.exit, done.out) == (1, "") and done.err.startswith("error: cut.pt: ")
    assert run("verify", "model.pt", "not-there", cwd=home).exit == 1
    assert run("verify", "model.pt", cwd=home).exit == 2


def test_a_verification_is_no_truth_value(home):
    with pytest.raises(TypeError, match=r"\.same"):
        bool(verify_checkpoint(home / "model.pt", home / "m.sha256"))
