"""What an output format is: how its files are named and laid out, and what they can hold.

A new one is a class in a module of its own beside this one, an instance of it in
`outputs.TARGETS`, and its name in `Target`. Whatever else depends on the format asks it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from ckptconv.formats.layout import Layout
    from ckptconv.formats.torch_zip import Tree
    from ckptconv.pickles.nodes import Node
    from ckptconv.tensors.compaction import CastRule
    from ckptconv.tensors.dtypes import DType
    from ckptconv.tensors.refs import TensorRef
    from ckptconv.tree.checkpoint import Checkpoint

Target = Literal["torch", "safetensors", "dcp", "npz"]
"""The names of the output formats."""

NamedTensor = tuple[str, "TensorRef", "DType"]
"""A tensor of an output: its key, itself, and the type to write it in."""

Retag = Callable[[str], str]
"""The device tag that a storage gets, by the one that it has."""


class TargetFormat:
    """An output format; what is said here is true of one that holds named tensors and no more.

    `name` is what `--to` calls it, `noun` what messages call an output that holds one state dict.
    Names that end in one of `suffixes` say this format; `claimed` are those that every reader takes
    for it, and so no other format may have; `suffix` is the one to offer. `shards_named` is what
    the shards of a folder are named after (empty: it is never split).

    `is_folder`: a folder, which `make_folder` makes of a torch file. `holds_trees`: it holds
    whole checkpoints, and not only the tensors of one state dict. `keeps_modules`: a whole pickled
    module can stay one in it. `keeps_order`: its tensors come back in the order of the plan.
    `is_counted`: what a written file names is counted without the reader. `holds_tags`: its tensors
    have device tags. `holds_metadata`: it holds a dict of strings. `encodes`: tensors of kinds that
    it lacks are taken apart. `shares_storages`: tensors that share bytes do so in it.
    """

    name: ClassVar[Target]
    noun: ClassVar[str]
    suffix: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    claimed: ClassVar[tuple[str, ...]] = ()
    shards_named: ClassVar[str] = ""
    is_folder: ClassVar[bool] = False
    holds_trees: ClassVar[bool] = False
    keeps_modules: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = False
    is_counted: ClassVar[bool] = False
    holds_tags: ClassVar[bool] = True
    holds_metadata: ClassVar[bool] = False
    encodes: ClassVar[bool] = False
    shares_storages: ClassVar[bool] = False

    # ------------------------------------------------------------------- what it can hold

    def refuse(self, named: Iterable[NamedTensor]) -> None:
        """Raise `RefusedObject` for a tensor that it cannot hold, naming its place."""

    def refuse_part(self, root: Node, *, keeps_objects: bool, only: str | None) -> None:
        """Raise `RefusedObject` where the part at the path `only` cannot be the tree of a file."""

    def part_notes(self, root: Node) -> Iterator[str]:
        """What becomes of a tree that the user should know of."""
        return iter(())

    def tensor_notes(self, named: Sequence[NamedTensor], retag: Retag) -> Iterator[str]:
        """What becomes of the tensors of a state dict that the user should know of."""
        return iter(())

    def aliases(
        self, named: Sequence[tuple[str, TensorRef]], checkpoint: Checkpoint
    ) -> dict[str, str]:
        """Dropped name → kept name, for names of one tensor of which it keeps only one."""
        return {}

    def metadata(
        self, named: Mapping[str, TensorRef], checkpoint: Checkpoint, retag: Retag
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

    def make_folder(self, plain: Path, folder: Path, name: PurePath) -> None:
        """Make an output that `is_folder` of the torch file `plain`; it will be known as `name`."""
        raise NotImplementedError

    def check_written(self, written: Path, name: PurePath, count: int) -> None:
        """Have the format's own library look at a file of `count` tensors that will be `name`.

        Raises `VerificationFailed`.
        """
