"""What the command says of a page that it wrote, as text and JSON."""

from __future__ import annotations

from typing import Any

from ckptconv.pages.make import Page
from ckptconv.support.errors import printable
from ckptconv.support.text import count_text, size_text


def page_headline(page: Page) -> str:
    """The line that says what was written."""
    about = ", ".join(printable(name) for name in page.sources)
    said = {None: "", True: "; they are the same", False: "; they differ"}[page.same]
    return (
        f"{printable(page.path)}: {size_text(page.nbytes)}, about {about} "
        f"({count_text(page.tensors, 'tensor')}){said}"
    )


def page_document(page: Page) -> dict[str, Any]:
    """The page as a JSON object."""
    return {
        "path": page.path,
        "bytes": page.nbytes,
        "sources": list(page.sources),
        "tensors": page.tensors,
        "same": page.same,
    }
