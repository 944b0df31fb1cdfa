"""What a user does with checkpoints in a bucket, on a real server; the disk is not needed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save_file

from ckptconv import load_portable
from helpers.certificates import certificate
from helpers.paths import SAMPLES
from helpers.program import Finished, run, run_process
from helpers.raw_objects import get_object, object_keys, open_uploads, put_object
from helpers.servers import SECRET, Server
from helpers.servers import servers as servers

pytestmark = pytest.mark.servers


@pytest.fixture
def server(servers) -> Server:
    return servers("seaweedfs")


@pytest.fixture
def home(request, server) -> str:
    """A prefix of this test alone."""
    return f"{abs(hash(request.node.name)):x}-{time.monotonic_ns()}"


@pytest.fixture
def url(server, home) -> str:
    return f"{server.url}/{home}"


def put(server: Server, home: str, *paths: Path) -> None:
    for path in paths:
        put_object(server, f"{home}/{path.name}", path.read_bytes())


def ckptconv(server: Server, cwd: Path, *arguments: object, **changes: str) -> Finished:
    return run(*arguments, cwd=cwd, env={**server.environment, **changes})


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A checkpoint of torch, of 60 MB, with tensors of several sizes."""
    torch.manual_seed(7)
    sizes = [(1500, 4000), (1,), (2000, 2000), (3,), (1000, 5000)]
    tensors = {f"layer.{number}.weight": torch.randn(size) for number, size in enumerate(sizes)}
    path = tmp_path_factory.mktemp("large") / "large.pt"
    torch.save(tensors, path)
    return path


@pytest.mark.parametrize("options", [(), ("--verify",)], ids=["plain", "verified"])
@pytest.mark.parametrize("most", ["1GB", "25MB"])
def test_from_s3_to_s3(most, options, server, home, url, large, tmp_path):
    put(server, home, large)
    target = f"{url}/out/model.safetensors"
    command = ("convert", f"{url}/large.pt", target, "--max-shard-size", most, "--json", *options)
    done = run_process(*command, cwd=tmp_path, env=server.environment)
    assert done.exit == 0, done.err
    names = [key for key in object_keys(server, f"{home}/out/") if key.endswith(".safetensors")]
    assert len(names) == (1 if most == "1GB" else 3)
    found: dict[str, np.ndarray] = {}
    for key in names:
        found |= load(get_object(server, key))
    expected = torch.load(large, weights_only=True)
    assert set(found) == set(expected)
    assert all(np.array_equal(found[key], value.numpy()) for key, value in expected.items())
    network = done.json()["network"]
    nbytes = large.stat().st_size
    assert nbytes * 0.99 < network["bytes_written"] < nbytes * 1.02
    # to verify, both are read once more
    assert network["bytes_read"] < nbytes * (1.05 if not options else 3.1)
    assert done.rss < 300 << 20
    assert open_uploads(server, home) == [] and list(tmp_path.iterdir()) == []
    again = ckptconv(server, tmp_path, *command)
    assert again.exit == 1 and "exists" in again.err


def test_nothing_is_written_to_the_disk(server, home, url, large, tmp_path):
    put(server, home, large)
    cwd, temporary = tmp_path / "cwd", tmp_path / "tmp"
    cwd.mkdir()
    temporary.mkdir()
    trusted = f"{certificate(tmp_path, 'store')}.crt"
    places = {"TMPDIR": str(temporary), "HOME": str(tmp_path / "home"), "AWS_CA_BUNDLE": trusted}
    command = ("convert", f"{url}/large.pt", f"{url}/model.safetensors", "--verify")
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-o", "/dev/null", "true"]).returncode:
        assert ckptconv(server, cwd, *command, **places).exit == 0
    else:
        log = tmp_path / "log"
        calls = "trace=openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat"
        program = [strace, "-f", "-qq", "-e", calls, "-o", log, "ckptconv"]
        program = [*map(str, program[:-1]), sys.executable, "-m", "ckptconv"]
        done = run_process(
            *command, cwd=cwd, env={**server.environment, **places}, command=program, limit=120
        )
        assert done.exit == 0, done.err
        lines = log.read_text(errors="replace").splitlines()
        assert len(lines) > 100
        made = re.compile(r"O_CREAT|O_WRONLY|O_RDWR|O_TMPFILE|creat\(|mkdir|rename|link").search
        fine = re.compile(r'"/dev/|"/proc/|= -1 E').search
        assert [line for line in lines if made(line) and not fine(line)] == []
    assert sorted(object_keys(server, home)) == [f"{home}/large.pt", f"{home}/model.safetensors"]
    assert [*cwd.iterdir(), *temporary.iterdir()] == [] and not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.glob("*.pt")))
