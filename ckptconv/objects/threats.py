"""What a global that a pickle names can do: plain (part of ordinary checkpoints), unknown, or
dangerous, and why.

The names of Python's own library, of torch with what it requires, of numpy and of safetensors are a
closed world: what is not in `known_names` as plain is dangerous, for every victim has it. The lists
in threats.txt say why, where more is to be said: what runs commands or code, reaches other modules,
files, the network or memory, or loads further pickles. Names of other packages are unknown, but for
those in the lists. No name is ever imported. Names of python 2 are judged under both names.
Sources: the documentation of Python's standard library, of numpy and of torch; `_compat_pickle` for
the names of python 2.
"""

from __future__ import annotations

import _compat_pickle
import functools
from collections.abc import Iterable
from typing import Literal

from ckptconv.objects.known_names import ALWAYS_THERE, MAKERS, PLAIN
from ckptconv.pickles.making import CALLED_RESULT
from ckptconv.pickles.nodes import Call, Global
from ckptconv.pickles.traces import CHANGERS, rebuilds
from ckptconv.support.errors import printable
from ckptconv.support.name_lists import names_beside
from ckptconv.support.records import NamedTuple
from ckptconv.support.report import DANGER

Level = Literal["plain", "unknown", "dangerous"]
LEVELS: tuple[Level, ...] = ("plain", "unknown", "dangerous")
"""From the best to the worst."""


class Verdict(NamedTuple):
    """How a name is judged, and why."""

    level: Level
    reason: str


_SECTIONS = names_beside(__file__)
# modules that are attributes of many others, and so can be reached through a name with dots
_REACHED = frozenset(_SECTIONS.pop("reached through others"))
# modules of which every name is dangerous but the plain ones, and why; modules in them too
_BY_MODULE: dict[str, str] = {}
# dangerous names of modules that are not dangerous as such, and why
_BY_NAME: dict[str, str] = {}
for _reason_of, _listed in _SECTIONS.items():
    _table = _BY_MODULE if _reason_of.startswith("module ") else _BY_NAME
    _table.update(dict.fromkeys(_listed, _reason_of.removeprefix("module ")))
# parts; a name of a file may have thousands
_LONGEST = max(name.count(".") + 1 for name in (*_BY_MODULE, *_BY_NAME))
# names that no package gives a module of its own
_NEVER_WITHIN = frozenset(("os", "posix", "nt", "sys", "subprocess", "builtins", "importlib"))
# by what name numpy and torch are imported, and so reached through the modules of others
_SHORT_NAMES = frozenset(("np", "th"))
_IMPORTED = ALWAYS_THERE | _SHORT_NAMES
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


@functools.lru_cache(maxsize=64)  # few names, of very many files
def judge(module: str, name: str) -> Verdict:
    """How the global `name` of `module` is judged, by the names that it has in python 2, in python
    3, and where it moved.

    What the tables call dangerous under one of them is so; then, plain is what is plain under one
    of them.
    """
    names = [(module, name), *_renamed(module, name)]
    return min((_judge(*pair) for pair in names), key=_precedence)


def _precedence(verdict: Verdict) -> int:
    # what no table names gives way to plain: a name that moved is plain where one of its names is
    return {"dangerous": 2 if verdict is _NEITHER else 0, "plain": 1, "unknown": 3}[verdict.level]


def danger_note(named: Iterable[tuple[str, str]], calls: Iterable[Call] = ()) -> str | None:
    """The note on a file whose pickles name these globals and make these calls; None where nothing
    of that is dangerous. `scan` looks further: at how values are used, and at what is not read.
    """
    found = {name: judge(*name) for name in named if name[1] != "getattr"}
    if found.pop(CALLED_RESULT, None):
        what = "the file calls what another call gives, which may be anything"
        return f"{DANGER}{what}; {DO_NOT_LOAD}"
    for call in calls:
        if call.name in CHANGERS and not (call.args and rebuilds(call.args[0])):
            what = f"the file has {call.name} call something that does not rebuild a tensor"
            return f"{DANGER}{what}; {DO_NOT_LOAD}"
        if call.name == "builtins.getattr":  # as old pickles name methods
            match call.args:
                case (Global(module=module, name=name), str() as attribute):
                    found[module, f"{name}.{attribute}"] = judge(module, f"{name}.{attribute}")
                case _:
                    found["builtins", "getattr"] = judge("builtins", "getattr")
    bad = [item for item in found.items() if item[1].level == "dangerous"]
    if not bad:
        return None
    worst, verdict = min(bad, key=lambda item: (_precedence(item[1]), item[0]))
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    path = printable(".".join(worst))
    return f"{DANGER}the file names {path}{more} ({verdict.reason}); {DO_NOT_LOAD}"


DO_NOT_LOAD = "do not load it, for its code is dangerous: ckptconv scan says more"


def gives_what_was_there(module: str, name: str) -> bool:
    """Whether a call of this plain global may give an object of old, whose change is felt."""
    paths = {f"{one}.{other}" for one, other in [(module, name), *_renamed(module, name)]}
    return bool(paths & PLAIN) and not paths & MAKERS


def _renamed(module: str, name: str) -> set[tuple[str, str]]:
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
        return Verdict("unknown", f"an object of {_IN_CPP}")
    top = module.partition(".")[0]
    if top == "__torch__":
        return judge_script_class(path)
    if not all(part.isidentifier() for part in module.split(".")):
        return Verdict("unknown", "no module has such a name")
    reached = _reached(module, name, top in ALWAYS_THERE)
    if reached:
        return Verdict("dangerous", f"reaches the module {reached} through another one")
    if any(part.startswith("__") and part.endswith("__") for part in name.split(".")):
        return Verdict("dangerous", _BY_NAME.get(path, "reaches the internals of an object"))
    reason = _reason(path)
    if reason:
        return Verdict("dangerous", reason)
    if top in ALWAYS_THERE:
        return _NEITHER
    why = "not part of ordinary checkpoints; its code would run where it is installed"
    return Verdict("unknown", why)


def _reached(module: str, name: str, is_always_there: bool) -> str | None:
    """The module that a name reaches by way of another one."""
    *ways, last = name.split(".")
    deep = [part for part in module.split(".")[1:] if part in _NEVER_WITHIN]
    if deep:
        return deep[0]
    through = _IMPORTED.intersection(ways)
    if is_always_there:
        through = frozenset()
    return next((part for part in (*ways, last) if part in _REACHED or part in through), None)


_IN_CPP = "a class that is written in C++; its code would run where it is installed"
_SCRIPT_CLASSES = "__torch__.torch.classes."
_PLAIN_NAMESPACES = "quantized rnn sparse mkldnn xnnpack cuda metal vulkan profiler"
# the namespaces of torch's own C++ classes that hold packed weights, or the like
_PLAIN_SCRIPT_CLASSES = frozenset(_PLAIN_NAMESPACES.split())


def judge_script_class(path: str) -> Verdict:
    """How a class in a TorchScript archive is judged: one of its own, or one written in C++."""
    if not path.startswith(_SCRIPT_CLASSES):
        return Verdict("plain", "a class of the TorchScript archive itself")
    namespace = path[len(_SCRIPT_CLASSES) :].partition(".")[0]
    if namespace in _PLAIN_SCRIPT_CLASSES:
        return Verdict("plain", "a class of torch that holds packed weights")
    return Verdict("unknown", _IN_CPP)


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
