"""What an output format is: how its files are named and laid out, and what they can hold; and the
table of all of them.

A new one is a class in a module of its own beside this one, an instance of it, a row in `TARGETS`
and its name in `Target`. Whatever else depends on the format asks it here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, ClassVar, Literal

from ckptconv.formats.containers import named as defined
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.tensors.dtypes import UINT8, DType

if TYPE_CHECKING:
    from ckptconv.pickles.nodes import Node
    from ckptconv.tensors.compaction import CastRule
    from ckptconv.tensors.refs import Storage, TensorRef
    from ckptconv.tree.checkpoint import Checkpoint
    from ckptconv.tree.walk import Overlay

Target = Literal["torch", "safetensors", "dcp", "universal", "npz"]
"""The names of the output formats."""

NamedTensor = tuple[str, "TensorRef", "DType"]
"""A tensor of an output: its key, itself, and the type to write it in."""

Retag = Callable[[str], str]
"""The device tag that a storage gets, by the one that it has."""


class WriteItem(NamedTuple):
    """One payload: after the bytes `lead`, at byte `offset` of the output, `nbytes` bytes of
    `values`. `values` are ready bytes, or a tensor whose values in C order are cast to `dtype`.
    """

    name: str
    lead: bytes
    offset: int
    nbytes: int
    values: TensorRef | bytes
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A whole output file of `nbytes` bytes: `items`, what follows each of them, and what ends the
    file.

    `trail(i, crc)` gives the bytes behind item i, whose payload had the CRC-32 `crc`;
    `ending(crcs)` those behind all. Without `has_crcs` neither says any, and they may be 0.
    """

    items: Sequence[WriteItem]
    nbytes: int
    trail: Callable[[int, int], bytes] = lambda _index, _crc: b""
    ending: Callable[[Sequence[int]], bytes] = lambda _crcs: b""
    has_crcs: bool = True


def one_item(name: str, raw: bytes) -> Layout:
    """A file of ready bytes."""
    return Layout((WriteItem(name, b"", 0, len(raw), raw, UINT8),), len(raw))


def ready_bytes(layout: Layout) -> bytes | None:
    """All of a file of ready bytes; None for any other."""
    if len(layout.items) != 1 or layout.items[0].nbytes != layout.nbytes:
        return None
    values = layout.items[0].values
    return values if isinstance(values, bytes) else None


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A tree to write: `root` seen through `overlay`, all tensors and bare storages in it."""

    root: Node
    overlay: Overlay
    tensors: Sequence[TensorRef]
    storages: Sequence[Storage]


class TargetFormat:
    """An output format; what is said here is true of one that holds named tensors and no more.

    `name` is what `--to` calls it, `noun` what messages call an output that holds one state dict.
    `suffix` is the end of names to offer. `shards_named` is what the shards of a folder are named
    after (empty: it is never split).

    `is_folder`: a folder of the files that `lay_out_files` gives; or, where it `is_made_by_torch`,
    one that `make_folder` makes of a torch file. `holds_trees`: it holds
    whole checkpoints, and not only the tensors of one state dict. `keeps_modules`: a whole pickled
    module can stay one in it. `keeps_order`: its tensors come back in the order of the plan.
    `is_counted`: what a written file names is counted without the reader. `holds_tags`: its tensors
    have device tags. `holds_metadata`: it holds a dict of strings. `encodes`: tensors of kinds that
    it lacks are taken apart. `shares_storages`: tensors that share bytes do so in it.
    `names_parameters`: optimizer states go by the names of parameters in it.
    """

    name: ClassVar[Target]
    noun: ClassVar[str]
    suffix: ClassVar[str]
    shards_named: ClassVar[str] = ""
    is_folder: ClassVar[bool] = False
    is_made_by_torch: ClassVar[bool] = False
    holds_trees: ClassVar[bool] = False
    keeps_modules: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = False
    is_counted: ClassVar[bool] = False
    holds_tags: ClassVar[bool] = True
    holds_metadata: ClassVar[bool] = False
    encodes: ClassVar[bool] = False
    shares_storages: ClassVar[bool] = False
    names_parameters: ClassVar[bool] = False

    # ------------------------------------------------------------------- what it can hold

    def refuse(self, named: Iterable[NamedTensor]) -> None:
        """Raise `RefusedObject` for a tensor that it cannot hold, naming its place."""

    def refuse_part(self, root: Node, *, keeps_objects: bool, only: str | None) -> None:
        """Raise `RefusedObject` where the part at the path `only` cannot be the tree of a file."""

    def part_notes(self, tree: Tree) -> Iterator[str]:
        """What becomes of a tree that the user should know of."""
        return iter(())

    def tensor_notes(self, named: Sequence[NamedTensor], retag: Retag) -> Iterator[str]:
        """What becomes of the tensors of a state dict that the user should know of."""
        return iter(())

    def aliases(
        self,
        named: Sequence[NamedTensor],
        metadata: Mapping[str, str],
        stays: str = "",
        *,
        are_shared: bool,
    ) -> dict[str, str]:
        """Dropped name → kept name, for names of one tensor of which it keeps only one: the one
        that the pattern `stays` matches, where there is one. `metadata` are the other strings.
        `are_shared`: some of the tensors may have bytes together.
        """
        return {}

    def metadata(
        self,
        keys: Sequence[str],
        refs: Sequence[TensorRef],
        checkpoint: Checkpoint,
        retag: Retag,
    ) -> dict[str, str]:
        """The strings beside the tensors, but for those of aliases and of encoded tensors."""
        return {}

    # ------------------------------------------------------------------- its bytes

    def lay_out(
        self, tensors: Sequence[NamedTensor], metadata: Mapping[str, str], retag: Retag
    ) -> Layout:
        """A file of named tensors."""
        raise NotImplementedError

    def lay_out_tree(self, tree: Tree, cast: CastRule, retag: Retag) -> Layout:
        """A file that holds a tree, where it `holds_trees`."""
        raise NotImplementedError

    def lay_out_files(
        self, tree: Tree, cast: CastRule, retag: Retag
    ) -> Iterator[tuple[str, Tree | None, Layout]]:
        """The files of an output that `is_folder`, by their paths: what each holds, its bytes."""
        raise NotImplementedError

    def make_folder(self, plain: Path, folder: Path, name: PurePath) -> None:
        """Make an output that `is_made_by_torch` of the torch file `plain`, to be called `name`."""
        raise NotImplementedError

    def load_checker(self, nbytes: int) -> None:
        """Import what `check_written` needs for so many bytes: to fail before a file is begun."""

    def check_written(self, written: Path, name: PurePath, count: int) -> None:
        """Have the format's own library look at a file of `count` tensors, which will be `name`."""


