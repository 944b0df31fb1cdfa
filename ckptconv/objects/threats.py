"""What a global that a pickle names can do: plain (part of ordinary checkpoints), unknown, or
dangerous, and why.

The names of Python's own library, of torch and of numpy are a closed world: what is not in
`known_names` as plain is dangerous, for every victim has it. The tables below say why, where more
is to be said: what runs commands or code, reaches other modules, files, the network or memory, or
loads further pickles. Names of other packages are unknown, but for those in the tables. No name is
ever imported. Names of python 2 are judged under both names. Sources: the documentation of Python's
standard library, of numpy and of torch; `_compat_pickle` for the names of python 2.
"""

from __future__ import annotations

import _compat_pickle
from typing import Literal, NamedTuple

from ckptconv.objects.known_names import ALWAYS_THERE, MAKERS, PLAIN

Level = Literal["plain", "unknown", "dangerous"]
LEVELS: tuple[Level, ...] = ("plain", "unknown", "dangerous")
"""From the best to the worst."""


class Verdict(NamedTuple):
    """How a name is judged, and why."""

    level: Level
    reason: str


_MODULES = {
    "runs commands of the system": """
        os posix nt subprocess _posixsubprocess commands popen2 pexpect syslog pty platform sh
        _osx_support _aix_support distutils setuptools pip ensurepip venv pkg_resources pydoc
        torch.utils.collect_env torch.utils.cpp_extension torch._inductor torch._dynamo
        torch.distributed.run torch.distributed.launch torch.distributed.launcher
        torch.distributed.elastic numpy.f2py numpy.distutils asyncio _asyncio multiprocessing
        concurrent uuid _winapi antigravity webbrowser torch.multiprocessing
    """,
    "runs code that it is given": """
        codeop pdb bdb timeit trace profile cProfile doctest runpy idlelib unittest lib2to3 IPython
        torch.utils.bottleneck torch.testing torch.fx.graph_module torch.fx.experimental
        torch.utils._config_module torch.distributed.rpc torch.package numpy.testing sympy
        cloudpickle compileall py_compile _pyrepl torch.jit.unsupported_tensor_ops test.support
        test.libregrtest tkinter turtle turtledemo xdoctest pytest _pytest nose _testcapi
        _testinternalcapi
    """,
    "imports any module": "importlib imp pkgutil zipimport _frozen_importlib "
    "_frozen_importlib_external _imp modulefinder",
    "reaches everything in the process": """
        sys inspect gc ctypes _ctypes cffi faulthandler mmap signal _signal atexit threading _thread
        _threading_local sysconfig site tracemalloc cgitb
    """,
    "reads, writes or deletes files": """
        shutil io _io _pyio tempfile glob fileinput linecache tarfile zipfile gzip bz2 lzma sqlite3
        _sqlite3 dbm filecmp mailbox logging posixpath ntpath genericpath
    """,
    "opens connections": """
        socket _socket socketserver ssl _ssl http httplib urllib urllib2 urllib3 requests aiohttp
        httpx ftplib telnetlib smtplib poplib imaplib nntplib xmlrpc xmlrpclib torch.hub
        torchvision.datasets.utils huggingface_hub select selectors asyncore asynchat smtpd paramiko
    """,
    "loads further pickles, which are executed": """
        pickle _pickle cPickle dill joblib shelve marshal jsonpickle torch.serialization
        torch.utils.data.datapipes pickletools
    """,
}
"""Modules of which every name is dangerous but the plain ones below; modules within them too."""

