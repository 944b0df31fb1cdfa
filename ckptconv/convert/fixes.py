"""The command that fixes a checkpoint: a conversion in words, where its output may be, whether it
would work, and what is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path, PurePath
from shlex import quote
from typing import TYPE_CHECKING, Any

from ckptconv.keys.rules import LEAD, all_start, find_wrappers
from ckptconv.objects.threats import DO_NOT_LOAD
from ckptconv.pickles.nodes import ABSENT, Call, Node, attributes, mapping_pairs
from ckptconv.support.addresses import UrlPath
from ckptconv.support.errors import AmbiguousStateDict, CheckpointError, RefusedObject
from ckptconv.support.records import dataclass
from ckptconv.support.text import STANDARD_INPUT, as_argument, count_text
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.candidates import metadata_of
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.walk import tensors_of

if TYPE_CHECKING:
    from ckptconv.convert.options import Request
    from ckptconv.convert.plan import ConversionPlan
    from ckptconv.tree.fitted_keys import KeyTarget
    from ckptconv.tree.settling import Unknown


@dataclass(frozen=True, slots=True)
class Fix:
    """A conversion that fixes: options of `ckptconv convert`, None where the default will do.

    `suffix` is that of the output's name, which decides its format; empty for a folder, whose
    format `to` says.
    """

    suffix: str | None = None
    to: str | None = None
    tag: str | None = None
    device: str | None = None
    only: str | None = None
    strip_prefix: str | None = None
    regex: str | None = None
    preset: str | None = None
    dtype: str | None = None
    like: str | None = None
    model: str | None = None
    tied: str | None = None
    unknown: Unknown | None = None
    drop_unexpected: bool | None = None
    dequantize: bool | None = None
    with_files: bool | None = None

    @property
    def ending(self) -> str:
        """How the name of the output ends."""
        return ".pt" if self.suffix is None else self.suffix

    def with_(self, other: Fix) -> Fix:
        """Both: what the other one asks for goes before what this one does."""
        return replace(self, **other.given())

    def given(self) -> dict[str, Any]:
        """What is asked for, by its name, in the order of a command line."""
        named = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in named if value is not None}

    def arguments(self) -> list[str]:
        """The same as words of a command line."""
        words: list[str] = []
        for name, value in self.given().items():
            if name != "suffix" and value is not False:
                words.append(f"--{name.replace('_', '-')}")
            if name != "suffix" and type(value) is not bool:
                words.append(value)
        return words


@dataclass(frozen=True, slots=True)
class Prescription:
    """A conversion that works; `lost` says what its output lacks because it has no plain form."""

    fix: Fix
    lost: tuple[str, ...] = ()


def command(fix: Fix, paths: Sequence[PurePath], output: PurePath | None = None) -> str:
    """The command line, ready for a POSIX shell; without an `output` it gets a free name."""
    made = output or output_beside(paths[0], fix.ending)
    return " ".join(
        map(quote, ("ckptconv", "convert", *map(as_argument, (*paths, made)), *fix.arguments()))
    )


def output_beside(path: PurePath, suffix: str, taken: Collection[PurePath] = ()) -> Path:
    """A free name beside `path`, not `taken`: ``model-portable.pt``, ``model-portable-2.pt``, … For
    a checkpoint that is elsewhere it is one of the working folder.
    """
    given = Path(path)
    if isinstance(path, UrlPath):
        given = Path(path.name)
    if str(path) == STANDARD_INPUT:
        given = Path("model")
    if not given.name:  # the working folder, which is called something
        given = given.absolute()
    stem = given.name.removesuffix(".index.json")
    if not given.is_dir():
        stem = Path(stem).stem
    numbers = ("", *(f"-{number}" for number in range(2, 1000)))
    places = (given.parent / f"{stem}-portable{number}{suffix}" for number in numbers)
    return next(place for place in places if not place.exists() and place not in taken)


# dtypes that are never codes
_USUAL = frozenset({"float64", "float32", "float16", "bfloat16", "int64", "bool"})


def surely_works(checkpoint: Checkpoint) -> bool:
    """Whether `Fix()` works for a checkpoint, as can be told without a plan: a whole torch file of
    nothing but a dict of tensors, whose keys stay apart without the lead that all of them have. To
    import what plans takes longer than all else that `inspect` does.
    """
    one, root = checkpoint, checkpoint.root
    if not one.container.has_version or one.files or one.part or one.modules or one.metadata:
        return False
    pairs = mapping_pairs(root) or ()
    keys = [key for key, _ in pairs if type(key) is str and "." in key]
    if not keys or len(set(keys)) < len(pairs) or not _tells_only_versions(root):
        return False
    if not "".join(keys).isprintable():  # half a character is refused
        return False
    lead = LEAD * len(find_wrappers(keys))  # an inner wrapper counts, so no key starts so
    return all_start(keys, lead) and all(
        type(value) is TensorRef and value.dtype.name in _USUAL for _, value in pairs
    )


def _tells_only_versions(root: Node) -> bool:
    """Whether a dict has no attributes, or only `_metadata`, and that the versions of modules."""
    if _bare_pairs(root) is not None:
        return True
    modules = _bare_pairs(metadata_of(root))
    if modules is None or len(attributes(root)) != 1:
        return False
    items = [(name, _bare_pairs(item)) for name, item in modules]
    return all(
        type(name) is str and pairs is not None and all(map(_is_version, pairs))
        for name, pairs in items
    )


def _bare_pairs(node: Node) -> Sequence[tuple[Node, Node]] | None:
    """The pairs of a dict without attributes; None for anything else."""
    if type(node) is Call and node.state is not ABSENT:
        return None
    return mapping_pairs(node)


def _is_version(pair: tuple[Node, Node]) -> bool:
    return type(pair[0]) is str and type(pair[1]) is int and pair[1] in range(1 << 31)


# ---------------------------------------------------------------------- whether a fix would work


def workable(
    fix: Fix, checkpoint: Checkpoint, target: KeyTarget | None = None
) -> Prescription | CheckpointError:
    """The fix, without objects that have no plain form if need be; or why it would not work."""
    from ckptconv.convert.planner import plan_trial  # slow to import, and a sure fix needs none

    try:
        plan = plan_trial(checkpoint, f"OUT{fix.ending}", _request(fix, target))
    except RefusedObject as error:
        if fix.unknown != "drop":
            return _dropping(fix, checkpoint, target, error)
        return error
    except CheckpointError as error:
        return error
    if fix.unknown != "drop":
        return Prescription(fix)
    lost = _lost(plan, checkpoint)
    if sum(count for _, count in lost) >= max(1, sum(1 for _ in plan.made_of.tensors())):
        return AmbiguousStateDict("most of its tensors would be lost", path=checkpoint.path)
    return Prescription(fix, tuple(text for text, _ in lost))


def _request(fix: Fix, target: KeyTarget | None) -> Request:
    """The conversion as the library has it; `target` is what `like` or `model` name."""
    from ckptconv.convert.options import Options  # as slow

    words = fix.given()
    fit_to = None
    if target and (fix.like or fix.model):
        fit_to = replace(target, drop_unexpected=bool(fix.drop_unexpected))
    for name in ("suffix", "tag"):  # those of the output's name, and of the opened source
        words.pop(name, None)
    return Options(**words).request(fit_to)


def _dropping(
    fix: Fix, checkpoint: Checkpoint, target: KeyTarget | None, refused: RefusedObject
) -> Prescription | CheckpointError:
    """The fix that drops what was refused; where that takes tensors along, the refusal."""
    found = workable(replace(fix, unknown="drop"), checkpoint, target)
    if not isinstance(found, AmbiguousStateDict):
        return found
    hint = (
        "load it where its classes are and save its state_dict(), or keep it as it is with "
        "--unknown keep"
    )
    if refused.code == "dangerous":
        hint = DO_NOT_LOAD
    what = f"{refused.what}, and its tensors are lost without it"
    return RefusedObject(what, path=refused.path, where=refused.where, hint=hint)


def _lost(plan: ConversionPlan, checkpoint: Checkpoint) -> list[tuple[str, int]]:
    """What was dropped, in words, and how many tensors: objects, and what is beside state dicts."""
    unsaved = {id(stray.node) for stray in checkpoint.module_strays if stray.is_refused}
    found = []
    for item in plan.skipped:
        if item.is_dropped or id(item.node) in unsaved:
            count = sum(1 for _ in tensors_of(item.node))
            what = [item.node.name] if type(item.node) is Call else []
            if count:
                what.append(count_text(count, "tensor"))
            about = f" ({', '.join(what)})" if what else ""
            found.append((f"{item.path or 'the root'}{about}", count))
    return found
