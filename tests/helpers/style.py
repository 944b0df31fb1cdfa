"""How the code reads, in numbers: ``python tests/helpers/style.py [FOLDER ...]``.

Per folder of modules: lines, functions (lines at the 50th and the 90th percentile and at most),
classes (lines at most), modules (lines at most), the largest fan-out (other modules of the folder
that one module imports), conditional expressions per 100 statements, lines of more than 100
columns, and lines that are comments, in percent.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

COLUMNS = (
    *("folder", "lines", "functions p50/p90/max", "class max", "module max", "fan-out"),
    *("ternaries /100", "> 100 columns %", "comments %"),
)


def lengths(trees: list[ast.Module], kinds: tuple[type, ...]) -> list[int]:
    """The lines of each function or class, the shortest first."""
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    return sorted((node.end_lineno or 0) - node.lineno + 1 for node in found)


def fan_out(folder: Path, files: list[Path], trees: list[ast.Module]) -> int:
    """The most modules of the folder that one of them imports."""
    names = {".".join(file.relative_to(folder.parent).with_suffix("").parts) for file in files}
    most = 0
    for file, tree in zip(files, trees, strict=True):
        package = file.relative_to(folder.parent).parent.parts
        used = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                module = ".".join((*base, *([node.module] if node.module else [])))
                used |= {module, *(f"{module}.{item.name}" for item in node.names)} & names
        most = max(most, len(used))
    return most


def row(folder: Path) -> list[str]:
    """The figures of a folder."""
    files = sorted(folder.rglob("*.py"))
    texts = [file.read_text("utf-8") for file in files]
    trees = [ast.parse(text) for text in texts]
    lines = [line for text in texts for line in text.splitlines()]
    functions = lengths(trees, (ast.FunctionDef, ast.AsyncFunctionDef))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    ternaries = sum(isinstance(node, ast.IfExp) for node in nodes)
    comments = sum(
        token.type == tokenize.COMMENT
        for text in texts
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    long = sum(len(line) > 100 for line in lines)
    middle, high = functions[len(functions) // 2], functions[len(functions) * 9 // 10]
    return [
        folder.name,
        f"{len(lines):,}",
        f"{middle}/{high}/{functions[-1]}",
        str(max(lengths(trees, (ast.ClassDef,)), default=0)),
        str(max(text.count("\n") for text in texts)),
        str(fan_out(folder, files, trees)),
        f"{100 * ternaries / statements:.1f}",
        f"{100 * long / len(lines):.1f}",
        f"{100 * comments / len(lines):.1f}",
    ]


def main(folders: list[str]) -> None:
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for folder in folders or [str(Path(__file__).resolve().parents[2] / "ckptconv")]:
        print(f"| {' | '.join(row(Path(folder)))} |")


if __name__ == "__main__":
    main(sys.argv[1:])
