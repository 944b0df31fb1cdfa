"""Names of Python's library, torch with what it requires, and numpy: what runs code through them is
dangerous, what models name is not.
"""

from __future__ import annotations

import collections
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ckptconv import scan_checkpoint
from ckptconv.objects.known_names import ALWAYS_THERE, MAKERS, PLAIN
from ckptconv.objects.threats import judge
from helpers import families
from helpers.program import run

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
networkx = pytest.importorskip("networkx")
sympy = pytest.importorskip("sympy")


# ----------------------------------------------------------------------------- pickles from opcodes


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(path: str) -> bytes:
    """A global, `module:name` where the name has dots."""
    module, _, name = path.rpartition(":" if ":" in path else ".")
    return text(module) + text(name) + b"\x93"


def call(path: str, *args: bytes) -> bytes:
    return named(path) + b"(" + b"".join(args) + b"tR"


def mapping(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(name) + value for name, value in items.items()) + b"u"


TIMER = "torch.utils.benchmark.utils.timer"


def ways(mark: str) -> dict[str, bytes]:
    """What each makes the file or the folder `mark`, when it is unpickled."""
    path, code = text(mark), f"__import__('os').mkdir({mark!r})"
    array = call("numpy.ndarray", b"(K\1t")
    return {
        "typing._eval_type": call(
            "typing._eval_type", call("typing.ForwardRef", text(code)), b"}", b"}"
        ),
        "dataclasses._create_fn": call(
            "dataclasses._create_fn",
            text("f"),
            b"](" + text(f"a={code}") + b"e",
            b"](" + text("pass") + b"e",
        ),
        "_xxsubinterpreters": call(
            "_xxsubinterpreters.run_string", call("_xxsubinterpreters.create"), text(code)
        ),
        "_interpreters": call("_interpreters.exec", call("_interpreters.create"), text(code)),
        "PosixPath.write_text": call(
            "pathlib:PosixPath.write_text", call("pathlib.PosixPath", path), text("x")
        ),
        "numpy.lib.format.open_memmap": call(
            "numpy.lib.format.open_memmap", path, text("w+"), text("u1"), b"(K\1t"
        ),
        "numpy.core.memmap": call(
            "numpy.core.memmap", path, text("u1"), text("w+"), b"K\0", b"(K\1t"
        ),
        "ndarray.tofile": call("numpy:ndarray.tofile", array, path),
        "torch._C.PyTorchFileWriter": call("torch._C.PyTorchFileWriter", path),
        "an attribute through a module": call("torch.nn.modules.linear:torch.save", b"K\1", path),
        "Timer.timeit": call(f"{TIMER}:Timer.timeit", call(f"{TIMER}.Timer", text(code)), b"K\1"),
        "the torch of a module": call("torch.nn.modules.linear:F.torch.save", b"K\1", path),
        "a method by getattr": call(
            "builtins.getattr", named("pathlib.PosixPath"), text("write_text")
        )
        + b"("
        + call("pathlib.PosixPath", path)
        + text("x")
        + b"tR",
        "jinja2.utils.import_string": call("jinja2.utils.import_string", text("os.mkdir"))
        + b"("
        + path
        + b"tR",
        "sympy.sympify": call("sympy.core.sympify.sympify", text(code)),
        "networkx.write_gml": call(
            "networkx.readwrite.gml.write_gml", call("networkx.classes.graph.Graph"), path
        ),
        "LocalFileSystem.mkdir": call(
            "fsspec.implementations.local:LocalFileSystem.mkdir",
            call("fsspec.implementations.local.LocalFileSystem"),
            path,
        ),
        "FileLock.acquire": call(
            "filelock:FileLock.acquire", call("filelock.FileLock", path, b"K\0")
        ),
        "safetensors.save_file": call("safetensors.numpy.save_file", mapping(a=array), path),
        "_compat_pickle.NAME_MAPPING": b"\x80\2c_compat_pickle\nNAME_MAPPING\n("
        + text("torch")
        + text("Size")
        + b"\x86"
        + text("os")
        + text("mkdir")
        + b"\x86u0ctorch\nSize\n"
        + path
        + b"\x85R",
    }


LOADED = """
import pickle, pathlib, sys
for path in sys.argv[1:]:
    try:
        pickle.load(open(path, "rb"))
    except Exception as error:
        print(path, type(error), error)
"""
"""Unpickles files one after the other, as a victim would; what comes after the first side effect
does not matter.
"""

