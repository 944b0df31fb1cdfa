"""Tensors that safetensors has no form for: taken apart, written, and put together again bit for
bit.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptconv import KeyRules, convert_checkpoint, load_portable, open_checkpoint
from ckptconv.objects.encodings import ENCODINGS
from ckptconv.support.errors import KeyConflict, MalformedCheckpoint, RefusedObject
from ckptconv.tensors.stream import iter_chunks
from helpers import oracle

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DENSE = torch.tensor(
    [[0.0, 1.5, 0.0, -2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0], [0.0, 7.0, 0.25, 0.0]]
)


def uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2], [1, 1, 0]]), torch.randn(3, 2, dtype=torch.half), (3, 2, 2)
    )


def by_channel(dtype: torch.dtype, axis: int) -> torch.Tensor:
    return torch.quantize_per_channel(
        DENSE, torch.rand(4, dtype=torch.float64) + 0.1, torch.arange(4), axis, dtype
    )


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "coo": DENSE.to_sparse,
    "coo, hybrid and uncoalesced": uncoalesced,
    "coo, empty": lambda: torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64),
        torch.empty(0), (3, 4)),
    "coo, parameter": lambda: torch.nn.Parameter(DENSE.to_sparse()),
    "csr": DENSE.to_sparse_csr,
    "csr, int32": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32),
        torch.ones(2), (2, 2)),
    "csr, complex128": DENSE.to(torch.complex128).mul(1j).to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((1, 2)),
    "per tensor": lambda: torch.quantize_per_tensor(DENSE, 0.1, 3, torch.quint8),
    "per tensor, int32": lambda: torch.quantize_per_tensor(DENSE, 1e-3 / 3, 0, torch.qint32),
    "per tensor, a view": lambda: torch.quantize_per_tensor(DENSE.repeat(2, 3, 1), 0.5, -7,
        torch.qint8)[:, 1].t(),
    "per tensor, 0-d": lambda: torch.quantize_per_tensor(torch.tensor(3.0), 0.1, 0, torch.qint8),
    "per channel": lambda: by_channel(torch.qint8, 0),
    "per channel, second axis": lambda: by_channel(torch.quint8, 1),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "complex128": lambda: torch.randn(2, 3, dtype=torch.complex128),
    "complex128, conjugate and negative": lambda: torch.randn(4, 3,
        dtype=torch.complex128).t().conj()[1:]._neg_view(),
    "complex128, 0-d": lambda: torch.tensor(1 - 2j, dtype=torch.complex128),
    "complex128, empty": lambda: torch.empty(0, 3, dtype=torch.complex128),
    "complex32": lambda: torch.tensor([1 - 2j, 3j], dtype=torch.complex64).to(torch.complex32),
}  # fmt: skip


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Same kind of tensor, same parts, bit for bit; strides and gradients, which safetensors does
    not keep, aside.
    """
    assert (found.layout, found.dtype, found.is_nested, found.is_quantized) == (
        expected.layout, expected.dtype, expected.is_nested, expected.is_quantized)  # fmt: skip
    if found.layout is torch.strided and not found.is_quantized and not found.is_nested:
        assert found.shape == expected.shape and oracle.value_bytes(found) == oracle.value_bytes(
            expected
        )
        return
    ours, theirs = (list(oracle._inside(tensor.detach())) for tensor in (found, expected))
    for (name, part), (_, other) in zip(ours, theirs, strict=True):
        if isinstance(part, torch.Tensor):
            assert_equal(part, other)
        elif isinstance(part, list):
            for inner, outer in zip(part, other, strict=True):
                if isinstance(inner, torch.Tensor):
                    assert_equal(inner, outer)
                else:
                    assert inner == outer, name
        else:
            assert part == other, name


def written(tree: Any, folder: Path, **options: Any) -> Path:
    torch.save(tree, folder / "source.pt")
    convert_checkpoint(
        folder / "source.pt",
        folder / "out.safetensors",
        fsync=False,
        force=True,
        verify=True,
        **options,
    )
    return folder / "out.safetensors"


