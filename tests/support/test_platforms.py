"""Systems other than this one: what only some have, and what the program does without it."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from ckptconv import CheckpointError, convert_checkpoint, open_checkpoint
from ckptconv.io.files import FileSource
from ckptconv.support import platforms
from ckptconv.support.errors import MalformedCheckpoint
from helpers import other_systems, posix_names
from helpers.examples import ALL
from helpers.house import MODULES, imports_of, nodes, top_names, trees
from helpers.paths import TESTS
from helpers.program import SAMPLES, assert_one_error, environment, run

ELSEWHERE = ("bare", "windows")
USERS_OF_PLATFORMS = {
    "support.signals", "keys.rules", "io.files", "io.inflate", "io.stream", "io.destination",
    "io.staging", "io.in_place", "io.journals", "io.hidden_folders", "io.location", "io.outputs",
    "io.open_files", "cli.terminal", "cli.options", "io.remote.patience",
    "io.remote.credentials", "io.remote.network", "io.appended", "batch.choosing",
    "batch.processes", "tensors.compute_ahead", "__main__",
}  # fmt: skip
ONLY_HERE = {
    "os.name",
    "os.O_BINARY",
    "os.O_TEMPORARY",
    "os.startfile",
    "sys.platform",
    "sys.getwindowsversion",
    "platform.system",
}
ONLY_HERE_MODULES = {
    "ctypes",
    "msvcrt",
    "nt",
    "winreg",
    "winsound",
    "tempfile",
    "_winapi",
    "_ctypes",
}
LACKING = {*other_systems.posix_only()}


# ---------------------------------------------------------------------------------------- the names


def named(tree: ast.Module) -> Iterator[str]:
    """The names of other modules that a module uses: by attribute, by import, and by text
    (`getattr(os, "fork")`).
    """
    aliases = {
        alias.asname or alias.name: alias.name
        for node in nodes(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in aliases
        ):
            yield f"{aliases[node.value.id]}.{node.attr}"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
        ):
            owner, name, *_ = node.args
            if (
                isinstance(owner, ast.Name)
                and owner.id in aliases
                and isinstance(name, ast.Constant)
            ):
                yield f"{aliases[owner.id]}.{name.value}"


def belongs_to_platforms(name: str) -> bool:
    return (
        name in LACKING | ONLY_HERE | ONLY_HERE_MODULES
        or name.startswith("os.O_")
        or name in {"os.SEEK_DATA", "os.SEEK_HOLE"}
    )


def test_only_one_module_names_what_not_every_system_has():
    found = {
        module: wrong
        for module, tree in trees().items()
        if (wrong := sorted(filter(belongs_to_platforms, named(tree))))
    }
    assert set(found) == {"support.platforms"}, found
    assert {"os.preadv", "os.O_DIRECTORY", "signal.SIGALRM", "fcntl", "msvcrt",
        "ctypes"} <= {*found["support.platforms"]} | {
        "signal.SIGALRM", "os.preadv",  # there, they are asked for by a name of their own
    }  # fmt: skip


def test_names_are_found_however_they_are_asked_for():
    source = """
import os as system, signal
from os import fork
from fcntl import flock
system.pread
getattr(signal, "SIGHUP")
hasattr(system, "O_NOFOLLOW")
def late():
    import termios
