"""Scanning: dangerous pickles made by recipe are told, real checkpoints are not called dangerous,
and nothing is executed.
"""

from __future__ import annotations

import base64
import collections
import errno
import functools
import io
import json
import lzma
import operator
import os
import pickle
import struct
import subprocess
import tarfile
import zipfile
import zlib
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptconv import (
    CheckpointError,
    MalformedCheckpoint,
    limits,
    open_checkpoint,
    scan_checkpoint,
)
from ckptconv.io.places import place_of
from ckptconv.objects.threats import judge
from ckptconv.scan.files import _CountedSource
from ckptconv.support.progress import Meter
from helpers import oracle
from helpers.examples import crossed, some
from helpers.program import SAMPLES, assert_one_error, idle_rss, run, run_process
from hostile.cases import bad

torch = pytest.importorskip("torch")


def call(module: str, name: str, argument: str = "echo", *, protocol: int = 2) -> bytes:
    """A pickle that calls a function with one text."""
    text = b"X" + struct.pack("<I", len(argument)) + argument.encode()
    if protocol < 2:
        return f"c{module}\n{name}\n(S'{argument}'\ntR.".encode()
    if protocol < 4:
        return b"\x80%c" % protocol + f"c{module}\n{name}\n".encode() + text + b"\x85R."
    parts = b"".join(b"\x8c%c" % len(part) + part.encode() for part in (module, name))
    return b"\x80\4" + parts + b"\x93" + text + b"\x85R."


_DANGEROUS = """
    os.system posix.system nt.system os.popen os.execv subprocess.Popen subprocess.check_output
    subprocess.run commands.getoutput builtins.eval builtins.exec builtins.compile
    builtins.__import__ builtins.getattr builtins.setattr builtins.open builtins.breakpoint
    __builtin__.eval __builtin__.execfile __builtin__.apply __builtin__.getattr builtins.map
    builtins.input runpy.run_path runpy._run_code pip.main pip._internal.main webbrowser.open
    operator.attrgetter operator.methodcaller _operator.attrgetter functools.partial
    functools.reduce _functools.partial torch.hub.load torch.load torch.serialization.load
    numpy.testing._private.utils.runstring numpy.load numpy.f2py.crackfortran.getlincoef
    shutil.rmtree socket.socket _socket.socket socket.create_connection importlib.import_module
    importlib.machinery.SourceFileLoader _frozen_importlib._gcd_import pty.spawn bdb.Bdb pdb.Pdb
    pdb.run timeit.timeit timeit.main code.InteractiveInterpreter
    asyncio.unix_events._UnixSubprocessTransport._start asyncio.subprocess.create_subprocess_shell
    asyncio.run multiprocessing.process.Process ctypes.CDLL ctypes.CFUNCTYPE pickle.loads
    _pickle.loads cPickle.loads dill.loads cloudpickle.cloudpickle.loads joblib.load marshal.loads
    types.CodeType types.FunctionType sys.exit sys.settrace urllib.request.urlopen urllib.urlopen
    urllib2.urlopen httplib.HTTPSConnection http.client.HTTPSConnection requests.get
    requests.api.get aiohttp.client.ClientSession smtplib.SMTP tempfile.mktemp io.open _io.FileIO
    zipfile.ZipFile logging.config.fileConfig logging.FileHandler pydoc.pipepager
    doctest.debug_script cProfile.run profile.run trace.Trace idlelib.run.Executive
    lib2to3.pgen2.pgen.ParserGenerator venv.create ensurepip.bootstrap
    distutils.file_util.write_file setuptools.sandbox.run_setup uuid._get_command_stdout
    codecs.decode torch.utils.collect_env.run torch.utils.cpp_extension.load
    torch.utils._config_module.load_config torch._dynamo.guards.GuardBuilder.get
    torch._inductor.codecache.compile_file
    torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression
    torch.fx.graph_module.reduce_graph_module torch.utils.bottleneck.__main__.run_cprofile
    torch.jit.load torch.package.PackageImporter
    torch.utils.data.datapipes.utils.decoder.basichandlers torch.distributed.run.main
    torch.ops.load_library sympy.parsing.sympy_parser.parse_expr yaml.unsafe_load pandas.read_pickle
    pkgutil.resolve_name inspect.getattr_static sqlite3.connect linecache.getlines platform.popen
    threading.Thread signal.signal atexit.register gc.get_objects torch.serialization.os.system
    torch.storage.io.BytesIO.__init__ collections.OrderedDict.__reduce__ numpy.os.system
    numpy.core.numeric.builtins.eval
"""
DANGEROUS = _DANGEROUS.split()


