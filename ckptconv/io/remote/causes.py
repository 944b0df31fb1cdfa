"""What answers and errors of other machines mean, and errors of the libraries that ask them: told
without an address, a key or a signature, for their texts have them all.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from ckptconv.io.remote.store import TRIES, Failing, Seen, StoreError
from ckptconv.support.errors import printable

NAMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure"}
"""The services, as they are called in errors."""

CREDENTIALS = "see: ckptconv help remote (credentials)"

_Meaning = tuple[Failing, str, str | None]

_FORBIDDEN: _Meaning = ("denied", "does not allow it", CREDENTIALS)
_REGION: _Meaning = (
    "final",
    "has the bucket in another region",
    "set AWS_REGION to that of the bucket",
)
_MISSING: _Meaning = ("missing", "no such file", "check the address")

# what codes that stand in the body of an answer mean
_CODES: tuple[tuple[str, _Meaning], ...] = (
    ("NoSuchBucket", ("final", "has no such bucket", "check the address")),
    ("ContainerNotFound", ("final", "has no such container", "check the address")),
    ("ContainerBeingDeleted", ("final", "is deleting the container", None)),
    ("InvalidBucketName", ("final", "does not accept this as a bucket name", "check it")),
    ("AccountIsDisabled", ("final", "says that the account is disabled", None)),
    ("NoSuchKey BlobNotFound", _MISSING),
    ("NoSuchUpload", ("missing", "the upload is not known any more: it was aborted", None)),
    ("InvalidAccessKeyId", ("denied", "does not know the access key", CREDENTIALS)),
    (
        "SignatureDoesNotMatch AuthenticationFailed AuthorizationFailure",
        ("denied", "does not accept the signature: the secret key is wrong", CREDENTIALS),
    ),
    (
        "InvalidToken ExpiredToken TokenRefreshRequired RequestExpired",
        ("denied", "says that the credentials have expired", "get new ones, and try again"),
    ),
    (
        "RequestTimeTooSkewed",
        ("denied", "says that the clock of this machine is wrong", "set the clock"),
    ),
    (
        "AccessDenied AllAccessDisabled AccountProblem AuthorizationPermissionMismatch "
        "PublicAccessNotPermitted",
        _FORBIDDEN,
    ),
    ("InvalidObjectState", ("final", "keeps it in an archive", "restore it first")),
    ("BlobArchived", ("final", "keeps it in an archive", "rehydrate it first")),
    ("PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException", _REGION),
    ("EntityTooLarge", ("final", "does not accept an object of this size", None)),
    ("QuotaExceeded", ("final", "has no room left", None)),
    (
        "SlowDown ServerBusy TooManyRequests Throttling ThrottlingException RequestLimitExceeded "
        "BandwidthLimitExceeded",
        ("passing", "asks for fewer requests", None),
    ),
    ("RequestTimeout", ("passing", "received too little data for too long", None)),
    ("BadDigest", ("passing", "received other bytes than were sent", None)),
    ("IncompleteBody", ("passing", "received fewer bytes than were sent", None)),
    (
        "ConditionalRequestConflict OperationAborted",
        ("passing", "is handling another request for it", None),
    ),
)
_MEANINGS = {code: meaning for codes, meaning in _CODES for code in codes.split()}

_PASSING = frozenset((408, 409, 425, 429, 500, 502, 503, 504))


class Forbidden(StoreError):
    """The store knows who asks, and forbids it; who may write need not be allowed to read."""


def meant(
    service: str, code: str, status: int, *, region: str | None = None, wait: float | None = None
) -> StoreError:
    """The error that the code and the status of an answer stand for."""
    who = NAMES[service]
    if status == 407:
        return unreached("password", who)
    if code == "PreconditionFailed" or status == 412:
        return StoreError("changed")
    meaning = _MEANINGS.get(code) or _by_status(code, status)
    kind, what, hint = meaning
    if kind == "missing":
        return StoreError(kind, what, hint=hint)
    if region and _MEANINGS.get(code) is _REGION:
        what, hint = f"has the bucket in the region {region}", f"set AWS_REGION={region}"
    if meaning is _FORBIDDEN:
        return Forbidden(kind, f"{who} {what}", hint=hint, wait=wait)
    return StoreError(kind, f"{who} {what}", hint=hint, wait=wait)


def _by_status(code: str, status: int) -> _Meaning:
    if status in _STATUSES:
        return _STATUSES[status]
    said = f"answers with status {status}"
    if code:
        said = f"answers {code} (status {status})"
    if status in _PASSING or status >= 500:
        return "passing", said, None
    return "final", said, None


_STATUSES = {301: _REGION, 401: _FORBIDDEN, 403: _FORBIDDEN, 404: _MISSING}


_CODE = re.compile(r"<Code>([A-Za-z][A-Za-z0-9]{2,60})</Code>").search  # of S3's XML
_STATUS = re.compile(r"(?:status code: |status: )(\d{3})").search  # of obstore's own words
_WHERE = re.compile(r"<Region>([a-z0-9-]{2,40})</Region>").search
_ADDRESS = re.compile(r"https?://\S+").sub
_ASKING_WHO = re.compile(r"Generic \w+ error: Error performing token request").match

# ---------------------------------------------------------------------------- who asks is not known

_NO_ROLE = "the service that grants the role does not answer", "check the network and the region"
# what errors of botocore and of the system mean where credentials were asked for
_WHO = {
    "SSOTokenLoadError": ("there is no SSO login", "aws sso login"),
    "SSOError": ("the SSO login has expired", "aws sso login"),
    "EndpointConnectionError": _NO_ROLE,
    "ConnectTimeoutError": _NO_ROLE,
    "NoRegionError": (
        "the service that grants the role is asked in a region, and none is set",
        "set AWS_DEFAULT_REGION, or region in the profile",
    ),
    "ClientError": ("AWS does not grant the role", "check role_arn, and who may assume it"),
    "FileNotFoundError": (
        "the token file is missing",
        "see AWS_WEB_IDENTITY_TOKEN_FILE, or web_identity_token_file of the profile",
    ),
    "RuntimeError": (
        "the credentials that it is given have expired",
        "check credential_process, or get new ones",
    ),
    "CredentialRetrievalError": (
        "the program that gives the credentials fails",
        "try the credential_process of the profile",
    ),
    "MetadataRetrievalError": ("this machine gets no credentials", CREDENTIALS),
    "ProfileNotFound": ("there is no such profile", "see AWS_PROFILE and ~/.aws/config"),
    "ConfigParseError": (
        "a profile file cannot be parsed",
        "see AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE",
    ),
    "PartialCredentialsError": ("one of the two keys is missing", CREDENTIALS),
    "Exception": ("the credentials fail", CREDENTIALS),
}

_FAILED = re.compile(r"credentials-fail-by-(\w+)").search


def credentials_failed(error: BaseException) -> tuple[str, str]:
    """Why there are no credentials, and what to do."""
    what, hint = _WHO[_who_failed(error)]
    file = getattr(error, "kwargs", {}).get("path")  # botocore's, of a file that it cannot parse
    if file is not None:
        what = f"{what} ({printable(file)})"
    return what, hint


def in_words_of_obstore(error: BaseException) -> Exception:
    """An error for obstore, by whose text `told_by_obstore` knows it again."""
    return PermissionError(f"credentials-fail-by-{_who_failed(error)}")


def _who_failed(error: BaseException) -> str:
    kinds = [kind.__name__ for one in _chain(error) for kind in type(one).__mro__]
    return next((kind for kind in kinds if kind in _WHO), "Exception")


# ------------------------------------------------------------------------ who is not reached at all

# why nothing was answered
_UNREACHED: dict[str, _Meaning] = {
    "expired": (
        "final",
        "has a certificate that has expired",
        "it has to be renewed there; or the clock of this machine is wrong",
    ),
    "early": (
        "final",
        "has a certificate that is not valid yet",
        "check the clock of this machine",
    ),
    "host": ("final", "has a certificate for another host", "check the address"),
    "issuer": (
        "final",
        "has a certificate that this machine does not trust",
        "SSL_CERT_FILE names the file or folder of yours (for S3 AWS_CA_BUNDLE too)",
    ),
    "rules": (
        "final",
        "has a certificate, or its authority has one, that breaks a rule of RFC 5280",
        "Python 3.13 and newer hold them; have it made anew, or use an older Python",
    ),
    "plain": ("final", "does not speak TLS there", "write http:// if that is meant"),
    "TLS": ("passing", "does not speak TLS as it should", None),
    "password": (
        "denied",
        "cannot be reached: the proxy asks for a password (status 407)",
        "write it into HTTPS_PROXY or HTTP_PROXY: http://USER:PASSWORD@HOST:PORT",
    ),
    "tunnel": (
        "final",
        "cannot be reached: the proxy does not let this through",
        "see HTTPS_PROXY and NO_PROXY",
    ),
    "proxy": (
        "passing",
        "cannot be reached: the proxy does not answer",
        "see HTTPS_PROXY and NO_PROXY",
    ),
    "nameless": ("passing", "has no address, or there is no network", "check the address"),
    "down": ("passing", "does not answer", "check the address and the network"),
    "cut": ("passing", "closed the connection", "if it speaks TLS, write https://"),
}

# by which words the text of obstore tells them, the first that it has
_IN_OBSTORE = (
    ("ExpiredContext", "expired"), ("Expired", "expired"), ("NotValidYet", "early"),
    ("NotValidForName", "host"), ("InvalidContentType", "plain"), ("certificate", "issuer"),
    ("InvalidCertificate", "issuer"), ("ProxyAuth", "password"), ("roxy auth", "password"),
    ("Tunnel", "tunnel"), ("ConnectionReset", "cut"), ("dns error", "nameless"),
    ("kind: Connect", "down"), ("tcp connect error", "down"), ("Connection refused", "down"),
)  # fmt: skip

_STRICT = range(80, 95)  # X509_V_FLAG_X509_STRICT, in x509_vfy.h of OpenSSL 3
_BY_CODE = {  # of OpenSSL's verification
    9: "early", 10: "expired", 62: "host", 64: "host", **dict.fromkeys(_STRICT, "rules"),
}  # fmt: skip
_BY_NAME = (
    ("ProxyError", "proxy"), ("ProxyConnectionError", "proxy"), ("SSLError", "TLS"),
    ("gaierror", "nameless"), ("NewConnectionError", "down"), ("ConnectTimeoutError", "down"),
    ("EndpointConnectionError", "down"),
)  # fmt: skip
_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3})").search


def unreached(cause: str, who: str) -> StoreError:
    """The error for a host that was never heard of."""
    kind, what, hint = _UNREACHED[cause]
    told = StoreError(kind, f"{who} {what}", hint=hint)
    if kind == "passing":
        told.tries = TRIES - 1  # the address is likely wrong
    return told


def not_connected(error: BaseException, who: str, *, is_plain: bool = False) -> StoreError:
    """What an error of urllib3 means, or of botocore, which asks by it; `is_plain`: without TLS."""
    causes = tuple(_chain(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return unreached(_BY_CODE.get(cause.verify_code, "issuer"), who)
        if isinstance(cause, ssl.SSLError) and "WRONG_VERSION" in str(cause):
            return unreached("plain", who)
        refused = isinstance(cause, OSError) and _TUNNEL(str(cause))
        if refused:
            return unreached({"407": "password"}.get(refused[1], "tunnel"), who)
    names = {type(cause).__name__ for cause in causes}
    for name, found in _BY_NAME:
        if name in names:
            return unreached(found, who)
    if any(isinstance(cause, TimeoutError) for cause in causes) or "ReadTimeoutError" in names:
        return StoreError("passing", f"{who} does not answer in time")
    if isinstance(error, ValueError):
        return StoreError("final", "is not an address of the web", hint="check the address")
    told = unreached("cut", who)
    if not is_plain:
        told.hint = None
    return told


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised for."""
    found: list[BaseException] = []
    waiting: list[Any] = [error]
    while waiting:
        cause = waiting.pop()
        if isinstance(cause, BaseException) and cause not in found:
            found.append(cause)
            waiting += [cause.__cause__, cause.__context__, *cause.args]
            waiting += [getattr(cause, "original_error", None), getattr(cause, "reason", None)]
            waiting += [*getattr(cause, "kwargs", {}).values()]
    yield from found


