"""Statistics of whole checkpoints: which tensors, under which names, and what the command says."""

from __future__ import annotations

import json
import re
from itertools import zip_longest

import pytest
import torch
from safetensors.torch import save_file

from ckptconv import MalformedCheckpoint, OptionRefused, Progress, stats
from ckptconv.values.collect import in_order
from helpers.paths import CORPUS
from helpers.program import run, run_on_terminal


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    path = tmp_path_factory.mktemp("stats") / "mixed.pt"
    torch.manual_seed(3)
    base, plain = torch.randn(300, 40), torch.randn(8, 4)
    tensors = {
        "base": base,
        "again": base,
        "strided": base.t()[3:9],
        "parameter": torch.nn.Parameter(plain),
        "half": plain.half(),
        "nested": {"list": [torch.arange(5), {"deep": plain[:2]}]},
        "per_tensor": torch.quantize_per_tensor(plain, 0.07, 11, torch.quint8),
        "per_channel": torch.quantize_per_channel(
            plain, torch.rand(8) + 0.01, torch.arange(8) - 4, 0, torch.qint8
        ),
        "other_axis": torch.quantize_per_channel(
            plain, torch.rand(4) + 0.01, torch.arange(4), 1, torch.qint32
        ),
        "half_bytes": torch.quantize_per_channel(
            plain, torch.rand(8) + 0.01, torch.rand(8), 0, torch.quint4x2
        ),
        "quarter_bytes": torch.quantize_per_tensor(plain[:7, :3] + 2, 0.9, 1, torch.quint2x4),
    }
    # for these torch has no numbers
    others = {
        "four_bits": torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2),
        "quarter_bytes_of_a_part": tensors["quarter_bytes"][2:],
        "plain_bits": torch.arange(8, dtype=torch.uint8).view(torch.bits8),
    }
    torch.save({**tensors, **others}, path)
    return path, tensors


def test_each_tensor_under_each_of_its_names(mixed):
    path, _ = mixed
    found = stats(path)
    assert {item.name for item in found.tensors} == {
        "base", "again", "strided", "parameter", "half", "nested.list.0", "nested.list.1.deep",
        "per_tensor", "per_channel", "other_axis", "half_bytes", "quarter_bytes", "four_bits",
    }  # fmt: skip
    assert found.unread == ("quarter_bytes_of_a_part", "plain_bits")


def test_the_figures_are_those_of_torch(mixed):
    path, tensors = mixed
    tensors = {**tensors, "nested.list.0": torch.arange(5)}
    checked = 0
    for item in stats(path).tensors:
        if item.name not in tensors:
            continue
        value = tensors[item.name]
        numbers = (value.dequantize() if value.is_quantized else value).detach().double()
        known = item.statistics
        assert (known.minimum, known.maximum) == (numbers.min().item(), numbers.max().item())
        assert known.mean == pytest.approx(numbers.mean().item(), rel=1e-12, abs=1e-12)
        assert known.std == pytest.approx(numbers.std().item(), rel=1e-12)
        assert item.shape == tuple(value.shape)
        checked += 1
    assert checked == 11


def test_4_bit_floats_are_counted_one_by_one(mixed):
    found = next(item for item in stats(mixed[0]).tensors if item.name == "four_bits")
    # the bytes 0 to 11: the low four bits are 0 to 11, the high ones 0 (OCP MX 1.0, 5.3.3)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5] + [0] * 12
    known = found.statistics
    assert (found.shape, known.numel, known.zeros) == ((3, 8), 24, 14)
    assert (known.minimum, known.maximum, known.distinct) == (-1.5, 6, 11)
    assert known.mean == pytest.approx(sum(values) / 24)
    assert known.quantiles([1.0]) == [6.0] and known.distinct_is_exact


def test_statistics_are_a_list_with_names(mixed):
    path, tensors = mixed
    found = stats(path)
    assert len(found) == len(found.tensors) and [*found] == [*found.tensors]
    assert found["half"].statistics.maximum == tensors["half"].max().item()
    assert found["per_tensor"] is found.tensors[[item.name for item in found].index("per_tensor")]
    with pytest.raises(KeyError, match="nothing"):
        found["nothing"]


