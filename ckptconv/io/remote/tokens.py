"""The token of the Hugging Face Hub: where its own library keeps it. It is never shown.

The variables and their order are those of huggingface_hub (`utils/_auth.py`, `constants.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptconv.io.local import LocalPlace
from ckptconv.io.location import read_small
from ckptconv.support.errors import CheckpointError


def is_set(name: str) -> bool:
    """Whether a variable says yes."""
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def hub_token() -> str | None:
    """The token that requests to the Hub may bear; None without one."""
    if is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    named = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    return _clean(named) or _in_file(_file())


def _file() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or f"{home}/token"))


def _in_file(file: Path) -> str | None:
    try:
        place = LocalPlace(file.expanduser())
        return _clean(read_small(place, "small_record_bytes").decode("utf-8"))
    except (CheckpointError, OSError, RuntimeError, UnicodeDecodeError):
        return None


def _clean(text: str) -> str | None:
    """The token, if it can stand in a header."""
    text = text.strip()
    return text if text and text.isascii() and text.isprintable() else None
