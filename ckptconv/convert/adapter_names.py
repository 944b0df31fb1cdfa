"""The presets of LoRA adapters among the options of a conversion: an edit, between the rules that
stand before them and those behind.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from ckptconv.convert.beside import FilesBeside, made_file
from ckptconv.convert.key_targets import is_pipeline
from ckptconv.convert.notes import prefix_notes
from ckptconv.convert.options import Request
from ckptconv.convert.plan import ConversionPlan
from ckptconv.formats.target_format import TargetFormat
from ckptconv.io.places import place_of
from ckptconv.keys.key_map import KEEP, STRIP
from ckptconv.keys.presets import Preset
from ckptconv.pickles.nodes import Node, mapping_pairs
from ckptconv.support.errors import OptionRefused, printable
from ckptconv.tensors.refs import TensorRef, view_identity
from ckptconv.tree.checkpoint import Edit
from ckptconv.tree.lora_adapters import CONFIG
from ckptconv.tree.lora_names import Convention
from ckptconv.tree.optimizer_names import RenameKeys
from ckptconv.tree.renaming import RenamedKeys
from ckptconv.tree.renaming_lora import RenameLora
from ckptconv.tree.reshaping import MadeKeys
from ckptconv.tree.walk import tensor_of


def with_adapter_edits(request: Request, to: TargetFormat) -> Request:
    """The request with an edit in the place of the preset; what `fit_to` names is the base of the
    adapter then.

    Raises `OptionRefused` for options that say nothing there, and for an output that cannot hold
    the scales.
    """
    rules = request.keys.rules
    named = [rule for rule in rules if isinstance(rule, Preset) and rule.of_adapters]
    if len(named) > 1:
        what = f"{named[0].words} and {named[1].words} name the same parts"
        raise OptionRefused(what, hint="give one of them")
    preset = named[0]
    _refuse_idle(request, preset)
    if preset.name == "lora-diffusers" and not to.holds_metadata:
        what = f"diffusers keeps alphas in metadata, for which a {to.name} output has no place"
        raise OptionRefused(what, hint="write safetensors")
    at = rules.index(preset)
    edits: list[Edit] = [*request.edits]
    before = replace(request.keys, rules=rules[:at])
    if before not in (STRIP, KEEP):
        edits.append(RenameKeys(before))
    convention: Convention = next(each for each in get_args(Convention) if each == preset.name)
    edits.append(RenameLora(convention, None if request.fit_to is None else request.fit_to.shapes))
    keys = replace(KEEP, rules=rules[at + 1 :])
    return replace(
        request,
        keys=keys,
        edits=tuple(edits),
        fit_to=None,
        tied="duplicate",  # what was one weight shares a matrix, and libraries read no aliases
        max_shard_size=request.shard_bytes,
    )


def _refuse_idle(request: Request, preset: Preset) -> None:
    if request.save_mapping is not None:
        what = f"--save-mapping tells of keys, and {preset.words} changes more"
        raise OptionRefused(what, hint="the preset of the other convention goes back")
    base = request.fit_to
    if base is not None and preset.name == "lora-peft" and is_pipeline(place_of(base.name)):
        what = f"{preset.words} is for one model, and {printable(base.name)} has several"
        raise OptionRefused(what, hint="name the folder of the component that the adapter is for")
    if base is not None and base.drop_unexpected:
        what = f"--drop-unexpected says nothing with {preset.words}"
        raise OptionRefused(what, hint="leave parts out before it: --exclude GLOB")
    if request.tied != "alias":
        what = f"--tied says nothing with {preset.words}, by which all names have a tensor"
        raise OptionRefused(what, hint="leave it out")
    if request.max_shard_size not in (None, sys.maxsize):
        what = "an adapter is one file, which --max-shard-size would split"
        raise OptionRefused(what, hint="leave it out")


def with_adapter_told(plan: ConversionPlan, preset: str) -> ConversionPlan:
    """The plan with the files beside its output that the edit made, in the place of copies, and
    with what became of the keys of the adapter. No note offers to take off what the convention puts
    before them.
    """
    made = plan.made_of.checkpoint.made_beside
    copied = [item for item in plan.beside.copied if item.name not in (*made, CONFIG)]
    files = [made_file(name, raw) for name, raw in made.items()]
    state_dicts = tuple(_told(plan, item, preset) for item in plan.state_dicts)
    beside = FilesBeside((*copied, *files), plan.beside.left)
    checkpoint = plan.made_of.checkpoint
    needless = {*prefix_notes(checkpoint, checkpoint.state_dicts(), KEEP, None)}
    notes = tuple(note for note in plan.notes if note not in needless)
    return replace(plan, beside=beside, state_dicts=state_dicts, notes=notes)


def _told(plan: ConversionPlan, item: RenamedKeys, preset: str) -> RenamedKeys:
    """What became of the keys, where no rule behind the preset changed them once more."""
    if item.changed or item.left_out:
        return item
    made_of = plan.made_of.checkpoint
    before = _tensors(made_of.dropped[-1])  # what the edit was given
    after = dict(made_of.state_dict().tensors())
    olds = _by_view(before)
    news = _by_view(after)
    same = {
        olds[view][0]: news[view][0]
        for view in olds.keys() & news.keys()
        if len(olds[view]) == len(news[view]) == 1
    }
    changed = tuple((old, same[old]) for old in before if old in same and same[old] != old)
    kept = set(same.values())
    gone = tuple(old for old in before if old not in same and old.endswith(".alpha"))
    sources = tuple(old for old in before if old not in same and old not in gone)
    targets = tuple(new for new in after if new not in kept)
    made: tuple[MadeKeys, ...] = ()
    if targets:
        first = "".join(_shape_text(before[key]) for key in sources[:1])
        shapes = first, _shape_text(after[targets[0]])
        counts = len(sources), len(targets)
        made = (MadeKeys(Preset(preset), counts, sources, targets, shapes),)
    return replace(
        item,
        count=len(before),
        changed=changed,
        left_out=gone,
        made=made,
        consumed=frozenset(sources),
    )


def _tensors(node: Node) -> dict[str, TensorRef]:
    """The tensors of the dict of an adapter."""
    found = ((key, tensor_of(value)) for key, value in mapping_pairs(node) or ())
    return {str(key): ref for key, ref in found if ref is not None}


def _by_view(tensors: Mapping[str, TensorRef]) -> dict[object, list[str]]:
    found: dict[object, list[str]] = {}
    for key, ref in tensors.items():
        found.setdefault(view_identity(ref), []).append(key)
    return found


def _shape_text(ref: TensorRef) -> str:
    return f"{ref.dtype.name} {list(ref.shape)}"