NOT_EVERYWHERE = {
    "_interpreters": sys.version_info >= (3, 13),
    "_xxsubinterpreters": sys.version_info < (3, 13),
    "dataclasses._create_fn": sys.version_info < (3, 13),
    "PosixPath.write_text": sys.platform != "win32",
    "a method by getattr": sys.platform != "win32",
}
"""What some versions of Python have, and whether this one does."""


@pytest.fixture(scope="module")
def unpickled(tmp_path_factory) -> Path:
    """A folder of all ways, and the marks that they made in another process."""
    folder = tmp_path_factory.mktemp("ways")
    paths = []
    for name in ways(""):
        content = ways(str(folder / f"{name}.mark"))[name]
        paths.append(folder / f"{name}.pkl")
        paths[-1].write_bytes((b"" if content[:1] == b"\x80" else b"\x80\4") + content + b".")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADED, *map(str, paths)],
        capture_output=True,
        text=True,
    )
    (folder / "said").write_text(done.stdout + done.stderr)
    return folder


@pytest.mark.parametrize("way", ways(""))
def test_what_runs_when_it_is_unpickled_is_dangerous(way, unpickled, tmp_path):
    path = unpickled / f"{way}.pkl"
    if NOT_EVERYWHERE.get(way, True):
        assert (unpickled / f"{way}.mark").exists(), (unpickled / "said").read_text()
    assert scan_checkpoint(path).level == "dangerous"
    assert run("scan", path, cwd=tmp_path).exit == 1


# ----------------------------------------------------------------- what was there before is changed

