"""Which names of the standard library are not on every system and Python, by the type stubs that
mypy brings along.

``python tests/helpers/posix_names.py`` writes data/posix_only.txt anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from helpers.paths import DATA

LIST = DATA / "posix_only.txt"
HEAD = (
    "# What Python 3.10 on Windows lacks of what Linux has, by the stubs of the standard "
    "library; posix_names.py wrote it\n"
)
LOWEST = (3, 10)


def stubs() -> Path:
    """The folder of mypy's stubs."""
    import mypy

    assert mypy.__file__ is not None
    return Path(mypy.__file__).with_name("typeshed") / "stdlib"


def names(statements: Sequence[ast.stmt], platform: str) -> Iterator[str]:
    """The public names that a stub has on a platform."""
    for item in statements:
        if isinstance(item, ast.If):
            yield from names(item.body if holds(item.test, platform) else item.orelse, platform)
        elif isinstance(item, (ast.FunctionDef, ast.ClassDef)):
            yield item.name
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id
        elif isinstance(item, ast.Assign):
            yield from (target.id for target in item.targets if isinstance(target, ast.Name))
        elif isinstance(item, ast.ImportFrom):
            yield from (alias.asname for alias in item.names if alias.asname == alias.name)


def holds(test: ast.expr, platform: str) -> bool:
    """Whether a condition on `sys.platform` or the version holds: on Linux of the newest Python,
    else of the lowest.
    """
    if isinstance(test, ast.BoolOp):
        parts = [holds(part, platform) for part in test.values]
        return all(parts) if isinstance(test.op, ast.And) else any(parts)
    if isinstance(test, ast.Compare) and ast.unparse(test.left) == "sys.platform":
        (other,) = test.comparators
        assert isinstance(other, ast.Constant)
        return (platform == other.value) == isinstance(test.ops[0], ast.Eq)
    if isinstance(test, ast.Compare) and ast.unparse(test.left) == "sys.version_info":
        since = isinstance(test.ops[0], ast.GtE)
        return since == (platform == "linux" or ast.literal_eval(test.comparators[0]) <= LOWEST)
    return True


def of_module(path: Path, platform: str) -> set[str]:
    return {
        name
        for name in names(ast.parse(path.read_text()).body, platform)
        if not name.startswith("_") or name == "_exit"
    }


def missing(platform: str, among: str = "linux") -> list[str]:
    """The modules and the names in `MODULES` that `among` has and `platform` lacks, sorted."""
    found = []
    for path in sorted(stubs().glob("*.pyi")):
        if (
            not path.stem.startswith("_")
            and path.stem not in NEWER
            and (here := of_module(path, among))
            and not of_module(path, platform) & here
        ):
            found.append(path.stem)
    for module, path in MODULES.items():
        lacking = of_module(stubs() / path, among) - of_module(stubs() / path, platform)
        found += [f"{module}.{name}" for name in sorted(lacking)]
    return found


NEWER = {"annotationlib"}
"""Modules that only newer Pythons have, on every system."""

MODULES = {
    "os": "os/__init__.pyi", "signal": "signal.pyi", "time": "time.pyi", "errno": "errno.pyi",
    "mmap": "mmap.pyi",
    "select": "select.pyi", "socket": "socket.pyi", "shutil": "shutil.pyi",
    "sys": "sys/__init__.pyi",
    "subprocess": "subprocess.pyi", "threading": "threading.pyi",
}  # fmt: skip


if __name__ == "__main__":
    LIST.write_text(HEAD + "\n".join(missing("win32")) + "\n")
