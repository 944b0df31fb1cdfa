"""The arrows between modules: each imports only from the layers above it, and only some know terminals, torch or files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ckptconv"

LAYERS = {
    "addresses": 0, "collector": 0, "errors": 0, "help_pages": 0, "nvidia_smi": 0, "platforms": 0, "progress": 0,
    "strict_json": 0,
    "bounds": 1, "choices": 1, "containers": 1, "devices": 1, "dtypes": 1, "labels": 1, "nodes": 1, "showing": 1,
    "signals": 1, "wording": 1,
    "casting": 2, "census": 2, "documents": 2, "findings": 2, "gpu_choice": 2, "key_rules": 2, "mapping_calls": 2,
    "pickling": 2, "sources": 2, "substitution": 2, "torch_words": 2,
    "archives": 3, "extents": 3, "joined_archives": 3, "keys": 3, "outputs": 3, "tensors": 3, "tracing": 3,
    "training_objects": 3, "unpickling": 3,
    "assembly": 4, "bitsandbytes_layers": 4, "checksums": 4, "compaction": 4, "inflation": 4, "key_fitting": 4,
    "layout": 4, "nonfinite": 4, "partitions": 4, "plain_objects": 4, "rule_files": 4, "scaled_weights": 4,
    "sharding": 4, "staging": 4, "torch_classes": 4, "torch_objects": 4,
    "comparison": 5, "composites": 5, "encodings": 5, "formats.records": 5, "held_tensors": 5, "known_names": 5,
    "module_walk": 5, "named_models": 5, "walking": 5,
    "candidates": 6, "pickled_modules": 6, "producers": 6, "threats": 6,
    "state_dicts": 7,
    "checkpoint": 8,
    "fitted_keys": 9, "formats.dcp_metadata": 9, "formats.dtensors": 9, "formats.lightning": 9,
    "formats.old_torchscript": 9, "formats.raw_pickle": 9, "formats.safetensors": 9, "formats.torch_legacy": 9,
    "formats.torch_tar": 9, "formats.torch_zip": 9, "formats.torchscript": 9, "formats.zip_members": 9,
    "old_tensors": 9, "settling": 9, "stray_tensors": 9, "zero_partitions": 9,
    "flattening": 10, "formats.accelerate": 10, "formats.dcp": 10, "formats.dcp_shards": 10, "formats.deepspeed": 10,
    "formats.megatron": 10, "formats.ranks": 10, "formats.sharded": 10, "formats.steps": 10, "modules": 10,
    "plans": 10, "refusals": 10, "script_operators": 10, "strays": 10,
    "formats.detect": 11, "plan_notes": 11, "renaming": 11, "script_code": 11,
    "dcp_output": 12, "diffing": 12, "flat_plans": 12, "inspection": 12, "key_targets": 12, "stream_scanner": 12,
    "accounting": 13, "model_fits": 13, "planning": 13, "scanning": 13,
    "convert": 14, "loading": 14, "prescriptions": 14,
    "fitting": 15, "host_report": 15, "inspection_report": 15, "report": 15, "saving": 15, "symptoms": 15,
    "unopened": 15, "verdicts": 15,
    "diagnosis": 16, "diagnosis_report": 16, "surveys": 16,
    "__init__": 17, "completion": 17, "survey_report": 17,
    "cli_options": 18, "progress_display": 18, "terminal": 18,
    "cli": 19,
    "__main__": 20,
}  # fmt: skip
"""Module → layer. A module imports from smaller numbers only."""

WITHIN_A_LAYER: set[tuple[str, str]] = set()
EMPTY = {"formats.__init__"}
"""Packages that import nothing, and so are in no layer."""

TERMINAL_MODULES = {"cli", "cli_options", "completion", "progress_display", "terminal"}
TORCH_MODULES = {"devices", "loading", "saving", "fitting", "dcp_output", "named_models"}
FILE_MODULES = {"platforms", "staging", "help_pages", "terminal"}
"""help_pages: the documentation; terminal: the file that is made before it is printed."""
USERS_OF_PLATFORMS = {"signals", "key_rules", "sources", "outputs", "staging", "terminal", "convert"} | {
    f"formats.{name}"
    for name in ("sharded", "steps", "dcp")  # names of files that files give
}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text(), str(path))
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """The dotted names that a module imports, wherever in it, TYPE_CHECKING blocks included; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def imports_of(module: str) -> list[str]:
    return list(imported(MODULES[module], ("ckptconv", *module.split(".")[:-1])))


def own_module(name: str) -> str | None:
    """The module of this package that the imported `name` is in; None for other packages."""
    top, *rest = name.split(".")
    if top != "ckptconv":
        return None
    while rest and ".".join(rest) not in MODULES:
        if ".".join((*rest, "__init__")) in MODULES:
            return ".".join((*rest, "__init__"))
        rest.pop()
    return ".".join(rest) or "__init__"


def top_names(module: str) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(module)}


def test_every_module_stands_in_the_table():
    assert set(MODULES) - EMPTY == set(LAYERS)


def test_packages_without_a_layer_import_nothing():
    assert [name for module in EMPTY for name in imports_of(module)] == []


@pytest.mark.parametrize("module", LAYERS)
def test_a_module_imports_only_from_the_layers_above_it(module):
    own = {other for other in map(own_module, imports_of(module)) if other is not None}
    wrong = [
        f"{module} ({LAYERS[module]}) imports {other} ({LAYERS.get(other)})"
        for other in sorted(own)
        if (module, other) not in WITHIN_A_LAYER and not LAYERS.get(other, len(LAYERS)) < LAYERS[module]
    ]
    assert wrong == []


def test_imports_within_functions_and_type_checking_blocks_are_seen():
    source = """
from ckptconv import report
if TYPE_CHECKING:
    import torch.nn as nn
def late():
    from .sources import CHUNK
    from . import keys
"""
    found = list(imported(ast.parse(source), ("ckptconv",)))
    assert found == ["ckptconv.report", "torch.nn", "ckptconv.source.CHUNK", "ckptconv.keys"]
    assert [own_module(name) for name in found] == ["report", None, "sources", "keys"]
    assert own_module("ckptconv.formats.detect.FORMATS") == "formats.detect"
    assert own_module("ckptconv.formats") == "formats.__init__"
    assert own_module("ckptconv.__version__") == "__init__"


def test_only_the_command_line_and_the_report_know_terminals():
    assert {module for module in MODULES if top_names(module) & {"click", "rich"}} <= TERMINAL_MODULES


def test_torch_is_imported_only_where_live_tensors_and_devices_are():
    assert {module for module in MODULES if "torch" in top_names(module)} <= TORCH_MODULES


def opens_files(tree: ast.Module) -> set[str]:
    """The calls and names in a module by which files are opened."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.add("open(")
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in ("read_bytes", "read_text", "write_bytes", "write_text") or (
                node.attr == "open" and owner in ("os", "io", "gzip", "zipfile", "codecs", "builtins", "Path", "path")
            ):
                found.add(f"{owner}.{node.attr}")
    return found


def test_only_files_opens_files():
    opening = {module for module, tree in MODULES.items() if opens_files(tree) or "tempfile" in top_names(module)}
    assert opening == FILE_MODULES


def test_nothing_unpickles_or_evaluates():
    forbidden = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "runpy", "code"}
    assert {module: names for module in MODULES if (names := top_names(module) & forbidden)} == {}
    called = {
        (module, node.func.id)
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec", "__import__")
    }
    assert called == set()
    assert {module for module in MODULES if "importlib" in top_names(module)} == {"__init__", "named_models"}
