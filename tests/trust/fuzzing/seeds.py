"""Small good files of every container that is read, from which the fuzzer starts.

Needs torch. What lies outside of the repository (real checkpoints, hostile files) is added where it
is present.
"""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptconv import convert_checkpoint
from fuzzing.inputs import GOOD, Seed, Trial, of_file
from fuzzing.quantised import good_folders
from helpers import gguf_files, old_torch, oracle, zero
from helpers.hostile_generator import GENERATOR, load_generator
from helpers.paths import DATA
from helpers.program import SAMPLES

LARGEST = 160_000
"""Bytes that a seed may have: most mutations of a larger one only meet its tensors."""


def make_seeds(folder: Path, *, foreign: bool = True) -> list[Seed]:
    """All seeds, made in the empty `folder`, the same ones in the same order each time (for one
    torch).

    `foreign` adds the checkpoints and hostile files that lie outside of the repository.
    """
    torch.manual_seed(0)
    made = [seed for make in (*MAKERS, *(FOREIGN if foreign else ())) for seed in make(folder)]
    return [seed for seed in made if seed.trial.nbytes <= LARGEST]


def of_folder(name: str, folder: Path, named: tuple[str, ...] = (".",)) -> Seed:
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return Seed(name, Trial(files, named))


# -------------------------------------------------------------------------------------------- trees


class Settings:
    """A class that `weights_only=True` refuses."""

    def __init__(self) -> None:
        self.lr, self.name = 0.1, "x"


def state_dict() -> OrderedDict[str, torch.Tensor]:
    """Tensors that share storages, lie apart and have several types."""
    weight = torch.arange(12.0).reshape(3, 4)
    found: OrderedDict[str, torch.Tensor] = OrderedDict({
        "module.fc.weight": weight,
        "module.fc.bias": weight[1],
        "module.t": torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
        "module.half": torch.ones(3, dtype=torch.bfloat16),
        "module.mask": torch.tensor([True, False]),
        "module.empty": torch.ones(0),
        "module.steps": torch.tensor(7),
    })  # fmt: skip
    found._metadata = OrderedDict({"": {"version": 1}, "module": {"version": 1}})  # type: ignore[attr-defined]
    return found


def training() -> dict[str, Any]:
    """A training checkpoint with an optimizer's state and plain values."""
    moments = {
        index: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(3, 4)} for index in range(2)
    }
    optimizer = {
        "state": moments,
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
    }
    return {
        "state_dict": state_dict(),
        "optimizer": optimizer,
        "epoch": 3,
        "name": "é",
        "none": None,
        "best": 0.5,
    }


def odd() -> dict[str, Any]:
    """What safetensors has no form for, and what stands beside tensors."""
    return {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.5, 3, torch.qint8),
        "channels": torch.quantize_per_channel(
            torch.ones(2, 2), torch.tensor([0.5, 1.0]), torch.tensor([0, 1]), 0, torch.qint8
        ),
        "complex": torch.ones(2, dtype=torch.complex128),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "parameter": nn.Parameter(torch.ones(2, 2)),
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "device": torch.device("cuda:1"),
        "bytes": b"\0\xff",
        "set": {1, 2},
    }


def numbers() -> dict[str, Any]:
    return {
        "array": np.arange(6.0, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "scalar": np.float64(0.5),
        "text": np.array(["a", "b"]),
        "tensor": torch.ones(2),
    }


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LSTM(3, 2))


