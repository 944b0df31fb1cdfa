"""What a global that a pickle names can do: plain (part of ordinary checkpoints), unknown, or dangerous, and why.

A name is judged by where it stands in the tables below, which list what runs commands or code, reaches other modules,
files, the network or memory, or loads further pickles. It is never imported. Names of python 2 are judged under both
names. Sources: the documentation of Python's standard library, of numpy and of torch; `_compat_pickle` for the names of
python 2.
"""

from __future__ import annotations

import _compat_pickle
from typing import Literal, NamedTuple

from ckptconv.torch_objects import WEIGHTS_ONLY

Level = Literal["plain", "unknown", "dangerous"]
LEVELS: tuple[Level, ...] = ("plain", "unknown", "dangerous")
"""From the best to the worst."""


class Verdict(NamedTuple):
    """How a name is judged, and why."""

    level: Level
    reason: str


_MODULES = {
    "runs commands of the system": """
        os posix nt subprocess _posixsubprocess commands popen2 pexpect syslog pty platform sh _osx_support
        _aix_support distutils setuptools pip ensurepip venv pkg_resources pydoc torch.utils.collect_env
        torch.utils.cpp_extension torch._inductor torch._dynamo torch.distributed.run torch.distributed.launch
        torch.distributed.launcher torch.distributed.elastic numpy.f2py numpy.distutils asyncio _asyncio
        multiprocessing concurrent uuid _winapi antigravity webbrowser torch.multiprocessing
    """,
    "runs code that it is given": """
        codeop pdb bdb timeit trace profile cProfile doctest runpy idlelib unittest lib2to3 IPython
        torch.utils.bottleneck torch.testing torch.fx.graph_module torch.fx.experimental
        torch.utils._config_module torch.distributed.rpc torch.package numpy.testing sympy cloudpickle
        compileall py_compile _pyrepl torch.jit.unsupported_tensor_ops test.support test.libregrtest tkinter
        turtle turtledemo xdoctest pytest _pytest nose _testcapi _testinternalcapi
    """,
    "imports any module": "importlib imp pkgutil zipimport _frozen_importlib _frozen_importlib_external _imp modulefinder",
    "reaches everything in the process": """
        sys inspect gc ctypes _ctypes cffi faulthandler mmap signal _signal atexit threading _thread
        _threading_local sysconfig site tracemalloc cgitb
    """,
    "reads, writes or deletes files": """
        shutil io _io _pyio tempfile glob fileinput linecache tarfile zipfile gzip bz2 lzma sqlite3 _sqlite3
        dbm filecmp mailbox logging posixpath ntpath genericpath
    """,
    "opens connections": """
        socket _socket socketserver ssl _ssl http httplib urllib urllib2 urllib3 requests aiohttp httpx ftplib
        telnetlib smtplib poplib imaplib nntplib xmlrpc xmlrpclib torch.hub torchvision.datasets.utils
        huggingface_hub select selectors asyncore asynchat smtpd paramiko
    """,
    "loads further pickles, which are executed": """
        pickle _pickle cPickle dill joblib shelve marshal jsonpickle torch.serialization
        torch.utils.data.datapipes pickletools
    """,
}
"""Modules of which every name is dangerous, but for the plain ones below; the modules within them too."""

