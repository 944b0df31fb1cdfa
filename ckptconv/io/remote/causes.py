"""What the errors of object stores mean, told without an address, a key or a signature: the texts
of their libraries have them all.
"""

from __future__ import annotations

import re

from ckptconv.io.remote.store import TRIES, Failing, StoreError

NAMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure"}
"""The services, as they are called in errors."""

CREDENTIALS = "see: ckptconv help remote (credentials)"

_Meaning = tuple[Failing, str, str | None]

_KEY: _Meaning = ("denied", "does not know the access key", CREDENTIALS)
_SECRET: _Meaning = ("denied", "does not accept the signature: the secret key is another", CREDENTIALS)  # fmt: skip # noqa: E501
_OLD: _Meaning = ("denied", "says that the credentials have expired", "get new ones, and try again")
_CLOCK: _Meaning = ("denied", "says that the clock of this machine is wrong", "set the clock")
_BUCKET: _Meaning = ("final", "has no such bucket", "check the address")
_REGION: _Meaning = ("final", "has the bucket in another region", "set AWS_REGION to that of the bucket")  # fmt: skip # noqa: E501
_FORBIDDEN: _Meaning = ("denied", "does not allow it", CREDENTIALS)
_BUSY: _Meaning = ("passing", "asks for fewer requests", None)

_MEANINGS: dict[str, _Meaning] = {
    "NoSuchBucket": _BUCKET,
    "ContainerNotFound": ("final", "has no such container", "check the address"),
    "ContainerBeingDeleted": ("final", "is deleting the container", None),
    "InvalidBucketName": ("final", "does not take this as the name of a bucket", "check it"),
    "AccountIsDisabled": ("final", "says that the account is disabled", None),
    "NoSuchKey": ("missing", "no such file", "check the address"),
    "BlobNotFound": ("missing", "no such file", "check the address"),
    "NoSuchUpload": ("missing", "the upload is not known any more: it was aborted", None),
    "InvalidAccessKeyId": _KEY,
    "SignatureDoesNotMatch": _SECRET,
    "AuthenticationFailed": _SECRET,
    "AuthorizationFailure": _SECRET,
    "InvalidToken": _OLD,
    "ExpiredToken": _OLD,
    "TokenRefreshRequired": _OLD,
    "RequestExpired": _OLD,
    "RequestTimeTooSkewed": _CLOCK,
    "AccessDenied": _FORBIDDEN,
    "AllAccessDisabled": _FORBIDDEN,
    "AccountProblem": _FORBIDDEN,
    "AuthorizationPermissionMismatch": _FORBIDDEN,
    "PublicAccessNotPermitted": _FORBIDDEN,
    "InvalidObjectState": ("final", "keeps it in an archive", "restore it first"),
    "BlobArchived": ("final", "keeps it in an archive", "rehydrate it first"),
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "EntityTooLarge": ("final", "does not take an object of this size", None),
    "QuotaExceeded": ("final", "has no room left", None),
    "SlowDown": _BUSY,
    "ServerBusy": _BUSY,
    "TooManyRequests": _BUSY,
    "Throttling": _BUSY,
    "ThrottlingException": _BUSY,
    "RequestLimitExceeded": _BUSY,
    "BandwidthLimitExceeded": _BUSY,
    "RequestTimeout": ("passing", "was sent too little for too long", None),
    "BadDigest": ("passing", "received other bytes than were sent", None),
    "IncompleteBody": ("passing", "received fewer bytes than were sent", None),
    "ConditionalRequestConflict": ("passing", "has another request for it at the same time", None),
    "OperationAborted": ("passing", "has another request for it at the same time", None),
}
"""What a code that stands in the body of an answer means."""

_PASSING = frozenset((408, 409, 425, 429, 500, 502, 503, 504))


class Forbidden(StoreError):
    """The store knows who asks, and does not allow it. A user who may write need not be one who may
    read.
    """


