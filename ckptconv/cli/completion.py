"""What the shell offers for the values of options: words that are always right, and what is in the
IN that is typed already.

A shell must never wait or see a traceback: torch is not imported, a large index is not read, and
where anything fails nothing is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptconv.io.places import place_of
from ckptconv.support.limits import limits
from ckptconv.tensors.dtypes import CHOICES

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckptconv.tree.checkpoint import Checkpoint

_TAGS = ("cpu", "cuda", "cuda:0", "cuda:1", "mps", "xpu", "hpu", "npu", "keep", "auto")
_LARGEST_INDEX = 4 << 20  # bytes of a pickle or a header: read in a tenth of a second
_MOST_RECORDS = 50_000
_MOST_STEPS = 200

Offer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def _offering(found: Callable[[click.Context, str], Iterator[str]]) -> Offer:
    """Offer the texts that start as what is typed; none where they cannot be found."""

    def offer(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        try:
            texts = list(dict.fromkeys(found(ctx, incomplete)))
        except Exception:
            return []
        return [
            CompletionItem(text)
            for text in texts
            if text.startswith(incomplete) and text.isprintable()
        ]

    return offer


def _inputs(ctx: click.Context, place: int = 0) -> Iterator[Path]:
    """The inputs that are typed already, of the argument at this place; while there is only one
    word it is taken for OUT.
    """
    names = [str(param.name) for param in ctx.command.params if isinstance(param, click.Argument)]
    given: Any = ctx.params.get(names[place])
    typed = [*(given if isinstance(given, tuple) else [given]), ctx.params.get("output")]
    yield from (path for path in map(Path, filter(None, typed)) if path.exists())


def _opened(path: Path) -> Checkpoint:
    from ckptconv.formats.registry import open_by_index

    most = _LARGEST_INDEX
    with limits(
        pickle_bytes=most,
        safetensors_header_bytes=most,
        index_bytes=most,
        archive_records=_MOST_RECORDS,
    ):
        return open_by_index(path)


def _parts(place: int) -> Callable[[click.Context, str], Iterator[str]]:
    def found(ctx: click.Context, _: str) -> Iterator[str]:
        from ckptconv.tree.state_dicts import find_state_dicts

        with _opened(next(_inputs(ctx, place))) as checkpoint:
            yield from (item.path for item in find_state_dicts(checkpoint.root) if item.path)

    return found


def _steps(place: int) -> Callable[[click.Context, str], Iterator[str]]:
    def found(ctx: click.Context, _: str) -> Iterator[str]:
        from ckptconv.formats.registry import is_gathering

        folder = next(path for path in _inputs(ctx, place) if path.is_dir())
        inside = sorted(folder.iterdir())[:_MOST_STEPS]
        yield from (item.name for item in inside if is_gathering(place_of(item)))

    return found


def _tags_there(ctx: click.Context, incomplete: str) -> Iterator[str]:
    """OLD= of the tags in IN; then NEW."""
    old, equals, _ = incomplete.partition("=")
    if equals:
        yield from (f"{old}={tag}" for tag in _TAGS if tag != "keep")
        return
    with _opened(next(_inputs(ctx))) as checkpoint:
        pieces = (piece for _, ref in checkpoint.tensors() for piece in ref.pieces)
        yield from (f"{tag}=" for tag in sorted({piece.storage.location for piece in pieces}))


def _presets(*_: object) -> Iterator[str]:
    from ckptconv.keys.presets import preset_names

    yield from preset_names()


offer_dtypes = _offering(lambda *_: iter(CHOICES))
offer_presets = _offering(_presets)
offer_devices = _offering(lambda *_: iter(_TAGS))
offer_map_locations = _offering(_tags_there)
offer_parts, offer_parts_of_b = _offering(_parts(0)), _offering(_parts(1))
offer_steps, offer_steps_of_b = _offering(_steps(0)), _offering(_steps(1))