_NAMES = {
    "runs code that it is given": """
        code.interact code.InteractiveConsole code.InteractiveInterpreter code.compile_command builtins.eval
        builtins.exec builtins.execfile builtins.compile builtins.breakpoint numpy._core._multiarray_tests
        torch.jit.CompilationUnit torch.jit.script torch.jit.load torch.jit.trace torch.compile pandas.eval
        pandas.core.computation.eval.eval yaml.load yaml.unsafe_load yaml.full_load builtins.help
    """,
    "imports any module": "builtins.__import__ torch.ops.load_library torch.classes.load_library torch.utils._import_utils",
    "reaches any attribute of any object": """
        builtins.getattr builtins.setattr builtins.delattr builtins.globals builtins.locals builtins.vars
        builtins.dir operator.itemgetter operator.attrgetter operator.methodcaller builtins.__build_class__
        builtins.type builtins.super operator.setitem operator.delitem builtins.object.__getattribute__
    """,
    "calls what it is given": """
        functools.partial functools.partialmethod functools.reduce operator.call builtins.apply builtins.map
        builtins.filter builtins.sorted builtins.iter builtins.max builtins.min itertools.starmap
        itertools.accumulate itertools.takewhile itertools.dropwhile itertools.filterfalse itertools.groupby
        weakref.finalize contextlib.ExitStack sched.scheduler
    """,
    "reads, writes or deletes files": """
        builtins.open builtins.file codecs.open numpy.load numpy.save numpy.savez numpy.memmap numpy.fromfile
        numpy.genfromtxt numpy.loadtxt numpy.savetxt numpy.lib.npyio numpy.lib._npyio_impl numpy.DataSource
        pandas.read_pickle pandas.io numpy.ctypeslib torch.save torch.from_file pathlib.Path.unlink
    """,
    "loads further pickles, which are executed": "torch.load torch.serialization.load",
    "makes functions out of byte code": "types.CodeType types.FunctionType types.MethodType types.LambdaType",
    "makes text or bytes out of others, which hides what they hold": "codecs.decode _codecs.decode codecs.getdecoder",
    "waits for input, or ends the process": "builtins.input builtins.raw_input builtins.exit builtins.quit",
}
"""Dangerous names of modules that are not dangerous as such."""

_PLAIN = """
    builtins.set builtins.frozenset builtins.list builtins.dict builtins.tuple builtins.int builtins.float
    builtins.bool builtins.str builtins.bytes builtins.bytearray builtins.complex builtins.slice
    builtins.range builtins.object builtins.Ellipsis __builtin__.long __builtin__.unicode __builtin__.xrange
    builtins.NotImplemented collections.OrderedDict collections.defaultdict collections.deque
    collections.Counter copyreg._reconstructor copyreg.__newobj__ argparse.Namespace types.SimpleNamespace
    datetime.datetime datetime.date datetime.time datetime.timedelta datetime.timezone decimal.Decimal
    fractions.Fraction uuid.UUID uuid.SafeUUID enum.auto logging.Logger logging.getLogger _codecs.encode
    array._array_reconstructor array.array numpy._core.multiarray._reconstruct numpy._core.multiarray.scalar
    numpy._core.numeric._frombuffer numpy.ndarray numpy.dtype numpy.random._pickle.__randomstate_ctor
    numpy.random._pickle.__generator_ctor numpy.random._pickle.__bit_generator_ctor
    torch.storage._load_from_bytes torch.Generator torch.Size torch.device torch.dtype
    torch.serialization._get_layout torch._utils._rebuild_xla_tensor
    torch._utils._rebuild_device_tensor_from_numpy torch.strided torch.nn.Module
    torch.nn.backends.thnn._get_thnn_function_backend torch.distributed.checkpoint.filesystem._StorageInfo
    torch.distributed._mesh_layout._MeshLayout torch.distributed._mesh_layout._FlatLayout
    torch.autograd.Variable
    numpy.random._mt19937.MT19937 numpy.random._pcg64.PCG64 numpy.random._pcg64.PCG64DXSM
    numpy.random._philox.Philox numpy.random._sfc64.SFC64 numpy.random.bit_generator.SeedSequence
    numpy.random.bit_generator.__pyx_unpickle_SeedSequence
"""
_PLAIN_NAMES = frozenset(_PLAIN.split()) | WEIGHTS_ONLY
_CLASSES = """
    pathlib torch.nn.modules torch.nn.parameter torch.nn.quantized torch.ao.nn torch.optim torch.jit._pickle
    torch.distributed.tensor torch.distributed._tensor torch.distributed._shard
    torch.distributed.checkpoint.metadata torch.distributed.device_mesh torch.distributed.fsdp
    torch.distributed.checkpoint.state_dict torch.distributed._mesh_layout
"""
_PLAIN_CLASSES = tuple(_CLASSES.split())
"""Modules whose classes are part of ordinary checkpoints."""
_OTHERS = ("torch.distributed._shard.checkpoint", "torch.distributed.tensor.experimental")
"""Modules within those that pass on everything of others."""
_PASSED_ON = frozenset(("GraphModule", "ExitStack", "ThreadPoolExecutor", "ProcessPoolExecutor", "Connection", "Future"))
"""Classes that modules of torch import, and so have by their own names, but that checkpoints do not name there."""