def written(folder: Path, content: bytes, name: str = "bad.pt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def level(folder: Path, content: bytes, name: str = "bad.pt") -> str:
    return scan_checkpoint(written(folder, content, name)).level


@pytest.mark.parametrize(("path", "protocol"), crossed(DANGEROUS, [0, 2, 4]))
def test_a_dangerous_name_is_told_in_every_protocol(path, protocol, tmp_path):
    module, _, name = path.rpartition(".")
    scan = scan_checkpoint(written(tmp_path, call(module, name, protocol=protocol)))
    assert scan.level == "dangerous"
    assert [finding.name for finding in scan.dangerous] == [path]
    assert scan.dangerous[0].reason


@pytest.mark.parametrize(
    "split", ["torch.serialization:os.system", "torch.nn.modules.module:os", "numpy:os.system"]
)
def test_a_module_reached_through_another_is_told(split):
    assert judge(*split.split(":")).level == "dangerous"


class Reduced:
    """Pickled as a call of whatever it is given."""

    def __init__(self, func, *args):
        self.call = func, args

    def __reduce__(self):
        return self.call


LIVE = {
    "os.system": Reduced(os.system, "echo"),
    "Popen": Reduced(subprocess.Popen, "echo"),
    "eval": Reduced(eval, "1"),
    "partial": Reduced(functools.partial, print),
    "attrgetter": Reduced(operator.attrgetter, "a"),
    "nested": Reduced(pickle.loads, pickle.dumps(Reduced(os.system, "echo"))),
    "in a dict": {"state_dict": {"w": [1, 2.0]}, "epoch": Reduced(os.system, "echo")},
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", LIVE)
def test_what_pickle_itself_writes_is_told(name, protocol, tmp_path):
    assert level(tmp_path, pickle.dumps(LIVE[name], protocol)) == "dangerous"


TRICKS = {
    "INST": b"(S'echo'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nX\x04\0\0\0echoo.",
    "NEWOBJ": b"\x80\2cos\nsystem\nX\x04\0\0\0echo\x85\x81.",
    "NEWOBJ_EX": b"\x80\4\x8c\2os\x8c\6system\x93X\x04\0\0\0echo\x85}\x92.",
    "popped": b"\x80\2cos\nsystem\nX\x04\0\0\0echo\x85R0}.",
    "popped with its mark": b"\x80\2(cos\nsystem\nX\x04\0\0\0echo\x85R1}.",
    "names from the memo": b"\x80\4\x8c\2os\x940\x8c\6system\x940h\0h\1\x93X\x04\0\0\0echo\x85R.",
    "names from the memo, out of order": (
        b"\x80\4\x8c\6systemq\x070\x8c\2osr\xff\0\0\x000j\xff\0\0\0h\x07\x93\x8c\1a\x85R."
    ),
    "names from a text memo": b"S'system'\np5\n0S'os'\np6\n0g6\ng5\n\x93(S'echo'\ntR.",
    "names from a tuple's side": b"\x80\4\x8c\2os\x8c\6system(\x8c\1a1\x93\x8c\4echo\x85R.",
    "names duplicated": b"\x80\4\x8c\6systemq\0\x30\x8c\2os2\x30h\0\x93\x8c\4echo\x85R.",
    "a name of python 2 strings": b"\x80\4U\2osU\6system\x93\x8c\4echo\x85R.",
    "a name across a frame": b"\x80\4\x95\3\0\0\0\0\0\0\0\x8c\2os\x8c\6system\x93\x8c\4echo\x85R.",
    "a text with a call behind its frame": b"\x80\4\x95\7\0\0\0\0\0\0\0X\x08\0\0\0abcNNNN.0N.",
    "the same, cut off": b"\x80\4\x95\7\0\0\0\0\0\0\0X\x20\0\0\0abcNNNN.",
    "a name that is computed": (
        b"\x80\4c_codecs\nencode\n\x8c\2bf\x8c\5rot13\x86R\x8c\6system\x93\x8c\4echo\x85R."
    ),
    "EXT1": b"\x80\2\x82\1(S'echo'\ntR.",
    "EXT2": b"\x80\2\x83\1\1(S'echo'\ntR.",
    "EXT4": b"\x80\2\x84\1\1\0\0(S'echo'\ntR.",
    "attributes of a function": b"\x80\2ctorch.nn.modules.linear\nLinear\n}X\1\0\0\0aK\1sb0}.",
    "cut off behind the call": b"\x80\2cos\nsystem\nX\x04\0\0\0echo\x85R",
    "broken behind the call": b"\x80\2cos\nsystem\nX\x04\0\0\0echo\x85R\xff\xff",
    "stack empty behind the call": b"\x80\2cos\nsystem\nX\x04\0\0\0echo\x85R000000.",
    "an unknown memo behind the call": b"\x80\2cos\nsystem\nX\x04\0\0\0echo\x85Rh\x77.",
    "an unknown protocol": b"\x80\7cos\nsystem\nX\x04\0\0\0echo\x85R.",
    "behind another pickle": pickle.dumps({"a": 1}) + call("os", "system"),
    "behind five": b"".join(map(pickle.dumps, range(1000, 1005))) + call("os", "system"),
    "in torch's stream": call("torch.storage", "_load_from_bytes").replace(
        b"X\4\0\0\0echo", b"B" + struct.pack("<I", len(call("os", "system"))) + call("os", "system")
    ),
    "in torch's stream, computed": b"\x80\2ctorch.storage\n_load_from_bytes\n"
    b"c_codecs\nencode\n\x8c\2ab\x8c\5utf-7\x86R\x85R.",
    "in torch's stream, by latin1": pickle.dumps({"x": call("os", "system")}, 2),
    "in torch's stream, then popped": b"\x80\2ctorch.storage\n_load_from_bytes\nC%c"
    % len(call("os", "system"))
    + call("os", "system")
    + b"\x85R0}.",
    "nested three times": pickle.dumps(
        pickle.dumps(pickle.dumps(pickle.dumps(Reduced(os.system, "echo"))))
    ),
    "nested in protocol 0": pickle.dumps({"x": call("os", "system", protocol=0)}, 4),
    "with newlines of another kind": b"cos\nsystem\n(S'echo'\r\ntR.",
    "a persistent id in text": b"Pabc\ncos\nsystem\n(S'echo'\ntR.",
    "a buffer out of band": b"\x80\5\x97\x980cos\nsystem\n(S'echo'\ntR.",
    "a state set twice": b"\x80\2ccollections\nOrderedDict\n)R}b}bcos\nsystem\n(S'echo'\ntR.",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_is_seen_through(trick, tmp_path):
    assert level(tmp_path, TRICKS[trick]) == "dangerous"


def framed(payload: bytes, size: int | None = None) -> bytes:
    return b"\x95" + struct.pack("<Q", len(payload) if size is None else size) + payload


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(raw)) + raw


def computed(raw: bytes) -> bytes:
    """Opcodes that make bytes of a list of numbers."""
    return b"cbuiltins\nbytes\n](" + b"".join(b"K%c" % byte for byte in raw) + b"e\x85R"


CALL = b"cos\nsystem\n" + text("echo") + b"\x85R"
LOADER = b"ctorch.storage\n_load_from_bytes\n"
STREAM = b"\x80\2" + CALL + b"."
MADE = computed(STREAM)
MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
LEGACY = b"\x80\2M\xe9\3.\x80\2}."
INNER = framed(b"N0Ja")
COMPUTED_NAME = b"".join(
    b"cbuiltins\nstr\nC%c%b" % (len(name), name) + text("ascii") + b"\x86R"
    for name in (b"os", b"system")
)
COMPUTED_CALL = COMPUTED_NAME + b"\x93" + text("echo") + b"\x85R"

HIDDEN = {
    "a memo number behind blanks": b"Np" + b" " * 5000 + b"5\n0" + CALL + b".",
    "a memo number behind zeros": b"Np" + b"0" * 4200 + b"5\n0" + CALL + b".",
    "a memo number before a NUL": b"Np5\0zz\n0" + CALL + b".",
    "a memo number that is not read": b"Np" + b" " * (1 << 20) + b"5\n0" + CALL + b".",
    "a frame within a frame": b"\x80\4" + framed(INNER) + b"....0" + CALL + b".",
    "an end within its frame": b"\x80\4" + framed(MAGIC + b"\xff" * 20_000) + LEGACY + STREAM,
    "bytes by keywords": b"\x80\4"
    + LOADER
    + b"cbuiltins\nbytes\n)}"
    + text("source")
    + b"]s\x92\x85R.",
    "bytes of a text by keywords": b"\x80\4"
    + LOADER
    + b"cbuiltins\nbytes\n"
    + text("a" * 5000)
    + b"\x85}\x92\x85R.",
    "a bytearray that grows": LOADER + b"cbuiltins\nbytearray\n)R(K\1K\2e\x85R.",
    "a bytearray that grows by one": LOADER + b"\x96\1\0\0\0\0\0\0\0aK\1a\x85R.",
    "a bytearray that is changed": LOADER + b"\x96\1\0\0\0\0\0\0\0a(K\0K\1u\x85R.",
    "a loader that another calls": b"ctorch._tensor\n_rebuild_from_type_v2\n("
    + LOADER
    + b"N"
    + MADE
    + b"\x85NtR.",
    "a loader as an attribute": b"ctypes\nSimpleNamespace\n)R}"
    + text("__setstate__")
    + LOADER
    + b"sb"
    + MADE
    + b"b.",
    "a loader as a persistent id": MAGIC
    + LEGACY
    + b"\x80\2("
    + text("module")
    + LOADER
    + b"))tQ"
    + MADE
    + b"\x85R.",
    "python 2 text as UTF-8": b"\x80\2"
    + LOADER
    + b"c_codecs\nencode\nT"
    + text(STREAM.decode("latin-1"))[1:]
    + text("latin1")
    + b"\x86R\x85R.",
    "a computed name, broken off": COMPUTED_CALL,
    "a computed name, the fourth of a legacy file": b"\x80\2"
    + MAGIC
    + LEGACY
    + b"\x80\4"
    + COMPUTED_CALL,
    "behind a short pickle": MAGIC + LEGACY + STREAM,
    "behind a shorter one": b"N." + STREAM,
    "a text that looks like a tar file": b"\x80\4"
    + text("x" * 250 + "ustar")
    + b"0\x8c\2os\x8c\6system\x93\x8c\1a\x85R.",
}


@pytest.mark.parametrize("trick", HIDDEN)
def test_what_hides_a_call_is_dangerous(trick, tmp_path):
    assert level(tmp_path, HIDDEN[trick]) == "dangerous"


def archived(content: bytes) -> bytes:
    """A tar file of one member."""
    file, member = io.BytesIO(), tarfile.TarInfo("pickle")
    member.size = len(content)
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


@pytest.mark.parametrize("place", ["bytes of a pickle", "a record of numbers"])
def test_what_lies_in_an_archive_within_numbers_is_no_number(place, tmp_path):
    """An extension code, called: it has no name, by which what lies in arrays is told."""
    inner = archived(b"\x80\2\x82\1(K\1tR.")
    if place == "bytes of a pickle":
        assert level(tmp_path, pickle.dumps({"x": inner}, protocol=4)) == "dangerous"
        return
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr("a/data/0", inner)
    assert scan_checkpoint(tmp_path / "in.zip").level == "dangerous"


def test_what_stops_the_scan_is_told_whatever_it_begins_with(tmp_path):
    with limits(scanned_values=50):
        assert level(tmp_path, b"(" + b"N" * 51 + b"1" + CALL + b".") == "unknown"


@pytest.mark.trust
def test_many_alarms_and_names_take_little_memory(tmp_path):
    for content in (
        b"\x82\x010" * 200_000,
        b"ctorch\nSize\n" + b"}b" * 200_000,
        b"NN\x930" * 200_000,
    ):
        assert (
            len(scan_checkpoint(written(tmp_path, b"\x80\2" + content + b"N.")).files[0].findings)
            <= 101
        )
    names = b"".join(b"cos\nb%x\n0" % index for index in range(100))
    with limits(scanned_pickles=50):
        scan = scan_checkpoint(written(tmp_path, b"\x80\2" + names + b"N."))
    assert len(scan.files[0].findings) == 51
    assert any(
        "--limit scanned_pickles=100 looks further" in finding.reason
        for finding in scan.files[0].findings
    )


@pytest.mark.trust
def test_very_many_headers_of_a_broken_archive_are_looked_at_within_bounds(tmp_path):
    scan = scan_checkpoint(written(tmp_path, b"PK\3\4" * 750_000))
    assert any("the rest was not looked at" in finding.reason for finding in scan.files[0].findings)


def zipped(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, payload in records.items():
            archive.writestr(name, payload)
    return out.getvalue()


BAD = call("os", "system")
GOOD = pickle.dumps({"epoch": 1, "w": [0.5] * 50})


def in_tar(name: str, content: bytes = bytes(2000) + BAD, first: bytes = GOOD) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for member, payload in (("sys_info", first), (name, content)):
            info = tarfile.TarInfo(member)
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    return out.getvalue()


def without_magic(archive: bytes) -> bytes:
    """A tar file as of 1979: its headers have a checksum and no magic."""
    blocks = [bytearray(archive[at : at + 512]) for at in range(0, len(archive), 512)]
    for block in blocks:
        if block[257:262] == b"ustar":
            block[257:265], block[148:156] = bytes(8), b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
    return b"".join(blocks)


def raw_deflated(payload: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(payload) + packer.flush()


def npy(payload: bytes) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + payload


CONTAINERS = {
    "data.pkl": zipped({"archive/data.pkl": BAD, "archive/version": b"3\n"}),
    "any name": zipped({"archive/data.pkl": GOOD, "archive/config.json": BAD}),
    "deflated": zipped({"archive/data.pkl": GOOD, "archive/data/0": BAD + bytes(5000)},
        zipfile.ZIP_DEFLATED),
    "a storage": zipped({"archive/data.pkl": GOOD, "archive/data/0": BAD}),
    "zip in zip": zipped({"inner.pt": zipped({"archive/data.pkl": BAD})}, zipfile.ZIP_DEFLATED),
    "tar": in_tar("pickle"),
    "tar of 1979": without_magic(in_tar("pickle", BAD)),
    "tar, names from the stack": in_tar("pickle",
        b"\x8c\2os\x8c\6system\x93" + text("echo") + b"\x85R."),
    "tar, behind bytes that reach to its end": in_tar("pickle", first=b"\x80\2B" + struct.pack("<I",
        9000) + b"N."),
    "tar, storages": in_tar("storages"),
    "zip without a directory": zipped({"archive/data.pkl": BAD})[:-30],
    "zip without a directory, protocol 4": zipped({"archive/data.pkl": call("os", "system",
        protocol=4)[2:]})[:-30],
    "deflated zip without a directory": zipped({"archive/data.pkl": BAD + bytes(99)},
        zipfile.ZIP_DEFLATED)[:-30],
    "zip with a wrong checksum": zipped({"archive/data.pkl": BAD}).replace(struct.pack("<I",
        zlib.crc32(BAD)), b"abcd"),
    "zip marked as encrypted": zipped({"archive/data.pkl": BAD}).replace(
        b"PK\1\2\x14\x03\x14\0\0\0", b"PK\1\2\x14\x03\x14\0\1\0"
    ),
    "two zips, one behind another": zipped({"a/data.pkl": GOOD}) + zipped({"a/data.pkl": BAD}),
    "zip behind a pickle": GOOD + zipped({"a/data.pkl": BAD}, zipfile.ZIP_DEFLATED),
    "zip behind bytes": b"#!/bin/sh\n" + zipped({"a/data.pkl": BAD}, zipfile.ZIP_DEFLATED),
    "numpy objects": npy(BAD),
    "npz": zipped({"weight.npy": npy(BAD)}, zipfile.ZIP_DEFLATED),
    "torchscript constants": zipped({"net/data.pkl": GOOD, "net/constants.pkl": BAD,
        "net/code/__torch__.py": b"class A:\n"}),
}  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_is_looked_into(container, tmp_path):
    assert level(tmp_path, CONTAINERS[container], "x.dat") == "dangerous"


def test_a_legacy_file_is_followed_through_its_five_pickles(tmp_path):
    path = tmp_path / "legacy.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert scan_checkpoint(path).level == "plain"
    assert scan_checkpoint(path).files[0].pickles == 5
    torch.save(
        {"w": torch.ones(3), "x": Reduced(os.system, "echo")},
        path,
        _use_new_zipfile_serialization=False,
    )
    assert scan_checkpoint(path).level == "dangerous"


def test_nothing_is_executed(tmp_path):
    mark = tmp_path / "executed"
    for number, content in enumerate(
        (pickle.dumps(Reduced(os.system, f"touch {mark}")), call("os", "mkdir", str(mark)))
    ):
        path = written(tmp_path, content, f"{number}.pt")
        assert scan_checkpoint(path).level == "dangerous"
        assert run("scan", path, cwd=tmp_path).exit == 1
    assert not mark.exists()
    pickle.loads((tmp_path / "0.pt").read_bytes())
    assert mark.exists(), "the recipe does what it should"


def real_files() -> list[Path]:
    corpus = oracle.corpus_folder()
    folders = (corpus, corpus.parent / "produced", SAMPLES)
    return [
        path
        for folder in folders
        if folder.is_dir()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]


@pytest.mark.parametrize("path", some(50, real_files()), ids=lambda path: path.name)
def test_a_real_checkpoint_is_not_called_dangerous(path):
    (file,) = scan_checkpoint(path).files
    assert file.level != "dangerous", file.findings
    assert (
        file.pickles
        or path.suffix in (".safetensors", ".json", ".md", ".sh", ".py", "")
        or file.kind.startswith("zip")
    )


def test_the_names_of_the_corpus_are_those_of_its_manifest(corpus):
    for entry in json.loads((corpus / "manifest.json").read_text()):
        if entry["container"] in ("zip", "legacy") and entry.get("globals"):
            (file,) = scan_checkpoint(corpus / "files" / entry["file"]).files
            found = {finding.name.replace("__builtin__.", "builtins.") for finding in file.findings}
            wanted = {name.replace("__builtin__.", "builtins.") for name in entry["globals"]}
            assert wanted <= found, entry["file"]


@pytest.mark.parametrize("protocol", range(6))
def test_random_states_are_plain(protocol, tmp_path):
    numpy = pytest.importorskip("numpy")
    for state in (
        numpy.random.RandomState(1),
        numpy.random.default_rng(2),
        numpy.random.Generator(numpy.random.Philox(3)),
    ):
        assert level(tmp_path, pickle.dumps(state, protocol)) == "plain"


@pytest.mark.parametrize("path", [
    "torch.distributed._shard.checkpoint._async_process_executor.ThreadPoolExecutor",
    "torch.distributed.tensor.experimental._tp_transform.GraphModule",
    "torch.distributed.fsdp._optim_utils.ExitStack",
    "torch.jit._pickle.build_intlist.x.evil",
])  # fmt: skip
def test_what_a_module_of_torch_only_passes_on_is_dangerous(path):
    module, _, name = (
        path.rpartition(".")
        if "_pickle" not in path
        else ("torch.jit._pickle", "", "build_intlist.x.evil")
    )
    assert judge(module, name).level == "dangerous"


def test_what_torch_writes_by_default_is_plain(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3},
        tmp_path / "train.pt",
    )
    torch.save(model, tmp_path / "module.pt")
    assert scan_checkpoint(tmp_path / "train.pt").level == "plain"
    assert scan_checkpoint(tmp_path / "module.pt").level == "plain"


@pytest.mark.trust
def test_arrays_that_are_pickles_by_chance_are_not_called_dangerous(tmp_path):
    random = torch.Generator().manual_seed(7)
    arrays = [
        torch.randint(-(1 << 31), 1 << 31, (25,), generator=random).to(torch.int32)
        for _ in range(20_000)
    ]
    chance = [
        b"\x80\2",
        b"\x80\4\x95",
        b"\x80\2\x82\1.",
        b"\x80\5B\xff\xff\xff\0",
        b"\x82\1.",
        b"(" * 16 + b"\x82\1.",
    ]
    arrays += [
        torch.frombuffer(bytearray(content.ljust(40, b"\0")), dtype=torch.uint8)
        for content in chance
    ]
    torch.save({str(index): array for index, array in enumerate(arrays)}, tmp_path / "many.pt")
    assert scan_checkpoint(tmp_path / "many.pt").level == "plain"
    (tmp_path / "many.pkl").write_bytes(pickle.dumps([array.numpy() for array in arrays], 4))
    assert scan_checkpoint(tmp_path / "many.pkl").level == "plain"


@pytest.mark.parametrize(
    "content",
    [b"", b"N.", b"config\nname\n", b"import os\nos.system\n", bytes(99), b"{}", b"(lp0\n"],
)
def test_what_is_no_pickle_is_plain(content, tmp_path):
    assert level(tmp_path, content, "README") == "plain"


@pytest.mark.parametrize("magic", [b"\x1f\x8b\x08", b"7z\xbc\xaf\x27\x1c", b"BZh9", b"\xfd7zXZ\0"])
def test_what_cannot_be_looked_into_is_said(magic, tmp_path):
    assert level(tmp_path, magic + bytes(range(1, 60))) == "unknown"


def serialized(payload: bytes, compression: int) -> bytes:
    text = json.dumps(
        {
            "policy_class": {":type:": "x", ":serialized:": base64.encodebytes(payload).decode()},
            "n": 1,
        }
    )
    return zipped({"data": text.encode(), "_stable_baselines3_version": b"2.3"}, compression)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_base64_pickles_of_stable_baselines3_are_looked_into(compression, tmp_path):
    assert level(tmp_path, serialized(BAD, compression), "agent.zip") == "dangerous"
    assert level(tmp_path, serialized(GOOD, compression), "agent.zip") == "unknown"
    assert (
        level(
            tmp_path,
            serialized(call("cloudpickle.cloudpickle", "_make_function"), compression),
            "agent.zip",
        )
        == "unknown"
    )
    assert level(tmp_path, serialized(b"no pickle", compression), "agent.zip") == "unknown"
    assert level(tmp_path, b'{"policy_class": {":type:": "x"}}', "data.json") == "plain"


B64 = base64.b64encode(BAD).decode()
AGENTS = {
    "blanks before it": (" \n" * 400 + '{"a": {":serialized:": "', B64, '"}}'),
    "an escaped name": (r'{"a": {":serialize\u0064\u003A": "', B64, '"}}'),
    "an escaped character": ('{"a": {":serialized:": "', f"\\u{ord(B64[0]):04x}{B64[1:]}", '"}}'),
    "no base64 between": ('{"a": {":serialized:": "', rf"{B64[:9]}!é\"\t{B64[9:]}", '"}}'),
    "broken off": ('{"a": {":serialized:": "', B64, '"'),
}


@pytest.mark.parametrize("agent", AGENTS)
def test_a_json_text_is_read_as_its_loader_would(agent, tmp_path):
    text = "".join(AGENTS[agent]).encode()
    assert level(tmp_path, text, "data.json") == "dangerous"
    assert level(tmp_path, zipped({"data": text}), "agent.zip") == "dangerous"
    assert level(tmp_path, zipped({"data": text}, zipfile.ZIP_DEFLATED), "agent.zip") == "dangerous"


def test_very_many_texts_of_pickles_are_counted_and_equal_ones_looked_at_once(tmp_path):
    text = '{":serialized:":"QUFB",' * 5 + f'":serialized:":"{B64}"}}'
    scan = scan_checkpoint(written(tmp_path, text.encode(), "data.json"))
    assert scan.level == "dangerous" and any(
        finding.reason.startswith("2 pickles as") for finding in scan.files[0].findings
    )
    with limits(scanned_pickles=3):
        scan = scan_checkpoint(tmp_path / "data.json")
    assert (
        scan.level == "unknown"
        and "more than 3 pickles stand in one text" in scan.files[0].findings[0].reason
    )


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_whose_compression_is_not_read_is_not_plain(compression, tmp_path):
    path = written(tmp_path, zipped({"data.pkl": BAD}, compression), "packed.zip")
    assert [finding.level for finding in scan_checkpoint(path).files[0].findings] == ["unknown"]
    assert run("scan", path, "--strict", cwd=tmp_path).exit == 1


@pytest.mark.parametrize(
    "packed", [zlib.compress(BAD), zlib.compress(BAD, 1), lzma.compress(BAD, lzma.FORMAT_ALONE)]
)
def test_what_joblib_packs_is_not_plain(packed, tmp_path):
    assert level(tmp_path, packed, "model.joblib") == "unknown"


def test_numbers_that_begin_as_zlib_and_lzma_do_are_plain(tmp_path):
    for value in (0x0178, 0x9C78, 0xDA78, 0x5D):
        torch.save({"n": torch.full((9,), value)}, tmp_path / "n.pt")
        assert scan_checkpoint(tmp_path / "n.pt").level == "plain"


def test_a_folder_that_cannot_be_listed_is_not_plain(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    listed = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [file.kind for file in scan_checkpoint(tmp_path).files] == ["unread"]
    assert scan_checkpoint(tmp_path).level == "unknown"
    with pytest.raises(CheckpointError, match="cannot be listed: Permission denied"):
        scan_checkpoint(tmp_path / "closed")


@given(st.binary(max_size=200), st.integers(0, 200))
def test_bytes_around_a_call_never_stop_the_scan(noise, cut):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(os.environ.get("TMPDIR", "/tmp"))
        path = Path(f"ckptconv-scan-{os.getpid()}.bin")
        try:
            path.write_bytes(noise + BAD[:cut])
            scan_checkpoint(path)
            path.write_bytes(BAD + noise)
            assert scan_checkpoint(path).level == "dangerous"
        finally:
            path.unlink()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("width", [1, 7])
def test_a_pickle_is_followed_alike_through_windows_of_any_width(
    protocol, width, tmp_path, monkeypatch
):
    tree = {
        "texts": ["a", "é" * 300, "x" * 5000],
        "bytes": [b"", bytes(range(256)) * 40, BAD],
        "ints": [1, -(1 << 70), 2.5],
    }
    content = pickle.dumps(
        [tree, collections.OrderedDict(a=1), Reduced(os.system, "echo")], protocol
    )
    whole = scan_checkpoint(written(tmp_path, content))
    assert {finding.name for finding in whole.dangerous} == {"os.system", "posix.system"}
    monkeypatch.setattr("ckptconv.pickles.byte_window._FIRST_WINDOW", width)
    monkeypatch.setattr("ckptconv.pickles.byte_window.CHUNK", width)
    assert scan_checkpoint(tmp_path / "bad.pt") == whole


def sized(opcode: bytes, payload: bytes, hole: int, tail: bytes, folder: Path) -> Path:
    """A pickle of one opcode with its size, of a payload with a hole of the file behind it, and of
    `tail`.
    """
    width = {b"T": 4, b"X": 4, b"B": 4, b"\x8e": 8}[opcode]
    path = folder / "large.pkl"
    with path.open("wb") as file:
        file.write(b"\x80\4" + opcode + (len(payload) + hole).to_bytes(width, "little") + payload)
        file.seek(hole, os.SEEK_CUR)
        file.write(tail)
    return path


@pytest.mark.trust
@pytest.mark.parametrize("opcode", [b"T", b"B", b"\x8e"])
def test_a_large_pickle_takes_little_memory(opcode, tmp_path):
    path = sized(opcode, BAD, 900_000_000, b".", tmp_path)
    done = run_process("scan", path, cwd=tmp_path)
    assert done.exit == 1 and "<bytes 0>" in done.out and "os.system" in done.out
    assert done.rss - idle_rss() < 50_000_000
    path = sized(opcode, b"", 900_000_000, b"0" + BAD[2:], tmp_path)
    done = run_process("scan", path, cwd=tmp_path)
    assert done.exit == 1 and "os.system" in done.out
    assert done.rss - idle_rss() < 50_000_000


LONG = "abc" * 2000
LONG_NAMES = {
    "GLOBAL": f"c{LONG}\nsystem\n(S'echo'\ntR.".encode(),
    "GLOBAL, its attribute": f"cbuiltins\n{'object.' * 900}__init__\n(S'echo'\ntR.".encode(),
    "INST": f"(S'echo'\ni{LONG}\nsystem\n.".encode(),
    "STACK_GLOBAL": b"\x80\4X\x70\x17\0\0" + LONG.encode() + b"\x8c\6system\x93X\4\0\0\0echo\x85R.",
}


@pytest.mark.parametrize("name", LONG_NAMES)
def test_a_name_that_no_module_has_is_dangerous(name, tmp_path):
    scan = scan_checkpoint(written(tmp_path, LONG_NAMES[name]))
    assert [finding.reason for finding in scan.dangerous] == [
        "a global is named in more than 4096 bytes"
    ]


def test_a_text_as_long_as_an_array_is_looked_into_up_to_a_limit(tmp_path):
    content = pickle.dumps({"x": BAD + bytes(5000)}, 2)
    assert level(tmp_path, content) == "dangerous"
    with limits(pickle_bytes=5000):
        (finding, *_) = scan_checkpoint(tmp_path / "bad.pt").files[0].findings
    assert finding.level == "unknown" and "--limit pickle_bytes=" in finding.reason


def test_a_folder_is_scanned_with_the_folders_in_it(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    written(tmp_path / "a" / "b", BAD, "weights.safetensors")
    written(tmp_path / "a", GOOD, "good.pkl")
    os.mkfifo(tmp_path / "a" / "pipe")
    scan = scan_checkpoint(tmp_path)
    assert {Path(file.path).name: file.level for file in scan.files} == {
        "weights.safetensors": "dangerous",
        "good.pkl": "plain",
        "pipe": "unknown",
    }


def test_a_linked_folder_is_not_plain_for_it_was_not_looked_into(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    written(tmp_path / "elsewhere", BAD)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "models" / "link.pt").symlink_to(written(tmp_path, GOOD))
    scan = scan_checkpoint(tmp_path / "models")
    assert [(Path(file.path).name, file.level) for file in scan.files] == [
        ("link", "unknown"),
        ("link.pt", "plain"),
    ]
    assert scan_checkpoint(tmp_path / "models" / "link").level == "dangerous"


def test_a_folder_without_files_is_called_so(tmp_path):
    (tmp_path / "empty").mkdir()
    done = run("scan", "empty", cwd=tmp_path)
    assert (done.exit, done.out) == (0, "empty: a folder without files\n")


def test_a_path_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        scan_checkpoint(tmp_path / "none.pt")


def test_the_program_answers_by_its_exit_code(tmp_path):
    bad, good = written(tmp_path, BAD), written(tmp_path, GOOD, "good.pkl")
    odd = written(tmp_path, b"\x80\2cmodels.yolo\nModel\n.", "odd.pkl")
    assert run("scan", good, cwd=tmp_path).exit == 0
    assert run("scan", good, bad, cwd=tmp_path).exit == 1
    assert (
        run("scan", odd, cwd=tmp_path).exit,
        run("scan", odd, "--strict", cwd=tmp_path).exit,
    ) == (0, 1)
    assert "os.system: runs commands of the system" in run("scan", bad, cwd=tmp_path).out
    assert_one_error(run("scan", "none.pt", cwd=tmp_path), code=2)
    both = run("scan", bad, "none.pt", good, cwd=tmp_path)
    assert both.exit == 2 and "os.system" in both.out and "good.pkl: holds only" in both.out
    assert both.err == "error: none.pt: no such file; check the path\n"
    document = run("scan", bad, "none.pt", "--json", cwd=tmp_path)
    assert (
        document.exit == 2
        and len(document.json()["scans"]) == 1
        and "no such file" in document.json()["error"]["message"]
    )
    assert run("scan", bad, "--quiet", cwd=tmp_path).out == ""
    document = run("scan", bad, "--json", cwd=tmp_path).json()
    assert document["scans"][0]["level"] == "dangerous"
    assert document["scans"][0]["files"][0]["findings"][0]["name"] == "os.system"


def test_text_from_a_file_is_escaped(tmp_path):
    done = run("scan", written(tmp_path, b"\x80\2cos\nsys\x1b[31mtem\n."), cwd=tmp_path)
    assert done.exit == 1
    assert "\x1b" not in done.out


def test_it_agrees_with_picklescan_on_what_is_dangerous(tmp_path):
    scanner = pytest.importorskip("picklescan.scanner")
    for path in DANGEROUS:
        module, _, name = path.rpartition(".")
        theirs = scanner.scan_bytes(io.BytesIO(call(module, name)), "x.pkl")
        if theirs.infected_files:
            assert judge(module, name).level == "dangerous", path
    tables = scanner._unsafe_globals
    for module, names in tables.items():
        if module == "test":
            continue  # a folder that many projects have; what is in the standard library's is told
        for name in {"*": ["anything"]}.get(names, [names]) if isinstance(names, str) else names:
            assert judge(module, name).level == "dangerous", f"{module}.{name}"


def test_it_agrees_with_fickling_on_what_is_dangerous(tmp_path):
    fickle, analysis = (
        pytest.importorskip("fickling.fickle"),
        pytest.importorskip("fickling.analysis"),
    )
    unsafe = 0
    for path in DANGEROUS:
        module, _, name = path.rpartition(".")
        content = call(module, name, protocol=4)
        unsafe += (
            analysis.check_safety(fickle.Pickled.load(content)).severity
            >= analysis.Severity.LIKELY_UNSAFE
        )
        assert level(tmp_path, content) == "dangerous"
    assert unsafe > len(DANGEROUS) / 2
    for module in fickle.UNSAFE_IMPORTS:
        assert judge(module, "anything").level == "dangerous" or module in LESS, module
    for module, names in analysis.UnsafeImportsML.UNSAFE_IMPORTS.items():
        for name in set(names) - {"_load_from_bytes"}:  # what it loads is looked into
            assert judge(module, name).level == "dangerous", f"{module}.{name}"


_LESS = """
    difflib test compile eval exec builtins __builtin__ __builtins__ torch types functools operator
    _operator code
"""
LESS = _LESS.split()
"""Modules that fickling refuses with all that is in them, and of which some names are judged
dangerous here.
"""


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_streams_in_streams_are_looked_into_as_deep_as_the_limit_says(compression, tmp_path):
    content = BAD
    for depth in range(1, 5):
        content = zipped({"in": content}, compression)
        with limits(scanned_depth=3):
            scan = scan_checkpoint(written(tmp_path, content))
        [found] = scan.files[0].findings
        if depth <= 3:
            assert (found.where, found.name) == ("in" + "/in" * (depth - 1), "os.system")
        else:
            assert scan.level == "unknown" and found.name == ""
            assert found.reason.startswith("streams are nested more than 3 deep; deeper ones were")
            assert "scanned_depth=6 looks further" in found.reason


@pytest.mark.parametrize(
    ("content", "kind", "pickles"),
    [
        (pickle.dumps([1]), "pickle", 1),
        (pickle.dumps([1]) * 3, "3 pickles", 3),
        (b"\x7fELF" + zipped({"a": pickle.dumps([1])}), "zip behind other bytes", 1),
        (b"some text", "text", 0),
    ],
)
def test_what_a_file_is_and_how_many_pickles_are_in_it(content, kind, pickles, tmp_path):
    [file] = scan_checkpoint(written(tmp_path, content)).files
    assert (file.kind, file.pickles, file.level) == (kind, pickles, "plain")


LOADER = b"ctorch.storage\n_load_from_bytes\n"
UNKNOWN = [
    (b"\x80\x02]" + LOADER + b"a.", "a function that loads streams is passed on, so it is unknown"),
    (b"\x80\x02" + LOADER + b"\x85.", "a function that loads streams is passed on, so it is unkn"),
    (b"\x80\x02X\1\0\0\0aQ)R.", "an object is called that the pickle does not name"),
    (b"\x80\x04C\1aNa.", "bytes are changed after they are written, so they are unknown"),
    (b"\x80\x04C\1a(NNe.", "bytes are changed after they are written, so they are unknown"),
    (b"\x80\x04\x95\6\0\0\0\0\0\0\0N.NNNN", "ends within its frame"),
    (b"\x80\x02\x82\1.", "a global is named by its number, 1, in a registry of the process"),
    (b"\x80\x02\x83\1\2)R.", "a global is named by its number, 513, in a registry of the process"),
    (b"\x80\x02\x84\1\0\1\0)R.", "a global is named by its number, 65537, in a registry"),
]


@pytest.mark.parametrize(("content", "reason"), UNKNOWN)
def test_what_nobody_can_know_of_a_pickle_is_dangerous(content, reason, tmp_path):
    for file in (content, zipped({"archive/data.pkl": content})):
        scan = scan_checkpoint(written(tmp_path, file))
        assert scan.level == "dangerous"
        assert any(found.reason.startswith(reason) for found in scan.dangerous)


def test_a_scan_counts_each_mebibyte_once_however_often_it_is_read(tmp_path):
    size = (4 << 20) + 5
    meter = Meter("read", size, None)
    source = _CountedSource(place_of(written(tmp_path, bytes(size))).open(), meter)
    with closing(source):
        for offset, nbytes, done in [
            (5, 7, 1 << 20),
            (0, 1 << 20, 1 << 20),
            ((2 << 20) - 1, 2, 3 << 20),
            (4 << 20, 5, (3 << 20) + 5),
        ]:
            assert source.read(offset, nbytes) == bytes(nbytes)
            assert meter.done == done
        source.count_rest()
    assert meter.done == size


def test_base64_that_hides_a_pickle_needs_a_decoder_that_is_told(tmp_path):
    hidden = base64.b64encode(BAD)
    content = pickle.dumps(Reduced(pickle.loads, Reduced(base64.b64decode, hidden)))
    assert level(tmp_path, content) == "dangerous"


MALFORMED = (
    "exec_setitem_on_tensor.pt",
    "zip_two_roots.pt",
    "zip_after_legacy_polyglot.pt",
    "torch_numel_too_big.pt",
)


@pytest.mark.parametrize("name", MALFORMED)
def test_what_a_conversion_refuses_as_malformed_is_not_plain(name, tmp_path):
    content = next(case[-1]() for case in bad.CASES if case[0] == name)
    scan = scan_checkpoint(written(tmp_path, content))
    assert scan.level == "unknown"
    told = [each for each in scan.files[0].findings if each.reason.startswith("malformed: ")]
    with pytest.raises(MalformedCheckpoint) as refused, open_checkpoint(tmp_path / "bad.pt"):
        pass
    assert [(each.where, each.reason, each.at) for each in told] == [
        (refused.value.where or "", f"malformed: {refused.value.what}", 0)
    ]


def test_why_a_directory_was_not_followed_is_a_sentence(tmp_path):
    scan = scan_checkpoint(
        written(tmp_path, next(case[-1]() for case in bad.CASES if case[0] == "zip_zip64_lie.pt"))
    )
    reasons = [
        finding.reason for finding in scan.files[0].findings if "not followed" in finding.reason
    ]
    assert reasons and all(
        reason.startswith("its directory was not followed (") for reason in reasons
    )
