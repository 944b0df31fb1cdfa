"""Warnings name the line of the program that called ckptconv, and can be made errors."""

from __future__ import annotations

import warnings

import pytest

from ckptconv import CheckpointWarning
from ckptconv.support.errors import warn


def _called_by_ckptconv(*notes: str) -> None:
    """`warn`, called two functions deep in code that says it is of ckptconv."""
    names = {"__name__": "ckptconv.somewhere", "warn": warn}
    exec("def inner(notes):\n    warn(notes)\ndef outer(notes):\n    inner(notes)", names)
    names["outer"](notes)  # type: ignore[operator]


def test_a_warning_stands_at_the_line_that_called_ckptconv():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            _called_by_ckptconv("the moving average was taken\n")
    assert [str(w.message) for w in shown] == ["the moving average was taken\\n"]
    # the caller is the function above: a line of this file, not one of the package
    assert shown[0].filename == __file__


def test_a_program_can_make_it_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        with pytest.raises(CheckpointWarning, match="left out"):
            _called_by_ckptconv("a part was left out")