FUNCTIONAL = named("torch.nn.modules.linear:F")
LOGGER = call("logging.getLogger", text("ckptconv-test"))
FORMAT = call("torch.serialization._get_layout", text("torch.strided"))
ENUM = call("torch.distributed.checkpoint.planner.WriteItemType", b"K\1")
INNER = pickle.dumps(torch.nn.Linear, 2)
CHANGES = {
    "a module": FUNCTIONAL + mapping(relu=b"N") + b"b",
    "a class": named("torch.nn.modules.linear.Linear") + mapping(forward=b"N") + b"b",
    "a class, item by item": named("collections.OrderedDict") + text("a") + b"K\1s",
    "a class by an old persistent id": b"("
    + text("module")
    + named("torch.nn.modules.linear.Linear")
    + b"NNtQ"
    + mapping(forward=b"N")
    + b"b",
    "an object of the process": LOGGER + mapping(disabled=b"\x88") + b"b",
    "an object by NEWOBJ": named("uuid.SafeUUID") + b"K\0\x85\x81" + mapping(name=b"N") + b"b",
    "a member of an enum": ENUM + mapping(name=b"N") + b"b",
    "a member of an enum, by copyreg": call("copyreg.__newobj__", named("uuid.SafeUUID"), b"K\0")
    + mapping(name=b"N")
    + b"b",
    "a layout": FORMAT + mapping(a=b"N") + b"b",
    "what a stream in the stream gives": call(
        "torch.storage._load_from_bytes", b"B" + struct.pack("<I", len(INNER)) + INNER
    )
    + mapping(forward=b"N")
    + b"b",
    "by a function that sets attributes": call(
        "torch._tensor._rebuild_from_type_v2",
        named("logging.getLogger"),
        named("logging.Logger"),
        text("a") + b"\x85",
        mapping(disabled=b"\x88"),
    ),
    "an item": LOGGER + text("a") + b"K\1s",
    "items": LOGGER + b"(" + text("a") + b"K\1u",
    "an element": LOGGER + b"K\1a",
    "elements": LOGGER + b"(K\1e",
    "set elements": LOGGER + b"(K\1\x90",
    "from the memo": LOGGER + b"\x940}h\0" + mapping(disabled=b"\x88") + b"b",
    "what an object gives that is called": call("collections.OrderedDict") + b")R",
    "what a called function gives": LOGGER + text("a") + b"\x85R",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_the_pickle_did_not_make_is_dangerous(change, tmp_path):
    (tmp_path / "bad.pkl").write_bytes(b"\x80\4" + CHANGES[change] + b".")
    assert scan_checkpoint(tmp_path / "bad.pkl").level == "dangerous"


@pytest.mark.trust
def test_such_a_change_is_felt_by_the_process_that_unpickles(tmp_path):
    for name in ("a module", "a class", "an object of the process"):
        (tmp_path / f"{name}.pkl").write_bytes(b"\x80\4" + CHANGES[name] + b".")
    shown = (
        "torch.nn.functional.relu, torch.nn.Linear.forward, "
        "logging.getLogger('ckptconv-test').disabled"
    )
    told = f"import torch, logging; print({shown})"
    paths = [str(tmp_path / f"{name}.pkl") for name in ("a module", "an object of the process")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADED + told, *paths],
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("None <function") and done.stdout.rstrip().endswith("True"), (
        done.stdout
    )


UNKNOWN = {
    "a state of another package": named("mine.Thing") + b")\x81}b",
    "what a function of another package gives": call("mine.make") + mapping(a=b"K\1") + b"b",
    "a method of another package by getattr": call(
        "builtins.getattr", named("mine.Thing"), text("mean")
    ),
    "a name with dots of another package": named("mine:Outer.Inner") + b")\x81}b",
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_another_package_does_is_unknown(case, tmp_path):
    (tmp_path / "odd.pkl").write_bytes(b"\x80\4" + UNKNOWN[case] + b".")
    assert scan_checkpoint(tmp_path / "odd.pkl").level == "unknown"


@pytest.mark.parametrize(
    "called",
    [b")R", b")\x81", b")}\x92", b"\x940(h\0o"],
    ids=["REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ"],
)
def test_a_call_of_what_an_unknown_function_gives_is_dangerous(called, tmp_path):
    (tmp_path / "odd.pkl").write_bytes(
        b"\x80\4" + call("mine.make", text("os.mkdir")) + called + b"."
    )
    assert scan_checkpoint(tmp_path / "odd.pkl").level == "dangerous"


@pytest.mark.parametrize(
    "path",
    [
        "mine:torch.save",
        "mine.models:np.load",
        "mine:nn.os",
        "mine:shutil.rmtree",
        "mine:Net.subprocess.run",
    ],
)
def test_a_package_that_is_always_there_is_not_reached_through_another(path):
    assert judge(*path.split(":")).level == "dangerous"


def test_getattr_that_is_more_than_another_name_is_dangerous(tmp_path):
    function = named("builtins.getattr")
    for content in (
        function + call("collections.OrderedDict") + text("clear") + b"\x86R",
        function + named("torch.nn.Module") + call("builtins.str", text("eval")) + b"\x86R",
        function + named("mine.Thing") + text("a") + b"N\x87R",
        b"](" + function + b"e",
        call("torch._tensor._rebuild_from_type_v2", function, named("torch.Tensor"), b"N", b"N"),
        call("builtins.getattr", named("torch.nn.Module"), text("register_forward_hook")),
    ):
        (tmp_path / "bad.pkl").write_bytes(b"\x80\4" + content + b".")
        assert scan_checkpoint(tmp_path / "bad.pkl").level == "dangerous", content


# -------------------------------------------------------------------------- what models really name


def looked_at(graph):
    """A graph with the views that it keeps once they are asked for."""
    for view in ("nodes", "edges", "adj", "degree", "in_edges", "in_degree", "out_degree"):
        getattr(graph, view, None)
    return graph


def ordinary() -> dict[str, object]:
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.GELU(),
        nn.Flatten(),
        nn.LSTM(2, 2),
        nn.MultiheadAttention(4, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return {
        "layers": model,
        "transformer, whose activation is a function": nn.Transformer(4, 2, 1, 1, 8),
        "activations as attributes": [torch.relu, torch.tanh, nn.functional.gelu,
            nn.functional.silu, torch.sigmoid],
        "weight norm": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)).state_dict(),
        "old weight norm": nn.utils.weight_norm(nn.Linear(2, 2))._forward_pre_hooks,
        "an optimizer": optimizer,
        "the method of a scheduler": torch.optim.lr_scheduler.OneCycleLR._annealing_cos,
        "a scaler": torch.amp.GradScaler("cpu", enabled=False).state_dict(),
        "a distribution": torch.distributions.Normal(torch.zeros(2), torch.ones(2)),
        "a dataset": torch.utils.data.TensorDataset(torch.ones(2)),
        "an averaged model": torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)).state_dict(),
        "containers": [collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]),
            collections.deque([1]), {1}, 1j],
        "paths": [Path("a"), Path("a").absolute()],
        "arrays": [numpy.arange(3), numpy.float32(1), numpy.matrix([1]), numpy.ma.array([1],
            mask=[0])],
        "types of arrays": [numpy.dtype("f4"), numpy.int64, numpy.dtype([("a", "i4")])],
        "formats": [torch.float16, torch.device("cpu"), torch.Size([1]), torch.strided],
        "a version": torch.torch_version.TorchVersion("2.0"),
        "packed sequences": nn.utils.rnn.pack_sequence([torch.ones(2)]),
        "jagged tensors": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "masked tensors": torch.masked.masked_tensor(torch.ones(1), torch.tensor([True])),
        "a scaler itself": torch.amp.GradScaler("cpu"),
        "numbers of sympy": [sympy.Integer(7), sympy.Integer(1), sympy.pi, sympy.oo,
            sympy.Symbol("x"), sympy.Rational(1, 2)],
        "graphs": [looked_at(kind([(1, 2)])) for kind in (networkx.Graph, networkx.DiGraph,
            networkx.MultiGraph, networkx.MultiDiGraph)],
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_models_and_training_name_is_plain(protocol, tmp_path):
    for name, value in ordinary().items():
        torch.save(value, tmp_path / "good.pt", pickle_protocol=protocol)
        findings = [
            item
            for item in scan_checkpoint(tmp_path / "good.pt").files[0].findings
            if item.level != "plain"
        ]
        assert findings == [], name