def saved(tree: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(tree, out, **options)
    return out.getvalue()


# --------------------------------------------------------------------------------------- containers


def samples(_: Path) -> Iterator[Seed]:
    for path in sorted(SAMPLES.glob("*.pt")):
        yield of_file(f"sample:{path.stem}", path.read_bytes(), path.name)


def zips(folder: Path) -> Iterator[Seed]:
    trees: dict[str, Any] = {"state": state_dict(), "training": training(), "odd": odd(),
        "numbers": numbers(),
                             "settings": {"w": torch.ones(2), "settings": Settings()},
                             "tensor": torch.ones(3),
                             "list": [torch.ones(2), torch.zeros(1)]}  # fmt: skip
    for name, tree in trees.items():
        yield of_file(f"zip:{name}", saved(tree), "in.pt")
    plain = old_torch.write(folder / "plain.pt", saved(training()))
    deflated = oracle.rezipped(plain, folder / "deflated.pt", compression=zipfile.ZIP_DEFLATED)
    yield of_file("deflated:training", deflated.read_bytes(), "in.pt")
    yield of_file("module:sequential", saved(module()), "in.pt")
    yield of_file("module:beside", saved({"model": module(), "epoch": 1}), "in.pt")


def legacies(_: Path) -> Iterator[Seed]:
    for name, tree in {"training": training(), "odd": odd(), "module": module()}.items():
        yield of_file(f"legacy:{name}", saved(tree, _use_new_zipfile_serialization=False), "in.pt")
    floats = struct.pack("<8f", *range(8))
    viewed = old_torch.storage("FloatStorage", "0", "cuda:1", 8, ("9", 2, 4))
    old = old_torch.Name("torch._utils", "_rebuild_tensor")
    tree = {"w": old_torch.Made(old, (viewed, 0, (2, 2), (2, 1))), old_torch.Bytestring(b"k"): 1}
    yield of_file(
        "legacy:views", old_torch.legacy(tree, ("0",), old_torch.blob(8, floats)), "in.pt"
    )


def tars(_: Path) -> Iterator[Seed]:
    floats, doubles = struct.pack("<8f", *range(8)), struct.pack("<2d", 0.5, -2)
    entries = [
        (11, "cpu", "FloatStorage", floats, 8),
        (12, "cuda:0", "cuda.DoubleStorage", doubles, 2),
    ]
    storages = old_torch.tar_storages(entries, ((13, 11, 2, 4),))
    tensors = old_torch.tar_tensors([(21, 11, "FloatTensor", (2, 4), (4, 1), 0), (22, 13,
        "FloatTensor", (2, 2), (1, 2), 0),
                                     (23, 12, "cuda.DoubleTensor", (2,), (1,), 0)])  # fmt: skip
    tree = {
        "state_dict": {name: old_torch.Persistent(21 + index) for index, name in enumerate("abc")},
        "epoch": 3,
    }
    yield of_file("tar:old", old_torch.tar_checkpoint(storages, tensors, tree), "in.pt")


def pickles(_: Path) -> Iterator[Seed]:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield of_file(
            f"pickle:{protocol}",
            pickle.dumps({"state_dict": state_dict(), "epoch": 3}, protocol),
            "in.pkl",
        )
        yield of_file(
            f"pickle:numpy{protocol}",
            pickle.dumps({"w": np.arange(4.0), "n": np.int64(3)}, protocol),
            "in.pkl",
        )


def nested(_: Path) -> Iterator[Seed]:
    members = {"raw.pkl": pickle.dumps({"w": torch.arange(4.0)}),
        "deep/new.pt": saved({"v": torch.zeros(2)}),
               "old.pth": saved({"u": torch.ones(1)}, _use_new_zipfile_serialization=False),
               "notes.txt": b"epoch 3"}  # fmt: skip
    for name, compression in (("stored", zipfile.ZIP_STORED), ("deflated", zipfile.ZIP_DEFLATED)):
        yield of_file(f"members:{name}", zipped(members, compression), "in.zip")


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return out.getvalue()


class Scripted(nn.Module):
    """A module with a submodule, a buffer, and an attribute that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)
        self.register_buffer("steps", torch.tensor(3))
        self.count = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.count


def scripts(_: Path) -> Iterator[Seed]:
    out = io.BytesIO()
    torch.jit.save(torch.jit.script(Scripted()), out)
    yield of_file("torchscript:new", out.getvalue(), "in.pt")
    tensors = [
        {"dims": ["2", "3"], "offset": "0", "strides": ["3", "1"], "requiresGrad": True,
            "dataType": "FLOAT",
         "data": {"key": "tensors/0"}, "device": "cpu"},
        {"offset": "0", "dataType": "INT64", "data": {"key": "tensors/1"}, "device": "cuda:0"},
    ]  # fmt: skip
    main = {
        "name": "Net",
        "submodules": [
            {"name": "fc", "parameters": [{"isBuffer": False, "tensorId": "0", "name": "weight"}]}
        ],
        "parameters": [{"isBuffer": True, "tensorId": "1", "name": "steps"}],
        "attributes": [{"type": "Tensor", "name": "mean", "id": "0"}],
    }
    document = {
        "protoVersion": "5",
        "mainModule": main,
        "producerName": "pytorch",
        "tensors": tensors,
    }
    yield of_file("torchscript:old", zipped({
        "old/version": b"1\n",
        "old/attributes.pkl": b"\x80\x02(ctorch.jit._pickle\nbuild_tensor_from_id\n(K\1tRK\7t.",
        "old/tensors/0": np.arange(6.0, dtype=np.float32).tobytes(),
        "old/tensors/1": np.int64(7).tobytes(),
        "old/model.json": json.dumps(document).encode(),
    }), "in.pt")  # fmt: skip


def flat_files(folder: Path) -> Iterator[Seed]:
    """Safetensors files, and sets of shards with their index, as ckptconv and the library write
    them.
    """
    from safetensors.torch import save

    yield of_file(
        "safetensors:library",
        save({"a": torch.ones(2, 3), "b": torch.zeros(0)}, {"format": "pt"}),
        "in.safetensors",
    )
    for name, tree in {"state": state_dict(), "odd": odd(), "numbers": numbers()}.items():
        source = old_torch.write(folder / f"{name}.pt", saved(tree))
        convert_checkpoint(source, folder / f"{name}.safetensors", fsync=False, force=True)
        yield of_file(
            f"safetensors:{name}", (folder / f"{name}.safetensors").read_bytes(), "in.safetensors"
        )
    for name, output in {
        "shards:safetensors": "model.safetensors",
        "shards:torch": "pytorch_model.bin",
    }.items():
        shards = folder / name.replace(":", "_")
        shards.mkdir()
        convert_checkpoint(folder / "state.pt", shards / output, max_shard_size=40, fsync=False)
        yield of_folder(name, shards)


def ggufs(_: Path) -> Iterator[Seed]:
    """GGUF files of plain types, a set of them, and quantised tensors."""
    blocks = gguf_files.tensor(sizes=(64, 2), kind=gguf_files.Q4_0)
    yield of_file("gguf:blocks", gguf_files.gguf(blocks, data=bytes(range(72))), "in.gguf")
    for path in (DATA / "gguf" / "little.gguf", DATA / "gguf" / "big.gguf"):
        yield of_file(f"gguf:{path.stem}", path.read_bytes(), "in.gguf")
    names = sorted((DATA / "gguf").glob("set-*.gguf"))
    yield Seed("gguf:set", Trial({path.name: path.read_bytes() for path in names}))


def quantised(_: Path) -> Iterator[Seed]:
    """Quantised weights with their config, in a file and in shards that part codes from scales."""
    from safetensors.torch import save

    for name, tensors, told in good_folders():
        config = json.dumps({"torch_dtype": "bfloat16", "quantization_config": told}).encode()
        files = {"model.safetensors": save(tensors), "config.json": config}
        yield Seed(f"quantised:{name}", Trial(files, kind="quantised"))
        names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        weight_map = {key: names[at % 2] for at, key in enumerate(sorted(tensors))}
        shards = {
            shard: save({key: tensors[key] for key, where in weight_map.items() if where == shard})
            for shard in names
        }
        index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
        shards |= {"config.json": config, "model.safetensors.index.json": index}
        yield Seed(f"quantised:{name}_shards", Trial(shards, kind="quantised"))


def distributed(folder: Path) -> Iterator[Seed]:
    """DCP folders, and the files of two ranks, written by one process that plays each of them in
    turn.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tree = {"model": dict(state_dict()), "step": 7, "list": [torch.ones(2), {"x": 1}]}
    dcp.save(tree, checkpoint_id=folder / "dcp", no_dist=True)
    yield of_folder("dcp:whole", folder / "dcp")
    ranks: dict[str, bytes] = {}
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        mesh = init_device_mesh("cpu", (2,))
        weight = torch.arange(20.0).reshape(5, 4)
        placements = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
        shards = {
            key: distribute_tensor(weight, mesh, [where], src_data_rank=None)
            for key, where in placements.items()
        }
        ranks[f"rank{rank}.pt"] = saved({**shards, "plain": torch.ones(2), "step": 3})
        _save_part(dcp, folder / "dcp_rank", shards, rank)
        dist.destroy_process_group()
    yield Seed("ranks:dtensor", Trial(ranks, tuple(ranks)))
    yield of_folder("dcp:ranks", folder / "dcp_rank")


def _save_part(dcp: Any, folder: Path, shards: dict[str, Any], rank: int) -> None:
    """What one rank leaves of a DCP folder that is written without talk between the ranks."""
    try:
        dcp.save(shards, checkpoint_id=folder, use_collectives=False)
    except TypeError:  # a torch without `use_collectives`
        dcp.save(shards, checkpoint_id=folder, no_dist=True)


def deepspeed(folder: Path) -> Iterator[Seed]:
    groups = [
        {"fc.weight": torch.arange(12.0).reshape(3, 4), "fc.bias": torch.ones(3)},
        {"norm": torch.ones(5)},
    ]
    for stage in (1, 2, 3):
        made = zero.write(
            folder / f"zero{stage}",
            stage,
            2,
            groups,
            buffers={"steps": torch.tensor(3)},
            kept={"exp_avg": torch.neg, "exp_avg_sq": torch.square},
        )
        yield of_folder(f"deepspeed:made{stage}", made)
    for name in ("deepspeed", "deepspeed_parallel"):
        for path in sorted((DATA / name).iterdir()):
            yield of_folder(f"{name}:{path.name}", path)


def accelerate(_: Path) -> Iterator[Seed]:
    from safetensors.torch import save

    yield Seed("accelerate:state", Trial({
        "model.safetensors": save({"a": torch.ones(2, 3)}),
        "optimizer.bin": saved(training()["optimizer"]),
        "random_states_0.pkl": saved({"step": 1, "torch_manual_seed": torch.ones(4,
            dtype=torch.uint8)}),
    }))  # fmt: skip


RULES = [{"strip-prefix": "model."}, {"rename": {"head.": "classifier."}},
    {"regex": {r"blocks\.(\d+)": r"layers.\1"}},
         {"add-prefix": "net."}, {"exclude": ["*.bias", "*.mean"]}, {"include": "*"},
         {"preset": "ddp"}]  # fmt: skip
YAML = r"""# rules
rules:
  - strip-prefix: model.
  - rename: {head.: "classifier.", 'old.': new.}
  - regex:
      'blocks\.(\d+)': layers.\1
  - exclude: ["*.bias", "*.mean"]
  - include: '*'
"""
TOML = r"""[[rules]]
strip-prefix = "model."
[[rules]]
rename = {"head." = "classifier."}
[[rules]]
regex = {'blocks\.(\d+)' = 'layers.\1'}
[[rules]]
exclude = ["*.bias", '*.mean']
"""


def renamed_keys() -> dict[str, torch.Tensor]:
    """A state dict that every rule of `RULES` has something to do with."""
    keys = (
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.1.weight",
        "head.weight",
        "old.weight",
        "norm.mean",
    )
    return {f"module.model.{key}": torch.full((2, index), 1.0) for index, key in enumerate(keys)}


def rules(folder: Path) -> Iterator[Seed]:
    good = saved(renamed_keys())
    source = old_torch.write(folder / "rules.pt", good)
    convert_checkpoint(source, folder / "out.pt", save_mapping=folder / "map.json", fsync=False)
    texts = {
        "json": json.dumps({"rules": RULES}),
        "list": json.dumps(RULES, indent=1),
        "mapping": (folder / "map.json").read_text(),
        "yaml": YAML,
        "toml": TOML,
    }
    if importlib.util.find_spec("yaml") is None:
        del texts["yaml"]
    for name, text in texts.items():
        file = f"rules.{name if name in ('yaml', 'toml') else 'json'}"
        yield Seed(f"rules:{name}", Trial({file: text.encode(), GOOD: good}, (file,), "rules"))


def likes(_: Path) -> Iterator[Seed]:
    good = renamed_keys()
    wanted = {key.replace("module.model.", "net."): value for key, value in good.items()}
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(wanted, "model-00001-of-00001.safetensors"),
    }
    files = {"keys.txt": "\n".join(wanted).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
             "other.pt": saved(wanted)}  # fmt: skip
    for file, content in files.items():
        yield Seed(f"like:{file}", Trial({file: content, GOOD: saved(good)}, (file,), "like"))


