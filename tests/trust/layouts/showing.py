"""Layouts, verdicts and differences as short text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from layouts.rule import Refused, Taken


def shown(tree: Any, depth: int = 0) -> str:
    """A tree, one label a line, each tensor by its type, shape and first value."""
    if isinstance(tree, (torch.Tensor, np.ndarray)):
        kind = "tensor" if isinstance(tree, torch.Tensor) else "array"
        first = tree.reshape(-1)[0].item()
        return f"{kind}{list(tree.shape)}={first:g}"
    if isinstance(tree, (dict, list, tuple)) and tree:
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        kind = (
            ""
            if type(tree) is dict
            else type(tree).__name__ + (" with _metadata" if hasattr(tree, "_metadata") else "")
        )
        lines = [
            f"{'  ' * (depth + 1)}{label!s}: {shown(value, depth + 1)}" for label, value in pairs
        ]
        return "\n".join([kind, *lines])
    return repr(tree)


def told(verdict: Taken | Refused) -> str:
    """A verdict of the rule in a line."""
    if isinstance(verdict, Refused):
        return (
            f"an error that lists {', '.join(verdict.choices)}"
            if verdict.choices
            else "an error: no state dict"
        )
    left = f", without {', '.join(verdict.left_out)}" if verdict.left_out else ""
    return f"'{verdict.name}' with {', '.join(verdict.state_dict)}{left}"