"""
    found = {name for name in named(ast.parse(source)) if belongs_to_platforms(name)}
    assert found == {"os.fork", "fcntl", "os.pread", "signal.SIGHUP", "os.O_NOFOLLOW", "termios"}


@pytest.mark.trust
def test_the_list_of_names_is_that_of_the_stubs_of_the_standard_library():
    """For all names that the package uses; the list as a whole changes with each Python."""
    pytest.importorskip("mypy")
    used = {name for tree in trees().values() for name in named(tree)} | {
        "os.preadv",
        "signal.SIGALRM",
        "fcntl",
        "os.fchmod",
    }
    stubs = {*posix_names.missing("win32")}
    assert used & stubs == used & LACKING
    assert {
        "fcntl",
        "os.preadv",
        "os.fchmod",
        "os.O_NOFOLLOW",
        "os.statvfs",
        "signal.SIGALRM",
        "signal.SIGHUP",
    } <= stubs


def test_the_module_is_asked_only_where_files_and_signals_are():
    users = {
        module
        for module in MODULES
        if any(name.startswith("ckptconv.support.platforms") for name in imports_of(module))
    }
    assert users == USERS_OF_PLATFORMS
    assert top_names("support.platforms") & {"ckptconv"} == set()


# -------------------------------------------------------------------------------- the whole program


EMULATED = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="another system is played on Linux only"
)


def requests(
    system: str, room: Path, asked: list[list[str]], *, encoding: str = "utf-8"
) -> list[Any]:
    """What the program answers in `room` on another system: exit code, stdout, stderr of each
    request.
    """
    script = [sys.executable, other_systems.__file__, system]
    env = environment(
        CKPTCONV_TEST_ENCODING=encoding, PYTHONPATH=f"{SAMPLES.parent}{os.pathsep}{TESTS}"
    )
    done = subprocess.run(
        script,
        cwd=room,
        input=json.dumps(asked),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout)
    return [
        (code, *(timeless(bytes.fromhex(text).decode(encoding)) for text in texts))
        for code, *texts in answers
    ]


def timeless(text: str) -> str:
    """What was printed, without how long it took and what was free meanwhile."""
    spent = r"(?:written|done) in [0-9.]+ (?:s|min)\b[^\n]*|in [0-9.]+ s(?:, [0-9.]+ [kMG]?B/s)?"
    pattern = spent + r"|\"seconds\": [0-9.e-]+"
    return re.sub(pattern, "<time>", text)


def room_of(folder: Path) -> Path:
    folder.mkdir()
    for sample in SAMPLES.glob("*.pt"):
        shutil.copy(sample, folder)
    return folder


def files(room: Path) -> dict[str, bytes]:
    """What is in a folder, hidden things too."""
    return {
        str(path.relative_to(room)): path.read_bytes()
        for path in sorted(room.rglob("*"))
        if path.is_file()
    }


SHARDS = ("--max-shard-size", "2KB")
SUITE: list[list[str]] = [
    ["--version"],
    ["--help"],
    *([name, "--help"] for name in ("convert", "doctor", "devices")),
    *(
        [command, sample.name]
        for command, first in (("inspect", 0), ("doctor", 1), ("scan", 2))
        for sample in sorted(SAMPLES.glob("*.pt"))[first :: 1 if ALL else 5]
    ),
    ["inspect", "ddp_cuda3_train.pt", "--json"],
    ["strip-module", "ddp_cuda3.pt", "stripped.pt"],
    ["add-module", "stripped.pt", "added.pt"],
    ["convert", "ddp_cuda3_train.pt", "out.safetensors", "--verify"],
    ["convert", "ddp_cuda3_train.pt", "out.safetensors"],
    ["convert", "ddp_cuda3_train.pt", "out.safetensors", "--force", "--dtype", "bf16"],
    ["convert", "ddp_cuda3_train.pt", "dry.safetensors", "--dry-run", "--json"],
    ["convert", "fp16.pt", "fp16.pt", "--force", "--verify", "--save-mapping", "map.json"],
    ["convert", "fp16.pt", "back.pt", "--rules", "map.json", "--reverse"],
    ["convert", "rnn_classifier.pt", "new/", "--to", "safetensors", *SHARDS],
    ["convert", "rnn_classifier.pt", "shards.safetensors", *SHARDS, "--verify"],
    ["convert", "rnn_classifier.pt", "shards.safetensors", *SHARDS, "--force", "--dtype", "bf16"],
    ["convert", "rnn_classifier.pt", "shards.safetensors", *SHARDS, "--force", "--verify"],
    [
        "convert",
        "shards.safetensors.index.json",
        "shards.safetensors",
        *SHARDS,
        "--force",
        "--dtype",
        "f16",
        "--verify",
    ],
    [
        "convert",
        "shards.safetensors.index.json",
        "shards.safetensors",
        *SHARDS,
        "--force",
        "--dtype",
        "bf16",
        "--verify",
    ],
    ["convert", "shards.safetensors.index.json", "joined.pt"],
    ["inspect", "shards.safetensors.index.json"],
    ["diff", "stripped.pt", "ddp_cuda3.pt", "--keys", "strip"],
    ["diff", "fp16.pt", "regression.pt", "--json"],
    ["diff", "rnn_classifier.pt", "joined.pt", "--atol", "1", "--ignore-dtype"],
    ["scan", ".", "--json"],
    ["convert", "tied.pt", "tied.safetensors", "--regex", r"(a+)+b=>\1"],
    ["convert", "no_such.pt", "x.pt"],
    ["convert", ".", "x.pt"],
    ["convert", "tied.pt", "no/such/folder/x.pt"],
    ["convert", "tied.pt", "new"],
    ["convert", "big.pt", "big.safetensors"],
    ["convert", "deflated.pt", "inflated.safetensors", "--verify"],
]


LIVE = """
import torch, ckptconv
tree = ckptconv.load_portable("ddp_cuda3_train.pt", mmap={mmap}, whole=True)
sums = sorted((key, float(value.double().sum())) for key, value in tree["state_dict"].items())
print(sorted(tree), sums)
net = torch.nn.Linear(13, 1)
print(ckptconv.load_into(net, "regression.pt"))
ckptconv.save_portable(net.state_dict(), "saved_{mmap}.safetensors")
"""
IN_USE = """
import gc, ckptconv
from ckptconv import CheckpointError, convert_checkpoint
tensors = ckptconv.load_portable("fp16.pt")
try:
    convert_checkpoint("fp16.pt", "fp16.pt", dtype="bf16", force=True)
