"""The libraries of the extra `remote`, imported when they are needed."""

from __future__ import annotations

from typing import Any

from ckptconv.support.errors import UnsupportedCheckpoint

EXTRA = "pip install 'obstore>=0.8' 'botocore>=1.36' 'urllib3>=2.2'"


def needed(name: str, address: str) -> Any:
    """A library of the extra, or `UnsupportedCheckpoint` that says how to install it."""
    try:
        if name == "obstore":
            import obstore
            import obstore.store

            return obstore
        if name == "urllib3":
            import urllib3

            return urllib3
        if name == "botocore":
            import botocore.session

            return botocore
        import fsspec

        return fsspec
    except ImportError:
        if name == "fsspec":
            what = "is not on this machine, and reading it needs fsspec"
            raise UnsupportedCheckpoint(what, path=address, hint="pip install fsspec") from None
        raise UnsupportedCheckpoint(
            "is not on this machine, and reading it needs obstore, botocore and urllib3",
            path=address,
            hint=EXTRA,
        ) from None
