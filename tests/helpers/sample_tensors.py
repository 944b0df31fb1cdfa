"""What torch finds in the sample checkpoints, kept for where there is no torch.

``python tests/helpers/sample_tensors.py`` writes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from helpers.paths import DATA, SAMPLES

KEPT = DATA / "samples.json"


def found() -> dict[str, dict[str, list[Any]]]:
    """By name of a sample and path in it: dtype, shape, SHA-256 of the values in C order."""
    import torch

    def walk(value: Any, path: str) -> Iterator[tuple[str, list[Any]]]:
        if isinstance(value, torch.Tensor):
            raw = value.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()
            yield (
                path,
                [
                    str(value.dtype).removeprefix("torch."),
                    list(value.shape),
                    hashlib.sha256(raw).hexdigest(),
                ],
            )
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from walk(item, f"{path}.{key}".strip("."))
        elif hasattr(value, "state_dict"):
            yield from walk(dict(value.state_dict()), path)
        elif hasattr(value, "__dict__"):
            yield from walk(vars(value), path)

    loaded = {
        path.name: torch.load(path, map_location="cpu", weights_only=False)
        for path in sorted(SAMPLES.glob("*.pt"))
    }
    return {name: dict(walk(tree, "")) for name, tree in loaded.items()}


if __name__ == "__main__":
    KEPT.write_text(json.dumps(found(), indent=1) + "\n")
