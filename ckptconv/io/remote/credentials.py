"""Who asks: credentials as each ecosystem has them. None of them is ever printed."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any


def options_of(service: str) -> dict[str, Any]:
    """What a store of obstore is opened with."""
    options: dict[str, Any] = {
        # trying again is the business of `patience`
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        "client_options": {"timeout": "120s", "connect_timeout": "10s"},
    }
    if service == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint and endpoint.startswith("http://"):
            options["client_options"]["allow_http"] = True
    return options