def recipes(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as opened:
        return json.loads((opened.metadata() or {}).get(ENCODINGS, "{}"))


@pytest.mark.parametrize("name", MAKERS)
def test_it_comes_back_from_safetensors_as_it_was(name, tmp_path):
    tree = {"w": torch.ones(3), "odd": MAKERS[name](), "b": torch.zeros(2)}
    path = written(tree, tmp_path)
    assert "odd" in recipes(path) and "odd" not in load_file(path)
    convert_checkpoint(path, tmp_path / "again.safetensors", fsync=False, verify=True)
    assert recipes(tmp_path / "again.safetensors") == recipes(path)
    convert_checkpoint(path, tmp_path / "back.pt", fsync=False, verify=True)
    again = (load_portable(tmp_path / "again.safetensors"), oracle.load(tmp_path / "back.pt"))
    for found in (load_portable(path), load_portable(path, mmap=False), *again):
        assert set(found) == set(tree)
        assert_equal(found["odd"], tree["odd"])
        assert torch.equal(found["w"], tree["w"]) and torch.equal(found["b"], tree["b"])


@pytest.mark.parametrize("name", MAKERS)
def test_a_torch_output_keeps_it(name, tmp_path):
    tree = {"w": torch.ones(3), "odd": MAKERS[name]()}
    torch.save(tree, tmp_path / "source.pt")
    convert_checkpoint(tmp_path / "source.pt", tmp_path / "out.pt", fsync=False, verify=True)
    for found in (oracle.load(tmp_path / "out.pt"), load_portable(tmp_path / "source.pt")):
        assert_equal(found["odd"], tree["odd"])


def test_the_components_mean_what_the_recipe_says(tmp_path):
    """Another program can read them: the names and fields are those of the table in `encodings`."""
    tree = {
        "q": by_channel(torch.qint8, 1),
        "s": DENSE.to_sparse_csr(),
        "c": torch.randn(2, dtype=torch.complex128),
    }
    path = written({**tree, "n": MAKERS["nested"]()}, tmp_path)
    parts, told = load_file(path), recipes(path)
    assert (
        torch.equal(torch.view_as_complex(parts["c.real_imag"]), tree["c"])
        and told["c"]["dtype"] == "complex128"
    )
    compressed = [parts[f"s.{name}"] for name in ("compressed_indices", "plain_indices", "values")]
    assert torch.equal(torch.sparse_csr_tensor(*compressed, told["s"]["size"]).to_dense(), DENSE)
    assert told["s"]["layout"] == "torch.sparse_csr"
    quantized = [parts[f"q.{name}"] for name in ("integers", "scales", "zero_points")]
    made = torch._make_per_channel_quantized_tensor(*quantized, told["q"]["axis"])
    assert torch.equal(made.dequantize(), tree["q"].dequantize())
    assert {name for name in parts if name.startswith("n.")} == {
        "n.buffer",
        "n.sizes",
        "n.strides",
        "n.offsets",
    }


def test_key_rules_and_casts_apply_to_the_tensor_and_not_to_its_components(tmp_path):
    tree = {
        "module.w": torch.randn(3),
        "module.s": DENSE.to_sparse(),
        "module.c": torch.ones(1, dtype=torch.complex128),
    }
    path = written(tree, tmp_path, dtype="bf16")
    expected = {
        "w": "bfloat16",
        "s.indices": "int64",
        "s.values": "float32",
        "c.real_imag": "float64",
    }
    assert {
        name: str(part.dtype).removeprefix("torch.") for name, part in load_file(path).items()
    } == expected
    assert list(recipes(written(tree, tmp_path, keys=KeyRules("keep", exclude=("*.c",))))) == [
        "module.s"
    ]


def test_what_only_looks_like_a_component_is_cast(tmp_path):
    """A tensor whose key goes on behind that of a sparse one, and one that is its values."""
    dense = torch.randn(3)
    places = torch.arange(3).expand(2, 3)
    sparse = torch.sparse_coo_tensor(places, dense, (3, 3), is_coalesced=True)
    path = written({"s": sparse, "s.w": torch.ones(2), "v": dense}, tmp_path, dtype="bf16")
    found = load_portable(path)
    assert_equal(found["s"], sparse)
    assert torch.equal(found["s.w"], torch.ones(2).bfloat16())
    assert torch.equal(found["v"], dense.bfloat16()) and found["v"].dtype is torch.bfloat16


def test_tied_ones_share_their_components(tmp_path):
    sparse = DENSE.to_sparse()
    path = written({"a": sparse, "b": sparse}, tmp_path)
    assert len(load_file(path)) == 2
    assert_equal(load_portable(path)["b"], sparse)


@pytest.mark.parametrize("key", ["c", ""])
def test_a_sharded_output_is_written_without_encodings(key, tmp_path):
    """Components may not lie in several files; a sharded torch output holds complex tensors as they
    are.
    """
    tree = {"w": torch.randn(3), key: torch.randn(2, dtype=torch.complex128), "v": torch.randn(4)}
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(RefusedObject, match=r": safetensors .*shards.*--max-shard-size") as refused:
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors", max_shard_size=16)
    assert refused.value.where == key
    convert_checkpoint(
        tmp_path / "in.pt",
        tmp_path / "one.safetensors",
        max_shard_size=1000,
        fsync=False,
        verify=True,
    )
    convert_checkpoint(
        tmp_path / "in.pt", tmp_path / "out.bin", max_shard_size=16, fsync=False, verify=True
    )
    for found in (
        load_portable(tmp_path / "one.safetensors"),
        load_portable(tmp_path / "out.bin.index.json"),
    ):
        assert set(found) == set(tree) and all(torch.equal(found[key], tree[key]) for key in tree)
    torch.save({**tree, "s": DENSE.to_sparse()}, tmp_path / "in.pt")
    with pytest.raises(
        RefusedObject, match=r"s: is a tensor that a sharded torch output cannot hold"
    ):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "sparse.bin", max_shard_size=16)