def told_by_obstore(error: BaseException, service: str, *, is_signed: bool = True) -> StoreError:
    """What an error of obstore means. Its text has the address and the body of the answer."""
    told = _told(error, service)
    if is_signed or told.kind != "denied":
        return told
    what = f"{NAMES[service]} does not show it to everybody, and the request was not signed"
    return Forbidden("denied", what, hint=CREDENTIALS)


def _first(found_in: Callable[[str], re.Match[str] | None], text: str) -> str:
    """The first group of a pattern; nothing where it is not in a text."""
    found = found_in(text)
    return found[1] if found else ""


def _told(error: BaseException, service: str) -> StoreError:
    name, who = type(error).__name__, NAMES[service]
    text = _ADDRESS("", str(error))  # whose words are the user's
    code, status, region = (_first(found, text) for found in (_CODE, _STATUS, _WHERE))
    if name == "AlreadyExistsError":
        return StoreError("exists")
    if name == "PreconditionError":
        return StoreError("changed")
    if "without LOCATION" in text:
        return meant(service, "PermanentRedirect", 301)
    failed = _first(_FAILED, text)
    if failed:
        what, hint = _WHO[failed]
        return StoreError("denied", f"{who} cannot be asked: {what}", hint=hint)
    if (name == "UnauthenticatedError" and not status) or _ASKING_WHO(text):
        what = f"{who} needs credentials, and those found fail"
        return StoreError("denied", what, hint=CREDENTIALS)
    if isinstance(error, FileNotFoundError) and not status:
        return StoreError("missing", hint="check the address")
    if code or status:
        return meant(service, code, int(status or 0), region=region)
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Forbidden("denied", f"{who} does not allow it", hint=CREDENTIALS)
    if isinstance(error, ValueError) or name in ("InvalidPathError", "NotSupportedError"):
        what = "holds a key that its client cannot name (an empty part, a control character)"
        return StoreError("final", f"{who} {what}")
    if "builder error" in text:
        return StoreError("final", f"{who} cannot be asked: the address of the service is wrong")
    if "non-partial" in text.lower() or "NotPartial" in text:
        hint = "download it first: this server does not give parts of files"
        return StoreError("final", f"{who} answers with the whole file", hint=hint)
    cause = next((cause for words, cause in _IN_OBSTORE if words in text), None)
    if cause is None:
        return StoreError("passing", f"{who} does not answer")
    told = unreached(cause, who)
    if cause == "cut" and "https:" in str(error):
        told.hint = None
    return told


