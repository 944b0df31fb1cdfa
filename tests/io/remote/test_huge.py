"""An object of 40 GB, of which only what is looked at is fetched: neither memory nor disk of the
server or of the client has it.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.http_server import HttpServer, Sparse
from helpers.program import run

GB = 10**9
WANTED = np.arange(1000, dtype=np.float32)


@pytest.fixture(scope="module")
def server():
    """Ten tensors of 4 GB and one of 4 kB between them, as a safetensors file."""
    entries, at, place = {}, 0, 0
    for number in range(10):
        if number == 7:
            entries["head.bias"] = (at, WANTED.nbytes, [1000])
            place, at = at, at + WANTED.nbytes
        entries[f"layers.{number}.weight"] = (at, 4 * GB, [GB])
        at += 4 * GB
    header = json.dumps(
        {
            key: {"dtype": "F32", "shape": shape, "data_offsets": [first, first + nbytes]}
            for key, (first, nbytes, shape) in entries.items()
        }
    ).encode()
    head = len(header).to_bytes(8, "little") + header
    pieces = {0: head, len(head) + place: WANTED.tobytes()}
    with HttpServer({"/huge.safetensors": Sparse(len(head) + at, pieces)}) as made:
        yield made


def network(done):
    return done.json()["network"]


def test_it_is_inspected_by_its_header(server, tmp_path):
    done = run("inspect", f"{server.url}/huge.safetensors", "--json", cwd=tmp_path)
    found = done.json()
    assert found["tensors"] == 11 and found["bytes"] > 40 * GB
    assert network(done)["requests"] == 1 and network(done)["bytes_read"] <= 1 << 17


def test_one_tensor_of_it_is_converted(server, tmp_path):
    address = f"{server.url}/huge.safetensors"
    done = run("convert", address, "one.safetensors", "--include", "head.*", "--json", cwd=tmp_path)
    assert done.exit == 0, done.err
    assert network(done)["bytes_read"] < 1 << 18
    np.testing.assert_array_equal(load_file(tmp_path / "one.safetensors")["head.bias"], WANTED)


def test_a_part_of_a_large_tensor_is_shown(server, tmp_path):
    done = run(
        "show", f"{server.url}/huge.safetensors", "layers.9.weight", "[999999990:]", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.json()["tensors"][0]["values"] == [0.0] * 10
    assert network(done)["bytes_read"] < 1 << 18
