"""An error as JSON values."""

from __future__ import annotations

from typing import Any

from ckptconv.keys.fits import Fit
from ckptconv.support.errors import CheckpointError, KeyMismatch


def error_document(error: CheckpointError, exit_code: int) -> dict[str, Any]:
    """An error as JSON values, with the exit code of the program."""
    return {
        "error": {
            "kind": type(error).__name__,
            "message": str(error),
            "path": error.path,
            "where": error.where,
            "what": error.what,
            "hint": error.hint,
            "exit_code": exit_code,
        },
        **(
            {"fit": fit_document(error.fit)}
            if isinstance(error, KeyMismatch) and isinstance(error.fit, Fit)
            else {}
        ),
    }


def fit_document(fit: Fit) -> dict[str, Any]:
    """What became of each key of a fit, as JSON values."""
    return {
        "how": fit.how,
        "fits": fit.fits,
        "covers": fit.covers,
        "renames": dict(fit.renames),
        "missing": list(fit.missing),
        "unexpected": list(fit.unexpected),
        "mismatched": [
            {
                "key": item.key,
                "source_key": item.source_key,
                "source": item.source,
                "target": item.target,
            }
            for item in fit.mismatched
        ],
        "ambiguous": {item.key: list(item.source_keys) for item in fit.ambiguous},
        "nearest": {item.key: list(item.source_keys) for item in fit.nearest},
        "filled": dict(fit.filled),
    }
