"""Who asks: credentials as each ecosystem has them. None of them is ever printed.

S3: what botocore finds, as the AWS command line does: the environment, profiles, SSO, processes,
web identities, roles of containers and instances. Google Cloud and Azure: what obstore finds, and
the names of variables that their own tools know. Where nobody is named, buckets that anybody may
read are read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ckptconv.io.remote.causes import CREDENTIALS, credentials_failed, in_words_of_obstore
from ckptconv.io.remote.network import Trusted, certificates, is_set, needed, proxy_for, tls_of
from ckptconv.support import platforms
from ckptconv.support.errors import UnsupportedCheckpoint


def options_of(
    service: str, bucket: str, *, host: str | None = None, tries: int = 0
) -> dict[str, Any]:
    """What a store of obstore is opened with, which tries again `tries` times by itself. `host` is
    that of Azure's account, where the address names it.
    """
    options: dict[str, Any] = {
        "retry_config": {
            "max_retries": tries,
            "retry_timeout": timedelta(seconds=120 if tries else 1),
        },
        "client_options": {"timeout": "120s", "connect_timeout": "10s"},
    }
    endpoint = endpoint_of(service)
    if endpoint is not None and endpoint.startswith("http://"):
        options["client_options"]["allow_http"] = True
    if service == "s3":
        trusted = certificates_of_aws()
        options |= _s3_options(endpoint, bucket)
    elif service == "gs":
        trusted = certificates()
        options |= _google(endpoint)
    else:
        trusted = certificates()
        options |= _azure(endpoint, host)
    if trusted is not None:
        options["client_options"]["root_certificate"] = trusted.pem
    at = options.get("endpoint", endpoint) or usual_endpoint(
        service, bucket, None, options.get("region") or options.get("account_name", "")
    )
    options["client_options"] |= _proxies(at)
    return options


def usual_endpoint(service: str, bucket: str, endpoint: str | None, where: str) -> str:
    """The address that a service is asked at: `endpoint`, else its own in a region or account."""
    hosts = {
        "s3": f"{bucket}.s3.{where}.amazonaws.com",
        "gs": "storage.googleapis.com",
        "az": f"{where}.blob.core.windows.net",
    }
    return endpoint or f"https://{hosts[service]}"


def _proxies(at: str) -> dict[str, str]:
    """What makes obstore use the proxy for an address or none: by itself it knows no ports, and no
    address by ``*``, in NO_PROXY.
    """
    proxy = proxy_for(at)
    if proxy is not None:
        return {"proxy_url": proxy}
    if not getproxies():
        return {}
    # a proxy that is never asked stands in for that of the environment, which would be
    return {"proxy_url": "http://127.0.0.1:9", "proxy_excludes": urlsplit(at).hostname or ""}


_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_STORAGE_SERVICE_ENDPOINT"),
}


def endpoint_of(service: str) -> str | None:
    """Where a service is, if not at its usual place."""
    if service == "s3" and is_set("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
        return None
    found = _first(*_ENDPOINTS[service])
    if service == "s3" and found is None and _has_profile():
        found = _endpoint_of_profile()
    if service == "az" and found is None:
        found = _blob_endpoint(_connection())
    if not found:
        return None
    if "://" not in found:  # STORAGE_EMULATOR_HOST is a host and a port
        found = f"http://{found}"
    return found.rstrip("/")


def _first(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)


def certificates_of_aws() -> Trusted | None:
    """The certificates that those of S3 are held against."""
    of_profile = None
    if not os.environ.get("AWS_CA_BUNDLE") and _has_profile():
        of_profile = profile_session().get_config_variable("ca_bundle")
    return certificates(of_profile=of_profile, is_aws=True)


# ---------------------------------------------------------------------------------------------- S3


def is_anonymous() -> bool:
    """Whether requests to S3 are not signed, because the user wants it so."""
    return is_set("AWS_SKIP_SIGNATURE") or is_set("AWS_NO_SIGN_REQUEST")


def _has_plain_keys() -> bool:
    """Whether the environment alone says who asks; botocore is not needed then."""
    return bool(os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"))


def _has_profile() -> bool:
    config = os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")
    shared = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return any(Path(path).expanduser().is_file() for path in (config, shared))


def _s3_options(endpoint: str | None, bucket: str) -> dict[str, Any]:
    options: dict[str, Any] = {"region": region_of(bucket, endpoint)}
    if endpoint is not None:
        options |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
    elif "." not in bucket:  # the certificates of the service are for one name before the dot
        options["virtual_hosted_style_request"] = True
    if is_anonymous():
        return {**options, "skip_signature": True}
    if _has_plain_keys():
        return {
            **options,
            "access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
            "secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        }
    found = credentials()
    if found is None:
        return {**options, "skip_signature": True}
    return {**options, "credential_provider": _provider(found)}


def credentials() -> Any:
    """What botocore finds; None where it finds nothing. `UnsupportedCheckpoint` where a profile is
    asked for that does not work.
    """
    import botocore.exceptions

    try:
        return profile_session().get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        failed = _without(error)
    raise failed  # here, so that no answer of a server is its context


def _without(error: Exception) -> UnsupportedCheckpoint:
    what, hint = credentials_failed(error)
    return UnsupportedCheckpoint(f"cannot be asked for: {what}", hint=hint)


def _provider(found: Any) -> Callable[[], dict[str, Any]]:
    """What obstore calls for credentials; those of roles are renewed by botocore."""

    def provide() -> dict[str, Any]:
        try:
            frozen = found.get_frozen_credentials()
        except Exception as error:  # its text may hold what is secret
            raise in_words_of_obstore(error) from None
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # when obstore asks again; botocore gives none that last for less than ten minutes
            "expires_at": datetime.now(timezone.utc) + timedelta(minutes=5),
        }

    return provide


def region_of(bucket: str, endpoint: str | None) -> str:
    """The region of a bucket: of the environment or the profile; else AWS is asked."""
    found = _first("AWS_REGION", "AWS_DEFAULT_REGION")
    if found is None and _has_profile():
        found = profile_session().get_config_variable("region")
    if found is None and endpoint is None:
        found = _region_told(bucket)
    return found or "us-east-1"


AWS = "https://s3.amazonaws.com"


@lru_cache(maxsize=64)
def _region_told(bucket: str) -> str | None:
    """The region that S3 names to whoever asks for a bucket, allowed or not."""
    import ssl
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    from ckptconv.io.remote.traffic import count

    count(requests=1)
    trusted = certificates_of_aws()
    context = ssl.create_default_context() if trusted is None else tls_of(trusted.pem)
    request = Request(f"{AWS}/{bucket}", method="HEAD")
    try:
        with urlopen(request, timeout=5, context=context) as answer:
            headers = answer.headers
    except HTTPError as error:  # S3 names the region in refusals too
        headers = error.headers
    except OSError:
        return None
    return str(headers.get("x-amz-bucket-region") or "") or None


def _endpoint_of_profile() -> str | None:
    from botocore.configprovider import ConfiguredEndpointProvider

    session = profile_session()
    provider = ConfiguredEndpointProvider(
        full_config=session.full_config, scoped_config=session.get_scoped_config(), client_name="s3"
    )
    return str(provider.provide() or "") or None


def profile_session() -> Any:
    """botocore's view of this user: profiles, regions, credentials."""
    about = ("AWS_", "HOME", "USERPROFILE")
    named = [(name, value) for name, value in os.environ.items() if name.startswith(about)]
    return _session(tuple(sorted(named)))