# ------------------------------------------------------------------------- answers of web servers

Headers = Mapping[str, str]

# to S3, 409 is two requests for one object at a time; to a web server, what another try meets again
_PASSING_OF_WEB = _PASSING - {409}
_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-(\d{1,19})/(\d{1,19})\s*", re.IGNORECASE).fullmatch
_SECONDS = re.compile(r"\s*(\d{1,9})(?:\.\d*)?\s*").fullmatch
_LEFT = re.compile(r"[;\s]r\s*=\s*(\d{1,9})").search
_RESET = re.compile(r"[;\s]t\s*=\s*(\d{1,9})").search

LIES = 3
"""How often a server may answer against the rules before it is believed to do so always."""


def range_of(headers: Headers) -> tuple[int, int, int] | None:
    """Where the bytes of an answer begin and end, and how many there are in all; None where that
    is not told.

    >>> range_of({"Content-Range": "bytes 5-9/100"})
    (5, 10, 100)
    """
    found = _RANGE(headers.get("Content-Range", ""))
    if found is None:
        return None
    first, last, total = (int(number) for number in found.groups())
    return (first, last + 1, total) if first <= last < total else None


def length_of(headers: Headers) -> int | None:
    """The length of the body as it is told."""
    text = headers.get("Content-Length", "").strip()
    if not text.isascii() or not text.isdigit() or len(text) >= 20:  # of at most 64 bits
        return None
    return int(text)