def test_load_portable_is_torch_load(name, server, home, url, monkeypatch):
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    put(server, home, SAMPLES / name)
    here = load_portable(SAMPLES / name, map_location="cpu")
    there = load_portable(f"{url}/{name}", map_location="cpu")
    assert list(here) == list(there)
    assert all(torch.equal(here[key], there[key]) for key in here)


def test_a_large_file_is_what_torch_loads(server, home, url, large, monkeypatch):
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    put(server, home, large)
    expected = torch.load(large, weights_only=True)
    found = load_portable(f"{url}/large.pt", map_location="cpu")
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def told(done: Finished) -> tuple[object, str]:
    """What a command says, but for the network."""
    if not done.out.startswith(("{", "[")):
        return done.out, done.err
    document = json.loads(done.out)
    if isinstance(document, dict):
        document.pop("network", None)
        document.pop("seconds", None)
    return document, done.err


@pytest.mark.parametrize("name", ["ddp_cuda3_train.pt", "tied.pt", "fp16.pt"])
@pytest.mark.parametrize(
    "command",
    ["inspect", "inspect --json", "doctor", "doctor --json", "stats --json", "scan", "scan --json"],
)
def test_a_command_says_of_an_object_what_it_says_of_a_file(
    command, name, server, home, url, tmp_path
):
    put(server, home, SAMPLES / name)
    verb, *options = command.split()
    shutil.copy(SAMPLES / name, tmp_path / name)
    here = ckptconv(server, tmp_path, verb, tmp_path / name, *options)
    there = ckptconv(server, tmp_path, verb, f"{url}/{name}", *options)
    assert there.exit == here.exit
    said = [portable_by_name(done).replace(url, str(tmp_path)) for done in (here, there)]
    if options:
        assert said[0] == said[1]


def portable_by_name(done: Finished) -> str:
    """What a command says; the file that it advises to write lies beside a file of this host, and
    in the working folder for an object.
    """
    return re.sub(r"\S*/(\S+-portable\S*\.)", r"\1", repr(told(done)))


def test_the_secret_is_in_nothing_that_is_printed(server, home, url, large, tmp_path):
    put(server, home, SAMPLES / "tied.pt", large)
    bad = {"AWS_ACCESS_KEY_ID": "nobody"}
    down = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    runs = [
        (("inspect", f"{url}/tied.pt", "--json"), {}, 0),
        (("convert", f"{url}/tied.pt", f"{url}/a.safetensors", "--json", "--verify"), {}, 0),
        (("convert", f"{url}/tied.pt", f"{url}/a.safetensors"), {}, 1),
        (("report", f"{url}/tied.pt", "-o", tmp_path / "page.html"), {}, 0),
        (("inspect", f"{url}/nothing.pt"), {}, 1),
        (("inspect", f"{url}/tied.pt"), bad, 1),
        (("convert", large, f"{url}/b.safetensors"), bad, 1),
        (("inspect", "s3://no-such-bucket/tied.pt"), {}, 1),
        (("convert", large, "s3://no-such-bucket/tied.safetensors"), {}, 1),
        (("cleanup", f"{url}/", "--json"), {}, 0),
        (("inspect", f"{url}/tied.pt"), down, 1),
    ]
    for command, changes, code in runs:
        done = ckptconv(server, tmp_path, *command, **changes)
        assert done.exit == code, (command, done.exit, done.err)
        assert SECRET not in done.out + done.err and "Traceback" not in done.err, command
        assert "Signature" not in done.out + done.err, command
    assert SECRET not in (tmp_path / "page.html").read_text()
    assert get_object(server, f"{home}/a.safetensors").find(SECRET.encode()) == -1


