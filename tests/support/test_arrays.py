"""numpy is imported when it is first used, and is numpy then."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

from ckptconv.io.remote.readahead import copied
from ckptconv.support.arrays import np
from ckptconv.support.choices import plain_name

PROGRAM = """
import sys
from ckptconv.support.arrays import Array, np

def before(values: Array) -> Array:
    return np.zeros(2)

print('numpy' in sys.modules)
before(None)
import numpy
print(np.float32 is numpy.float32, np.lib.format is numpy.lib.format)
numpy.zeros = None  # what is looked up later is what the module has by then
print(np.zeros)
try:
    np.no_such_name
except AttributeError as error:
    print(error)
"""


def test_numpy_is_imported_when_it_is_first_used():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "False",
        "True True",
        "None",
        "module 'numpy' has no attribute 'no_such_name'",
    ]


def test_a_numpy_that_another_thread_is_importing_is_not_asked(monkeypatch):
    """It stands in `sys.modules` half made: options and reads of other threads were errors."""
    assert np.float32
    monkeypatch.setitem(sys.modules, "numpy", ModuleType("numpy"))
    assert plain_name("f32") == "f32"
    assert plain_name(np.float32) == "float32"
    view = bytearray(1 << 20)
    copied(memoryview(b"x" * len(view)), memoryview(view))
    assert view.count(b"x") == len(view)
