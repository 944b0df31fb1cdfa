"""Which store an address belongs to."""

from __future__ import annotations

import re

from ckptconv.io.remote.store import Store
from ckptconv.support.errors import UnsupportedCheckpoint

WEB = ("http", "https")
S3 = ("s3", "s3a")
OBJECTS = ("gs", "gcs", "az", "azure", "abfs", "abfss")
HUB = ("hf",)


def store_of(address: str) -> tuple[Store, str]:
    """The store of an address, and the key in it; `UnsupportedCheckpoint` where it has none."""
    scheme = address.partition("://")[0].lower()
    if scheme in WEB:
        from ckptconv.io.remote.hub import hub_address, hub_store

        if (named := hub_address(address)) is not None:
            return hub_store(named)
        from ckptconv.io.remote.web import web_store

        return web_store(address)
    if scheme in HUB:
        from ckptconv.io.remote.hub import hub_store

        return hub_store(address)
    if scheme in (*S3, *OBJECTS):
        _refuse_unnameable(address)
    if scheme in S3:
        from ckptconv.io.remote.s3 import s3_store

        return s3_store(address)
    if scheme in OBJECTS:
        from ckptconv.io.remote.objects import object_store

        return object_store(address)
    from ckptconv.io.remote.filesystems import filesystem_store

    return filesystem_store(address)


def _refuse_unnameable(address: str) -> None:
    """Raise `UnsupportedCheckpoint` for a key that is legal and that obstore cannot name, as
    ``object_store::path::Path`` says: an empty part would be lost, and another object meant.
    """
    _, _, key = address.partition("://")[2].partition("/")
    if "//" in f"/{key}":
        odd = "an empty part (//)"
    elif _CONTROL(key):
        odd = "a control character"
    elif {".", ".."} & {*key.split("/")}:
        odd = "a part that is . or .."
    else:
        return
    what = f"has {odd} in its key, which the client of this service cannot ask for"
    hint = "open it by a signed https address (aws s3 presign, gcloud storage sign-url)"
    raise UnsupportedCheckpoint(what, path=address, hint=hint)


_CONTROL = re.compile(r"[\x00-\x1f\x7f]").search