@lru_cache(maxsize=1)
def _session(_: tuple[tuple[str, str], ...]) -> Any:
    session = needed("botocore", "s3://").session.Session()
    try:
        session.get_scoped_config()
    except Exception as error:  # there is no such profile
        failed = _without(error)
    else:
        return session
    raise failed


# ------------------------------------------------------------------------------------ Google Cloud


def _google(endpoint: str | None) -> dict[str, Any]:
    if endpoint is not None:  # an emulator, which asks nobody who they are
        nobody = {"client_email": "", "private_key": "", "private_key_id": ""}
        emulated = {"gcs_base_url": endpoint, "disable_oauth": True, **nobody}
        return {"service_account_key": json.dumps(emulated)}
    if is_set("GOOGLE_SKIP_SIGNATURE"):
        return {"skip_signature": True}
    if _first(*_GOOGLE) is not None:
        return {}
    file = _gcloud_file()
    if file.is_file():
        return {"application_credentials": str(file)}
    return {} if _on_gce() else {"skip_signature": True}


_GOOGLE = (
    "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN",
)  # fmt: skip


def _gcloud_file() -> Path:
    """Where gcloud keeps the credentials of programs."""
    usual = "~/AppData/Roaming/gcloud" if platforms.ON_WINDOWS else "~/.config/gcloud"
    folder = Path(os.environ.get("CLOUDSDK_CONFIG") or usual).expanduser()
    return folder / "application_default_credentials.json"


