"""How many of a sample of mutants the tests find: small changes to the code, one at a time.

    python tests/helpers/mutants.py ckptconv/io ckptconv/formats ckptconv/keys --tests tests/io ...

Needs the package ``coverage``, which tells which tests run a line: of a mutant only these are run.
The tests that are marked ``trust`` count too. Each mutant is made in a copy of the checkout. One
that runs forever counts as found. What survives is printed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """A change of one statement: the file, its line, what it was and what it is now."""

    path: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one small change."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in COMPARED:
        new.ops[0] = COMPARED[type(new.ops[0])]()
        yield new
    elif isinstance(new, ast.BinOp) and type(new.op) in COMPUTED:
        new.op = COMPUTED[type(new.op)]()
        yield new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        yield new.operand
    elif isinstance(new, ast.Constant) and type(new.value) is bool:
        yield ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and type(new.value) is int:
        yield ast.Constant(new.value + 1)
    elif isinstance(new, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
        yield new
    elif isinstance(new, ast.Raise) or (
        isinstance(new, ast.Expr) and isinstance(new.value, ast.Call)
    ):
        yield ast.Pass()
    elif isinstance(new, ast.Return) and not says_no(new):
        yield ast.Return(ast.Constant(None))


def says_no(node: ast.Return) -> bool:
    """Whether it says None already, or False, which is asked for its truth alone."""
    return node.value is None or ast.unparse(node.value) in ("None", "False")


class Replaced(ast.NodeTransformer):
    """A tree with one node replaced, told by its place in a walk."""

    def __init__(self, number: int) -> None:
        self.number, self.at = number, -1
        self.change: tuple[ast.AST, ast.AST] | None = None
        self.seen: list[str] = []  # all changes, if none is made

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.AnnAssign):  # a type is not run
            node.value = self.visit(node.value) if node.value else None
            return node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            node.body = [self.visit(item) for item in node.body]
            return node
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return node  # of a zip whose items have one length: no input tells
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return node  # a docstring
        for new in changed(node):
            self.at += 1
            if self.number < 0:
                self.seen.append(f"{ast.unparse(node)} -> {ast.unparse(new)}")
            elif self.at == self.number:
                self.change = node, new
                return ast.copy_location(new, node)
        return self.generic_visit(node)


def sites(path: Path) -> list[str]:
    """What each mutant of a file changes; what stands there several times is numbered."""
    seeing = Replaced(-1)
    seeing.visit(ast.parse(path.read_text("utf-8")))
    met: Counter[str] = Counter()
    told = []
    for text in seeing.seen:
        told.append(f"{text} {met[text]}")
        met[text] += 1
    return told


def mutant(root: Path, path: Path, number: int) -> Mutant:
    """The mutant of this number in a file."""
    tree = ast.parse(path.read_text("utf-8"))
    replacing = Replaced(number)
    tree = ast.fix_missing_locations(replacing.visit(tree))
    assert replacing.change is not None
    before, after = replacing.change
    told = [" ".join(ast.unparse(node).split())[:100] for node in (before, after)]
    return Mutant(str(path.relative_to(root)), before.lineno, *told, ast.unparse(tree))


def sample(root: Path, folders: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of the files in these folders, each place as likely as another.

    They are drawn by what they are, not by where they stand: a change elsewhere draws no others, so
    that the figures of two trees compare.
    """
    named = [root / name for name in folders]
    files = sorted(
        path for item in named for path in (item.rglob("*.py") if item.is_dir() else [item])
    )
    drawn = []
    for path in files:
        for number, text in enumerate(sites(path)):
            lot = f"{seed} {path.relative_to(root)} {text}"
            drawn.append((hashlib.sha256(lot.encode()).digest(), path, number))
    drawn = sorted(drawn)[:count]
    return [mutant(root, path, number) for path, number in sorted(item[1:] for item in drawn)]


def rows(data: Path) -> list[tuple[str, str, bytes]]:
    """What coverage kept: a file, a test, and a bit for each line."""
    asked = """select path, context, numbits from line_bits
        join file on file.id = file_id join context on context.id = context_id"""
    with closing(sqlite3.connect(data)) as base:
        return base.execute(asked).fetchall()


def tests_of(data: Path, root: Path) -> dict[tuple[str, int], set[str]]:
    """The tests that run each line, out of the data of coverage. What is run once, when a module
    is imported, may tell all tests that run a line of that module.
    """
    found: dict[tuple[str, int], set[str]] = {}
    imported = set()
    for file, test, bits in chain.from_iterable(map(rows, data.parent.glob(f"{data.name}*"))):
        path = os.path.relpath(file, root)
        for at, byte in enumerate(bits):
            for bit in range(8):
                if byte >> bit & 1 and test:
                    found.setdefault((path, at * 8 + bit), set()).add(test)
                elif byte >> bit & 1:
                    imported.add((path, at * 8 + bit))
    of_files: dict[str, set[str]] = {}
    for (path, _), tests in found.items():
        of_files.setdefault(path, set()).update(tests)
    return {(path, line): of_files.get(path, set()) for path, line in imported - {*found}} | found