_NAMES = {
    "runs code that it is given": """
        code.interact code.InteractiveConsole code.InteractiveInterpreter code.compile_command
        builtins.eval builtins.exec builtins.execfile builtins.compile builtins.breakpoint
        numpy._core._multiarray_tests torch.jit.CompilationUnit torch.jit.script torch.jit.load
        torch.jit.trace torch.compile pandas.eval pandas.core.computation.eval.eval yaml.load
        yaml.unsafe_load yaml.full_load builtins.help
    """,
    "imports any module": "builtins.__import__ torch.ops.load_library torch.classes.load_library "
    "torch.utils._import_utils",
    "reaches any attribute of any object": """
        builtins.getattr builtins.setattr builtins.delattr builtins.globals builtins.locals
        builtins.vars builtins.dir operator.itemgetter operator.attrgetter operator.methodcaller
        builtins.__build_class__ builtins.type builtins.super operator.setitem operator.delitem
        builtins.object.__getattribute__
    """,
    "calls what it is given": """
        functools.partial functools.partialmethod functools.reduce operator.call builtins.apply
        builtins.map builtins.filter builtins.sorted builtins.iter builtins.max builtins.min
        itertools.starmap itertools.accumulate itertools.takewhile itertools.dropwhile
        itertools.filterfalse itertools.groupby weakref.finalize contextlib.ExitStack
        sched.scheduler
    """,
    "reads, writes or deletes files": """
        builtins.open builtins.file codecs.open numpy.load numpy.save numpy.savez numpy.memmap
        numpy.fromfile numpy.genfromtxt numpy.loadtxt numpy.savetxt numpy.lib.npyio
        numpy.lib._npyio_impl numpy.DataSource pandas.read_pickle pandas.io numpy.ctypeslib
        torch.save torch.from_file pathlib.Path.unlink
    """,
    "loads further pickles, which are executed": "torch.load torch.serialization.load",
    "makes functions from byte code": "types.CodeType types.FunctionType types.MethodType "
    "types.LambdaType",
    "decodes text or bytes, which hides what they hold": "codecs.decode _codecs.decode "
    "codecs.getdecoder",
    "waits for input, or ends the process": "builtins.input builtins.raw_input builtins.exit "
    "builtins.quit",
}
"""Dangerous names of modules that are not dangerous as such."""

_BY_MODULE = {module: reason for reason, text in _MODULES.items() for module in text.split()}
_BY_NAME = {name: reason for reason, text in _NAMES.items() for name in text.split()}
# parts; a name of a file may have thousands
_LONGEST = max(name.count(".") + 1 for name in (*_BY_MODULE, *_BY_NAME))
_OFTEN_REACHED = """
    os posix nt sys subprocess importlib builtins shutil socket runpy pickle ctypes pty webbrowser
    inspect operator multiprocessing threading tempfile urllib
"""
_REACHED = frozenset(_OFTEN_REACHED.split())
"""Modules that are attributes of many others, and so can be reached through a name with dots."""
_NEVER_WITHIN = frozenset(("os", "posix", "nt", "sys", "subprocess", "builtins", "importlib"))
"""Names that no package gives a module of its own."""
_SHORT_NAMES = frozenset(("np", "th"))
"""By what name numpy and torch are imported, and so reached through the modules of others."""
_NEITHER = Verdict(
    "dangerous",
    "not part of ordinary checkpoints, but of a package that is always installed: its code would "
    "run",
)
_MOVED = {
    f"torch.nn.{name}": f"torch.ao.nn.{name}"
    for name in ("quantized", "quantizable", "intrinsic", "qat")
}
_MOVED |= {"torch.quantization": "torch.ao.quantization", "numpy.core": "numpy._core"}
"""Packages that have moved, and whose modules are the same below."""


def judge(module: str, name: str) -> Verdict:
    """How the global `name` of `module` is judged, by the names that it has in python 2, in python
    3, and where it moved.

    What the tables call dangerous under one of them is so; then, plain is what is plain under one
    of them.
    """
    return min(
        (_judge(*pair) for pair in [(module, name), *_renamed(module, name)]), key=_precedence
    )


def _precedence(verdict: Verdict) -> int:
    return {"dangerous": 2 if verdict is _NEITHER else 0, "plain": 1, "unknown": 3}[verdict.level]


