"""To, from and between safetensors files; the official library says what is in them."""

from __future__ import annotations

import json
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from ckptconv import (
    CheckpointWarning,
    KeyRules,
    convert_checkpoint,
    load_into,
    load_portable,
    open_checkpoint,
    save_portable,
)
from ckptconv.formats.safetensors import SAFETENSORS
from ckptconv.support.errors import (
    AmbiguousStateDict,
    CheckpointError,
    DeviceUnavailable,
    KeyConflict,
    MalformedCheckpoint,
    RefusedObject,
    VerificationFailed,
)
from helpers import oracle, trees
from helpers.examples import examples

thorough = settings(max_examples=examples(120), deadline=None)
quick = settings(max_examples=examples(40), deadline=None)
DTYPES = sorted(safetensors.torch._SIZE, key=str)
"""Every dtype that the library writes."""
PAIRS = st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=5), max_size=3)


def convert(tree: Any, folder: Path, **options: Any) -> Path:
    """`tree` saved by torch and converted; returns the output, the source is ``source.pt`` beside
    it.
    """
    torch.save(tree, folder / "source.pt")
    convert_checkpoint(
        folder / "source.pt", folder / "output.safetensors", fsync=False, force=True, **options
    )
    return folder / "output.safetensors"


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as opened:
        return opened.metadata() or {}


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Same dtype, shape and bits, but for those of NaNs (torch itself may change them when it
    negates or casts).
    """
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if oracle.value_bytes(found) != oracle.value_bytes(expected):
        found, expected = (
            found.detach().resolve_conj().resolve_neg(),
            expected.detach().resolve_conj().resolve_neg(),
        )
        numbers = ~expected.isnan()
        assert torch.equal(found.isnan(), expected.isnan())
        assert oracle.value_bytes(found[numbers]) == oracle.value_bytes(expected[numbers])


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The same stored values in C order."""
    values = torch.frombuffer(
        bytearray(oracle.stored_bytes(tensor) or b"\0" * 16), dtype=torch.uint8
    )
    return trees.make(
        tensor.dtype, values, 0, tensor.shape, torch.empty(tensor.shape, device="meta").stride()
    )


