"""Files that are one part of a checkpoint, by their names or by what they hold, so that they are
never taken for the whole.

Shards (``model-00001-of-00002.safetensors``) and the older files of torchtune
(``hf_model_0001_0.pt`` is part 1 after epoch 0) hold whole tensors. Meta's ``consolidated.00.pth``
and vLLM's ``model-rank-0-part-0.safetensors`` hold a slice of each where the model was split, and
are the whole model where it was not. What a rank of DeepSpeed or FSDP saved says so itself. Source:
torchtune/training/checkpointing/_checkpointer.py; llama/generation.py;
vllm/model_executor/model_loader/sharded_state_loader.py; deepspeed/runtime/engine.py (0.19.8).

What joins the parts is imported only where there are some (`sharded`, `ranks`, `deepspeed`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import PurePath
from shlex import quote
from typing import Any

from ckptconv.formats.folders.steps import weight_files
from ckptconv.io.location import Location, is_plain_name, read_small
from ckptconv.pickles.nodes import Call, Global, Node, mapping_pairs
from ckptconv.support.errors import CheckpointError, UnsupportedCheckpoint, printable
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import first_few
from ckptconv.tensors.dtypes import UINT8
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.checkpoint import Checkpoint, PartFile
from ckptconv.tree.walk import tensor_of

SPLIT = "join them with the tools of the program that split it"

META = "consolidated."
"""What the names of Meta's files begin with: of a model that was split each holds slices."""

_NAMES = (
    ("-of-", r"(.*[^0-9])([0-9]{5})(-of-(?!00001)[0-9]{5})((?:_[0-9]+)?\.\w+)"),
    ("hf_model_", r"(hf_model_)([0-9]{4})()(_[0-9]+\.pt)"),
    (META, rf"({re.escape(META)})([0-9]{{2}})()(\.pth)"),
    ("model-rank-", r"(model-rank-)([0-9]+)()(-part-[0-9]+\.safetensors)"),
)
"""What the names of parts have in them, and how they are made."""


class Numbered(NamedTuple):
    """What the name of a part says: its number, how many (``-of-``), and what stands around."""

    stem: str
    number: str
    of: str
    end: str

    @property
    def numbers(self) -> range:
        """The numbers of all parts, as far as this name tells."""
        own = int(self.number)
        begins_at_1 = self.of != "" or self.stem == "hf_model_"
        first = min(own, int(begins_at_1))
        return range(first, first + int(self.of.removeprefix("-of-") or own + 1 - first))

    def other(self, number: int) -> str:
        """The name of the part of that number."""
        return f"{self.stem}{number:0{len(self.number)}}{self.of}{self.end}"


def numbered(name: str) -> Numbered | None:
    """What a name says of a part; None where it is the name of none, or of the only one."""
    for word, pattern in _NAMES:
        found = re.fullmatch(pattern, name) if word in name else None
        if found is not None:
            return Numbered(*found.groups())
    return None


def part_of(place: Location, checkpoint: Checkpoint) -> PartFile | None:
    """What a file is a part of, if it is one: by its name, else by what it holds."""
    name = re.sub(r"\.(?:gz|bz2|xz|zst)$", "", place.name)
    root = checkpoint.root
    if _holds_changes(checkpoint):
        return delta_part(place.parent.path, {})
    named = _by_name(name, place) or part_of_step(name, root)
    return named or flat_part(root) or _slice_of(root) or checkpoint.part


DELTA_ENCODING = "delta_encoding"
"""What the metadata of an index have where its shards hold changes (`formats.deltas`)."""


def delta_part(folder: PurePath, told: Mapping[str, Any]) -> PartFile:
    """What a folder of changes is, or one of its files; `told` are the metadata of its index."""
    since = ""
    if told:
        versions = (printable(told.get(name), 20) for name in ("base_version", "version"))
        since = f" from version {{}} to {{}} of a model ({DELTA_ENCODING} {{}})".format(
            *versions, printable(told[DELTA_ENCODING], 20)
        )
    what = f"holds changes of tensors{since}, not weights"
    hint = f"apply them: ckptconv apply BASE {quote(printable(folder))} OUT"
    return PartFile(what, hint, is_delta=True)


_HAS_CHECKSUM = partial(re.fullmatch, r"[0-9a-f]{8}|[0-9a-f]{32}|[0-9a-f]{64}")


