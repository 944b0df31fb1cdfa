"""Who asks: credentials as each ecosystem has them. None of them is ever printed.

S3: what botocore finds, as the AWS command line does: the environment, profiles, SSO, web
identities, roles of containers and instances. Google Cloud and Azure: what obstore finds, and the
variables of their command lines that it does not know.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckptconv.support.errors import UnsupportedCheckpoint

HELP = "see: ckptconv help remote (credentials)"


def options_of(service: str, host: str | None = None) -> dict[str, Any]:
    """What a store of obstore is opened with; `host` is that of Azure's account, where the address
    names one.
    """
    options: dict[str, Any] = {
        # trying again is the business of `patience`
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        "client_options": {"timeout": "120s", "connect_timeout": "10s"},
    }
    endpoint = endpoint_of(service)
    if service == "s3":
        options |= _s3_options(endpoint)
    elif service == "gs":
        options |= _google_options(endpoint)
    else:
        options |= _azure_options(endpoint, host)
        endpoint = options.get("endpoint")
    if endpoint is not None and endpoint.startswith("http://"):
        options["client_options"]["allow_http"] = True
    return options


def endpoint_of(service: str) -> str | None:
    """Where a service is, if not at its usual place."""
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("STORAGE_EMULATOR_HOST",),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_STORAGE_SERVICE_ENDPOINT"),
    }
    found = _variable(*names[service])
    if found is not None and service == "gs" and "://" not in found:
        return f"http://{found}"  # as Google's own libraries take it
    if found is None and service == "s3" and not _has_plain_keys():
        found = profile_session().get_scoped_config().get("endpoint_url")
    return found


def _variable(*names: str) -> str | None:
    """The first of these variables that is set."""
    return next((value for name in names if (value := os.environ.get(name))), None)


# ---------------------------------------------------------------------------------------- Google


def _google_options(endpoint: str | None) -> dict[str, Any]:
    if endpoint is not None:
        account = {
            "gcs_base_url": endpoint.rstrip("/"),
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return {"service_account_key": json.dumps(account)}
    if _variable(*_GOOGLE_VARIABLES) is not None:
        return {}
    home = os.environ.get("CLOUDSDK_CONFIG")
    folder = Path(home) if home else Path.home() / ".config" / "gcloud"
    file = folder / "application_default_credentials.json"
    if file.is_file():
        return {"application_credentials": str(file)}
    # no machine of Google's: a bucket that anybody may read
    return {} if _is_known("metadata.google.internal") else {"skip_signature": True}


_GOOGLE_VARIABLES = (
    "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN", "GOOGLE_SKIP_SIGNATURE",
)  # fmt: skip


@lru_cache(maxsize=1)
def _is_known(host: str) -> bool:
    """Whether the network knows a host by its name."""
    try:
        socket.getaddrinfo(host, 80)
    except OSError:
        return False
    return True


# ----------------------------------------------------------------------------------------- Azure


def _azure_options(endpoint: str | None, host: str | None) -> dict[str, Any]:
    options = connection_options(os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    own = {
        "account_name": _variable("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
        "account_key": _variable(
            "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY"
        ),
        "sas_key": _variable("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"),
        "endpoint": endpoint,
    }
    options |= {name: value for name, value in own.items() if value is not None}
    if "sas_key" in options:
        options["sas_key"] = options["sas_key"].lstrip("?")
    if host is None:
        return options
    account = host.partition(".")[0]
    if options.get("account_name", account) == account:
        return {"account_name": account, "endpoint": f"https://{host}", **options}
    if options.keys() & {"account_key", "sas_key"}:  # not for the eyes of another account
        raise UnsupportedCheckpoint(
            f"is not in the account of the credentials, {options['account_name']}",
            path=f"https://{host}",
            hint=HELP,
        )
    return {**options, "account_name": account, "endpoint": f"https://{host}"}


def connection_options(text: str) -> dict[str, Any]:
    """What a connection string of Azure says.

    >>> connection_options("AccountName=a;AccountKey=c2VjcmV0==;EndpointSuffix=core.windows.net")
    {'account_name': 'a', 'account_key': 'c2VjcmV0==', 'endpoint': 'https://a.blob.core.windows.net'}
    """
    pairs = (item.partition("=") for item in text.split(";") if "=" in item)
    said = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if said.get("usedevelopmentstorage", "").lower() == "true":
        return {"use_emulator": True}
    options = {
        name: said[key]
        for name, key in (
            ("account_name", "accountname"),
            ("account_key", "accountkey"),
            ("sas_key", "sharedaccesssignature"),
        )
        if said.get(key)
    }
    if (endpoint := _blob_endpoint(said)) is not None:
        options["endpoint"] = endpoint
        host = endpoint.partition("://")[2].partition("/")[0]
        options.setdefault("account_name", host.partition(".")[0])
    return options


def _blob_endpoint(said: Mapping[str, str]) -> str | None:
    if found := said.get("blobendpoint"):
        return found.rstrip("/")
    if not (said.get("accountname") and said.get("endpointsuffix")):
        return None
    scheme = said.get("defaultendpointsprotocol", "https")
    return f"{scheme}://{said['accountname']}.blob.{said['endpointsuffix']}"


# -------------------------------------------------------------------------------------------- S3


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