def same_view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one and the same values in memory."""
    place = (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
    )
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def tied_names(state_dict: dict[str, torch.Tensor]) -> dict[str, str]:
    """Dropped name → kept name: of the names of one view, the first in sorted order is kept."""
    kept: dict[tuple[Any, ...], str] = {}
    return {
        name: kept[same_view(state_dict[name])]
        for name in sorted(state_dict)
        if state_dict[name].numel() and kept.setdefault(same_view(state_dict[name]), name) != name
    }


# ------------------------------------------------------------------------------ torch → safetensors


@given(trees.state_dicts(DTYPES), st.sampled_from(["keep", "strip"]))
@thorough
def test_the_library_loads_every_tensor_of_a_state_dict(drawn, keys):
    with tempfile.TemporaryDirectory() as folder:
        try:
            output = convert(drawn.tree, Path(folder), keys=keys, verify=True)
        except CheckpointError:
            assert any(
                t.dtype is torch.float4_e2m1fn_x2 and not t.shape for t in drawn.tree.values()
            )
            return
        source = oracle.load(Path(folder) / "source.pt")
        expected = oracle.bare_state_dict(source) if keys == "strip" else source
        tied = tied_names(expected)
        found = safetensors.torch.load_file(output)
        assert found.keys() == expected.keys() - tied.keys()
        for key, tensor in found.items():
            assert_equal(tensor, expected[key])
        assert metadata(output) == {"format": "pt", "device": "cpu", **tied}


@given(trees.state_dicts(DTYPES))
@quick
def test_tensors_lie_aligned_by_falling_element_size_in_their_own_order(drawn):
    with tempfile.TemporaryDirectory() as folder:
        tree = {
            key: value
            for key, value in drawn.tree.items()
            if value.dtype is not torch.float4_e2m1fn_x2
        }
        if not tree:
            return
        output = convert(tree, Path(folder), keys="keep", tied="duplicate")
        header, start = oracle.safetensors_header(output)
        header.pop("__metadata__")
        assert list(header) == sorted(tree, key=lambda key: -tree[key].element_size()), (
            "sorted() is stable"
        )
        assert start % 8 == 0
        ends = [0]
        for key, entry in header.items():
            begin, end = entry["data_offsets"]
            assert (start + begin) % tree[key].element_size() == 0
            assert begin == ends[-1] and end - begin == tree[key].numel() * tree[key].element_size()
            ends.append(end)
        assert output.stat().st_size == start + ends[-1]


REFUSED = {
    "bits": lambda: trees.make(torch.bits8, torch.zeros(2, dtype=torch.uint8), 0, (2,), (1,)),
    "four bits": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint4x2
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_what_safetensors_cannot_hold_is_refused_with_its_key(make, tmp_path):
    tree = {"w": torch.ones(1), "odd": make()}
    with pytest.raises(RefusedObject, match=r"odd: .*safetensors .*--to torch"):
        convert(tree, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]
    convert(tree, tmp_path, keys=KeyRules(exclude=("odd",)))


def test_half_a_byte_alone_is_refused(tmp_path):
    scalar = trees.make(torch.float4_e2m1fn_x2, torch.zeros(1, dtype=torch.uint8), 0, (), ())
    with pytest.raises(RefusedObject, match="w"):
        convert({"w": scalar}, tmp_path)


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda key: key != "__metadata__"), st.integers(0, 9), min_size=1
    )
)
@quick
def test_any_text_is_a_key(values):
    with tempfile.TemporaryDirectory() as folder:
        tree = {key: torch.full((2,), value) for key, value in values.items()}
        output = convert(tree, Path(folder), keys="keep")
        assert {
            key: tensor[0].item() for key, tensor in safetensors.torch.load_file(output).items()
        } == values
        assert list(load_portable(output, keys="keep")) == list(values)


@pytest.mark.parametrize(
    "keys",
    [["__metadata__", "b"], ["a\ud800", "b"], [1, "1"], [b"k", "k"], [(1, 2), "b"]],
    ids=repr,
)
def test_keys_that_cannot_be_names_are_refused(keys, tmp_path):
    with pytest.raises(CheckpointError):
        convert({key: torch.ones(1) for key in keys}, tmp_path, keys="keep")
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_integer_and_bytes_keys_become_text(tmp_path):
    output = convert({0: torch.zeros(1), 1: torch.ones(1), b"raw": torch.ones(2)}, tmp_path)
    assert safetensors.torch.load_file(output).keys() == {"0", "1", "raw"}


def test_the_state_dict_is_taken_out_of_a_training_checkpoint(tmp_path):
    tree = {
        "epoch": 3,
        "state_dict": OrderedDict({"module.a": torch.ones(2), "module.b": torch.zeros(3)}),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []},
    }
    torch.save(tree, tmp_path / "source.pt")
    result = convert_checkpoint(tmp_path / "source.pt", tmp_path / "out.safetensors")
    assert safetensors.torch.load_file(tmp_path / "out.safetensors").keys() == {"a", "b"}
    assert [skipped.path for skipped in result.plan.skipped] == ["epoch", "optimizer"]


def test_values_that_are_no_tensors_are_skipped_and_listed(tmp_path):
    torch.save(
        {"a": torch.ones(2), "n": 3, "none": None, "l": [1], "extra._extra_state": b"x"},
        tmp_path / "source.pt",
    )
    result = convert_checkpoint(tmp_path / "source.pt", tmp_path / "out.safetensors")
    assert safetensors.torch.load_file(tmp_path / "out.safetensors").keys() == {"a"}
    assert [skipped.path for skipped in result.plan.skipped] == [
        "n",
        "none",
        "l",
        "extra._extra_state",
    ]


def test_several_state_dicts_are_a_choice_for_the_user(tmp_path):
    tree = {"model": {"fc.w": torch.ones(2)}, "ema": {"fc.w": torch.zeros(2)}}
    with pytest.raises(AmbiguousStateDict, match=r"model, ema; choose one: --only model"):
        convert(tree, tmp_path)
    assert safetensors.torch.load_file(convert(tree, tmp_path, only="ema"))["fc.w"].sum() == 0


def test_the_device_is_recorded_and_becomes_the_tag_again(tmp_path):
    output = convert({"a": torch.ones(2)}, tmp_path, device="cuda:1")
    assert metadata(output)["device"] == "cuda:1"
    convert_checkpoint(output, tmp_path / "back.pt", device="keep")
    assert oracle.tags(tmp_path / "back.pt") == ["cuda:1"]
    assert load_portable(output)["a"].device.type == "cpu"


# --------------------------------------------------------------------------- safetensors → anything


@given(trees.state_dicts(DTYPES), PAIRS)
@quick
def test_a_library_s_file_becomes_a_torch_file(drawn, extra):
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "source.safetensors", Path(folder) / "output.pt"
        plain = {
            key: contiguous(value)
            for key, value in drawn.tree.items()
            if value.dtype is not torch.float4_e2m1fn_x2
        }
        extra = {
            key: value for key, value in extra.items() if key not in plain and value not in plain
        }
        if not plain:
            return
        safetensors.torch.save_file(plain, source, metadata=extra)
        convert_checkpoint(source, output, keys="keep", fsync=False, verify=True)
        found = oracle.load(output)
        assert list(found) == [
            key for key in oracle.safetensors_header(source)[0] if key != "__metadata__"
        ]
        for key, tensor in plain.items():
            assert_equal(found[key], tensor)
        for ours, theirs in zip(
            found.values(), load_portable(source, keys="keep").values(), strict=True
        ):
            assert_equal(ours, theirs)


@given(trees.state_dicts([torch.float32, torch.int64, torch.float8_e5m2]), PAIRS)
@quick
def test_metadata_and_tied_names_are_carried_over(drawn, extra):
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first.safetensors", Path(folder) / "second.safetensors"
        output = convert(drawn.tree, Path(folder), keys="keep")
        with safe_open(output, framework="pt") as opened:
            extra = {
                key: value
                for key, value in extra.items()
                if key not in drawn.tree and value not in drawn.tree
            }
            known = {**extra, **(opened.metadata() or {})}
        safetensors.torch.save_file(safetensors.torch.load_file(output), first, metadata=known)
        convert_checkpoint(first, second, keys="keep", fsync=False, verify=True)
        assert metadata(second) == known
        before, after = safetensors.torch.load_file(first), safetensors.torch.load_file(second)
        assert before.keys() == after.keys()
        for key in before:
            assert_equal(after[key], before[key])


def test_a_file_without_metadata_gets_the_format(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", dtype="f16")
    assert metadata(tmp_path / "b.safetensors") == {"format": "pt", "device": "cpu"}


# ------------------------------------------------------------------------------------- tied tensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.again = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.again.weight = self.embed.weight


def test_tied_names_are_recorded_as_the_library_does(tmp_path):
    model = Tied()
    safetensors.torch.save_model(model, tmp_path / "theirs.safetensors")
    ours = convert(model.state_dict(), tmp_path)
    theirs = tmp_path / "theirs.safetensors"
    assert safetensors.torch.load_file(ours).keys() == safetensors.torch.load_file(theirs).keys()
    assert metadata(ours) == {**metadata(theirs), "format": "pt", "device": "cpu"}
    fresh = Tied()
    assert safetensors.torch.load_model(fresh, ours) == (set(), [])
    assert torch.equal(fresh.lm_head.weight, model.embed.weight)
    for path in (ours, theirs):
        loaded = load_portable(path)
        assert loaded.keys() == model.state_dict().keys()
        assert (
            len({loaded[f"{name}.weight"].data_ptr() for name in ("embed", "lm_head", "again")})
            == 1
        )


def test_tied_names_that_end_otherwise_are_read_beside_texts(tmp_path):
    tied = nn.Parameter(torch.ones(2))
    model = nn.ModuleDict({"a": nn.ParameterDict({"x": tied}), "b": nn.ParameterDict({"y": tied})})
    safetensors.torch.save_model(model, tmp_path / "in.safetensors", metadata={"author": "us"})
    assert load_portable(tmp_path / "in.safetensors").keys() == model.state_dict().keys()


class Named(nn.Module):
    """One tensor under two names, which may be those of attributes of a module."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._parameters |= dict.fromkeys(names, nn.Parameter(torch.arange(3.0)))


