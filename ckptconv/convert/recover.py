"""What can be saved of a damaged file, written as a checkpoint of whole tensors."""

from __future__ import annotations

from ckptconv.convert.execute import ConversionResult, execute_plan
from ckptconv.convert.options import Options, Request
from ckptconv.convert.planner import plan_conversion
from ckptconv.convert.targets import check_place
from ckptconv.formats.salvage import salvage
from ckptconv.formats.target_format import Target
from ckptconv.io.files import one_run
from ckptconv.io.places import Output, Place, place_of, resolved
from ckptconv.keys.key_map import KEEP
from ckptconv.pickles.nodes import Node
from ckptconv.support.choices import refuse_no_flag, refuse_no_path, spelling_checked
from ckptconv.support.errors import MalformedCheckpoint, OutputRefused, printable
from ckptconv.support.progress import OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.report import Fields, Row, listed, note_rows, short_repr
from ckptconv.support.text import count_text
from ckptconv.tree.dropping import without_lost
from ckptconv.tree.settling import Unknown
from ckptconv.values.named import components_in


@dataclass(frozen=True, slots=True, repr=False)
class Recovery:
    """What was saved of the file `path` into `output`: the names of the tensors that are whole, and
    of those that are lost. `damage` is what is wrong with the file; None where it opens as any
    other. `skipped` are whole tensors that the output cannot hold, or was not asked for.
    """

    path: str
    output: str
    whole: tuple[str, ...]
    lost: tuple[str, ...]
    damage: str | None
    result: ConversionResult

    @property
    def is_complete(self) -> bool:
        """Whether nothing is lost."""
        return not self.lost

    def __bool__(self) -> bool:
        """Raises `TypeError`: a result that is always true would be taken for all of the file."""
        raise TypeError("a Recovery is neither true nor false: write .is_complete")

    def __repr__(self) -> str:
        told = f"{len(self.whole):,} whole", f"{len(self.lost):,} lost"
        return short_repr("Recovery", f"{self.path} → {self.output}", *told)


@spelling_checked
def recover_checkpoint(
    source: Place,
    output: Output,
    *,
    to: Target | None = None,
    only: str | None = None,
    unknown: Unknown = "refuse",
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> Recovery:
    """Write what is whole of a damaged file into another one, under the same names.

    A tensor is given if all its bytes are there, and have the CRC-32 that a zip file declares; no
    part of one is. What says the names has to be whole: the pickle of a torch file, the header of a
    safetensors file. `to`, `only` and `unknown` are as in `Options`; `force` replaces an output.
    Raises `CheckpointError` where no tensor can be saved.
    """
    refuse_no_path(source=source)
    refuse_no_flag(force=force)
    if resolved(place_of(source).path) == resolved(place_of(output).path):
        hint = "name another file: what is lost now may be saved in another way"
        raise OutputRefused("is the damaged file itself", path=place_of(output).path, hint=hint)
    # nothing is changed beside what is lost, so that both files can be compared by names
    options = Options(to=to, only=only, unknown=unknown, keys=KEEP, device="keep")
    request = options.request(None)
    with one_run():
        check_place(output, request, force=force)
        return _recovered(source, output, request, force, on_progress)


def _recovered(
    source: Place, output: Output, request: Request, force: bool, on_progress: OnProgress | None
) -> Recovery:
    place = place_of(source)
    salvaged = salvage(place)
    with salvaged.checkpoint as checkpoint:
        named = _names(checkpoint.root)
        left = without_lost(checkpoint, salvaged.is_whole)
        whole = _names(left.root)
        if named and not whole:
            what = f"no tensor of it is whole: {count_text(len(named), 'tensor')} lost"
            hint = "nothing was written; recover another copy"
            raise MalformedCheckpoint(what, path=place.path, hint=hint)
        plan = plan_conversion(left, output, request)
        result = execute_plan(plan, force=force, on_progress=on_progress)
        there = {*whole}
        lost = [name for name in named if name not in there]
        told = str(place.path), str(plan.output), tuple(whole), tuple(lost), salvaged.damage
        return Recovery(*told, result)


def _names(root: Node) -> list[str]:
    return [each.name for each in components_in(root)]


# -------------------------------------------------------------------------------------- report


def recovery_headline(found: Recovery) -> str:
    """The line that says how much was saved."""
    of = f"{len(found.whole):,} of {count_text(len(found.whole) + len(found.lost), 'tensor')}"
    return f"{printable(found.path)} → {printable(found.output)}: {of} whole"


def recovery_rows(found: Recovery) -> tuple[Row, ...]:
    """Each tensor that was lost; of those that were saved, which may be thousands, the document
    tells.
    """
    rows = [] if found.damage is None else [Row("damage", printable(found.damage, 500), "warning")]
    rows += (Row("lost", _shown(name), "error") for name in found.lost)
    plan = found.result.plan
    skipped = [f"{printable(item.path)}: {printable(item.reason)}" for item in plan.skipped]
    rows += listed("skipped", skipped, "warning", most=len(skipped))
    return (*rows, *note_rows(plan.notes))


def _shown(name: str) -> str:
    return printable(name, 500) or "the root"


RECOVERY = Fields(
    "path output complete=is_complete damage whole lost skipped=result.plan.skipped "
    "notes=result.plan.notes",
    skipped=Fields("path reason"),
)
"""The document of a recovery."""
