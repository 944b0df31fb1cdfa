"""The pages of docs/ as topics of `ckptconv help`: which there are, and their text.

A wheel brings them as ckptconv/docs; in a checkout, and in an editable install of one, they lie
beside the package.
"""

from __future__ import annotations

import difflib
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "docs", _PACKAGE.parent / "docs")


def topics() -> dict[str, str]:
    """The name of each page and its title, by name; none where the pages were left out of a
    package.
    """
    pages = sorted(_folder().glob("*.md"))
    return {
        page.stem: page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").strip()
        for page in pages
    }


def page_text(topic: str) -> str | None:
    """The Markdown of a page, by its name as people write it (State_Dicts, keys.md); None where
    there is none.
    """
    name = _plain(topic)
    return (_folder() / f"{name}.md").read_text(encoding="utf-8") if name in topics() else None


def near_matches(topic: str, commands: list[str]) -> list[str]:
    """The topics and commands that `topic` may have meant, the likeliest first."""
    known = [*topics(), *commands]
    parts = [name for name in known if _plain(topic) and _plain(topic) in name]
    return list(dict.fromkeys([*parts, *difflib.get_close_matches(_plain(topic), known)]))


def _plain(topic: str) -> str:
    return topic.lower().removesuffix(".md").replace("_", "-").replace(" ", "-")


def _folder() -> Path:
    return next((folder for folder in _FOLDERS if (folder / "keys.md").is_file()), _FOLDERS[0])