MAKERS: tuple[Callable[[Path], Iterator[Seed]], ...] = (
    samples, zips, legacies, tars, pickles, nested, scripts, flat_files, ggufs, quantised,
    distributed, deepspeed, accelerate, rules, likes,
)  # fmt: skip


# ------------------------------------------------------------------------ outside of the repository


def corpus(_: Path) -> Iterator[Seed]:
    """Real checkpoints of other people, and what frameworks wrote."""
    files = oracle.corpus_folder() / "files"
    for path in sorted(files.iterdir()) if files.is_dir() else ():
        yield (
            of_folder(f"corpus:{path.name}", path)
            if path.is_dir()
            else of_file(f"corpus:{path.name}", path.read_bytes(), path.name)
        )
    produced = oracle.corpus_folder().parent / "produced"
    for path in sorted(produced.iterdir()) if produced.is_dir() else ():
        if path.is_dir():
            yield of_folder(f"produced:{path.name}", path)
        elif path.suffix in (".pt", ".ckpt"):
            yield of_file(f"produced:{path.name}", path.read_bytes(), path.name)


def hostile(_: Path) -> Iterator[Seed]:
    """The hostile files that the generator writes."""
    if not GENERATOR.is_file():
        return
    for file, category, _what, _expected, build in load_generator().CASES:
        yield of_file(f"hostile:{category}/{file}", build(), file)


FOREIGN: tuple[Callable[[Path], Iterator[Seed]], ...] = (corpus, hostile)
