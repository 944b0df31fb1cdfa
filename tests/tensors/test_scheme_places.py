"""Each sample of quantised weights has the values of its framework wherever it lies: in shards that
part codes from their scales, behind a web server, among the jobs of a batch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptconv import Dequantize, convert_checkpoint, load_portable
from ckptconv.io.remote import source
from ckptconv.tensors import computed
from helpers.http_server import HttpServer
from helpers.paths import NUMBERS
from helpers.program import run
from tensors.test_schemes import SAMPLES, check, expected_of, is_same, name_of


def beside(sample: Path) -> list[Path]:
    """The configs that belong to a sample."""
    return [path for path in sample.parent.iterdir() if path.suffix == ".json"]


def in_shards(sample: Path, folder: Path) -> Path:
    """A sample in two files, each tensor in another one than those before and behind it."""
    folder.mkdir()
    with safe_open(sample, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(sample)
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {key: names[at % 2] for at, key in enumerate(sorted(tensors))}
    for name in names:
        part = {key: tensors[key] for key, where in weight_map.items() if where == name}
        save_file(part, folder / name, metadata)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in beside(sample):
        shutil.copy(path, folder)
    return folder


FLAT = [sample for sample in SAMPLES if sample.suffix == ".safetensors"]


@pytest.mark.parametrize("sample", FLAT, ids=name_of)
def test_shards_that_part_codes_from_their_scales_are_read_as_one(tmp_path, sample):
    shards = in_shards(sample, tmp_path / "shards")
    convert_checkpoint(shards, tmp_path / "out.safetensors", dequantize=True, dtype="f32")
    check(sample, load_file(tmp_path / "out.safetensors"))
    out = tmp_path / "out"
    convert_checkpoint(
        shards, out, to="safetensors", dequantize=True, dtype="f32", max_shard_size="20KB"
    )
    made: dict[str, torch.Tensor] = {}
    for path in out.glob("*.safetensors"):
        made |= load_file(path)
    check(sample, made)
    for key, value in load_portable(shards, edits=[Dequantize()]).items():
        wanted = expected_of(sample)[key].to(value.dtype)
        assert is_same(value, wanted, of_sign="modelopt" not in str(sample)), key


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_a_sample_is_read_over_http(tmp_path, sample):
    files = {f"/m/{path.name}": path.read_bytes() for path in (sample, *beside(sample))}
    with HttpServer(files) as server:
        far = f"{server.url}/m/{sample.name}"
        convert_checkpoint(far, tmp_path / "out.safetensors", dequantize=True, dtype="f32")
    check(sample, load_file(tmp_path / "out.safetensors"))


@pytest.mark.parametrize(
    "samples",
    [SAMPLES[::9], pytest.param(SAMPLES, marks=pytest.mark.trust)],
    ids=["some", "all"],
)
def test_a_batch_of_two_processes_makes_all_of_them(tmp_path, samples):
    lines = [
        {"source": str(sample), "output": str(tmp_path / "out" / f"{number}.safetensors")}
        for number, sample in enumerate(samples)
    ]
    manifest = tmp_path / "jobs.jsonl"
    manifest.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = run("batch", manifest, "--jobs", "2", "--dequantize", "--dtype", "f32", cwd=tmp_path)
    assert done.exit == 0, done.err
    for line, sample in zip(lines, samples, strict=True):
        check(sample, load_file(line["output"]))


def test_there_are_samples():
    assert NUMBERS.is_dir() and len(FLAT) > 30


def test_a_folder_over_http_is_read_about_once(tmp_path, monkeypatch):
    """Also words that are packed down the inputs, whose rows are gathered strip by strip."""
    monkeypatch.setattr(computed, "_STRIP", 1 << 18)
    monkeypatch.setattr(source, "_KEPT", 1 << 16)
    outputs, inputs = 16384, 130 * 8  # rows of 64 KiB, of which 2 are read at a time
    torch.manual_seed(0)
    tensors = {
        "a.qweight": torch.randint(-(1 << 31), 1 << 31, (inputs // 8, outputs), dtype=torch.int32),
        "a.qzeros": torch.zeros(10, outputs // 8, dtype=torch.int32),
        "a.scales": torch.ones(10, outputs, dtype=torch.float16),
        "a.g_idx": torch.arange(inputs, dtype=torch.int32) // 104,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 104}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    objects = {f"/m/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    out = tmp_path / "out.safetensors"
    with HttpServer(objects) as server:
        convert_checkpoint(server.at("m/model.safetensors"), out, dequantize=True)
        sent = server.sent - 2 * source.HEAD  # it is opened twice, to see what it is
    assert sent <= 1.05 * sum(map(len, objects.values()))
    near = tmp_path / "near.safetensors"
    convert_checkpoint(tmp_path / "model.safetensors", near, dequantize=True)
    assert out.read_bytes() == near.read_bytes()
