"""The checkpoints of holes that `bench/make_huge.py` makes: torch and safetensors open them, and
what ckptconv makes of them has the same values. So what is measured on terabytes is true of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptconv import convert_checkpoint, plan_conversion
from ckptconv.convert.options import Options
from ckptconv.formats.registry import open_certain
from ckptconv.support import platforms
from ckptconv.support.limits import limits
from helpers import oracle
from helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import make_huge

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_torch_reads_a_folder_of_holes_and_so_does_ckptconv(tmp_path):
    make_huge.write_dcp(tmp_path / "in", 24, 4_000_000, ranks=5, chunks=3)
    dcp_to_torch_save(tmp_path / "in", tmp_path / "torch.pt")
    expected = torch.load(tmp_path / "torch.pt")
    assert len(expected["model"]) == 24
    values = torch.cat([tensor[tensor != 0] for tensor in expected["model"].values()])
    assert values.tolist() == [*range(1, len(values) + 1)]
    convert_checkpoint(tmp_path / "in", tmp_path / "out.pt", fsync=False, verify=True)
    assert oracle.value_rows(oracle.load(tmp_path / "out.pt")) == oracle.value_rows(expected)


def test_safetensors_reads_shards_of_holes_and_so_does_ckptconv(tmp_path):
    make_huge.write_hf(tmp_path / "in", 24, 1_000_000, shards=3)
    files = sorted((tmp_path / "in").glob("*.safetensors"))
    expected = {key: value for file in files for key, value in load_file(file).items()}
    assert len(files) == 3 and len(expected) == 24
    assert sum(int((value != 0).sum()) for value in expected.values()) == 3
    convert_checkpoint(
        tmp_path / "in", tmp_path / "out.safetensors", fsync=False, verify=True, keys="keep"
    )
    found = load_file(tmp_path / "out.safetensors")
    assert oracle.value_rows(dict(sorted(found.items()))) == oracle.value_rows(
        dict(sorted(expected.items()))
    )


@pytest.mark.parametrize("kind", [pytest.param("dcp", marks=pytest.mark.trust), "hf"])
def test_a_terabyte_is_planned_in_little_disk_time_and_memory(kind, tmp_path):
    """The figures are those of docs/benchmarks.md; here it is only seen that it is a terabyte."""
    write = make_huge.write_dcp if kind == "dcp" else make_huge.write_hf
    write(tmp_path / "in", 1600, 1_000_000_000_000, 20, **({"chunks": 2} if kind == "dcp" else {}))
    files = [*(tmp_path / "in").iterdir()]
    assert sum(file.stat().st_size for file in files) > 990_000_000_000
    assert sum(file.stat().st_blocks for file in files) * 512 < 40_000_000
    with open_certain(tmp_path / "in") as checkpoint:
        plan = plan_conversion(checkpoint, tmp_path / "out", Options(max_shard_size="5GB"))
    assert len(plan.files) > 190 and plan.nbytes > 990_000_000_000


def test_a_file_is_opened_once_for_all_of_its_items(tmp_path, monkeypatch):
    """Each tensor has a chunk in each file, as ranks save them, and few files may be open."""
    make_huge.write_dcp(tmp_path / "in", 200, 1_000_000, 20, chunks=20)
    opened = []
    really = platforms.open_to_read
    monkeypatch.setattr(
        platforms, "open_to_read", lambda path: opened.append(path.name) or really(path)
    )
    with limits(open_files=4), open_certain(tmp_path / "in"):
        pass
    assert max(map(opened.count, opened)) <= 3 and len({*opened}) == 21


def test_what_an_input_is_made_of_is_what_its_writers_make(tmp_path):
    """The header of a shard is that of the library, and so its metadata."""
    make_huge.write_hf(tmp_path / "in", 8, 100_000, shards=1)
    [file] = Path(tmp_path / "in").glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert opened.get_slice("model.layers.0.norm.weight").get_shape() == [make_huge.COLUMNS]
