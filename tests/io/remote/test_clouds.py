"""Google Cloud Storage and Azure by whole commands, on their emulators: what a user sees, what
another client finds, and who is told what.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from helpers.paths import SAMPLES
from helpers.program import Finished, environment, run
from helpers.raw_objects import get_object, object_keys, put_object
from helpers.servers import Server, azure_request
from helpers.servers import servers as servers

pytestmark = pytest.mark.servers


@pytest.fixture
def azure(servers) -> Server:
    return servers("azurite")


@pytest.fixture
def google(servers) -> Server:
    return servers("fake-gcs-server")


@pytest.fixture
def home(tmp_path) -> str:
    """A folder of this test alone."""
    return hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]


@pytest.fixture
def large(tmp_path) -> Path:
    """A checkpoint of several parts."""
    path = tmp_path / "large.safetensors"
    save_file({f"w{number}": np.full(2 << 20, number, "<f4") for number in range(4)}, path)
    return path


def ckptconv(cwd: Path, env: Mapping[str, str], *arguments: object) -> Finished:
    done = run(*arguments, cwd=cwd, env=env)
    for name, value in env.items():
        if name.endswith(("KEY", "TOKEN", "STRING")):
            assert value not in f"{done.out}{done.err}"
    assert "Traceback" not in done.err and "sig=" not in f"{done.out}{done.err}"
    return done


def test_azure_is_written_to_and_read_from(azure, home, large):
    cwd, env, url = large.parent, azure.environment, f"az://bucket/{home}/out.safetensors"
    done = ckptconv(cwd, env, "convert", large, url, "--verify", "--to", "safetensors")
    assert done.exit == 0, done.err
    assert object_keys(azure, home) == [f"{home}/out.safetensors"]
    tensors = load(get_object(azure, f"{home}/out.safetensors"))
    assert sorted(tensors) == ["w0", "w1", "w2", "w3"] and (tensors["w3"] == 3).all()
    again = ckptconv(cwd, env, "convert", large, url)
    assert again.exit == 1 and "exists; add --force" in again.err
    assert ckptconv(cwd, env, "convert", large, url, "--force").exit == 0
    assert ckptconv(cwd, env, "diff", large, url).exit == 0
    back = ckptconv(cwd, env, "convert", url, "back.safetensors")
    assert back.exit == 0 and load((cwd / "back.safetensors").read_bytes()).keys() == tensors.keys()
    assert object_keys(azure, home) == [f"{home}/out.safetensors"]


@pytest.mark.parametrize("options", [(), ("--verify",)], ids=["", "verified"])
def test_a_set_of_shards_on_azure(options, azure, home, large):
    cwd, env, url = large.parent, azure.environment, f"az://bucket/{home}/set/"
    arguments = ("convert", large, f"{url}model.safetensors", "--max-shard-size", "10MB", *options)
    done = ckptconv(cwd, env, *arguments)
    assert done.exit == 0, done.err
    names = [key.rpartition("/")[2] for key in object_keys(azure, home)]
    assert names[-1] == "model.safetensors.index.json" and len(names) == 5
    index = json.loads(get_object(azure, f"{home}/set/{names[-1]}"))
    assert sorted(index["weight_map"]) == ["w0", "w1", "w2", "w3"]
    assert ckptconv(cwd, env, "diff", large, f"{url}{names[-1]}").exit == 0
    assert ckptconv(cwd, env, *arguments).exit == 1
    assert ckptconv(cwd, env, *arguments, "--force").exit == 0


def test_google_is_read_from(google, home, tmp_path):
    env = google.environment
    put_object(google, f"{home}/in é.pt", (SAMPLES / "tied.pt").read_bytes())
    url = f"gs://bucket/{home}/in é.pt"
    done = ckptconv(tmp_path, env, "convert", url, "out.safetensors", "--verify")
    assert done.exit == 0, done.err
    assert ckptconv(tmp_path, env, "diff", url, "out.safetensors").exit == 0
    # fake-gcs-server has no writing by the XML API
    done = ckptconv(tmp_path, env, "convert", url, f"gs://bucket/{home}/out.safetensors")
    assert done.exit == 1 and "cannot be written: Google Cloud Storage answers" in done.err


# -------------------------------------------------------------------------------- who is asking


def signed(key: str, permissions: str) -> str:
    """A shared access signature for the account of the emulator."""
    until = (datetime.now(timezone.utc) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    parts = ["devstoreaccount1", permissions, "b", "sco", "", until, "", "https,http"]
    text = "\n".join([*parts, "2021-12-02", "", ""])
    made = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
    named = {"sv": "2021-12-02", "ss": "b", "srt": "sco", "sp": permissions, "se": until}
    named |= {"spr": "https,http", "sig": base64.b64encode(made).decode()}
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in named.items())


def ways(server: Server) -> dict[str, dict[str, str]]:
    """The environments in which Azure is asked, by what they are called."""
    key = server.environment["AZURE_STORAGE_ACCOUNT_KEY"]
    endpoint = server.environment["AZURE_STORAGE_ENDPOINT"]
    account = {"AZURE_STORAGE_ACCOUNT": "devstoreaccount1", "AZURE_STORAGE_ENDPOINT": endpoint}
    pairs = f"AccountName=devstoreaccount1;AccountKey={key};BlobEndpoint={endpoint};"
    return {
        "key": {**account, "AZURE_STORAGE_KEY": key},
        "token": {**account, "AZURE_STORAGE_SAS_TOKEN": f"?{signed(key, 'rwdlac')}"},
        "string": {"AZURE_STORAGE_CONNECTION_STRING": pairs},
    }


# with a token azurite fails (500) to remove anything by batches, as obstore does: not tried here
@pytest.mark.parametrize("way", ["key", "string"])
@pytest.mark.parametrize(
    "root", ["az://bucket", "abfss://bucket@devstoreaccount1.dfs.core.windows.net"]
)
def test_azure_is_asked_by_what_its_tools_know(way, root, azure, home, large):
    env, url = ways(azure)[way], f"{root}/{home}/out.safetensors"
    done = ckptconv(large.parent, env, "convert", large, url)
    assert done.exit == 0, done.err
    assert object_keys(azure, home) == [f"{home}/out.safetensors"]
    assert ckptconv(large.parent, env, "diff", large, url).exit == 0


def test_who_may_only_read_is_told_so(azure, home, large):
    key = azure.environment["AZURE_STORAGE_ACCOUNT_KEY"]
    env = {**ways(azure)["token"], "AZURE_STORAGE_SAS_TOKEN": signed(key, "rl")}
    done = ckptconv(large.parent, env, "convert", large, f"az://bucket/{home}/out.safetensors")
    assert done.exit == 1 and "Azure does not allow it" in done.err, done.err
    assert object_keys(azure, home) == []


def test_who_is_not_known_is_told_so(azure, tmp_path):
    env = {**azure.environment, "AZURE_STORAGE_ACCOUNT_KEY": "bWFya2Vk"}
    done = ckptconv(tmp_path, env, "inspect", "az://bucket/a.pt")
    assert done.exit == 1 and "Azure does not accept the signature" in done.err, done.err


@pytest.mark.parametrize("name", ["azure", "google"])
def test_what_is_not_there_is_told_in_one_line(name, request, tmp_path):
    server = request.getfixturevalue(name)
    # fake-gcs-server fails (500) where it has no such bucket
    for bucket in ("bucket", "nosuchbucket") if name == "azure" else ("bucket",):
        done = ckptconv(tmp_path, server.environment, "inspect", f"{server.scheme}://{bucket}/a.pt")
        told = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert done.exit == 1 and len(told) == 1, done.err
        assert told[0].startswith(f"error: {server.scheme}://{bucket}/a.pt: ")


def test_what_a_killed_process_left_is_listed_and_removed(azure, home, tmp_path):
    put_object(azure, f"{home}/.a.pt.0badcafe.ckptconv-part", b"half")
    put_object(azure, f"{home}/a.pt", b"whole")
    url = f"az://bucket/{home}/"
    listed = ckptconv(tmp_path, azure.environment, "cleanup", url)
    assert "1 unfinished upload found" in listed.out, listed.out + listed.err
    assert ckptconv(tmp_path, azure.environment, "cleanup", url, "--abort").exit == 0
    assert object_keys(azure, home) == [f"{home}/a.pt"]


SLOW = """
import sys, time
from ckptconv.io.remote import uploads
from ckptconv.cli.main import main
written, count = uploads.PartsUpload.write, [0]
def slow(self, view):
    written(self, view)
    count[0] += 1
    if count[0] == 40:  # parts are on their way
        print("stuck", file=sys.stderr, flush=True)
        time.sleep(0.2)