@lru_cache(maxsize=1)
def _on_gce() -> bool:
    """Whether this is a machine of Google Cloud, which has credentials of its own."""
    host = os.environ.get("GCE_METADATA_HOST", "169.254.169.254")
    pool = needed("urllib3", "gs://").PoolManager(timeout=1.0, retries=False)
    try:
        answer = pool.request("GET", f"http://{host}/", headers={"Metadata-Flavor": "Google"})
    except Exception:  # nobody is at that address
        return False
    return bool(answer.headers.get("Metadata-Flavor") == "Google")


# ------------------------------------------------------------------------------------------- Azure


_HOSTS = re.compile(
    r"([a-z0-9]{3,24})\.(?:dfs|blob)\."
    r"(core\.(?:windows\.net|chinacloudapi\.cn|usgovcloudapi\.net))"
).fullmatch


def account_in(bucket: str) -> tuple[str, str | None]:
    """Container and host of the account of ``CONTAINER@ACCOUNT.dfs.core.windows.net``; where a
    container is alone, the environment has the account.

    >>> account_in("models@mine.dfs.core.windows.net"), account_in("models")
    (('models', 'mine.blob.core.windows.net'), ('models', None))
    """
    container, at, host = bucket.rpartition("@")
    if not at:
        return bucket, None
    found = _HOSTS(host.lower())
    if found is None or not container:  # whose host it is would be told what only Azure may know
        raise UnsupportedCheckpoint(
            "names no account of Azure",
            hint="write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/…",
        )
    return container, f"{found[1]}.blob.{found[2]}"


def _azure(endpoint: str | None, host: str | None) -> dict[str, Any]:
    connection = _connection()
    named = _first("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    named = named or connection.get("AccountName") or _account_at(endpoint)
    name = (host or "").partition(".")[0] or named
    if name is None:
        raise UnsupportedCheckpoint(
            "names no account of Azure",
            hint="set AZURE_STORAGE_ACCOUNT, or write "
            "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
        )
    key = _first("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCESS_KEY")
    key = key or connection.get("AccountKey")
    sas = _first("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
    sas = sas or connection.get("SharedAccessSignature")
    if host is not None and (endpoint is None or name != named):
        if named is not None and name != named and (key or sas):
            # a signature for one account is not for the eyes of another
            raise UnsupportedCheckpoint(
                f"is in the account {name}, and the credentials are those of {named}",
                hint=CREDENTIALS,
            )
        endpoint = f"https://{host}"
    options: dict[str, Any] = {"account_name": name}
    if endpoint is not None:
        options["endpoint"] = endpoint
    if is_set("AZURE_SKIP_SIGNATURE"):
        options["skip_signature"] = True
    elif key is not None:
        options["account_key"] = key
    elif sas is not None:
        options["sas_key"] = sas.removeprefix("?")
    elif Path("~/.azure").expanduser().is_dir() and not _first(
        "AZURE_CLIENT_ID", "AZURE_STORAGE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE"
    ):
        options["use_azure_cli"] = True
    return options


def _account_at(endpoint: str | None) -> str | None:
    """The account that the name of Azure's own host begins with."""
    found = _HOSTS((endpoint or "").partition("://")[2].lower())
    return found[1] if found else None


# what Azure's documentation says of the emulator: the key is the same everywhere, and no secret
_EMULATOR = {
    "AccountName": "devstoreaccount1",
    "AccountKey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/"
    "KBHBeksoGMGw==",
    "BlobEndpoint": "http://127.0.0.1:10000/devstoreaccount1",
}


def _blob_endpoint(parts: dict[str, str]) -> str | None:
    """Where a connection string says that the blobs are."""
    name, suffix = parts.get("AccountName"), parts.get("EndpointSuffix")
    if parts.get("BlobEndpoint") or not name or not suffix:
        return parts.get("BlobEndpoint")
    return f"{parts.get('DefaultEndpointsProtocol', 'https')}://{name}.blob.{suffix}"


def _connection() -> dict[str, str]:
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = dict(part.strip().split("=", 1) for part in text.split(";") if "=" in part)
    if parts.get("UseDevelopmentStorage", "").lower() == "true":
        return dict(_EMULATOR)
    return parts
