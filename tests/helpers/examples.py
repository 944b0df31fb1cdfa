"""How many examples a property is tried with: a quarter of them in `make test` and in CI, all of
them in `make trust`.
"""

from __future__ import annotations

import os

ALL = os.environ.get("CKPTCONV_EXAMPLES") == "all"


def examples(count: int) -> int:
    """`count`, or a quarter of it where time is short."""
    return count if ALL else max(10, count // 4)