uploads.PartsUpload.write = slow
sys.argv[0] = "ckptconv"
main()
"""


def stopped(azure: Server, large: Path, url: str, number: int) -> tuple[int, str]:
    """A conversion that gets a signal while parts are on their way: its exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "convert", str(large), url], cwd=large.parent, text=True,
        env=environment(**azure.environment), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )  # fmt: skip
    assert process.stderr is not None and process.stderr.readline() == "stuck\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    return process.returncode, told


def uncommitted_too(azure: Server, home: str) -> list[str]:
    """The names of blobs, and of those whose parts are there but are no blob."""
    asked = f"bucket?restype=container&comp=list&include=uncommittedblobs&prefix={home}"
    return re.findall(r"<Name>(.*?)</Name>", azure_request(azure, "GET", asked).data.decode())


@pytest.fixture
def larger(tmp_path) -> Path:
    path = tmp_path / "larger.safetensors"
    save_file({f"w{number}": np.full(6 << 20, number, "<f4") for number in range(4)}, path)
    return path


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_leaves_nothing_on_azure_uncommitted_blobs_too(name, code, azure, home, larger):
    for turn in range(3):
        url = f"az://bucket/{home}/{turn}.pt"
        done, told = stopped(azure, larger, url, getattr(signal, name))
        assert done == code and "Traceback" not in told
    time.sleep(0.5)
    assert uncommitted_too(azure, home) == []


def test_what_was_killed_on_azure_is_found_and_removed(azure, home, larger):
    code, _ = stopped(azure, larger, f"az://bucket/{home}/a.pt", signal.SIGKILL)
    assert code == -9 and len(uncommitted_too(azure, home)) == 1
    url = f"az://bucket/{home}/"
    listed = ckptconv(larger.parent, azure.environment, "cleanup", url)
    assert "1 unfinished upload found" in listed.out
    assert ckptconv(larger.parent, azure.environment, "cleanup", url, "--abort").exit == 0
    assert uncommitted_too(azure, home) == []