def test_what_has_no_numbers_is_said(tmp_path):
    nan, inf = float("nan"), float("inf")
    tensors = {"a": [inf] * 3, "b": [1.0, 2.0, nan], "c": [nan, nan], "d": [1.0] * 9}
    torch.save({key: torch.tensor(value) for key, value in tensors.items()}, tmp_path / "m.pt")
    found = stats(tmp_path / "m.pt")
    assert [item.name for item in in_order(found, "nan", 4)] == ["a", "c", "b", "d"]
    done = run("stats", "m.pt", "--histogram", "c", cwd=tmp_path)
    assert "it holds no finite numbers" in done.out and "quantiles" not in done.out
    torch.save({"a": {}, "b": torch.ones(1)}, tmp_path / "m.pt")
    assert run("stats", "m.pt", "--only", "a", cwd=tmp_path).out.strip() == "it holds no tensors"


def test_types_whose_layout_nobody_says_are_named(tmp_path):
    """F6 of safetensors (safetensors#611), and F4 that are not pairs."""
    shapes = {"F6_E2M3": [4, 4], "F4": [2, 3], "F32": [3]}
    tensors = {
        name: {"dtype": name, "shape": shape, "data_offsets": [12 * at, 12 * at + size]}
        for at, ((name, shape), size) in enumerate(zip(shapes.items(), (12, 3, 12), strict=True))
    }
    tensors["F32"]["data_offsets"] = [15, 27]
    header = json.dumps(tensors).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(27))
    found = stats(path)
    assert [item.name for item in found.tensors] == ["F32"]
    assert sorted(found.unread) == ["F4", "F6_E2M3"]
    assert "the numbers of 2 tensors are not read" in run("stats", path, cwd=tmp_path).out
    done = run("show", path, "F6_E2M3", cwd=tmp_path)
    assert done.exit == 1 and "numpy has no type for elements of float6_e2m3fn" in done.err


def test_the_same_codes_with_other_scales_are_other_numbers(tmp_path):
    codes = torch.arange(6, dtype=torch.uint8)
    first = torch._make_per_tensor_quantized_tensor(codes, 0.5, 0)
    second = torch._make_per_channel_quantized_tensor(
        codes.reshape(2, 3), torch.tensor([1.0, 10.0]), torch.tensor([0, 0]), 0
    )
    torch.save({"a": first, "b": second}, tmp_path / "q.pt")
    a, b = stats(tmp_path / "q.pt").tensors
    assert (a.statistics.maximum, b.statistics.maximum) == (2.5, 50.0)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_containers_agree(tmp_path, suffix):
    tensors = {f"t{i}": torch.randn(700, 33) for i in range(9)}
    path = tmp_path / f"m{suffix}"
    torch.save(tensors, path) if suffix == ".pt" else save_file(tensors, path)
    found = {item.name: item.statistics for item in stats(path).tensors}
    assert {name: known.std for name, known in found.items()} == {
        name: pytest.approx(value.double().std().item(), rel=1e-12)
        for name, value in tensors.items()
    }


def test_a_damaged_file_is_an_error(tmp_path):
    value = torch.randn(200_000)
    torch.save({"w": value, "v": torch.ones(3)}, tmp_path / "m.pt")
    raw = bytearray((tmp_path / "m.pt").read_bytes())
    raw[raw.index(value.numpy().tobytes()[:64]) + 400_000] ^= 4
    (tmp_path / "m.pt").write_bytes(raw)
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        stats(tmp_path / "m.pt")
    assert run("stats", "m.pt", cwd=tmp_path).exit == 1


def test_parts_and_globs_choose(mixed):
    path, _ = mixed
    assert [item.name for item in stats(path, only="nested").tensors] == ["list.0", "list.1.deep"]
    assert {item.name for item in stats(path, include=["per_*", "half"]).tensors} == {
        "per_tensor", "per_channel", "half",
    }  # fmt: skip
    with pytest.raises(OptionRefused, match=r"^nothing\* matches no tensor"):
        stats(path, include=["nothing*"])


def test_progress_counts_all_bytes(tmp_path):
    torch.save({str(i): torch.randn(1 << 19) for i in range(4)}, tmp_path / "m.pt")
    told: list[Progress] = []
    stats(tmp_path / "m.pt", on_progress=told.append)
    assert (told[0].done, told[-1].done, told[-1].total) == (0, 8 << 20, 8 << 20)
    assert [step.done for step in told] == sorted(step.done for step in told)