def _holds_changes(checkpoint: Checkpoint) -> bool:
    """Whether a file is one of a delta: all its tensors are runs of bytes, and its metadata have a
    checksum under the name of each.
    """
    metadata = checkpoint.metadata
    if not metadata:
        return False
    held = mapping_pairs(checkpoint.root) or ()
    refs = [(key, tensor_of(value)) for key, value in held]
    return bool(refs) and all(
        ref is not None
        and ref.dtype is UINT8
        and len(ref.shape) == 1
        and type(key) is str
        and _HAS_CHECKSUM(metadata.get(key, ""))
        for key, ref in refs
    )


def _slice_of(root: Node) -> PartFile | None:
    """A slice of Llama 1 or 2, whatever its name: the embedding is narrower than the norms."""
    names = ("tok_embeddings.weight", "norm.weight")
    found = {key: tensor_of(value) for key, value in mapping_pairs(root) or () if key in names}
    wide, whole = map(found.get, names)
    if wide is None or whole is None or wide.shape[1:] == whole.shape:
        return None
    return PartFile("is one of the parallel parts of a model, which are not joined", SPLIT)


def _by_name(name: str, place: Location) -> PartFile | None:
    told = numbered(name)
    if told is None:
        return None
    own = int(told.number)
    numbers = (number for number in told.numbers if number != own)
    others = [told.other(number) for number in islice(numbers, _NAMED + 1)]
    after = told.other(own + 1)
    if not told.of and place.beside(after).is_file():
        others.append(after)
    if not others:
        return None
    named = first_few(others, _NAMED)
    mark = f"{told.number}{told.of}" if told.of else f"{told.stem}{told.number}"
    what = f"is by its name only one part of a checkpoint; the others: {named}"
    together = "folder" if told.end == ".gguf" else "index"  # a set of GGUF has no index
    alone = f"one is converted alone to an OUT with {mark} in its name"
    return PartFile(what, f"name all, or their {together}; {alone}", mark)


_NAMED = 3


MODULES = "modules.json"
"""Where sentence-transformers lists the modules of a model (`SentenceTransformer.save`)."""


def module_folders(folder: Location) -> list[Location]:
    """The folders in it of a model's modules, as its list names them, those that are there."""
    place = folder.child(MODULES)
    if not place.is_file():
        return []
    import json

    try:
        listed = json.loads(read_small(place, "index_bytes"))
    except (CheckpointError, ValueError, RecursionError):
        return []
    items = listed if type(listed) is list else []
    named = {str(item.get("path")) for item in items if isinstance(item, dict)}
    folders = [folder.child(name) for name in sorted(named) if is_plain_name(name)]
    return [one for one in folders if one.is_folder() and one.stays_within(folder)]


def part_of_modules(folder: Location) -> PartFile | None:
    """What the weights in a folder are a part of, where other modules of the model have some."""
    others = [one.name for one in module_folders(folder) if weight_files(one)]
    if not others:
        return None
    what = f"holds one module of a model; {', '.join(map(printable, others))} hold weights too"
    return PartFile(what, "copy all with --with-files, or name the file of the one", is_copied=True)


def are_parts(names: Sequence[str]) -> bool:
    """Whether names are those of parts of one checkpoint, of which some may be missing."""
    told = [numbered(name) for name in names]
    sets = {one and (one.stem, one.of, one.end) for one in told}
    is_one = len(sets) == 1 and None not in sets and len({*names}) == len(names)
    return is_one and (len(names) > 1 or any(one and one.of for one in told))


# --------------------------------------------------------------------------------- what ranks saved


# mp_rank_00_model_states.pt of ZeRO 1 and 2, zero_pp_rank_0_mp_rank_00_model_states.pt of ZeRO 3
MODEL_STATES = partial(
    re.fullmatch, r"(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{1,6})_model_states\.pt"
)
OPTIMIZER_STATES = partial(
    re.fullmatch,
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,6})_?optim_states\.pt",
)
# layer_03-model_00-model_states.pt
PIPELINE = partial(re.fullmatch, r"layer_([0-9]+)((?:-[a-z]+_[0-9]+)*)-model_states\.pt")
# layer_0_expert_3_mp_rank_00_model_states.pt, expp_rank_0_mp_rank_00_optim_states.pt
EXPERTS = partial(
    re.fullmatch,
    r"(?:layer_[0-9]+_)?expert_[0-9]+_mp_rank_[0-9]+_model_states\.pt|expp_rank_.*optim_states\.pt",
)
NOT_READ = "save the weights with the framework that wrote them"
"""What can be done about layouts of DeepSpeed that are not read."""