def meant(
    service: str,
    code: str,
    status: int,
    *,
    region: str | None = None,
    wait: float | None = None,
) -> StoreError:
    """The error that the code and the status of an answer stand for."""
    who = NAMES[service]
    if code == "PreconditionFailed" or status == 412:
        return StoreError("changed", "was changed while it was read")
    kind, what, hint = _MEANINGS.get(code) or _by_status(code, status)
    if kind == "missing":
        return StoreError(kind, what, hint=hint)
    if kind == "final" and region and _MEANINGS.get(code) is _REGION:
        what, hint = f"has the bucket in the region {region}", f"set AWS_REGION={region}"
    error = Forbidden if _MEANINGS.get(code, _FORBIDDEN) is _FORBIDDEN else StoreError
    return (error if kind == "denied" else StoreError)(kind, f"{who} {what}", hint=hint, wait=wait)


def _by_status(code: str, status: int) -> _Meaning:
    if status == 404:
        return "missing", "no such file", "check the address"
    if status in (401, 403):
        return _FORBIDDEN
    if status == 301:
        return _REGION
    said = f"answers with status {status}" if not code else f"answers {code} (status {status})"
    return ("passing" if status in _PASSING or status >= 500 else "final"), said, None


_CODE = re.compile(r"<Code>([A-Za-z][A-Za-z0-9]{2,60})</Code>").search
_STATUS = re.compile(r"(?:status code: |status: )(\d{3})").search
_WHERE = re.compile(r"<Region>([a-z0-9-]{2,40})</Region>").search
_ADDRESS = re.compile(r"https?://\S+").sub
_ASKING_WHO = re.compile(r"Generic \w+ error: Error performing token request").match
_UNREACHED = ("kind: Connect", "dns error", "tcp connect error", "Connection refused")
_UNTRUSTED = ("certificate", "CertificateError", "UnknownIssuer")


def told_by_obstore(error: BaseException, service: str) -> StoreError:
    """What an error of obstore means. Its text has the address and the body of the answer."""
    name, who = type(error).__name__, NAMES[service]
    text = _ADDRESS("", str(error))  # whose words are the user's
    code, status, region = _CODE(text), _STATUS(text), _WHERE(text)
    if name == "AlreadyExistsError":
        return StoreError("exists", "exists")
    if name == "PreconditionError":
        return StoreError("changed", "was changed while it was read")
    if "without LOCATION" in text:
        return meant(service, "PermanentRedirect", 301)
    is_nobody = name == "UnauthenticatedError" and status is None
    if is_nobody or _ASKING_WHO(text):
        return StoreError("denied", f"{who} needs credentials, and none work", hint=CREDENTIALS)
    if isinstance(error, FileNotFoundError) and status is None:
        return StoreError("missing", "no such file", hint="check the address")
    if code or status:
        return meant(
            service,
            code[1] if code else "",
            int(status[1]) if status else 0,
            region=region[1] if region else None,
        )
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Forbidden("denied", f"{who} does not allow it", hint=CREDENTIALS)
    if isinstance(error, ValueError) or name in ("InvalidPathError", "NotSupportedError"):
        return StoreError("final", f"{who} cannot be asked for a name like this")
    if "builder error" in text:
        return StoreError("final", f"{who} cannot be asked: the address of the service is wrong")
    if any(words in text for words in _UNTRUSTED):
        what = f"{who} has a certificate that this machine does not trust"
        return StoreError("final", what, hint="AWS_CA_BUNDLE names the file of yours")
    if "non-partial" in text.lower() or "NotPartial" in text:
        hint = "download it first: this server does not give parts of files"
        return StoreError("final", f"{who} answers with the whole file", hint=hint)
    is_unreached = any(words in text for words in _UNREACHED)
    return StoreError(
        "passing",
        f"{who} does not answer",
        hint="check the address and the network" if is_unreached else None,
        tries=TRIES if is_unreached else None,
    )