@pytest.mark.parametrize("name", ["format", "device"])
def test_a_tied_name_may_be_one_of_the_metadata(name, tmp_path):
    made = tmp_path / "made.safetensors"
    safetensors.torch.save_model(Named("a", name), made)
    assert metadata(made) == {name: "a"}
    convert_checkpoint(made, tmp_path / "back.pt", verify=True)
    convert_checkpoint(tmp_path / "back.pt", tmp_path / "again.safetensors")
    convert_checkpoint(made, tmp_path / "direct.safetensors")
    for found in (
        load_portable(made),
        oracle.load(tmp_path / "back.pt"),
        safetensors.torch.load_file(tmp_path / "again.safetensors"),
        safetensors.torch.load_file(tmp_path / "direct.safetensors"),
    ):
        assert {*found} == {"a", name} and torch.equal(found[name], torch.arange(3.0))
    fresh = Named("a", name)
    load_into(fresh, made)
    assert torch.equal(fresh.state_dict()[name], torch.arange(3.0))
    opened = open_checkpoint(made)
    assert {ref.location for _, ref in opened.tensors()} == {"cpu"}
    assert opened.notes == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [("format", "pt"), ("device", "cpu"), ("device", "cuda:0"), ("name", "a"), ("x.key", "a")],
)
def test_a_text_that_is_the_name_of_a_tensor_too_is_told(name, value, tmp_path):
    made = tmp_path / "made.safetensors"
    safetensors.torch.save_file({value: torch.ones(2)}, made, metadata={name: value})
    what = f"the metadata entry {name} = {value} is taken for a text"
    with pytest.warns(CheckpointWarning, match=what):
        opened = open_checkpoint(made)
    assert [key for key, _ in opened.tensors()] == [value]
    assert opened.notes == (f"{what}, not for a second name of that tensor",)
    with pytest.warns(CheckpointWarning, match=what):
        assert [*load_portable(made, map_location="cpu")] == [value]


