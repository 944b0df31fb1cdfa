"""Which store an address belongs to."""

from __future__ import annotations

import re
from importlib import import_module

from ckptconv.io.remote.store import Store
from ckptconv.support.errors import UnsupportedCheckpoint

_S3, _OBJECTS, _WEB = ("s3", "s3_store"), ("objects", "object_store"), ("web", "web_store")
_STORES = {
    "s3": _S3, "s3a": _S3,
    "gs": _OBJECTS, "gcs": _OBJECTS,
    "az": _OBJECTS, "azure": _OBJECTS, "abfs": _OBJECTS, "abfss": _OBJECTS,
    "http": _WEB, "https": _WEB,
    "hf": ("hub", "hub_store"),
}  # fmt: skip
"""Which function of which module here makes the store of an address; for any other, fsspec."""


def store_of(address: str) -> tuple[Store, str]:
    """The store of an address, and the key in it; `UnsupportedCheckpoint` where it has none."""
    scheme = address.partition("://")[0].lower()
    module, name = _STORES.get(scheme, ("filesystems", "filesystem_store"))
    if module == "web":
        from ckptconv.io.remote.hub import hub_address, hub_store

        if (named := hub_address(address)) is not None:
            return hub_store(named)
    if module in ("s3", "objects"):
        _refuse_unnameable(address)
    made: tuple[Store, str] = getattr(import_module(f"{__package__}.{module}"), name)(address)
    return made


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
