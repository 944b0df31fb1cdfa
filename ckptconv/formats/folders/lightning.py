"""The tree of a sharded checkpoint of Lightning: that of its DCP folder, and ``meta.pt``, which
holds all that is not a tensor.

Fabric keeps the user's own names in both. The Trainer's strategies have the model under ``model``
(FSDP) or ``state_dict``, and optimizers under ``optimizer_0``, ``optimizer_1``, …; Lightning's own
consolidation gives them the names that its single files have. Source:
lightning/fabric/utilities/load.py and lightning/pytorch/utilities/consolidate_checkpoint.py (2.6).
"""

from __future__ import annotations

from ckptconv.pickles.nodes import Dict, Node, mapping_pairs
from ckptconv.support.errors import printable

META = "meta.pt"
_TRAINER = "pytorch-lightning_version"


def with_meta(root: Dict, meta: Node) -> tuple[Dict, tuple[str, ...]]:
    """The two trees as one, and a note on what is left out: a `meta.pt` of somebody else, whose
    names are not new ones.
    """
    known = {key for key, _ in root.pairs}
    pairs = mapping_pairs(meta)
    if pairs is None or any(type(key) is not str for key, _ in pairs):
        return root, (f"{META} beside it is left out: it holds no dict of names",)
    if twice := [key for key, _ in pairs if key in known]:
        return root, (
            f"{META} beside it is left out: '{printable(twice[0])}' is in the checkpoint too",
        )
    joined = Dict([*root.pairs, *pairs])
    return (_as_single_file(joined) if any(key == _TRAINER for key, _ in pairs) else joined), ()


def _as_single_file(root: Dict) -> Dict:
    """The tree with the Trainer's names: ``state_dict``, and a list of ``optimizer_states``."""
    found: dict[Node, Node] = dict(root.pairs)
    if "state_dict" not in found and "model" in found:
        found["state_dict"] = found.pop("model")
    optimizers: list[Node] = []
    while "optimizer_states" not in found and (name := f"optimizer_{len(optimizers)}") in found:
        optimizers.append(found.pop(name))
    if optimizers:
        found["optimizer_states"] = optimizers
    return Dict(list(found.items()))