_BY_MODULE = {module: reason for reason, text in _MODULES.items() for module in text.split()}
_BY_NAME = {name: reason for reason, text in _NAMES.items() for name in text.split()}
_LONGEST = max(name.count(".") + 1 for name in (*_BY_MODULE, *_BY_NAME))  # parts; a name of a file may have thousands
_OFTEN_REACHED = """
    os posix nt sys subprocess importlib builtins shutil socket runpy pickle ctypes pty webbrowser inspect
    operator multiprocessing threading tempfile urllib
"""
_REACHED = frozenset(_OFTEN_REACHED.split())
"""Modules that are attributes of many others, and so can be reached through a name with dots."""
_NEVER_WITHIN = frozenset(("os", "posix", "nt", "sys", "subprocess", "builtins", "importlib"))
"""Names that no package gives a module of its own."""


def judge(module: str, name: str) -> Verdict:
    """How the global `name` of `module` is judged: dangerous where it is so in python 2 or in python 3, plain likewise."""
    verdicts = {verdict.level: verdict for verdict in (_judge(*pair) for pair in [(module, name), *_renamed(module, name)])}
    return next(verdicts[level] for level in ("dangerous", "plain", "unknown") if level in verdicts)


def _renamed(module: str, name: str) -> set[tuple[str, str]]:
    """What a name of python 2 is in python 3, and the module without the underscore of its C form."""
    found = set()
    if (module, name) in _compat_pickle.NAME_MAPPING:
        found.add(_compat_pickle.NAME_MAPPING[module, name])
    elif module in _compat_pickle.IMPORT_MAPPING:
        found.add((_compat_pickle.IMPORT_MAPPING[module], name))
    if module in ("_operator", "_functools", "_weakref"):
        found.add((module[1:], name))
    if module.startswith("numpy.core."):
        found.add((module.replace("numpy.core.", "numpy._core.", 1), name))
    return found


def _judge(module: str, name: str) -> Verdict:
    path = f"{module}.{name}"
    if path in _PLAIN_NAMES:
        return Verdict("plain", "part of ordinary checkpoints")
    if module == "__torch__" or module.startswith("__torch__."):
        return Verdict("plain", "a class of the TorchScript archive itself")
    if not all(part.isidentifier() for part in module.split(".")):
        return Verdict("unknown", "no module has such a name")
    *ways, last = name.split(".")
    if deep := [part for part in module.split(".")[1:] if part in _NEVER_WITHIN]:
        return Verdict("dangerous", f"reaches the module {deep[0]} through another one")
    if reached := [part for part in (*ways, last) if part in _REACHED]:
        return Verdict("dangerous", f"reaches the module {reached[0]} through another one")
    if any(part.startswith("__") and part.endswith("__") for part in name.split(".")) and name != "__newobj__":
        return Verdict("dangerous", _BY_NAME.get(path, "reaches into the workings of an object"))
    if reason := _reason(path):
        return Verdict("dangerous", reason)
    is_class = _within(module, _PLAIN_CLASSES) and not _within(module, _OTHERS) and last.lstrip("_")[:1].isupper()
    if not ways and last not in _PASSED_ON and (is_class or module == "torch.jit._pickle"):
        return Verdict("plain", "a class of ordinary checkpoints")
    if _within(module, ("torch._utils",)) and last.startswith("_rebuild"):
        return Verdict("plain", "makes a tensor")
    return Verdict("unknown", "no part of ordinary checkpoints; its code would run where it is installed")


def _reason(path: str) -> str | None:
    """Why a name is dangerous: by itself, by what it is an attribute of, or by a module that it is in."""
    parts = path.split(".")
    for count in range(min(len(parts), _LONGEST), 0, -1):
        prefix = ".".join(parts[:count])
        if prefix in _BY_NAME:
            return _BY_NAME[prefix]
        if count < len(parts) and prefix in _BY_MODULE:
            return _BY_MODULE[prefix]
    return None


def _within(module: str, roots: tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)