def test_an_object_that_is_replaced_while_it_is_converted_is_told(server, home, url, tmp_path):
    """The version that was opened is asked for; the other one is no part of the output."""
    for number in range(2):
        save_file({"w": np.full(12 << 20, number, "<f4")}, tmp_path / f"{number}.safetensors")
    put_object(server, f"{home}/in.safetensors", (tmp_path / "0.safetensors").read_bytes())
    script = """
import sys
from ckptconv import convert_checkpoint, CheckpointError
from ckptconv.io.remote import place
import botocore.session, os
get, asked = place.Site.get, []
def late(self, key, first, nbytes, pinned):
    asked.append(first)
    if len(asked) == 2:
        client = botocore.session.Session().create_client(
            "s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        client.put_object(Bucket="bucket", Key=key, Body=open(sys.argv[3], "rb").read())
    return get(self, key, first, nbytes, pinned)
place.Site.get = late
try:
    convert_checkpoint(sys.argv[1], sys.argv[2])
except CheckpointError as error:
    print(error.what)
"""
    done = run_process(
        f"{url}/in.safetensors", f"{url}/out.pt", tmp_path / "1.safetensors",
        cwd=tmp_path, env=server.environment, command=[sys.executable, "-c", script],
    )  # fmt: skip
    assert "was changed while it was read" in done.out, (done.out, done.err)
    assert object_keys(server, home) == [f"{home}/in.safetensors"]
    assert open_uploads(server, home) == []


def test_whatever_names_a_file_may_name_an_object(server, home, url, tmp_path):
    put(server, home, SAMPLES / "ddp_cuda3.pt")
    put_object(server, f"{home}/meta.json", b'{"license": "mit"}')
    source = f"{url}/ddp_cuda3.pt"
    for words in (
        ("convert", source, f"{url}/a.safetensors", "--save-mapping", f"{url}/map.json"),
        ("convert", f"{url}/a.safetensors", f"{url}/b.pt", "--reverse", "--rules",
         f"{url}/map.json"),
        ("convert", source, f"{url}/c.safetensors", "--like", f"{url}/a.safetensors",
         "--metadata-from", f"{url}/meta.json"),
        ("report", source, "-o", f"{url}/page.html"),
        ("diff", source, f"{url}/b.pt", "--html", f"{url}/diff.html"),
        ("show", f"{url}/a.safetensors", "classifier.bias", "--npy", f"{url}/bias.npy"),
        ("average", f"{url}/a.safetensors", f"{url}/c.safetensors", f"{url}/d.safetensors"),
    ):  # fmt: skip
        done = ckptconv(server, tmp_path, *words)
        assert done.exit == 0, (words, done.err)
    assert get_object(server, f"{home}/page.html").startswith(b"<!")
    kept = load(get_object(server, f"{home}/c.safetensors"))
    original = torch.load(SAMPLES / "ddp_cuda3.pt", map_location="cpu", weights_only=True)
    assert np.array_equal(kept["classifier.bias"], original["module.classifier.bias"].numpy())
    assert b'"license":"mit"' in get_object(server, f"{home}/c.safetensors")
    assert list(tmp_path.iterdir()) == []
    refused = ckptconv(server, tmp_path, "report", source, "-o", source, "--force")
    assert refused.exit == 1 and "is read by this run" in refused.err