@pytest.mark.parametrize("name", ["device", "fancy"])
def test_a_device_that_would_read_as_something_else_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "fancy")
    torch.save({name: torch.ones(2), "b": torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(DeviceUnavailable, match="the location tag 'fancy' is not a device"):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors", device="keep")


def test_tied_names_follow_the_key_rules(tmp_path):
    wrapped = nn.DataParallel(Tied())
    output = convert(wrapped.state_dict(), tmp_path)
    assert metadata(output)["lm_head.weight"] == "again.weight"
    convert_checkpoint(output, tmp_path / "prefixed.safetensors", keys=KeyRules(add_prefix="net."))
    assert metadata(tmp_path / "prefixed.safetensors") == {
        "format": "pt", "device": "cpu", "net.lm_head.weight": "net.again.weight",
        "net.embed.weight": "net.again.weight"
    }  # fmt: skip
    assert load_portable(tmp_path / "prefixed.safetensors").keys() == {
        f"net.{key}" for key in Tied().state_dict()
    }


def test_tied_tensors_survive_the_way_back_to_torch(tmp_path):
    output = convert(Tied().state_dict(), tmp_path)
    convert_checkpoint(output, tmp_path / "back.pt")
    back = oracle.load(tmp_path / "back.pt")
    assert len({back[f"{name}.weight"].data_ptr() for name in ("embed", "lm_head", "again")}) == 1


def test_duplicates_are_written_when_asked_for(tmp_path):
    output = convert(Tied().state_dict(), tmp_path, tied="duplicate")
    assert safetensors.torch.load_file(output).keys() == Tied().state_dict().keys()
    assert metadata(output) == {"format": "pt", "device": "cpu"}


def test_views_that_merely_overlap_are_each_written_whole(tmp_path):
    base = torch.arange(12.0)
    tree = {
        "qkv": base.reshape(3, 4),
        "q": base[:4],
        "flat": base,
        "transposed": base.reshape(3, 4).t(),
    }
    found = safetensors.torch.load_file(convert(tree, tmp_path))
    assert found.keys() == tree.keys()
    for key, tensor in tree.items():
        assert_equal(found[key], tensor)


def test_a_name_that_metadata_needs_is_not_dropped(tmp_path):
    shared = torch.arange(3.0)
    found = safetensors.torch.load_file(
        convert({"a": shared, "device": shared, "format": shared}, tmp_path)
    )
    assert found.keys() == {"a", "device", "format"}


# -------------------------------------------------------------------------------------------- casts


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@given(
    drawn=trees.state_dicts(
        [*trees.FLOATS, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
    ),
    name=st.sampled_from(["f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2"]),
)
@quick
def test_casts_are_torch_s_own_and_count_what_overflowed(to, drawn, name):
    dtypes = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16,
        "bf16": torch.bfloat16,
              "f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}  # fmt: skip
    tree = {
        f"k{number}": value.detach().clone() for number, value in enumerate(drawn.tree.values())
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.save(tree, Path(folder) / "source.pt")
        output = Path(folder) / "output"
        result = convert_checkpoint(
            Path(folder) / "source.pt", output, to=to, dtype=name, fsync=False, verify=True
        )
        found = safetensors.torch.load_file(output) if to == "safetensors" else oracle.load(output)
    lost = {}
    for key, tensor in tree.items():
        floating = tensor.dtype in (*trees.FLOATS, torch.float8_e4m3fn)
        expected = tensor.resolve_neg().to(dtypes[name]) if floating else tensor
        assert found[key].dtype == expected.dtype and found[key].shape == expected.shape
        wide, ours = expected.to(torch.complex128), found[key].to(torch.complex128)
        assert torch.equal(wide.isnan(), ours.isnan())
        assert torch.equal(wide[~wide.isnan()], ours[~ours.isnan()])
        before = tensor.resolve_neg().to(torch.complex128)
        odd = before.isfinite() & ~wide.isfinite()
        if name == "f8_e4m3" and tensor.dtype in trees.FLOATS:
            odd = before.abs() >= 464  # becomes 448
        if count := int(odd.sum()):
            lost[key] = count
    assert dict(result.overflowed) == lost


def test_overflows_are_told_under_the_key_that_has_them(tmp_path):
    base = torch.tensor([1.0, 2.0, 1e6, 3.0, 1e7, -1e8])
    torch.save({"q": base[:2], "k": base[2:4], "v": base[4:]}, tmp_path / "source.pt")
    result = convert_checkpoint(tmp_path / "source.pt", tmp_path / "out.safetensors", dtype="f16")
    assert dict(result.overflowed) == {"k": 1, "v": 2}
    assert dict(result.plan.casts) == {("float32", "float16"): 3}


def test_a_cast_keeps_tied_tensors_tied(tmp_path):
    output = convert(Tied().state_dict(), tmp_path, dtype="bf16")
    loaded = load_portable(output)
    assert loaded["lm_head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert loaded["embed.weight"].dtype is torch.bfloat16


# ------------------------------------------------------------------------------------------- damage


def raw_file(path: Path, header: Any, data: bytes = b"", pad: int = 0) -> Path:
    raw = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * pad
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": F32}, b"abc"),
        ({"a": F32}, b"abcde"),
        ({"a": {**F32, "shape": [2]}}, b"abcd"),
        ({"a": {**F32, "data_offsets": [1, 5]}}, b"abcde"),
        ({"a": F32, "b": F32}, b"abcd"),
        ({"a": {**F32, "dtype": "F33"}}, b"abcd"),
        ({"a": {**F32, "shape": [-1]}}, b"abcd"),
        ({"a": {**F32, "shape": [1.0]}}, b"abcd"),
        ({"a": {**F32, "shape": [True]}}, b"abcd"),
        ({"a": {**F32, "data_offsets": [4, 0]}}, b"abcd"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"abcd"),
        ({"__metadata__": {"a": 1}}, b""),
        (b'{"a": NaN}', b""),
        (b"[1]", b""),
        (b'{"a"', b""),
        ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"ab"),
    ],
)
def test_headers_that_the_library_refuses_are_refused(header, data, tmp_path):
    path = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(Exception):  # noqa: B017 (the library raises several)
        safetensors.torch.load_file(path)
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


def test_a_key_that_stands_twice_is_refused(tmp_path):
    entry = json.dumps(F32).encode()
    with pytest.raises(MalformedCheckpoint, match="twice"):
        open_checkpoint(
            raw_file(
                tmp_path / "bad.safetensors", b'{"a":' + entry + b',"a":' + entry + b"}", b"abcd"
            )
        )


def test_headers_that_the_library_accepts_are_accepted(tmp_path):
    for header, data in (
        ({}, b""),
        ({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, b"abcd"),
        ({"a": {"dtype": "F32", "shape": [0, 5], "data_offsets": [0, 0]}}, b""),
        ({"b": {**F32, "data_offsets": [4, 8]}, "a": F32, "__metadata__": {}}, b"abcdefgh"),
        ({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"ab"),
    ):
        path = raw_file(tmp_path / "good.safetensors", header, data, pad=3)
        theirs = safetensors.torch.load_file(path)
        with open_checkpoint(path) as checkpoint:
            assert {key: tuple(ref.shape) for key, ref in checkpoint.tensors()} == {
                key: tuple(t.shape) for key, t in theirs.items()
            }


@pytest.mark.parametrize(
    "header",
    [
        b'{"__metadata__":{}8"w":ENTRY}',
        b'{"w":ENTRY,}',
        b'{"w":ENTRY}}',
        b'{"w":ENTRY',
        b'{"w\n":ENTRY}',
        b'{"w\xff":ENTRY}',
        b'{"w":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}',
        b'{"w":{"dtype":"F32","shape":[1,],"data_offsets":[0,4]}}',
    ],
)
def test_a_header_without_spaces_is_still_json(header, tmp_path):
    entry = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = header.replace(b"ENTRY", entry)
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(path)
    with pytest.raises(MalformedCheckpoint):
        open_checkpoint(path)


def test_headers_with_and_without_spaces_hold_the_same_tensors(tmp_path):
    tensors = {
        "a.b": torch.rand(2, 3),
        "é": torch.arange(4),
        "e": torch.rand(0, 2),
        "s": torch.rand(()),
    }
    safetensors.torch.save_file(tensors, tmp_path / "plain.safetensors", {"device": "cuda:1"})
    raw = (tmp_path / "plain.safetensors").read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    spaced = json.dumps(json.loads(raw[8:size])).encode()
    whole = len(spaced).to_bytes(8, "little") + spaced + raw[size:]
    (tmp_path / "spaced.safetensors").write_bytes(whole)
    described = []
    for name in ("plain", "spaced"):
        with open_checkpoint(tmp_path / f"{name}.safetensors") as opened:
            described.append([(key, ref.dtype, ref.location) for key, ref in opened.tensors()])
        loaded = load_portable(tmp_path / f"{name}.safetensors", map_location="cpu")
        assert loaded.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert_equal(loaded[key], tensor)
    assert described[0] == described[1]


def test_a_shorter_file_is_refused(tmp_path):
    output = convert({"a": torch.ones(100)}, tmp_path)
    output.write_bytes(output.read_bytes()[:-1])
    with pytest.raises(MalformedCheckpoint):
        open_checkpoint(output)


def test_two_keys_that_become_one_are_refused(tmp_path):
    safetensors.torch.save_file(
        {"a": torch.ones(1), "_orig_mod.a": torch.zeros(1)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(KeyConflict, match="both become 'a'"):
        convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.pt")


def test_live_state_dicts_are_saved_as_the_library_does(tmp_path):
    model = Tied()
    save_portable(model.state_dict(), tmp_path / "ours.safetensors")
    safetensors.torch.save_model(model, tmp_path / "theirs.safetensors")
    ours, theirs = (
        safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_an_extra_state_with_tensors_is_listed_and_so_accounted_for(tmp_path):
    tree = {"a.weight": torch.ones(3), "a._extra_state": {"scale": torch.ones(2)}}
    torch.save(tree, tmp_path / "in.pt")
    done = convert_checkpoint(
        tmp_path / "in.pt", tmp_path / "out.safetensors", fsync=False, verify=True
    )
    assert [item.path for item in done.plan.skipped] == ["a._extra_state"]


@pytest.mark.parametrize("numel", [4, 1 << 19])  # a short file is read whole, a longer one mapped
def test_the_library_looks_at_what_was_written(numel, tmp_path):
    made = tmp_path / "made.safetensors"
    safetensors.torch.save_file({"a": torch.ones(numel), "b": torch.zeros(2)}, made)
    SAFETENSORS.check_written(made, made, 2)
    with pytest.raises(VerificationFailed, match="the safetensors library sees 2 tensors in it"):
        SAFETENSORS.check_written(made, made, 3)
    raw = made.read_bytes()
    for damaged in (raw[:-4], raw + bytes(4), raw.replace(b'"F32"', b'"F64"', 1)):
        made.write_bytes(damaged)
        with pytest.raises(VerificationFailed, match="the safetensors library does not open it"):
            SAFETENSORS.check_written(made, made, 2)