def part_of_step(name: str, root: Node) -> PartFile | None:
    """What a file of a step is a part of, by its name and content, if it is not the whole model."""
    states = {key: value for key, value in mapping_pairs(root) or () if key in _SAID_BY_RANKS}
    if not states and not name.endswith("states.pt"):
        return None
    width = states.get("mp_world_size")
    rank = MODEL_STATES(name)
    if PIPELINE(name):
        what = "is one layer of a pipeline-parallel checkpoint (layer_*-model_states.pt)"
        return PartFile(f"{what} of DeepSpeed", "name its folder")
    if rank and rank[1] and states.get("param_shapes") is not None:
        # they look as if they held weights
        return PartFile("is one rank of ZeRO stage 3, without any weights", "name its folder")
    if EXPERTS(name):
        what = "is one of the experts of an expert-parallel checkpoint (*expert_*_model_states.pt)"
        return PartFile(f"{what} of DeepSpeed", "name its folder")
    if type(width) is int and width > 1:
        what = f"is one of {width} tensor- or pipeline-parallel parts (mp_rank_*)"
    elif any(map(states.get, _AUTOEP)):
        what = "is an expert-parallel checkpoint without its experts (*expert_*_model_states.pt)"
    else:
        return None
    return PartFile(f"{what} of DeepSpeed, which is not read", NOT_READ)


_AUTOEP = ("num_experts", "ds_autoep_layers", "autoep_layers")
_SAID_BY_RANKS = ("mp_world_size", "param_shapes", *_AUTOEP)


def flat_part(root: Node) -> PartFile | None:
    """What a tree is with a flat parameter of FSDP1, which holds many parameters and does not say
    which, in it or in a dict in it. Source: torch/distributed/fsdp/_flat_param.py.
    """
    pairs = mapping_pairs(root) or ()
    dicts = (value for _, value in pairs if type(value) is not TensorRef)
    inner = chain.from_iterable(mapping_pairs(value) or () for value in dicts)
    for key, _ in chain(pairs, inner):
        if type(key) is str and key.endswith(_FLAT) and key.rpartition(".")[2] in _FLAT:
            return PartFile(f"{printable(key)} {_IS_FLAT}", _NOT_FLAT)
    return None


def refuse_flat(keys: Iterable[str], path: PurePath) -> None:
    """Raise where a key is that of a flat parameter."""
    flat = next((key for key in keys if key.rpartition(".")[2] in _FLAT), None)
    if flat:
        raise UnsupportedCheckpoint(_IS_FLAT, path=path, where=flat, hint=_NOT_FLAT)


_IS_FLAT = (
    "is a flat parameter of FSDP (LOCAL_STATE_DICT), which does not say what parameters are in it"
)
_NOT_FLAT = "save it with SHARDED_STATE_DICT or FULL_STATE_DICT"
_FLAT = ("_flat_param", "flat_param")


def refuse_without_index(names: Iterable[str], path: PurePath) -> None:
    """Raise for the files of a Megatron checkpoint without the `.metadata` of its tensors: there is
    `common.pt`, which could be read alone.
    """
    if {"common.pt", "metadata.json"} <= {*names}:
        what = "holds common.pt of Megatron, and no .metadata, which says where its tensors are"
        hint = "copy hidden files too; what was saved with zarr has to be saved as torch_dist"
        raise UnsupportedCheckpoint(what, path=path, hint=hint)


def is_shard(node: Node) -> bool:
    """Whether a node is what torch pickles for a DTensor or a ShardedTensor."""
    return (
        type(node) is Call
        and node.name.endswith("._rebuild_from_type_v2")
        and len(node.args) == 4
        and type(node.args[0]) is Global
        and node.args[0].path == "torch._utils._rebuild_wrapper_subclass"
        and type(node.args[1]) is Global
        and node.args[1].module.startswith("torch.distributed")
        and node.args[1].name in ("DTensor", "ShardedTensor")
    )


def has_shards(calls: Iterable[Call]) -> bool:
    """Whether some of the calls of a file are shards of tensors, as in each rank's of several."""
    return any(map(is_shard, calls))