def seen(size: int, headers: Headers) -> Seen:
    """The version of a file that is `size` bytes long."""
    tag = headers.get("ETag", "").strip()
    if is_strong(tag):
        return Seen(size, tag, True)
    # files of other bytes may have one weak tag
    return Seen(size, f"{tag} {headers.get('Last-Modified', '').strip()}".strip(), False)


def is_strong(tag: str) -> bool:
    """Whether two versions with this tag are the same, byte for byte."""
    return len(tag) > 2 and tag[0] == tag[-1] == '"'


def wait_of(headers: Headers, status: int) -> float | None:
    """The seconds for which a server asks to wait; None where it does not.

    Retry-After tells seconds or a date; RateLimit (of the Hub) the seconds until there may be
    requests again.

    >>> wait_of({"RateLimit": '"api";r=0;t=55'}, 429), wait_of({"Retry-After": "7"}, 503)
    (55.0, 7.0)
    """
    limit = headers.get("RateLimit", "")
    reset = _RESET(limit)
    if status == 429 and reset:
        left = _LEFT(limit)
        if left is None or not int(left[1]):
            return float(reset[1])
    text = headers.get("Retry-After", "")
    found = _SECONDS(text)
    if found:
        return float(found[1])
    try:
        until = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=timezone.utc)
    return max(0.0, (until - datetime.now(timezone.utc)).total_seconds())


def refusal(status: int, headers: Headers, hints: Mapping[int, str] | None = None) -> StoreError:
    """The error for an answer that holds no bytes."""
    hint = (hints or {}).get(status)
    if status in (404, 410):
        return StoreError("missing", hint=hint or "check the address")
    if status in (401, 403):
        return StoreError("denied", f"the server does not allow it (status {status})", hint=hint)
    if status == 407:
        return unreached("password", "the server")
    if status == 412:
        return StoreError("changed")
    what = f"the server answers with status {status}"
    if status not in _PASSING_OF_WEB:
        return StoreError("final", what, hint=hint)
    wait = wait_of(headers, status)
    if wait is not None and wait >= 1:
        what = f"{what}, and asks to wait {wait:.0f} s"
    return StoreError("passing", what, hint=hint or "try again later", wait=wait)
