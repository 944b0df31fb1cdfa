"""Several checkpoints as one: put together, and averaged; torch says what the mean is."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import (
    CheckpointError,
    KeyConflict,
    KeyMismatch,
    MalformedCheckpoint,
    OptionRefused,
    RefusedObject,
    average,
    merge,
)
from helpers.examples import crossed
from helpers.paths import DATA
from helpers.program import run

FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        if dtype.is_complex:
            return torch.randn(*shape, dtype=dtype, generator=generator)
        return torch.randn(*shape, generator=generator).to(dtype)

    shared = numbers(6, 5)
    return {
        "embed": shared,
        "head": shared,
        "rows": numbers(70, 90),
        "strided": numbers(40, 30).t()[3:17],
        "empty": numbers(0, 4),
        "scalar": numbers(1)[0],
        "large": numbers(700, 601),
    }


def saved(folder, count: int, dtype: torch.dtype = torch.float32, **more):
    paths, found = [], []
    for seed in range(count):
        found.append({**drawn(seed, dtype), **{name: value(seed) for name, value in more.items()}})
        paths.append(folder / f"e{seed}.pt")
        torch.save({f"module.{key}": value for key, value in found[-1].items()}, paths[-1])
    return paths, found


def mean(values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """The mean in float64, cast at the end."""
    is_complex = values[0].is_complex()
    reals = [torch.view_as_real(value.resolve_conj()) if is_complex else value for value in values]
    acc = reals[0].to(torch.float64) * weights[0]
    for value, weight in zip(reals[1:], weights[1:], strict=True):
        acc = acc + value.to(torch.float64) * weight
    found = (acc / sum(weights)).to(reals[0].dtype)
    return torch.view_as_complex(found.contiguous()) if is_complex else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [3, 6, 10])
def test_the_mean_of_equal_values_is_that_value(tmp_path, dtype, count):
    single = dtype is torch.float32  # ten times another float64 may be between two of them
    values = torch.tensor([7.0, *[0.1, -1e30, 1 / 3, 1e-40] * single], dtype=dtype)
    for number in range(count):
        torch.save({"w": values}, tmp_path / f"{number}.pt")
    paths = [tmp_path / f"{number}.pt" for number in range(count)]
    average(paths, tmp_path / "mean.pt")
    assert torch.equal(torch.load(tmp_path / "mean.pt")["w"], values)


def test_a_sum_beyond_all_numbers_has_a_mean(tmp_path):
    most = torch.finfo(torch.float64).max
    values = torch.tensor([most, -most, 1.0, math.inf, math.nan], dtype=torch.float64)
    for name in "abc":
        torch.save({"w": values}, tmp_path / f"{name}.pt")
    average([tmp_path / f"{name}.pt" for name in "abc"], tmp_path / "mean.pt")
    made = torch.load(tmp_path / "mean.pt")["w"]
    assert torch.allclose(made[:3], values[:3], rtol=1e-15) and torch.isinf(made[3])
    assert torch.isfinite(made[:3]).all() and torch.isnan(made[4])


def test_a_checkpoint_and_itself_are_verified(tmp_path):
    paths, found = saved(tmp_path, 1, torch.float32)
    average([*paths, *paths], tmp_path / "mean.pt", verify=True)
    made = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert all(torch.equal(made[key], value) for key, value in found[0].items())


@pytest.mark.parametrize(
    ("dtype", "weights"), crossed(FLOATS, [[0.1, 0.7, 3], None, [1, 1, 2]]), ids=str
)
def test_the_mean_is_that_of_torch_to_the_bit(tmp_path, dtype, weights):
    paths, found = saved(tmp_path, 3, dtype)
    average(paths, tmp_path / "mean.pt", weights=weights, verify=True)
    made = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert made.keys() == found[0].keys()
    for key, value in made.items():
        expected = mean([item[key] for item in found], weights or [1, 1, 1])
        assert value.dtype is dtype and value.shape == expected.shape
        raw = [torch.view_as_real(t) if dtype.is_complex else t for t in (value, expected)]
        assert torch.equal(*(t.contiguous().view(torch.uint8) if t.ndim else t for t in raw)), key
    assert made["embed"].data_ptr() == made["head"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mean_in_another_type_is_rounded_once(dtype, tmp_path):
    one, other = drawn(1, torch.bfloat16), drawn(2, torch.bfloat16)
    for name, values in (("a.pt", one), ("b.pt", other)):
        torch.save(values, tmp_path / name)
    sources = [tmp_path / "a.pt", tmp_path / "b.pt"]
    average(sources, tmp_path / "o.pt", dtype=dtype, weights=[1, 2], verify=True)
    for key, made in torch.load(tmp_path / "o.pt").items():
        assert torch.equal(made, ((one[key].double() + 2 * other[key].double()) / 3).to(dtype))


def test_a_mean_goes_to_any_format(tmp_path):
    paths, found = saved(tmp_path, 2)
    average(paths, tmp_path / "mean.safetensors", dtype="bf16", exclude="strided", verify=True)
    made = load_file(tmp_path / "mean.safetensors")
    expected = mean([item["rows"] for item in found], [1, 1]).bfloat16()
    assert torch.equal(made["rows"], expected) and "strided" not in made


def test_integers_have_no_mean(tmp_path):
    paths, _ = saved(tmp_path, 2, steps=torch.tensor, mask=lambda _: torch.tensor([True]))
    with pytest.raises(KeyMismatch, match="int64 has no mean") as raised:
        average(paths, tmp_path / "mean.pt")
    assert raised.value.where == "steps" and "--integers" in str(raised.value)
    assert not (tmp_path / "mean.pt").exists()
    for which, number in (("first", 0), ("last", 1)):
        average(paths, tmp_path / "mean.pt", integers=which, force=True)
        assert torch.load(tmp_path / "mean.pt")["steps"] == number


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sd: sd.pop("module.rows"), "lacks 1 key of .*rows"),
        (lambda sd: sd.update({"module.more": torch.ones(1)}), "has 1 key that it does not have"),
        (
            lambda sd: sd.update({"module.rows": torch.ones(2)}),
            r"the shape \[2\], but .* in .*e0\.pt",
        ),
        (
            lambda sd: sd.update({"module.rows": sd["module.rows"].half()}),
            r"has the dtype float16, but float32 in .*e0\.pt",
        ),
    ],
)
def test_checkpoints_of_other_models_are_refused(tmp_path, change, message):
    paths, _ = saved(tmp_path, 3)
    state_dict = torch.load(paths[2])
    change(state_dict)
    torch.save(state_dict, paths[2])
    with pytest.raises(KeyMismatch, match=message):
        average(paths, tmp_path / "mean.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e0.pt", "e1.pt", "e2.pt"]


def test_a_damaged_source_is_found_before_its_values_are_used(tmp_path):
    paths, found = saved(tmp_path, 2)
    raw = bytearray(paths[1].read_bytes())
    raw[raw.index(found[1]["large"].numpy().tobytes()[:64]) + 5] ^= 1
    paths[1].write_bytes(raw)
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        average(paths, tmp_path / "mean.pt")
    assert not (tmp_path / "mean.pt").exists()


def test_weights_whose_sum_is_no_number_are_weights(tmp_path):
    paths, found = saved(tmp_path, 2)
    average(paths, tmp_path / "mean.pt", weights=[1.5e308, 1.5e308])
    made = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert torch.equal(made["rows"], mean([item["rows"] for item in found], [1, 1]))


@pytest.mark.parametrize(
    "weights", [[1], [1, 0], [1, -1], [1, math.nan], [1, math.inf], [1, 10**400]]
)
def test_weights_are_positive_and_as_many(tmp_path, weights):
    paths, _ = saved(tmp_path, 2)
    with pytest.raises(OptionRefused):
        average(paths, tmp_path / "mean.pt", weights=weights)


def test_quantized_tensors_have_no_mean(tmp_path):
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(2), "q": quantized}, tmp_path / name)
    with pytest.raises(RefusedObject, match="has no mean"):
        average([tmp_path / "a.pt", tmp_path / "b.pt"], tmp_path / "mean.pt")


def test_state_dicts_are_put_together_in_order(tmp_path):
    body = {f"module.{key}": value for key, value in drawn(1).items()}
    head = {"fc.weight": torch.randn(3, 2), "fc.bias": torch.randn(3)}
    torch.save({"state_dict": body, "optimizer": {"state": {0: torch.ones(9)}}},
               tmp_path / "body.pt")  # fmt: skip
    save_file(head, tmp_path / "head.safetensors")
    merge(
        [tmp_path / "body.pt", tmp_path / "head.safetensors"], tmp_path / "o.pt",
        prefix={str(tmp_path / "head.safetensors"): "head."}, verify=True,
    )  # fmt: skip
    made = torch.load(tmp_path / "o.pt", weights_only=True)
    assert list(made) == [*drawn(1), "head.fc.bias", "head.fc.weight"]
    for key, value in drawn(1).items():
        assert torch.equal(made[key], value)
    assert torch.equal(made["head.fc.weight"], head["fc.weight"])
    assert made["embed"].data_ptr() == made["head"].data_ptr()


def test_a_key_of_two_is_an_error_that_names_both(tmp_path):
    torch.save({"w": torch.ones(1), "x": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({"module.w": torch.zeros(1)}, tmp_path / "b.pt")
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    with pytest.raises(KeyConflict) as raised:
        merge(paths, tmp_path / "o.pt")
    assert (
        raised.value.where == "w"
        and "a.pt" in str(raised.value)
        and "--prefix" in str(raised.value)
    )
    with pytest.raises(KeyConflict, match="name each checkpoint once"):
        merge(paths[:1] * 2, tmp_path / "o.pt", prefix={str(paths[0]): "p."})
    with pytest.raises(KeyConflict):  # what the prefix makes equal
        merge(paths, tmp_path / "o.pt", prefix={str(paths[0]): "p.", str(paths[1]): "p."})
    with pytest.raises(OptionRefused, match="not one of the sources"):
        merge(paths, tmp_path / "o.pt", prefix={"other.pt": "p."})
    assert not (tmp_path / "o.pt").exists()


@pytest.mark.parametrize("command", ["merge", "average"])
def test_the_commands_say_what_they_do(tmp_path, command):
    torch.save({"w": torch.ones(4), "n": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.zeros(4), "n": torch.ones(2)}, tmp_path / "b.pt")
    more = ["--prefix", "b.pt=b."] if command == "merge" else ["--weights", "3,1"]
    done = run(command, "a.pt", "b.pt", "o.pt", *more, "--json", "--verify", cwd=tmp_path)
    assert done.exit == 0 and json.loads(done.out)["output"]["path"] == "o.pt"
    made = torch.load(tmp_path / "o.pt")
    assert (made["b.w"] if command == "merge" else made["w"]).tolist() == (
        [0] * 4 if command == "merge" else [0.75] * 4
    )
    assert run(command, "a.pt", "b.pt", "o.pt", *more, cwd=tmp_path).exit == 1  # it exists
    dry = run(command, "a.pt", "b.pt", "p.pt", *more, "-n", cwd=tmp_path)
    assert dry.exit == 0 and not (tmp_path / "p.pt").exists()
    assert run(command, "a.pt", "p.pt", cwd=tmp_path).exit != 0


@pytest.mark.parametrize("name", ["rules", "keys", "strip_prefix"])
def test_rules_of_keys_are_not_options(tmp_path, name):
    paths, _ = saved(tmp_path, 2)
    with pytest.raises(OptionRefused, match="is not an option here"):
        merge(paths, tmp_path / "o.pt", **{name: "x"})


def test_one_checkpoint_is_not_several(tmp_path):
    paths, _ = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="only one checkpoint"):
        average(paths, tmp_path / "o.pt")


def test_what_is_not_taken_is_said(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(2, 2)

    torch.save({"state_dict": Net().state_dict(), "epoch": 3, "loss": 0.5}, tmp_path / "a.pt")
    torch.save(Net().state_dict(), tmp_path / "b.pt")
    save_file({"c": torch.ones(1)}, tmp_path / "c.safetensors", {"license": "mit", "format": "pt"})
    words = ("--prefix", "b.pt=b.")
    done = run("merge", "a.pt", "b.pt", "c.safetensors", "o.pt", *words, "--json", cwd=tmp_path)
    notes = " ".join(done.json()["notes"])
    assert "a.pt: only the state dict is taken; left out: epoch, loss" in notes
    assert "c.safetensors: only the state dict is taken; left out: metadata license" in notes
    assert "2 keys of b.pt get b. before them" in notes and "_metadata" in notes
    done = run("average", "a.pt", "b.pt", "mean.pt", "--json", cwd=tmp_path)
    assert "left out: epoch, loss" in " ".join(done.json()["notes"])
    timm = {"epoch": 3, "arch": "resnet18", "version": 2, "state_dict": Net().state_dict()}
    torch.save({**timm, "state_dict_ema": Net().state_dict()}, tmp_path / "t.pt")
    done = run("average", "t.pt", "b.pt", "mean2.pt", "--json", cwd=tmp_path)
    assert "t.pt: state_dict_ema is taken, where timm has" in " ".join(done.json()["notes"])
    wrapped = {f"module.{key}": value for key, value in Net().state_dict().items()}
    torch.save(wrapped, tmp_path / "w.pt")
    done = run("average", "w.pt", "b.pt", "m2.pt", "--json", cwd=tmp_path)
    assert "w.pt: module. is stripped from its keys" in " ".join(done.json()["notes"])
    assert done.json()["state_dicts"][0]["example"] == ["module.fc.weight", "fc.weight"]
    torch.save(wrapped, tmp_path / "w2.pt")
    done = run("average", "w.pt", "w2.pt", "b.pt", "m4.pt", cwd=tmp_path)
    assert "w.pt, w2.pt: module. is stripped from its keys" in done.err
    assert "2 of 2 keys renamed, e.g. module.fc.weight → fc.weight" in done.err
    done = run("merge", "w.pt", "c.safetensors", "m3.pt", "--save-mapping", "m.json", cwd=tmp_path)
    assert done.exit == 1 and "a mapping cannot undo" in done.err
    found = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert type(found).__name__ == "OrderedDict"
    assert found._metadata == Net().state_dict()._metadata


@pytest.mark.parametrize(
    ("sources", "given"),
    [
        ("a.pt", {}), (["a.pt", "b.pt"], {"weights": "1,3"}), (["a.pt", "b.pt"], {"weights": 3}),
        (["a.pt", "b.pt"], {"weights": [[1], 2]}),
    ],
)  # fmt: skip
def test_what_is_not_an_option_is_said_in_python_too(tmp_path, sources, given):
    with pytest.raises(OptionRefused):
        average(sources, tmp_path / "o.pt", **given)
    with pytest.raises(OptionRefused):
        merge(sources, tmp_path / "o.pt", prefix="a.pt=x.")


def test_the_error_about_too_few_weights_counts_them(tmp_path):
    with pytest.raises(OptionRefused, match=r"^1 weight for 2 checkpoints; give one for each$"):
        average(["a.pt", "b.pt"], tmp_path / "o.pt", weights=[1])


@pytest.mark.parametrize("combine", [average, merge])
def test_several_folders_of_megatron_are_not_written_as_the_first_of_them(combine, tmp_path):
    """Its tree under Megatron's own names stood for all: neither mean nor second was in it."""
    folder, out = DATA / "megatron_optimizer" / "plain", tmp_path / "out"
    other = shutil.copytree(folder, tmp_path / "other")
    more = {} if combine is average else {"prefix": {other: "b."}}
    with pytest.raises(OptionRefused, match="not a torch_dist folder of Megatron"):
        combine([folder, other], out, to="dcp", optimizer="megatron", **more)
    assert not out.exists()


@pytest.mark.parametrize("word", ["a.pt", "=x.", ""])
def test_a_prefix_says_of_which_source_it_is(word, tmp_path):
    paths, _ = saved(tmp_path, 2)
    done = run("merge", *paths, "o.pt", "--prefix", word, cwd=tmp_path)
    assert done.exit == 2 and f"--prefix {word} is not IN=PREFIX" in done.err
    assert not (tmp_path / "o.pt").exists()


@pytest.mark.parametrize("again", ["a.pt=y.", "./a.pt=y."])
def test_a_source_has_one_prefix(again, tmp_path):
    """The last one was taken, without a word."""
    paths, _ = saved(tmp_path, 2)
    paths[0].rename(tmp_path / "a.pt")
    words = ("--prefix", "a.pt=x.", "--prefix", again)
    done = run("merge", "a.pt", "e1.pt", "o.pt", *words, cwd=tmp_path)
    assert done.exit and "--prefix names a.pt twice" in done.err
    assert not (tmp_path / "o.pt").exists()