def gives_what_was_there(module: str, name: str) -> bool:
    """Whether a call of this plain global may give an object that was there before, whose change is
    felt elsewhere.
    """
    paths = {f"{one}.{other}" for one, other in [(module, name), *_renamed(module, name)]}
    return bool(paths & PLAIN) and not paths & MAKERS


def _renamed(module: str, name: str) -> set[tuple[str, str]]:
    """What a name of python 2 is in python 3, the module without the underscore of its C form, and
    where it moved.
    """
    found = set()
    if (module, name) in _compat_pickle.NAME_MAPPING:
        found.add(_compat_pickle.NAME_MAPPING[module, name])
    elif module in _compat_pickle.IMPORT_MAPPING:
        found.add((_compat_pickle.IMPORT_MAPPING[module], name))
    if module in ("_operator", "_functools", "_weakref"):
        found.add((module[1:], name))
    moved = (old for old in _MOVED if module == old or module.startswith(f"{old}."))
    return found | {(_MOVED[old] + module[len(old) :], name) for old in moved}


def _judge(module: str, name: str) -> Verdict:
    path = f"{module}.{name}"
    if path in PLAIN:
        return Verdict("plain", "part of ordinary checkpoints")
    # whole quantized modules hold some; of which class tells nobody
    if path == "torch.ScriptObject":
        return Verdict(
            "unknown",
            "an object of a class that is written in C++; its code would run where it is installed",
        )
    top = module.partition(".")[0]
    if top == "__torch__":
        return judge_script_class(path)
    if not all(part.isidentifier() for part in module.split(".")):
        return Verdict("unknown", "no module has such a name")
    if reached := _reached(module, name, top in ALWAYS_THERE):
        return Verdict("dangerous", f"reaches the module {reached} through another one")
    if any(part.startswith("__") and part.endswith("__") for part in name.split(".")):
        return Verdict("dangerous", _BY_NAME.get(path, "reaches the internals of an object"))
    if reason := _reason(path):
        return Verdict("dangerous", reason)
    if top in ALWAYS_THERE:
        return _NEITHER
    return Verdict(
        "unknown", "not part of ordinary checkpoints; its code would run where it is installed"
    )


def _reached(module: str, name: str, is_always_there: bool) -> str | None:
    """The module that a name reaches by way of another one."""
    *ways, last = name.split(".")
    if deep := [part for part in module.split(".")[1:] if part in _NEVER_WITHIN]:
        return deep[0]
    through = (
        []
        if is_always_there
        else [part for part in ways if part in ALWAYS_THERE or part in _SHORT_NAMES]
    )
    return next(
        (part for part in (*ways, last, *through) if part in _REACHED or part in through), None
    )


_SCRIPT_CLASSES = "__torch__.torch.classes."
_PLAIN_SCRIPT_CLASSES = frozenset(
    ("quantized", "rnn", "sparse", "mkldnn", "xnnpack", "cuda", "metal", "vulkan", "profiler")
)
"""The namespaces of torch's own C++ classes that hold packed weights, or the like."""


def judge_script_class(path: str) -> Verdict:
    """How a class in a TorchScript archive is judged: one of its own, or one written in C++."""
    if not path.startswith(_SCRIPT_CLASSES):
        return Verdict("plain", "a class of the TorchScript archive itself")
    namespace = path[len(_SCRIPT_CLASSES) :].partition(".")[0]
    if namespace in _PLAIN_SCRIPT_CLASSES:
        return Verdict("plain", "a class of torch that holds packed weights")
    return Verdict(
        "unknown", "a class that is written in C++; its code would run where it is installed"
    )


def _reason(path: str) -> str | None:
    """Why a name is dangerous: by itself, by what it is an attribute of, or by its module."""
    parts = path.split(".")
    for count in range(min(len(parts), _LONGEST), 0, -1):
        prefix = ".".join(parts[:count])
        if prefix in _BY_NAME:
            return _BY_NAME[prefix]
        if count < len(parts) and prefix in _BY_MODULE:
            return _BY_MODULE[prefix]
    return None
