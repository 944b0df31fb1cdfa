"""The torch zip file as an output format: whole checkpoints, or the tensors of one state dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptconv.formats.layout import Layout
from ckptconv.formats.target_format import NamedTensor, Retag, TargetFormat
from ckptconv.formats.torch_zip import Tree, lay_out_torch_zip
from ckptconv.pickles.nodes import ORDERED_DICT, Call
from ckptconv.tensors.compaction import CastRule
from ckptconv.tensors.refs import refuse_packed

_NOT_IN_TORCH = "write safetensors (--to safetensors), or leave it out (--exclude)"
"""What can be done about a tensor that safetensors holds and torch does not."""


class TorchFile(TargetFormat):
    """What `torch.save` writes since torch 1.6."""

    name = "torch"
    noun = "a sharded torch output"
    suffix = ".pt"
    suffixes = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".th", ".pkl", ".model")
    claimed = (".pt", ".pth", ".bin", ".ckpt")
    shards_named = "pytorch_model.bin"
    holds_trees = True
    keeps_modules = True
    keeps_order = True
    is_counted = True
    shares_storages = True

    def refuse(self, named: Iterable[NamedTensor]) -> None:
        refuse_packed(((key, ref) for key, ref, _ in named), _NOT_IN_TORCH)

    def lay_out(
        self, tensors: Sequence[NamedTensor], metadata: Mapping[str, str], retag: Retag
    ) -> Layout:
        root = Call(ORDERED_DICT, ())
        root.pairs = [(key, ref) for key, ref, _ in tensors]
        refs = {id(ref): (ref, dtype) for _, ref, dtype in tensors}
        tree = Tree(root, {}, [ref for ref, _ in refs.values()], [])
        return lay_out_torch_zip(tree, lambda ref: refs[id(ref)][1], retag)

    def lay_out_tree(self, tree: Tree, cast: CastRule, retag: Retag) -> Layout:
        return lay_out_torch_zip(tree, cast, retag)


TORCH = TorchFile()