def test_a_name_that_is_a_component_s_is_an_error(tmp_path):
    double = DENSE.to(torch.complex128)
    for sparse in (DENSE.to_sparse(), double.to_sparse()):
        for other in (torch.ones(1), DENSE.to_sparse(), double):
            for tree in ({"s": sparse, "s.values": other}, {"s.values": other, "s": sparse}):
                with pytest.raises(KeyConflict, match=r"s\.values(\.real_imag)?: is both"):
                    written(tree, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_what_has_no_encoding_is_refused_with_its_key(tmp_path):
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    four_bits = torch.quantize_per_channel(
        DENSE, torch.rand(4) + 0.1, torch.rand(4), 0, torch.quint4x2
    )
    for odd, told in ((jagged, "NestedTensor"), (four_bits, "_rebuild_qtensor")):
        with pytest.raises(RefusedObject, match=rf"odd: .*{told}.*--to torch"):
            written({"w": torch.ones(1), "odd": odd}, tmp_path)


def test_a_tensor_subclass_stays_in_a_torch_file_and_is_refused_in_safetensors(corpus, tmp_path):
    source = corpus.parent / "produced" / "torchao_int8.pt"
    if not source.is_file():
        pytest.skip("the folder of files that frameworks wrote is not here")
    with pytest.raises(
        RefusedObject,
        match=r"0\.weight: .*safetensors cannot hold \(torchao\.quantization\.Int8Tensor\)",
    ):
        convert_checkpoint(source, tmp_path / "out.safetensors")
    convert_checkpoint(source, tmp_path / "out.pt", unknown="keep", fsync=False, verify=True)
    assert contents(tmp_path / "out.pt") == contents(source) != []


def contents(path: Path) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Path, dtype, shape and bytes of all tensors that a file holds, in whatever objects."""
    with open_checkpoint(path) as checkpoint:
        found = list(checkpoint.tensors())
        return [
            (place, ref.dtype.name, ref.shape, b"".join(map(bytes, iter_chunks(ref))))
            for place, ref in found
        ]


# ---------------------------------------------------------------------------------- foreign recipes

SPARSE = {"encoding": "sparse", "layout": "torch.sparse_coo", "size": [2, 2], "coalesced": True}
QUANTIZED = {
    "encoding": "quantized",
    "dtype": "qint8",
    "scheme": "per_tensor_affine",
    "scale": 0.5,
    "zero_point": 0,
}
PARTS = {
    "s.indices": torch.zeros(2, 1, dtype=torch.int64), "s.values": torch.ones(1),
    "q.integers": torch.ones(2, dtype=torch.int8),
    "c.real_imag": torch.ones(2, 2, dtype=torch.float64),
}  # fmt: skip


def saved(folder: Path, text: str, tensors: dict[str, torch.Tensor] = PARTS) -> Path:
    save_file(tensors, folder / "made.safetensors", {"format": "pt", ENCODINGS: text})
    return folder / "made.safetensors"


def test_a_recipe_without_any_of_its_components_is_passed_over(tmp_path):
    path = saved(tmp_path, json.dumps({"gone": SPARSE, "q": QUANTIZED}))
    assert set(load_portable(path)) == {"s.indices", "s.values", "q", "c.real_imag"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not JSON"),
        ("[" * 90_000, "is not JSON"),
        ("[]", "something other than recipes"),
        ('{"s": 3}', "something other than recipes"),
        (json.dumps({"s": {}}), "unknown"),
        (json.dumps({"s": {**SPARSE, "layout": "torch.sparse_xyz"}}), "unknown"),
        (json.dumps({"s": {**SPARSE, "layout": ["torch.sparse_coo"]}}), "unknown"),
        (json.dumps({"s": {**SPARSE, "layout": "torch.sparse_csr"}}), "are incomplete"),
        (json.dumps({"s": {**SPARSE, "size": [2]}}), "do not fit"),
        (json.dumps({"s": {**SPARSE, "size": [2, -2]}}), "do not fit"),
        (json.dumps({"s": {**SPARSE, "size": 4}}), "do not fit"),
        (json.dumps({"s": {"encoding": "sparse", "layout": "torch.sparse_coo"}}), "do not fit"),
        (json.dumps({"q": {**QUANTIZED, "dtype": "quint8"}}), "do not fit"),
        (json.dumps({"q": {**QUANTIZED, "dtype": []}}), "do not fit"),
        (json.dumps({"q": {**QUANTIZED, "scheme": "os.system"}}), "do not fit"),
        (json.dumps({"q": {**QUANTIZED, "scheme": "per_channel_affine"}}), "are incomplete"),
        (json.dumps({"q": {**QUANTIZED, "scale": "x"}}), "do not fit"),
        (json.dumps({"q": {**QUANTIZED, "zero_point": 0.5}}), "do not fit"),
        (json.dumps({"c": {"encoding": "complex", "dtype": "complex32"}}), "do not fit"),
        (json.dumps({"c": {"encoding": "complex"}}), "do not fit"),
    ],
    ids=range(20),
)
def test_recipes_that_do_not_fit_say_so(text, told, tmp_path):
    with pytest.raises(MalformedCheckpoint, match=told) as caught:
        open_checkpoint(saved(tmp_path, text))
    assert caught.value.path == str(tmp_path / "made.safetensors") and caught.value.where in (
        ENCODINGS,
        "s",
        "q",
        "c",
    )


def test_a_recipe_for_a_key_that_is_there_contradicts_itself(tmp_path):
    path = saved(tmp_path, json.dumps({"q": QUANTIZED}), {**PARTS, "q": torch.ones(1)})
    with pytest.raises(MalformedCheckpoint, match="q: "):
        open_checkpoint(path)


# ---------------------------------------------------------------------------- tensors by themselves


@pytest.mark.parametrize("only", [None, "inside"])
@pytest.mark.parametrize("number", [None, 3])
def test_bare_tensors_get_names_in_safetensors_and_stay_bare_in_torch(only, number, tmp_path):
    tensors = [torch.arange(4.0) + at for at in range(number or 1)]
    bare = tensors[0] if number is None else tuple(tensors)
    torch.save(bare if only is None else {"inside": bare, "epoch": 1}, tmp_path / "in.pt")
    plan = convert_checkpoint(
        tmp_path / "in.pt", tmp_path / "out.safetensors", only=only, fsync=False, verify=True
    ).plan
    assert any("state dict: " in note for note in plan.notes)
    expected = {
        "tensor" if number is None else str(at): tensor for at, tensor in enumerate(tensors)
    }
    for found in (
        load_file(tmp_path / "out.safetensors"),
        load_portable(tmp_path / "in.pt", only=only),
    ):
        assert set(found) == set(expected) and all(
            torch.equal(found[key], expected[key]) for key in expected
        )
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", only=only, fsync=False, verify=True)
    again = oracle.load(tmp_path / "out.pt")
    assert type(again) is type(bare) and all(
        map(torch.equal, again if number else [again], tensors)
    )


def test_a_quantized_tensor_that_is_not_one_is_refused_by_its_key(tmp_path):
    """Its parameters are looked at before its bytes: the error names the key, and a way out."""
    tree = {"w": torch.quantize_per_tensor(torch.ones(2, 2), 0.5, 0, torch.quint8)}
    torch.save(tree, tmp_path / "in.pt")
    with zipfile.ZipFile(tmp_path / "in.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in records if name.endswith("data.pkl"))
    assert records[name].count(b"ctorch\nper_tensor_affine\n") == 1
    records[name] = records[name].replace(b"ctorch\nper_tensor_affine\n", b"X\1\0\0\0x")
    with zipfile.ZipFile(tmp_path / "bad.pt", "w") as archive:
        for record, content in records.items():
            archive.writestr(record, content)
    with pytest.raises(RefusedObject, match=r"bad\.pt: w: .*--exclude"):
        convert_checkpoint(tmp_path / "bad.pt", tmp_path / "out.safetensors")
