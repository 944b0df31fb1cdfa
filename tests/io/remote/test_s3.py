"""Conversions to S3, on real servers: what a user sees, and what is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from helpers.paths import SAMPLES
from helpers.program import environment, run
from helpers.raw_objects import get_object, object_keys, open_uploads, put_object
from helpers.servers import SECRET, Server
from helpers.servers import servers as servers

pytestmark = pytest.mark.servers


@pytest.fixture(params=["seaweedfs", "moto"])
def server(request, servers) -> Server:
    return servers(request.param)


@pytest.fixture
def home(request, server) -> str:
    """A prefix of this test alone."""
    return f"{abs(hash(request.node.name)):x}-{time.monotonic_ns()}"


@pytest.fixture
def large(tmp_path) -> Path:
    """A checkpoint of four parts."""
    path = tmp_path / "large.safetensors"
    save_file({f"w{number}": np.full(2 << 20, number, "<f4") for number in range(4)}, path)
    return path


def ckptconv(server: Server, cwd: Path, *arguments: object, **changes: str):
    return run(*arguments, cwd=cwd, env={**server.environment, **changes})


def left(server: Server, home: str) -> list[str]:
    open_ones = [key for key, _ in open_uploads(server, home)]
    return [*object_keys(server, home), *open_ones]


STUCK = """
import os, sys, threading
from ckptconv.io.remote import s3
from ckptconv.cli.main import main
send, is_first = s3._S3Upload._send, threading.Event()
def stuck(self, number, data):
    if number == 1:
        done = send(self, number, data)
        is_first.set()
        return done
    is_first.wait(60)
    os.write(1, b"stuck\\n")  # one piece, for there are several threads
    threading.Event().wait(60)
s3._S3Upload._send = stuck
sys.argv[0] = "ckptconv"
main()
"""


def _hear_ctrl_c() -> None:
    """Where the tests run in the background, it is ignored, and would be ignored here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def stopped(server: Server, large: Path, url: str, number: int) -> tuple[int, str]:
    """A conversion that gets a signal while parts are on their way: its exit code and stderr."""
    env = environment(**server.environment)
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, "convert", str(large), url],
        env=env, cwd=large.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=_hear_ctrl_c,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "stuck\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    return process.returncode, told


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_leaves_nothing(name, code, server, home, large):
    begin = time.monotonic()
    done, told = stopped(server, large, f"s3://bucket/{home}/a.pt", getattr(signal, name))
    assert done == code and "Traceback" not in told
    assert time.monotonic() - begin < 15
    assert left(server, home) == []


def test_what_a_killed_process_left_is_listed_and_aborted(server, home, large):
    cwd = large.parent
    put_object(server, f"{home}/.b.pt.0badcafe.ckptconv-part", b"12345")
    put_object(server, f"{home}/b.pt", b"whole")
    code, _ = stopped(server, large, f"s3://bucket/{home}/a.pt", signal.SIGKILL)
    assert code == -9
    assert [key for key, _ in open_uploads(server, home)] == [f"{home}/a.pt"]

    url = f"s3://bucket/{home}/"
    listed = ckptconv(server, cwd, "cleanup", url)
    assert (
        listed.exit == 0 and "2 unfinished uploads found; add --abort to remove them" in listed.out
    )
    assert f"{url}a.pt" in listed.out and f"{url}.b.pt.0badcafe.ckptconv-part" in listed.out
    young = ckptconv(server, cwd, "cleanup", url, "--older-than", "1", "--json")
    names = [item["path"] for item in json.loads(young.out)["uploads"]]
    assert names == ([] if server.name == "seaweedfs" else [f"{url}a.pt"])  # of moto all are old

    done = ckptconv(server, cwd, "cleanup", url, "--abort", "--json")
    told = json.loads(done.out)
    assert told["aborted"] and {item["path"]: item["bytes"] for item in told["uploads"]} == {
        f"{url}a.pt": 8 << 20,
        f"{url}.b.pt.0badcafe.ckptconv-part": 5,
    }
    assert left(server, home) == [f"{home}/b.pt"]
    assert "no unfinished uploads" in ckptconv(server, cwd, "cleanup", url).out


@pytest.mark.parametrize("options", [(), ("--verify",)], ids=["plain", "verified"])
def test_shards_and_their_index_are_written_and_replaced(options, server, home, large):
    cwd, url = large.parent, f"s3://bucket/{home}/model.safetensors"
    done = ckptconv(server, cwd, "convert", large, url, "--max-shard-size", "18MB", *options)
    assert done.exit == 0, done.err
    index = json.loads(get_object(server, f"{home}/model.safetensors.index.json"))
    assert sorted(set(index["weight_map"].values())) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert len(object_keys(server, home)) == 3
    for name in set(index["weight_map"].values()):
        for key, value in load(get_object(server, f"{home}/{name}")).items():
            assert (value == int(key[1:])).all()
    again = ckptconv(server, cwd, "convert", large, url, "--max-shard-size", "18MB")
    assert again.exit == 1 and "exists; add --force" in again.err
    limit = ("--max-shard-size", "1GB")
    whole = ckptconv(server, cwd, "convert", large, url, "--force", *limit, *options)
    assert whole.exit == 0, whole.err
    assert left(server, home) == [f"{home}/model.safetensors"]