_MEASURED = """
import sys, coverage, pytest
data, source, server, *rest = sys.argv[1:]
measuring = coverage.Coverage(data_file=None, config_file=False, source=[source])
class Named:
    def pytest_runtest_protocol(self, item):
        measuring.switch_context(item.nodeid)
    def pytest_collection_finish(self):
        from helpers import fork_server
        fork_server.__file__ = server
measuring.start()
pytest.main(rest, [Named()])
measuring.stop()
kept = coverage.CoverageData(basename=data)
kept.update(measuring.get_data())
kept.write()
"""


# In place of `fork_server`: each run of the program, by the name of its test, to a file of its own.
# A run may have taken away what is needed to write it, and is not noted then.
_FORKED = """
import contextlib, importlib.util, os, sys, uuid, coverage
data, source, server = {0!r}, {1!r}, {2!r}
spec = importlib.util.spec_from_file_location("fork_server", server)
sys.modules["fork_server"] = forked = importlib.util.module_from_spec(spec)
spec.loader.exec_module(forked)
run = forked._run
def measured(before):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    options = dict(data_file=None, config_file=False, source=[source], messages=False)
    measuring = coverage.Coverage(context=test, **options)
    measuring.start()
    try:
        return run(before)
    finally:
        measuring.stop()
        with contextlib.suppress(Exception):
            kept = coverage.CoverageData(basename=data + "." + uuid.uuid4().hex)
            kept.update(measuring.get_data())
            kept.write()
            kept.close()
forked._run = measured
forked.main()
"""


def measured(root: Path, folder: Path, tests: list[str], marks: str) -> Path:
    """Run the tests once with coverage; the file that says which test runs which line.

    A test is named as pytest names it: coverage itself would name the class that an inherited test
    stands in, where pytest finds none, and each mutant would count as found. The data stay in
    memory until the end: some tests are nobody for a while, others have no file descriptors left,
    and coverage notes what is run then too. Runs of the program in a fork are measured there.
    """
    data, source = str(folder / "coverage"), str(root / "ckptconv")
    server = folder / "measured_server.py"
    server.write_text(_FORKED.format(data, source, str(root / "tests/helpers/fork_server.py")))
    given = ["-q", "-m", marks, "-p", "no:cacheprovider", "-n", "0", *tests]
    command = [sys.executable, "-c", _MEASURED, data, source, str(server), *given]
    subprocess.run(command, cwd=root, check=False)
    return Path(data)


def chosen(tests: set[str], reach: Counter[str], most: int, seed: int) -> list[str]:
    """At most so many of the tests that run a line: those that run the fewest lines first, which
    are about it, up to a half; the others drawn.
    """
    nearest = sorted(tests, key=lambda test: (reach[test], test))
    near, far = nearest[: most // 2], nearest[most // 2 :]
    return near + random.Random(seed).sample(far, min(len(far), most - len(near)))


def is_found(item: Mutant, tests: list[str], copies: list[Path], limit: int) -> bool:
    """Whether one of the tests fails on the mutant."""
    root = copies.pop()
    target = root / item.path
    original = target.read_text("utf-8")
    try:
        target.write_text(item.source)
        command = [
            sys.executable,
            "-B",
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-n",
            "0",
        ]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            [*command, "-m", "trust or not trust", *tests],
            cwd=root,
            env=env,
            capture_output=True,
            timeout=limit,
            check=False,
        )
        if b"ERROR: not found: " in done.stderr and done.returncode == 4:
            raise RuntimeError(f"not the tests that were measured: {done.stderr[-500:]!r}")
        return done.returncode not in (0, 5)
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(original)
        copies.append(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", help="folders and files to change")
    parser.add_argument("--tests", nargs="+", default=[], help="the tests to run; else all")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--most", type=int, default=150, help="the tests that are run of each mutant"
    )
    parser.add_argument(
        "--limit", type=int, default=600, help="seconds until a mutant runs forever"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--data", type=Path, help="data of coverage that is there already")
    parser.add_argument(
        "--marks", default="not readme", help="the tests by which lines are measured"
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    given = parser.parse_args()
    root = given.root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        data = given.data or measured(root, Path(folder), given.tests, given.marks)
        known = tests_of(data, root)
        reach = Counter(chain.from_iterable(known.values()))
        copies = []
        for number in range(given.jobs):
            ignored = shutil.ignore_patterns(
                ".git", ".venv*", "*.pyc", "__pycache__", "demo-out", "bench-out"
            )
            copies.append(
                Path(shutil.copytree(root, Path(folder) / f"{number}" / root.name, ignore=ignored))
            )
            (Path(folder) / f"{number}" / "shared").symlink_to(root.parent / "shared")
        drawn = sample(root, given.folders, given.count, given.seed)
        told = {"found": 0, "survived": 0, "not run by any test": 0}

        def tried(item: Mutant) -> None:
            running = known.get((item.path, item.line), set())
            tests = chosen(running, reach, given.most, item.line)
            if not tests:
                what = "not run by any test"
            else:
                what = "found" if is_found(item, tests, copies, given.limit) else "survived"
            told[what] += 1
            if what != "found":
                print(f"{what}: {item}", flush=True)

        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(tried, drawn))
    print(json.dumps({"mutants": len(drawn), **told}))


if __name__ == "__main__":
    main()
