"""numpy is imported when it is first used, and is numpy then."""

from __future__ import annotations

import subprocess
import sys

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