def test_two_processes_write_and_one_wins(server, home, large):
    """Of uploads in parts both may believe that they won, on a server that looks and then puts; of
    small objects not.
    """
    url = f"s3://bucket/{home}/a.safetensors"
    env = environment(**server.environment)
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "ckptconv", "convert", str(SAMPLES / name), url],
            env=env, cwd=large.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in ("tied.pt", "ddp_cuda3.pt") * 2
    ]  # fmt: skip
    told = [process.communicate(timeout=60)[1] for process in commands]
    assert sorted(process.returncode for process in commands) == [0, 1, 1, 1]
    assert sum("exists" in text for text in told) == 3
    assert left(server, home) == [f"{home}/a.safetensors"]


def test_names_of_all_kinds(server, home, tmp_path):
    for name in ("a b.safetensors", "é ü.safetensors", "a%2Fb.safetensors", "a+b&c=#?.safetensors"):
        url = f"s3://bucket/{home}/{name}"
        done = ckptconv(server, tmp_path, "convert", SAMPLES / "tied.pt", url, "--verify")
        assert done.exit == 0, done.err
        assert f"{home}/{name}" in object_keys(server, home)
        shown = ckptconv(server, tmp_path, "inspect", url)
        assert shown.exit == 0 and url in shown.out


@pytest.mark.parametrize(
    "key", ["a//x.pt", "/x.pt", "a//", "ta\tb.pt", "new\nline.pt", "a/../x.pt", "a/./x.pt"]
)
def test_a_key_that_the_client_cannot_name_is_refused_by_its_name(key, servers, tmp_path):
    """It is legal, and another key would be meant without its odd part."""
    server = servers("moto")
    address = f"s3://bucket/odd/{key}" if key[0] != "/" else f"s3://bucket/{key}"
    shown = address.replace("\t", "\\t").replace("\n", "\\n")
    before = object_keys(server, "")
    for words, code in (("inspect", address), 1), (("convert", SAMPLES / "tied.pt", address), 2):
        done = ckptconv(server, tmp_path, *words)
        assert done.exit == code and f"error: {shown}: has a" in done.err and "presign" in done.err
        assert "request" not in done.err
    assert object_keys(server, "") == before


def test_a_bucket_that_is_not_there_is_named_as_it_was(servers, tmp_path):
    done = ckptconv(servers("moto"), tmp_path, "inspect", "s3://nobucket")
    assert done.exit == 1 and "error: s3://nobucket: S3 has no such bucket" in done.err


# ------------------------------------------------------------------------------------- errors


WRONG = {
    "wrong secret": ({"AWS_SECRET_ACCESS_KEY": "MARKED-secret"}, "the secret key is wrong"),
    "wrong key": ({"AWS_ACCESS_KEY_ID": "MARKED-key"}, "does not know the access key"),
    "nobody": (
        {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"},
        "(credentials)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_who_is_not_allowed_is_told_why_without_secrets(name, servers, tmp_path):
    server = servers("seaweedfs")
    changes, what = WRONG[name]
    changes = {**changes, "HOME": str(tmp_path)}
    put_object(server, "allowed/in.pt", (SAMPLES / "tied.pt").read_bytes())
    for arguments in (
        ("inspect", "s3://bucket/allowed/in.pt"),
        ("inspect", "s3://bucket/allowed/"),
        ("convert", SAMPLES / "tied.pt", "s3://bucket/allowed/out.safetensors"),
        ("convert", SAMPLES / "tied.pt", "s3://bucket/allowed/in.pt", "--force"),
        ("cleanup", "s3://bucket/allowed/"),
    ):
        for json_too in ((), ("--json",)):
            done = ckptconv(server, tmp_path, *arguments, *json_too, **changes)
            text = done.out + done.err
            assert done.exit in (1, 2), (arguments, text)
            assert what in text, (arguments, text)
            assert "see: ckptconv help remote" in text
            for secret in ("MARKED", SECRET, "X-Amz", "Signature=", "http://", "Traceback"):
                assert secret not in text, (arguments, text)


def test_what_is_not_there_is_told(server, tmp_path):
    for url, what in (
        ("s3://bucket/nothing.pt", "no such file"),
        ("s3://no-such-bucket/a.pt", "S3 has no such bucket; check the address"),
    ):
        done = ckptconv(server, tmp_path, "inspect", url)
        assert done.exit == 1 and f"{url}: {what}" in done.err
    url = "s3://no-such-bucket/a.safetensors"
    done = ckptconv(server, tmp_path, "convert", SAMPLES / "tied.pt", url)
    assert done.exit == 1 and f"{url}: cannot be written: S3 has no such bucket" in done.err


def test_a_server_that_is_down_is_given_up_soon(tmp_path):
    env = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    }
    for arguments in (
        ("inspect", "s3://bucket/a.pt"),
        ("convert", SAMPLES / "tied.pt", "s3://bucket/a.safetensors"),
    ):
        done = run(*arguments, cwd=tmp_path, env=env)
        assert done.exit == 1 and done.seconds < 20
        assert "S3 does not answer" in done.err
        assert "check the address and the network" in done.err


def test_a_folder_of_dcp_is_not_made_there(server, home, tmp_path):
    url = f"s3://bucket/{home}/dcp"
    done = ckptconv(server, tmp_path, "convert", SAMPLES / "tied.pt", url, "--to", "dcp")
    assert done.exit == 1 and "on this machine only" in done.err
    assert left(server, home) == []
    assert [*tmp_path.iterdir()] == []
