"""Which store an address belongs to."""

from __future__ import annotations

import re

from ckptconv.io.remote.store import Store
from ckptconv.support.errors import UnsupportedCheckpoint


def store_of(address: str) -> tuple[Store, str]:
    """The store of an address, and the key in it; `UnsupportedCheckpoint` where it has none."""
    scheme = address.partition("://")[0].lower()
    if scheme in ("s3", "s3a"):
        from ckptconv.io.remote.s3 import s3_store

        return s3_store(_nameable(address))
    if scheme in ("gs", "gcs", "az", "azure", "abfs", "abfss"):
        from ckptconv.io.remote.objects import object_store

        return object_store(_nameable(address))
    if scheme in ("http", "https", "hf"):
        from ckptconv.io.remote.hub import hub_address, hub_store
        from ckptconv.io.remote.web import web_store

        named = address if scheme == "hf" else hub_address(address)
        return web_store(address) if named is None else hub_store(named)
    from ckptconv.io.remote.filesystems import filesystem_store

    return filesystem_store(address)


def _nameable(address: str) -> str:
    """The address; `UnsupportedCheckpoint` for a key that is legal and that obstore cannot name, as
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
        return address
    what = f"has {odd} in its key, which the client of this service cannot ask for"
    hint = "open it by a signed https address (aws s3 presign, gcloud storage sign-url)"
    raise UnsupportedCheckpoint(what, path=address, hint=hint)


_CONTROL = re.compile(r"[\x00-\x1f\x7f]").search
