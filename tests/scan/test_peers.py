"""Other scanners of pickles: what two of them flag, of the files that their own tests scan, is
never called plain.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptconv import scan_checkpoint
from helpers.peer_files import SCANNERS, collected, flagging

FILES = Path(
    os.environ.get(
        "CKPTCONV_PEER_FILES", Path(__file__).parents[1] / ".venv-families" / "peers" / "files"
    )
)


@pytest.fixture(scope="module")
def files() -> list[Path]:
    for name in SCANNERS:
        pytest.importorskip(name)
    if not (found := list(collected(FILES))):
        pytest.skip(
            f"no files of other scanners in {FILES} (CKPTCONV_PEER_FILES); make families collects "
            "them"
        )
    return found


def test_nothing_that_two_other_scanners_flag_is_called_plain(files):
    flagged = [path for path in files if len(flagging(path)) > 1]
    assert len(flagged) > 100, "their tests were collected"
    assert [path.name for path in flagged if scan_checkpoint(path).level == "plain"] == []
