"""Conversions that are interrupted by the tests of crash safety: what is there before, and what a
reader may find after.

Readers are torch, safetensors and json: a checkpoint that is there must be all of the old tensors
or all of the new ones.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ckptconv import convert_checkpoint
from helpers.deltas import INDEX as DELTA_INDEX
from helpers.deltas import apply_frame, header_of, write_delta

Tensors = Mapping[str, torch.Tensor]
NEW: Tensors = {f"layer{index}.weight": torch.arange(200.0) + 1000 * index for index in range(3)}
OLD: Tensors = {key: -tensor for key, tensor in NEW.items()}
SHARDED = ("--max-shard-size", "900B")  # one tensor in each shard


@dataclass(frozen=True)
class Scene:
    """A conversion: `prepare` makes the room in which it runs, `arguments` are the command's,
    `found` reads the output.

    `written` reads what is put in place where other readers may still find the old output, whole;
    `again` are the words that are added when the conversion is made once more.
    """

    prepare: Callable[[Path], None]
    arguments: Callable[[Path], tuple[object, ...]]
    found: Callable[[Path], Tensors | None]
    written: Callable[[Path], Tensors | None] | None = None
    again: tuple[str, ...] = ("--force",)

    def state(self, room: Path) -> str:
        """What a reader of the output finds: ``old``, ``new`` or ``absent``; anything else is an
        error of the reader.
        """
        tensors = self.found(room)
        if tensors is None:
            return "absent"
        states = [
            name for name, expected in (("old", OLD), ("new", NEW)) if same(tensors, expected)
        ]
        assert len(states) == 1, (
            f"neither old nor new: { {key: value[:2].tolist() for key, value in tensors.items()} }"
        )
        return states[0]


def same(found: Tensors, expected: Tensors) -> bool:
    """Whether two state dicts hold the same keys and values."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )


def contents(room: Path) -> dict[str, str]:
    """The files in a folder and their hashes."""
    files = sorted(path for path in room.rglob("*") if path.is_file())
    return {
        str(path.relative_to(room)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def hidden(room: Path) -> list[str]:
    """The folders of ckptconv's own that are left in a folder."""
    return sorted(str(path.relative_to(room)) for path in room.rglob(".*ckptconv-*"))


# ------------------------------------------------------------------------------------------ readers


def file_at(name: str) -> Callable[[Path], Tensors | None]:
    """A reader of one file."""

    def read(room: Path) -> Tensors | None:
        path = room / name
        if not path.exists():
            return None
        return (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, weights_only=True)
        )

    return read


def set_at(index: str) -> Callable[[Path], Tensors | None]:
    """A reader of shards, which believes their index."""

    def read(room: Path) -> Tensors | None:
        path = room / index
        if not path.exists():
            return None
        where = json.loads(path.read_text())["weight_map"]
        load = load_file if ".safetensors" in path.name else torch.load
        shards = {name: load(path.parent / name) for name in set(where.values())}
        assert sorted(key for shard in shards.values() for key in shard) == sorted(where), (
            "shards and index differ"
        )
        return {key: shards[name][key] for key, name in where.items()}

    return read


def set_or_file(folder: str) -> Callable[[Path], Tensors | None]:
    """A reader of a folder of weights that prefers the index."""
    read_set, read_file = (
        set_at(f"{folder}/model.safetensors.index.json"),
        file_at(f"{folder}/model.safetensors"),
    )
    return lambda room: tensors if (tensors := read_set(room)) is not None else read_file(room)


def dcp_at(name: str) -> Callable[[Path], Tensors | None]:
    """A reader of a DCP folder: torch's own."""

    def read(room: Path) -> Tensors | None:
        import torch.distributed.checkpoint as dcp

        if not (room / name).exists():
            return None
        found = {key: torch.empty_like(tensor) for key, tensor in NEW.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(found, checkpoint_id=room / name, no_dist=True)
        return found

    return read


def universal_at(name: str) -> Callable[[Path], Tensors | None]:
    """A reader of a universal checkpoint, by the step that it names: of each parameter the weight
    and its moment, which is twice that, and the weights beside.
    """

    def read(room: Path) -> Tensors | None:
        if not (room / name).exists():
            return None
        step = room / name / (room / name / "latest_universal").read_text()
        found = {}
        for key in NEW:
            weight, moment = (
                torch.load(step / "zero" / key / file)["param"]
                for file in ("fp32.pt", "exp_avg.pt")
            )
            assert torch.equal(moment, 2 * weight), "a mixture"
            found[key] = weight
        assert same(torch.load(step / "mp_rank_00_model_states.pt")["module"], found), "a mixture"
        return found

    return read


# ------------------------------------------------------------------------------------------- before


def source(room: Path) -> None:
    torch.save(dict(NEW), room / "in.pt")


def with_file(name: str) -> Callable[[Path], None]:
    """The source, and a file of the old tensors."""

    def prepare(room: Path) -> None:
        source(room)
        save_file(dict(OLD), room / name) if name.endswith(".safetensors") else torch.save(
            dict(OLD), room / name
        )

    return prepare


def with_set(groups: list[list[str]], folder: str = "out") -> Callable[[Path], None]:
    """The source, and a set of shards with the old tensors, of which `groups` tells the keys."""

    def prepare(room: Path) -> None:
        source(room)
        (room / folder).mkdir()
        names = [
            f"model-{number:05}-of-{len(groups):05}.safetensors"
            for number in range(1, len(groups) + 1)
        ]
        for name, keys in zip(names, groups, strict=True):
            save_file({key: OLD[key] for key in keys}, room / folder / name, {"format": "pt"})
        where = {key: name for name, keys in zip(names, groups, strict=True) for key in keys}
        index = {"metadata": {"total_size": 2400}, "weight_map": where}
        (room / folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (room / folder / "config.json").write_text("{}")

    return prepare


def with_dcp(room: Path) -> None:
    """The source, and a DCP folder of the old tensors, which torch wrote."""
    import torch.distributed.checkpoint as dcp

    source(room)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(OLD), checkpoint_id=room / "out", no_dist=True)


def training(room: Path, tensors: Tensors = NEW) -> None:
    """A source with an optimizer, whose moments are twice the weights."""
    state = {key: {"exp_avg": 2 * value} for key, value in tensors.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}
    torch.save({"model": dict(tensors), "optimizer": optimizer}, room / "in.pt")


def with_universal(room: Path) -> None:
    """A source with an optimizer, and a universal checkpoint of the old tensors."""
    training(room, OLD)
    convert_checkpoint(room / "in.pt", room / "out", to="universal", fsync=False)
    training(room)


def with_folder(room: Path) -> None:
    """The source, and a folder that holds something else."""
    source(room)
    (room / "out").mkdir()
    (room / "out" / "config.json").write_text("{}")


EACH, PAIR = [[key] for key in OLD], [list(OLD)[:2], list(OLD)[2:]]


def convert(
    *words: str, source: str = "in.pt", output: str
) -> Callable[[Path], tuple[object, ...]]:
    return lambda room: ("convert", room / source, room / output, "-q", *words)


def with_model(room: Path) -> None:
    """A source with files beside it, and a folder that has one of them."""
    (room / "hf").mkdir()
    source(room / "hf")
    (room / "hf" / "in.pt").rename(room / "hf" / "pytorch_model.bin")
    for name in ("config.json", "tokenizer.json"):
        (room / "hf" / name).write_text(f"new {name}")
    (room / "out").mkdir()
    (room / "out" / "config.json").write_text("old config.json")


def with_files_at(index: str) -> Callable[[Path], Tensors | None]:
    """A reader of shards, which wants the files beside them whole."""
    read = set_at(index)

    def found(room: Path) -> Tensors | None:
        folder, tensors = (room / index).parent, read(room)
        texts = {path.name: path.read_text() for path in folder.glob("[ct]*.json")}
        allowed = {f"{word} {name}" for word in ("old", "new") for name in texts}
        assert set(texts.values()) <= allowed, texts
        assert tensors is None or "tokenizer.json" in texts
        return tensors

    return found


def in_place(name: str) -> Callable[[Path], None]:
    """One file of the old tensors, under keys that the conversion turns to the new names."""

    def prepare(room: Path) -> None:
        torch.save({f"module.{key}": tensor for key, tensor in NEW.items()}, room / name)

    return prepare


def stripped(name: str) -> Callable[[Path], Tensors | None]:
    """A reader of what `in_place` made: wrapped keys are the old file's."""
    read = file_at(name)

    def found(room: Path) -> Tensors | None:
        tensors = read(room)
        if tensors is None or "module.layer0.weight" not in tensors:
            return tensors
        return {key.removeprefix("module."): -value for key, value in tensors.items()}

    return found


def set_in_place(room: Path) -> None:
    """A set of shards whose tensors the conversion casts."""
    with_set(EACH)(room)
    for path in (room / "out").glob("*.safetensors"):
        save_file(
            {key: NEW[key].to(torch.float64) for key in load_file(path)}, path, {"format": "pt"}
        )
    (room / "in.pt").unlink()


def cast(room: Path) -> Tensors | None:
    """A reader of what `set_in_place` made: tensors of 64 bits are the old ones."""
    tensors = set_at("out/model.safetensors.index.json")(room)
    kinds = {value.dtype for value in tensors.values()} if tensors else {torch.float32}
    assert len(kinds) == 1, "a mixture"
    return (
        {key: -value.float() for key, value in tensors.items()}
        if tensors and kinds == {torch.float64}
        else tensors
    )


def numbers(count: int) -> Callable[[Path], None]:
    """A source of five tensors of so many floats, each of one number."""
    return lambda room: torch.save(
        {f"w{index}": torch.full((count,), float(index)) for index in range(5)}, room / "in.pt"
    )


def numbers_at(name: str) -> Callable[[Path], Tensors | None]:
    """A reader of what `numbers` becomes, in a file or in shards that an index names: the new
    tensors if it is whole.
    """

    def read(room: Path) -> Tensors | None:
        found = (set_at if name.endswith(".json") else file_at)(name)(room)
        whole = found is None or [set(tensor.unique().tolist()) for tensor in found.values()] == [
            {float(n)} for n in range(5)
        ]
        return NEW if found is not None and whole else found

    return read


def wrapped_file(room: Path) -> None:
    """A safetensors file of the old tensors, under keys that an edit turns to the new names."""
    save_file({f"module.{key}": tensor for key, tensor in NEW.items()}, room / "m.safetensors")


def edit(*words: str) -> Callable[[Path], tuple[object, ...]]:
    return lambda room: ("edit", room / "m.safetensors", "-q", "--keys", "strip", *words)


def raw(tensors: Tensors) -> dict[str, bytes]:
    """The bytes of each tensor."""
    return {key: value.numpy().tobytes() for key, value in tensors.items()}


BASE: Tensors = {key: value + 1 for key, value in NEW.items()}


def with_delta(room: Path) -> None:
    """A base, what makes the new tensors of it, and a file of the old ones."""
    torch.save(dict(BASE), room / "base.pt")
    write_delta(room / "weight_v000001", raw(BASE), raw(NEW))
    save_file(dict(OLD), room / "out.safetensors")


def with_versions(*there: str) -> Callable[[Path], None]:
    """A base and the new tensors; where it is to be there, a delta that makes the old ones."""

    def prepare(room: Path) -> None:
        source(room)
        torch.save(dict(BASE), room / "base.pt")
        for name in there:
            write_delta(room / name, raw(BASE), raw(OLD))

    return prepare


def changes_at(name: str) -> Callable[[Path], Tensors | None]:
    """A reader of a delta, which believes its index, and makes of the base what it says."""

    def read(room: Path) -> Tensors | None:
        index = room / name / DELTA_INDEX
        if not index.exists():
            return None
        told = json.loads(index.read_text())
        found = raw(BASE)
        for key, file in told["weight_map"].items():
            header, data = header_of(index.parent / file)
            begin, end = header[key]["data_offsets"]
            wanted = header["__metadata__"][key]
            found[key] = apply_frame(found[key], data[begin:end], told["metadata"], wanted)
        return {
            key: torch.frombuffer(bytearray(value), dtype=torch.float32)
            for key, value in found.items()
        }

    return read


def delta(*words: str) -> Callable[[Path], tuple[object, ...]]:
    return lambda room: ("delta", room / "base.pt", room / "in.pt", room / "out", "-q", *words)


INDEX = "out/model.safetensors.index.json"
SCENES: dict[str, Scene] = {
    "torch": Scene(source, convert(output="out.pt"), file_at("out.pt")),
    "safetensors": Scene(source, convert(output="out.safetensors"), file_at("out.safetensors")),
    "force": Scene(with_file("out.pt"), convert("--force", output="out.pt"), file_at("out.pt")),
    "in place": Scene(
        in_place("m.pt"), convert("--force", source="m.pt", output="m.pt"), stripped("m.pt")
    ),
    "edit": Scene(wrapped_file, edit(), stripped("m.safetensors"), again=()),
    "edit that does not fit": Scene(
        wrapped_file,
        edit("--metadata", f"note={'x' * 3000}"),
        stripped("m.safetensors"),
        again=(),
    ),
    "edit with a mapping": Scene(
        wrapped_file,
        lambda room: (*edit()(room), "--save-mapping", room / "map.json"),
        stripped("m.safetensors"),
        again=(),
    ),
    "large": Scene(
        numbers(900_000), convert(output="out.safetensors"), numbers_at("out.safetensors")
    ),
    "mapping": Scene(
        source,
        lambda room: (*convert(output="out.pt")(room), "--save-mapping", room / "map.json"),
        file_at("out.pt"),
    ),
    "new shards": Scene(source, convert(*SHARDED, output="out"), set_at(INDEX)),
    "shards in a folder": Scene(with_folder, convert(*SHARDED, output="out"), set_at(INDEX)),
    "torch shards": Scene(
        with_folder,
        convert(*SHARDED, "--to", "torch", output="out"),
        set_at("out/pytorch_model.bin.index.json"),
    ),
    "shards of the same names": Scene(
        with_set(EACH), convert(*SHARDED, "--force", output="out"), set_at(INDEX)
    ),
    "shards of other names": Scene(
        with_set(PAIR), convert(*SHARDED, "--force", output="out"), set_at(INDEX)
    ),
    "shards in place": Scene(
        set_in_place,
        convert(
            "--max-shard-size", "900B", "--dtype", "f32", "--force", source="out", output="out"
        ),
        cast,
    ),
    "one file for shards": Scene(
        with_set(PAIR),
        convert("--max-shard-size", "1GB", "--force", output="out"),
        set_or_file("out"),
        file_at("out/model.safetensors"),
    ),
    "files in a new folder": Scene(
        with_model,
        convert(*SHARDED, "--with-files", source="hf", output="model"),
        with_files_at("model/model.safetensors.index.json"),
    ),
    "files in a folder": Scene(
        with_model,
        convert(*SHARDED, "--with-files", "--force", source="hf", output="out"),
        with_files_at(INDEX),
    ),
    "dcp": Scene(source, convert("--to", "dcp", output="out"), dcp_at("out")),
    "dcp again": Scene(with_dcp, convert("--to", "dcp", "--force", output="out"), dcp_at("out")),
    "universal": Scene(training, convert("--to", "universal", output="out"), universal_at("out")),
    "universal again": Scene(
        with_universal,
        convert("--to", "universal", "--force", output="out"),
        universal_at("out"),
    ),
    "apply": Scene(
        with_delta,
        lambda room: (
            *("apply", room / "base.pt", room / "weight_v000001", room / "out.safetensors"),
            *("-q", "--force"),
        ),
        file_at("out.safetensors"),
        again=(),
    ),
    "delta": Scene(with_versions(), delta(), changes_at("out")),
    "delta again": Scene(with_versions("out"), delta("--force"), changes_at("out"), again=()),
}