def test_the_plain_classes_of_torch_are_defined_where_they_are_listed():
    """A name that a module only imports would be another way to what is elsewhere."""
    for path in sorted(MAKERS):
        module, _, name = path.rpartition(".")
        value = getattr(sys.modules.get(module), name, None)
        if isinstance(value, type) and module.startswith(
            ("torch.nn.modules", "torch.optim", "torch.distributions")
        ):
            assert module.startswith(value.__module__), path


def test_every_module_of_this_python_is_always_there():
    for module in sys.stdlib_module_names - {"test", "__main__"}:
        if not module.startswith("_sysconfigdata"):
            assert module in ALWAYS_THERE, module
            assert judge(module, "anything").level == "dangerous"


@pytest.mark.filterwarnings("ignore")
def test_a_whole_module_in_ddp_names_nothing_dangerous(tmp_path):
    with families.one_process():
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        torch.save(ddp, tmp_path / "in.pt")
    assert scan_checkpoint(tmp_path / "in.pt").level == "plain"


def test_a_plain_name_has_no_dots_that_reach_further():
    for path in PLAIN:
        module, _, name = path.rpartition(".")
        assert judge(module, name).level == "plain", path
        assert judge(module, f"{name}.__init__").level == "dangerous"
        assert judge(module, f"{name}.something").level == "dangerous"


# ---------------------------------------------------------- functions that call what they are given

CALLER = "torch._tensor._rebuild_from_type"
CALLED = {
    "a function that finds": call(
        CALLER,
        named(CALLER),
        named("torch.Tensor"),
        b"(" + named("logging.getLogger") + named("torch.Tensor") + b")}t",
        b"}",
    ),
    "a member of an enum": call(
        CALLER,
        named("copyreg.__newobj__"),
        named("torch.Tensor"),
        b"(" + named("torch.distributed.fsdp.api.ShardingStrategy") + b"K\1t",
        b"}",
    ),
}


@pytest.mark.trust
def test_a_function_that_rebuilds_a_tensor_by_calling_another_calls_only_one_that_rebuilds(
    tmp_path,
):
    """What it gave was there before, so that the state that is set on it changes the process."""
    paths = []
    for number, called in enumerate(CALLED.values()):
        paths.append(tmp_path / f"{number}.pkl")
        paths[-1].write_bytes(b"\x80\x04" + called + mapping(disabled=b"\x88") + b"b.")
    told = "import pickle, sys; print(*(pickle.load(open(p, 'rb')).disabled for p in sys.argv[1:]))"
    ran = subprocess.run(
        [sys.executable, "-c", told, *paths], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.split() == ["True"] * len(paths), ran.stderr
    assert [scan_checkpoint(path).level for path in paths] == ["dangerous"] * len(paths)
