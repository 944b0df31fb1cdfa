"""Who asks: credentials as each ecosystem has them. None of them is ever printed.

S3: what botocore finds, as the AWS command line does: the environment, profiles, SSO, web
identities, roles of containers and instances. Google Cloud and Azure: what obstore finds.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any


def options_of(service: str) -> dict[str, Any]:
    """What a store of obstore is opened with."""
    options: dict[str, Any] = {
        # trying again is the business of `patience`
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        "client_options": {"timeout": "120s", "connect_timeout": "10s"},
    }
    endpoint = endpoint_of(service)
    if endpoint is not None and endpoint.startswith("http://"):
        options["client_options"]["allow_http"] = True
    if service == "s3":
        options |= _s3_options(endpoint)
    elif endpoint is not None:
        options |= _emulated(service, endpoint)
    return options


def endpoint_of(service: str) -> str | None:
    """Where a service is, if not at its usual place."""
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("STORAGE_EMULATOR_HOST",),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }
    found = next((value for name in names[service] if (value := os.environ.get(name))), None)
    if found is None and service == "s3" and not _has_plain_keys():
        found = profile_session().get_scoped_config().get("endpoint_url")
    return found


def _emulated(service: str, endpoint: str) -> dict[str, Any]:
    """Google Cloud's or Azure's service at another place than the usual one."""
    if service == "az":
        return {"endpoint": endpoint}
    return {"config": {"base_url": endpoint, "skip_signature": True}}


def _has_plain_keys() -> bool:
    """Whether the environment alone says who asks."""
    return bool(os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"))


def _s3_options(endpoint: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if endpoint is not None:
        options |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return {**options, "skip_signature": True}
    if _has_plain_keys():
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return {**options, "region": region or "us-east-1"}
    session = profile_session()
    options["region"] = session.get_config_variable("region") or "us-east-1"
    if (found := session.get_credentials()) is None:  # a bucket that anybody may read
        return {**options, "skip_signature": True}
    return {**options, "credential_provider": _provider(found)}


def _provider(credentials: Any) -> Any:
    """What obstore calls for credentials; those of roles are renewed by botocore."""

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(minutes=5),
        }

    return provide


@lru_cache(maxsize=1)
def profile_session() -> Any:
    """botocore's view of this user: profiles, regions, credentials."""
    from ckptconv.io.remote.missing import needed

    return needed("botocore", "s3://").session.Session()
