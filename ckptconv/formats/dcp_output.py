"""The DCP folder as an output format, written by `torch.distributed.checkpoint` itself, so that
FSDP training resumes from a plain checkpoint.

This is the one output for which torch is imported: the layout of a DCP folder is its own, and
changes with it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path, PurePath
from typing import Any

from ckptconv.formats.target_format import Layout, NamedTensor, Retag, TargetFormat, Tree
from ckptconv.formats.torch_output import TORCH
from ckptconv.io.destination import new_file
from ckptconv.objects.plain import plain_form
from ckptconv.pickles.nodes import Call, Dict, Node, mapping_pairs, seen_through
from ckptconv.support.errors import OutputRefused, RefusedObject, printable
from ckptconv.support.signals import held_back
from ckptconv.support.text import some_text
from ckptconv.tensors.compaction import CastRule
from ckptconv.tree.optimizer_forms import OF_LOADER, refuse_shares
from ckptconv.tree.optimizer_parts import parts_of
from ckptconv.tree.optimizer_states import optimizer_states
from ckptconv.tree.state_dicts import find_state_dicts
from ckptconv.tree.walk import place_text, walk


class DcpFolder(TargetFormat):
    """A folder that torch makes of a plain torch file, which holds a dict."""

    name = "dcp"
    noun = "a DCP folder"
    suffix = ""
    is_folder = True
    is_made_by_torch = True
    holds_trees = True

    def refuse(self, named: Iterable[NamedTensor]) -> None:
        TORCH.refuse(named)

    def refuse_part(self, root: Node, *, keeps_objects: bool, only: str | None) -> None:
        if keeps_objects:
            what = "objects of unknown classes cannot be kept in a DCP folder"
            raise RefusedObject(what, hint="use --unknown drop")
        is_dict = mapping_pairs(root) is not None
        if not is_dict and not (type(root) is Call and type(plain_form(root)) is Dict):
            what = "is not a dict, and a DCP folder holds only dicts"
            raise RefusedObject(what, where=only, hint="--only PATH takes one part")
        models = find_state_dicts(root)
        for state in optimizer_states(root, {}, models):
            try:
                parts = parts_of(state, state.node)
            except RefusedObject:  # of a form that nobody asked to change
                continue
            if not parts.is_numbered:
                refuse_shares(parts, models, state.path, None)

    def part_notes(self, tree: Tree) -> Iterator[str]:
        """Tell of master weights, and of keys that DCP keeps as text: an optimizer's state has
        numbers (torch/distributed/checkpoint/_nested_dict.py).
        """
        masters = _masters(seen_through(tree.root, tree.overlay))
        if masters:
            yield (
                f"FSDP2 does not use fp32_param, the weight in float32 that the optimizer keeps of "
                f"{some_text(masters)}: it goes on from the weights as they are"
            )
        for place, node in walk(tree.root, tree.overlay):
            if any(type(key) is int for key, _ in mapping_pairs(node) or ()):
                where = printable(place_text(place)) or "the root"
                told = f"keys that are numbers ({where}, …) become text in a DCP folder, as torch "
                told += "itself writes them"
                if any(state.shapes for state in optimizer_states(tree.root, tree.overlay)):
                    told += "; FSDP2 looks for names of parameters: --optimizer names"
                yield told
                return

    def lay_out_tree(self, tree: Tree, cast: CastRule, retag: Retag) -> Layout:
        """The plain torch file of which the folder is made."""
        return TORCH.lay_out_tree(tree, cast, retag)

    def make_folder(self, plain: Path, folder: Path, name: PurePath) -> None:
        write_dcp(plain, folder, name)


DCP = DcpFolder()


def _masters(root: Node) -> list[str]:
    """The names of parameters of which an optimizer's state has a master weight, but in Megatron's
    form, whose loader takes it.
    """
    found: dict[str, None] = {}
    for state in optimizer_states(root, {}):
        try:
            parts = parts_of(state, state.node)
        except RefusedObject:
            continue
        found |= {str(name): None for name, kept in parts.states.items() if "fp32_param" in kept}
    return list(found)


def write_dcp(plain: Path, folder: Path, name: PurePath) -> None:
    """Save what the torch file `plain` holds, a dict, into `folder`, in this process alone; it will
    be known as `name`.

    A tree in Megatron's form becomes a `torch_dist` folder, whose items have no paths. The
    file is mapped, so memory does not grow with it. Raises `MissingDependency` where
    torch is missing, `OutputRefused` where it refuses the values.
    """
    from ckptconv.devices.host import require_torch  # seldom needed

    require_torch("writing a DCP folder")
    try:
        with held_back():
            import torch
            from torch.distributed.checkpoint.api import CheckpointException
            from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
            from torch.distributed.checkpoint.filesystem import FileSystemWriter
            from torch.distributed.checkpoint.state_dict_saver import save
    except ImportError as error:
        what, hint = "needs a version of torch that writes DCP folders", "pip install 'torch>=2.2'"
        raise OutputRefused(what, path=name, hint=hint) from error

    class Writer(FileSystemWriter):
        """Notes the folder's lasting name instead of the temporary one."""

        def storage_meta(self) -> Any:
            noted: Any = super().storage_meta()  # since torch 2.3, which is who asks for it
            return noted and replace(noted, checkpoint_id=str(name))

    try:
        # else what is made here would be on the device of a `with torch.device("meta")`
        with torch._C.DisableTorchFunction():
            tree = torch.load(plain, map_location="cpu", mmap=True, weights_only=True)
        beside = tree.pop(OF_LOADER, None)
        planner = DefaultSavePlanner(flatten_state_dict=beside is None)
        if beside is not None:
            tree = _as_items(tree, name)
            common, backends = memoryview(beside[0].numpy()), json.dumps(_BACKENDS).encode()
            for file, raw in (("common.pt", common), ("metadata.json", memoryview(backends))):
                with new_file(folder / file, name, size=len(raw)) as stream:
                    stream.write(raw)
                    stream.settle(fsync=False)
        with torch._C.DisableTorchFunction(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a save without a process group
            # the only way there is before torch 2.6
            alone = {"no_dist": True} if "no_dist" in signature(save).parameters else {}
            save(tree, storage_writer=Writer(folder, sync_files=False), planner=planner, **alone)
    except OSError:
        raise
    except (Exception, CheckpointException) as error:  # which is not an Exception
        cause = _cause(error)
        stop = _stop(cause)
        if stop is not None:
            raise stop from None
        if isinstance(cause, OSError):
            raise cause from error
        why = printable(str(cause) or type(cause).__name__, 300)
        what = f"torch.distributed.checkpoint does not take it: {why}"
        raise OutputRefused(what, path=name) from error


# By which Megatron's loader chooses its code (megatron/core/dist_checkpointing/core.py, 0.16)
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _as_items(tree: dict[Any, Any], name: PurePath) -> dict[Any, Any]:
    """What Megatron's loader looks for in the items: weights, states and objects, all flat."""
    parts = [tree.pop(part, {}) for part in ("model", "optimizer")] + [tree]
    items = {key: value for part in parts for key, value in part.items()}
    if len(items) < sum(map(len, parts)):
        what = "two items would have one name in a folder of Megatron"
        raise OutputRefused(what, path=name, hint="give keys other names")
    return items


def _cause(error: BaseException) -> BaseException:
    """What went wrong in this process, which torch wraps with its traceback."""
    failures: dict[int, tuple[BaseException, Any]] = getattr(error, "failures", {})
    return next((cause for cause, _ in failures.values()), error)


def _stop(error: BaseException | None) -> BaseException | None:
    """The wish to end the program behind `error`: torch's writer, closed too early, complains."""
    while error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
        error = error.__context__
    return error