except CheckpointError as error:
    print(error)
del tensors
gc.collect()
print(convert_checkpoint("fp16.pt", "fp16.pt", dtype="f32", force=True, verify=True).verified)
"""
WITH_TORCH: list[list[str]] = [
    ["devices"],
    ["python", LIVE.format(mmap=True)],
    ["python", LIVE.format(mmap=False)],
    ["convert", "ddp_cuda3.pt", "folder", "--to", "dcp", "--verify"],
    ["convert", "ddp_cuda3.pt", "folder", "--to", "dcp"],
    ["convert", "folder", "folder", "--to", "dcp", "--force", "--dtype", "bf16", "--verify"],
    ["convert", "folder", "plain.pt"],
    ["inspect", "folder"],
    ["convert", "fp16.pt", "like.pt", "--like", "plain.pt", "--drop-unexpected"],
]


def fill(room: Path) -> Path:
    """A deflated archive, and one of some 20 MB, beside the samples."""
    with (
        zipfile.ZipFile(room / "tied.pt") as archive,
        zipfile.ZipFile(room / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as made,
    ):
        for item in archive.infolist():
            made.writestr(zipfile.ZipInfo(item.filename), archive.read(item), zipfile.ZIP_DEFLATED)
    return room


def big(room: Path) -> None:
    from safetensors.numpy import save_file

    save_file(
        {f"w{n}": numpy.arange(2_500_000, dtype=numpy.float32) + n for n in range(2)},
        room / "big.pt",
    )


def suite_answers(system: str, folder: Path) -> tuple[list[Any], dict[str, bytes]]:
    """What the suite answers and leaves on a system."""
    room = fill(room_of(folder / system))
    big(room)
    return requests(system, room, SUITE), files(room)


@EMULATED
@pytest.mark.trust
def test_every_command_does_the_same_elsewhere(tmp_path):
    answers, left = suite_answers("here", tmp_path)
    assert_does_what_it_is_to(answers, left)
    assert [name for name in left if "ckptconv-" in name] == []
    for system in ELSEWHERE:
        theirs, left_there = suite_answers(system, tmp_path)
        for asked, here, there in zip(SUITE, answers, theirs, strict=True):
            assert "Traceback" not in there[2], f"{asked}\n{there[2]}"
            assert there == here, (system, asked)
        assert left_there == left, system


@EMULATED
def test_a_console_of_windows_gets_plain_forms_and_json_plain_lines(tmp_path):
    asked = [
        ["inspect", "rnn_classifier.pt"],
        ["strip-module", "ddp_cuda3.pt", "out.pt"],
        ["inspect", "tied.pt", "--json"],
    ]
    room = room_of(tmp_path / "room")
    tree, done, document = requests(
        "windows", room, [*asked, ["python", "print('raw')"]], encoding="cp1252"
    )[:3]
    assert "  |- " in tree[1] and "`- " in tree[1] and "\\u25" not in tree[1]
    assert "-> out.pt" in done[2]
    assert "\r" not in tree[1] + done[2] + document[1]
    assert json.loads(document[1])
    assert requests("windows", room, [["python", "print('raw')"]])[0][1] == "raw\r\n"


@EMULATED
def test_a_model_cannot_be_named_where_there_is_no_torch(tmp_path, monkeypatch):
    from ckptconv.convert.named_models import model_shapes

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match="building a model needs torch"):
        model_shapes("collections:Counter")


@pytest.mark.parametrize("to", ["torch", pytest.param("dcp", marks=pytest.mark.trust)])
def test_outputs_of_names_that_windows_reserves_are_refused_there(to, tmp_path):
    room = room_of(tmp_path / "room")
    names = ["nul.pt", "model.pt:stream", "model.pt.", "CON"]
    answers = requests(
        "windows",
        room,
        [["convert", "tied.pt", name, "--to", to] for name in names],
    )
    assert {(code, err.partition(": ")[2].partition(": ")[2]) for code, _, err in answers} == {
        (1, "is not a plain file name on Windows; choose another name\n")
    }
    assert run("convert", "tied.pt", "nul.pt", "--to", to, cwd=room).exit == 0


def assert_does_what_it_is_to(answers: list[Any], left: dict[str, bytes]) -> None:
    """Fail if it is refusals that are compared."""
    failing = {
        " ".join(asked)
        for asked, (code, _, _) in zip(SUITE, answers, strict=True)
        if code not in (0, 1)
    }
    assert failing == set()
    done = {
        "out.safetensors",
        "stripped.pt",
        "added.pt",
        "joined.pt",
        "shards.safetensors.index.json",
        "inflated.safetensors",
    }
    assert done <= set(left)
    assert any(name.startswith("new/") for name in left)
    over = [
        err
        for asked, (code, _, err) in zip(SUITE, answers, strict=True)
        if asked[1:2] == ["shards.safetensors.index.json"]
    ]
    # shards over shards of the same names, of which they were read
    assert all("<time>" in err for err in over[:2])
    assert len([name for name in left if re.fullmatch(r"shards-\d+-of-\d+\.safetensors", name)]) > 2


@pytest.mark.trust
@EMULATED
def test_what_needs_torch_does_the_same_elsewhere(tmp_path):
    pytest.importorskip("torch")
    answers, left = {}, {}
    for system in ("here", *ELSEWHERE):
        answers[system] = requests(system, room_of(tmp_path / system), WITH_TORCH)
        left[system] = files(tmp_path / system)
        left[system].pop("folder/.metadata")
    assert [code for code, _, _ in answers["here"][:4]] == [0, 0, 0, 0]
    for system in ELSEWHERE:
        for asked, mine, theirs in zip(WITH_TORCH, answers["here"], answers[system], strict=True):
            assert "Traceback" not in mine[2] + theirs[2], f"{asked}\n{mine[2]}{theirs[2]}"
            assert (theirs[0], theirs[1].splitlines(), theirs[2]) == (
                mine[0],
                mine[1].splitlines(),
                mine[2],
            ), (system, asked)
        assert left[system] == left["here"]


@pytest.mark.trust
@EMULATED
def test_what_is_mapped_cannot_be_replaced_on_windows_and_says_so(tmp_path):
    pytest.importorskip("torch")
    ((code, out, err),) = requests("windows", room_of(tmp_path / "room"), [["python", IN_USE]])
    assert (code, err) == (0, "")
    error, verified = out.splitlines()
    assert error == (
        "fp16.pt: is in use or read-only, and so cannot be replaced on this system; "
        "close it: tensors of load_portable keep their file open unless mmap=False; nothing was "
        "left behind"
    )
    assert int(verified) > 0
    assert [name for name in files(tmp_path / "room") if "ckptconv-" in name] == []


@pytest.mark.trust
@EMULATED
@pytest.mark.parametrize("system", ELSEWHERE)
def test_threads_that_read_one_file_elsewhere_get_what_they_ask_for(system, tmp_path):
    """Without positioned reads, one thread must not move the place from which another reads."""
    room = tmp_path / "room"
    room.mkdir()
    (room / "numbers").write_bytes(
        b"".join(number.to_bytes(4, "little") for number in range(1 << 18))
    )
    ((code, out, err),) = requests(system, room, [["python", THREADS]])
    assert (code, err, out.split()) == (0, "", ["8000", "True"])


THREADS = """
import os, random, sys, threading
from ckptconv.io.files import FileSource
sys.setswitchinterval(1e-6)
source, wrong, done = FileSource("numbers"), [], []
def read(seed):
    chosen = random.Random(seed)
    for _ in range(1000):
        at, count = chosen.randrange((1 << 18) - 5000), chosen.choice((10, 5000))
        room = bytearray(count * 4)
        source.read_into(at * 4, memoryview(room))
        done.append(room == b"".join(n.to_bytes(4, "little") for n in range(at, at + count)))
threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(done), all(done) and not hasattr(os, "preadv"))
"""


@EMULATED
@pytest.mark.parametrize("system", ["here", "windows"])
def test_what_a_killed_process_left_is_told_from_what_a_living_one_holds(system, tmp_path):
    room = room_of(tmp_path / "room")
    ((code, out, err),) = requests(system, room, [["python", LEFT_OVER]])
    assert (code, err) == (0, "")
    held, left = out.splitlines()
    assert held == "held: True killed: False"
    assert left == "[]"
    assert [name for name in files(room) if "ckptconv-" in name] == []


LEFT_OVER = """
from pathlib import Path
from ckptconv import convert_checkpoint
from ckptconv.support import platforms
from ckptconv.io.hidden_folders import staging_folder
target = Path("out.pt")
killed = Path(".out.pt.01234567.ckptconv-tmp")
killed.mkdir()
(killed / "out.pt").write_text("half of it")
(killed / ".ckptconv-lock").write_text("")
with staging_folder(target, target) as made:
    held = made if made.name.endswith("-tmp") else made.parent
    (made / "out.pt").write_text("being written")
    convert_checkpoint("fp16.pt", "out.pt")
    print("held:", (made / "out.pt").exists() and held.exists(), "killed:", killed.exists())
print([str(path) for path in Path().iterdir() if "ckptconv-" in path.name])
"""


@EMULATED
@pytest.mark.parametrize("system", ["here", "windows"])
def test_writers_of_shards_of_one_name_take_turns(system, tmp_path):
    """While one holds the folder the other waits; with the lock given back, it goes on, and leaves
    no lock behind.
    """
    room = room_of(tmp_path / "room")
    ((code, out, err),) = requests(system, room, [["python", TURNS]])
    assert (code, err) == (0, "")
    assert out.splitlines() == ["waited: True", "done: True"]
    assert [name for name in files(room) if "ckptconv-" in name] == []


TURNS = """
import threading, time
from pathlib import Path
from ckptconv import convert_checkpoint
from ckptconv.support import platforms
lock = platforms.folder_lock(Path("."), follow=True)
lock.take(wait=True)
options = {"max_shard_size": "2KB"}
arguments = ("rnn_classifier.pt", "s.safetensors")
thread = threading.Thread(target=lambda: convert_checkpoint(*arguments, **options))
thread.start()
thread.join(1.0)
print("waited:", thread.is_alive() and not Path("s.safetensors.index.json").exists())
lock.close()
thread.join(30)
print("done:", Path("s.safetensors.index.json").exists())
"""


# --------------------------------------------------------------------------------------- the module


def test_a_short_read_at_the_end_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"0123456789")
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "pread")
    source = FileSource(tmp_path / "file")
    room = bytearray(4)
    source.read_into(6, memoryview(room))
    assert room == b"6789"
    with pytest.raises(MalformedCheckpoint, match="ends at byte 10"):
        source.read_into(8, memoryview(room))
    source.close()


def test_a_file_that_is_replaced_while_it_is_mapped_by_its_name_is_refused(tmp_path, monkeypatch):
    """If no path leads to an open file itself, another file may have its name by then (macOS)."""
    torch = pytest.importorskip("torch")
    from ckptconv import load_portable
    from ckptconv.live import load as loading

    torch.save({"w": torch.zeros(4)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(4)}, tmp_path / "b.pt")
    monkeypatch.setattr(platforms, "path_of_open", lambda fd: None)
    assert torch.equal(load_portable(tmp_path / "a.pt")["w"], torch.zeros(4))
    real = loading.open_certain

    def replaced(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        (tmp_path / "b.pt").replace(tmp_path / "a.pt")
        return found

    monkeypatch.setattr(loading, "open_certain", replaced)
    with pytest.raises(MalformedCheckpoint, match="was replaced while it was read"):
        load_portable(tmp_path / "a.pt")


PLAIN = [
    "model.safetensors",
    "a/b/c.pt",
    "über.pt",
    "com.pt",
    "console",
    "aux1.safetensors",
    "nul-1.pt",
    ".hidden",
    "a b.pt",
    "COM10",
]
NOT_PLAIN = [
    "", ".", "..", "/a", "a//b", "a/../b", "..\\x", "C:x", "C:\\x.safetensors",
    "\\\\server\\share\\x", "a/b\\c",
    "NUL", "nul.pt", "aux.safetensors", "a/CON/x.pt", "COM1", "lpt9.bin", "com¹.txt", "CONIN$",
    "nul .pt",
    "shard.safetensors:stream", "shard.safetensors.", "shard.safetensors ", "a./x.pt", "...",
    "a\nb", "a\0b",
]  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_names_that_mean_the_same_everywhere_are_taken(name):
    assert platforms.is_plain_path(name)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_names_that_lead_elsewhere_on_some_system_are_not(name):
    assert not platforms.is_plain_path(name)


@pytest.mark.parametrize("name", NOT_PLAIN[1:])
def test_an_index_that_names_such_a_shard_is_refused_on_every_system(name, tmp_path):
    """Even where there is a file of that name here: elsewhere, it is another one, a device, or
    none.
    """
    from safetensors.numpy import save

    with contextlib.suppress(OSError, ValueError):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(save({"w": numpy.ones(3, numpy.float32)}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"w": name}}))
    with pytest.raises(MalformedCheckpoint, match="is not a plain file name"):
        open_checkpoint(index)


@pytest.mark.parametrize("name", ["C:step", "..\\step", "NUL", "step.", "aux", "step-1 ."])
def test_a_folder_that_names_such_a_step_is_refused_on_every_system(name, tmp_path):
    for step in (name, "other"):
        (tmp_path / step).mkdir()
        shutil.copy(SAMPLES / "tied.pt", tmp_path / step / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text(name)
    with pytest.raises(MalformedCheckpoint, match="is not a plain folder name"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["C:x.distcp", "..\\x.distcp", "NUL", "x.distcp.", "a/aux.distcp", "x.distcp:y"]
)
def test_metadata_of_dcp_that_names_such_a_file_is_refused_on_every_system(name, tmp_path):
    from ckptconv.formats.folders.dcp import inside
    from ckptconv.io.places import LocalPlace

    (tmp_path / "a").mkdir()
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(MalformedCheckpoint, match="is not a plain relative path"):
        inside(LocalPlace(tmp_path), name)
    (tmp_path / "x").write_bytes(b"")
    found = inside(LocalPlace(tmp_path), "./a/../x".replace("a/../", ""))
    assert found.path == tmp_path / "x"


KEYS = [
    "C:\\net\\w",
    "C:w",
    "\\\\server\\share\\w",
    "..\\w",
    "../w",
    "/w",
    "NUL",
    "con.weight",
    "w.",
    "w ",
    "aux.safetensors",
    "w:stream",
]


@EMULATED
@pytest.mark.parametrize("system", ["here", *ELSEWHERE])
def test_keys_are_only_text_whatever_they_look_like(system, tmp_path):
    from safetensors.numpy import load_file, save_file

    values = {key: numpy.full(300, number, numpy.float32) for number, key in enumerate(KEYS)}
    save_file(values, tmp_path / "in.safetensors")
    split = ["--to", "safetensors", "--max-shard-size", "3KB"]
    whole = ["convert", "in.safetensors"]
    faithful = ["--keys", "keep"]
    asked = [
        [*whole, "out.pt", *faithful, "--verify"],
        [*whole, "out.safetensors", *faithful, "--verify"],
        [*whole, "folder/", *faithful, "--verify", *split],
        ["convert", "out.pt", "back0.safetensors", *faithful],
        ["convert", "out.safetensors", "back1.safetensors", *faithful],
        ["convert", "folder/", "back2.safetensors", *faithful],
        [*whole, "renamed.safetensors", "--rename", "C:\\net\\w=D:\\net\\w"],
    ]
    for code, _, err in requests(system, tmp_path, asked):
        assert code == 0, err
    for number in range(3):
        found = load_file(tmp_path / f"back{number}.safetensors")
        assert {key: value.tolist() for key, value in found.items()} == {
            key: value.tolist() for key, value in values.items()
        }
    assert "D:\\net\\w" in load_file(tmp_path / "renamed.safetensors")
    assert len(list(tmp_path.glob("folder/*.safetensors"))) == 6


@pytest.mark.parametrize("root", ["NUL", "con", "aux.1", "C:", "model:stream", "w. "])
def test_records_of_an_archive_are_only_text_too(root, tmp_path):
    """Nothing is unpacked, so a record may have the name of a device; backslashes are refused in
    any case.
    """
    with (
        zipfile.ZipFile(SAMPLES / "tied.pt") as archive,
        zipfile.ZipFile(tmp_path / "in.pt", "w") as made,
    ):
        for item in archive.infolist():
            made.writestr(f"{root}/{item.filename.partition('/')[2]}", archive.read(item))
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors")
    convert_checkpoint(SAMPLES / "tied.pt", tmp_path / "same.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (
        tmp_path / "same.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rules", "C:\\rules.json"), r"C:\rules.json: no such file"),
        (("--model", "C:\\models\\net.py:build"), r"C:\models\net.py:build"),
        (("--like", "D:\\x.pt"), r"D:\x.pt: no such file"),
    ],
)
def test_options_with_drive_letters_are_read_and_refused_by_name(arguments, told, tmp_path):
    done = run("convert", "tied.pt", "out.pt", *arguments, cwd=room_of(tmp_path / "room"))
    assert told in assert_one_error(done, code=done.exit)
    assert done.exit in (1, 2)


# -------------------------------------------------------------------------------------- the memory

_FAULTS = """
import resource, sys
from ckptconv.__main__ import main
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt, file=sys.stderr)
"""


@pytest.mark.trust
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_is_not_fetched_from_the_kernel_again(tmp_path):
    parts = {
        "packed": torch.zeros(4096, 1024, dtype=torch.int32),
        "scale": torch.ones(4096, 64).half(),
        "shape": torch.tensor([4096, 8192]),
    }
    save_file(
        {f"a.weight_{name}": part for name, part in parts.items()}, tmp_path / "in.safetensors"
    )
    weights = {"weights": {"num_bits": 4, "group_size": 128}}
    quantised = {"quant_method": "compressed-tensors", "config_groups": {"all": weights}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    words = [sys.executable, "-c", _FAULTS, "convert", "in.safetensors", "out.safetensors"]
    done = subprocess.run(
        [*words, "--dequantize", "--no-fsync"],
        cwd=tmp_path,
        env=environment(CKPTCONV_THREADS="1"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stderr.split()[-1]) < 22_000


@pytest.mark.parametrize("error", [TypeError, OSError])
def test_memory_stays_as_it_is_where_malloc_cannot_be_asked(error, monkeypatch):
    def lacking(*_given: object, **_options: object) -> None:
        raise error  # on Windows TypeError: the C library has no name there

    monkeypatch.setattr("ctypes.CDLL", lacking)
    platforms.share_memory_between_threads()
    platforms.keep_freed_memory()