def test_the_command_sorts_and_cuts(mixed):
    path, _ = mixed
    done = run("stats", path, "--sort", "std", "--top", "2", "--json", cwd=path.parent)
    document = json.loads(done.out)
    found = stats(path)
    expected = sorted(found.tensors, key=lambda item: -item.statistics.std)[:2]
    assert [item["name"] for item in document["tensors"]] == [item.name for item in expected]
    assert document["left_out"] == len(found.tensors) - 2
    assert document["tensors"][0]["std"] == expected[0].statistics.std
    assert [item.name for item in in_order(found, "name", 1)] == ["again"]


def plain_lines(out: str) -> list[str]:
    """What a terminal shows, without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m|\r", "", out).splitlines()


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_a_table_is_as_wide_as_the_terminal_and_says_what_it_lacks(mixed, columns):
    path, _ = mixed
    _, out = run_on_terminal(
        "stats", path.name, "--sort", "abs-max", cwd=path.parent, columns=columns
    )
    head, *lines = plain_lines(out)
    assert "abs-max" in head and max(map(len, [head, *lines[:3]])) <= columns
    lacks = {"dtype", "mean", "std", "nan", "distinct"} - set(head.split())
    told = [line for line in lines if line.startswith("no room for")]
    assert bool(told) == bool(lacks) and all(name in told[0] for name in lacks)


def test_odd_values_are_said_in_the_last_line(tmp_path):
    torch.save({"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(2)}, tmp_path / "m.pt")
    done = run("stats", "m.pt", cwd=tmp_path)
    assert done.out.splitlines()[-1] == "2 tensors, 1 of them with NaN or infinite values"
    assert done.exit == 0


def test_names_are_escaped_and_never_cut_where_no_terminal_shows_them(tmp_path):
    long = "x" * 300
    torch.save({"a\x1b[31m": torch.ones(1), long: torch.ones(1)}, tmp_path / "m.pt")
    out = run("stats", "m.pt", cwd=tmp_path).out
    assert "\x1b" not in out and long in out


def test_a_terminal_shows_the_beginning_and_the_end_of_a_long_name(tmp_path):
    torch.save({f"model.{'x' * 300}.weight": torch.ones(1)}, tmp_path / "m.pt")
    _, out = run_on_terminal("stats", "m.pt", cwd=tmp_path, columns=80)
    _, line, *_ = plain_lines(out)
    assert re.match(r"model\.x+…x+\.weight +1 ", line) and len(line) == 80


def test_a_histogram_is_drawn(tmp_path):
    torch.save({"w": torch.randn(10_000)}, tmp_path / "m.pt")
    lines = run("stats", "m.pt", "--histogram", "*", cwd=tmp_path).out.splitlines()
    assert lines[0].startswith("w  float32  [10000]")
    drawn = lines[1:9]
    assert max(map(len, drawn)) <= 66 and "█" in drawn[-1]
    assert any("quantiles" in line for line in lines)


def test_the_bars_of_a_histogram_are_as_high_as_what_they_count(tmp_path):
    counts = [1, 8, 16, 21, 40, 64, 50, 0]  # of the values 0 to 7, in eight bins
    values = [float(at) for at, count in enumerate(counts) for _ in range(count)]
    torch.save({"w": torch.tensor([*values, 8.0])}, tmp_path / "m.pt")
    drawn = run("stats", "m.pt", "--histogram", "*", cwd=tmp_path).out.splitlines()[1:9]
    columns = zip_longest(*(line[2:] for line in reversed(drawn)), fillvalue=" ")
    heights = [sum(map(" ▁▂▃▄▅▆▇█".index, column)) for column in columns]
    assert [height for height in heights if height] == [*filter(None, counts), 1]


REAL = (
    "timesler__facenet-pytorch__onet.pt",
    "tracel-ai__burn__bfloat16.pt",
    "tracel-ai__burn__legacy_shared_storage.pt",
)


@pytest.mark.parametrize("name", REAL)
def test_real_files_have_the_statistics_of_what_torch_loads(name):
    path = CORPUS / "files" / name
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    by_name = {item.name: item.statistics for item in stats(path).tensors}
    assert by_name.keys() == loaded.keys()
    for key, value in loaded.items():
        assert by_name[key].maximum == value.double().max().item(), key
        assert by_name[key].mean == pytest.approx(value.double().mean().item(), abs=1e-12)
