"""How state dicts fit a named model, and what `load_state_dict` would say of the file as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptconv.doctor import torch_words as words
from ckptconv.keys.fits import Fit, Shapes
from ckptconv.keys.fitting import fit_keys
from ckptconv.tree.fitted_keys import KeyTarget, shapes_of
from ckptconv.tree.state_dicts import StateDict


@dataclass(frozen=True, slots=True)
class ModelFit:
    """The state dict that fits best, how, and the error of `load_state_dict(strict=True)` (None: it
    loads as it is).
    """

    found: StateDict
    fit: Fit
    error: str | None

    @property
    def fixes(self) -> bool:
        """Whether other keys, and fewer, would do."""
        return self.fit.fits or (self.fit.covers and bool(self.fit.renames))


def best_fit(state_dicts: Sequence[StateDict], target: KeyTarget) -> ModelFit | None:
    """The state dict that loads as it is, else that can be made to fit, else that comes nearest.

    None where there is none.
    """
    fits = [_fit(found, target) for found in state_dicts]
    return max(
        fits,
        key=lambda fit: (fit.error is None, fit.fit.fits, fit.fixes, len(fit.fit.renames)),
        default=None,
    )


def _fit(found: StateDict, target: KeyTarget) -> ModelFit:
    shapes = shapes_of(found)
    return ModelFit(
        found, fit_keys(shapes, target.shapes, target.ties), _error(shapes, target.shapes)
    )


def _error(shapes: Shapes, target: Shapes) -> str | None:
    missing = [key for key in target if key not in shapes]
    unexpected = [key for key in shapes if key not in target]
    if missing:
        return words.on_missing(missing[0], unexpected[:1])
    if unexpected:
        return words.on_unexpected(unexpected[0])
    for key, wanted in target.items():
        have = shapes[key]
        if have is not None and wanted is not None and have != wanted:
            return words.on_shape(key, have, wanted)
    return None
