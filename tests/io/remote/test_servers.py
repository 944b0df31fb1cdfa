"""Real servers of S3 on this host keep the promises of every source, place and destination."""

from __future__ import annotations

import pytest

from helpers.served import ServedOutput, ServedPlaces, ServedSet, ServedSource

pytestmark = pytest.mark.servers


class TestSeaweedSource(ServedSource):
    SERVER = "seaweedfs"


class TestSeaweedPlaces(ServedPlaces):
    SERVER = "seaweedfs"


class TestSeaweedObject(ServedOutput):
    SERVER = "seaweedfs"
    READ_BACK = False


class TestSeaweedObjectReadBack(ServedOutput):
    SERVER = "seaweedfs"


class TestSeaweedSet(ServedSet):
    SERVER = "seaweedfs"
    READ_BACK = False


class TestSeaweedSetReadBack(ServedSet):
    SERVER = "seaweedfs"


class TestMotoSource(ServedSource):
    SERVER = "moto"


class TestMotoPlaces(ServedPlaces):
    SERVER = "moto"


class TestMotoObject(ServedOutput):
    SERVER = "moto"
    READ_BACK = False


class TestMotoObjectReadBack(ServedOutput):
    SERVER = "moto"


class TestMotoSet(ServedSet):
    SERVER = "moto"
    READ_BACK = False


class TestMotoSetReadBack(ServedSet):
    SERVER = "moto"