# -------------------------------------------------------------------------------------- the table


class Output(NamedTuple):
    """An output format by the names of its files: those that end in one of `suffixes` say it, and
    of these `claimed` are those that every reader takes for it, so that no other format may have
    them. `defined_in` is the instance of it, as ``module.NAME``; it is imported when asked for.
    """

    name: Target
    defined_in: str
    suffixes: tuple[str, ...] = ()
    claimed: tuple[str, ...] = ()


TARGETS: tuple[Output, ...] = (
    Output(
        "torch",
        "torch_output.TORCH",
        (".pt", ".pth", ".bin", ".ckpt", ".tar", ".th", ".pkl", ".model"),
        (".pt", ".pth", ".bin", ".ckpt"),
    ),
    Output("safetensors", "safetensors.SAFETENSORS", (".safetensors",), (".safetensors",)),
    Output("dcp", "dcp_output.DCP"),
    Output("universal", "universal.UNIVERSAL"),
    Output("npz", "npz.NPZ", (".npz",), (".npz",)),
)
"""All output formats, in the order in which they are listed."""

FOR_FOLDERS: Target = "safetensors"
"""What a folder of shards is written in where nobody says."""


@functools.cache
def target_named(name: str) -> TargetFormat:
    """The output format that users call so."""
    found: TargetFormat = defined(_DEFINED_IN[name])
    return found


_DEFINED_IN: dict[str, str] = {row.name: row.defined_in for row in TARGETS}


def target_of_suffix(suffix: str) -> TargetFormat | None:
    """The output format of files whose names end so; None where that does not tell."""
    return next((target_named(row.name) for row in TARGETS if suffix.lower() in row.suffixes), None)


# What else a name may say that a file is; nothing of it is written
_OTHERS = {
    "GGUF": ".gguf .ggml", "ONNX": ".onnx", "HDF5": ".h5 .hdf5 .keras", "a numpy array": ".npy",
    "TensorFlow": ".pb .tflite .index", "Flax": ".msgpack", "Paddle": ".pdparams .pdopt",
    "Core ML": ".mlmodel", "OpenVINO": ".xml", "TensorRT": ".engine .plan", "JAX": ".orbax",
    "a table": ".parquet .arrow .feather",
    "a compressed file": ".gz .bz2 .xz .zst .lz4 .7z .rar .tgz .nemo",
    "a text": ".json .jsonl .yaml .yml .toml .txt .md .csv .html .py .log",
}  # fmt: skip


def claimant(suffix: str) -> str | None:
    """What every reader takes files whose names end so for, an output format or another."""
    low = suffix.lower()
    claiming = [row.name for row in TARGETS if low in row.claimed]
    others = [name for name, ends in _OTHERS.items() if low in ends.split()]
    return next(iter([*claiming, *others]), None)
