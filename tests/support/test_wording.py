"""An error names an option in the words of who called: the command line's, or Python's."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ckptconv import CheckpointError, Job, convert_checkpoint, convert_many, limits
from ckptconv.cli.main import cli
from ckptconv.support.errors import on_command_line, worded
from helpers.house import MODULES, nodes, tree_of
from helpers.program import SAMPLES, run

TRAIN = SAMPLES / "ddp_cuda3_train.pt"
NEVER_ERRORS = ("report.py", "fixes.py", "__main__.py")
"""Where options stand in what a terminal shows, or in the words of a command."""
ELSEWHERE = {"npy"}
"""What a terminal is told of `show`, which Python has not."""


@functools.cache
def texts() -> tuple[tuple[str, str], ...]:
    """The texts in the code beside its docstrings; what stands in braces is ``x``."""
    return tuple(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for module, path in MODULES.items():
        if path.parent.name in ("cli", "pages") or path.name in NEVER_ERRORS:
            continue
        tree = tree_of(module)
        parts = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
        for node in nodes(tree):
            if isinstance(node, ast.JoinedStr):
                parts.update(map(id, node.values))
                said = [getattr(part, "value", "x") for part in node.values]
                yield path.name, "".join(part if isinstance(part, str) else "x" for part in said)
        yield from (
            (path.name, node.value)
            for node in nodes(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in parts
        )


def options() -> set[str]:
    """The names of all options of the command line, without the hyphens."""
    context = click.Context(cli)
    commands = [cli.get_command(context, name) for name in cli.list_commands(context)]
    return {
        word[2:]
        for command in commands
        for parameter in command.params
        for word in (*parameter.opts, *parameter.secondary_opts)
        if word.startswith("--")
    }


COMMAND = re.compile(r"ckptconv [a-z-]+ (?:[A-Z]|--)[^;]*")


def test_every_option_that_a_message_names_has_words_for_python():
    known = options()
    found = [(name, text) for name, text in texts() if re.search(r"--[a-z]", text)]
    assert len(found) > 60
    for name, text in found:
        left = re.findall(r"--([a-z]+(?:-[a-z]+)*)(?![\w-])", COMMAND.sub("", worded(text)))
        assert not known.intersection(left) - ELSEWHERE, (name, text)
        with on_command_line():
            assert worded(text) == text


def test_no_message_speaks_both_languages():
    for name, text in texts():
        assert not re.search(r"\bin code\)|on the command line\)", text), (name, text)


CALLS = {
    "force": (lambda at: convert_checkpoint(TRAIN, at / "there.pt"),
        ("convert", TRAIN, "there.pt"), "add force=True to", "add --force to"),
    "only": (lambda at: convert_checkpoint(at / "two.pt", at / "o.safetensors"),
        ("convert", "two.pt", "o.safetensors"), 'only="a" or only="b"', "--only a or --only b"),
    "to": (lambda at: convert_checkpoint(TRAIN, at / "out.x"),
        ("convert", TRAIN, "out.x"), 'to="safetensors"', "--to safetensors"),
    "a limit": (lambda at: limited(at), ("convert", TRAIN, "o.pt", "--limit", "depth=1"),
        "ckptconv.limits(depth=2)", "--limit depth=2"),
}  # fmt: skip


def limited(at: Path) -> object:
    with limits(depth=1):
        return convert_checkpoint(TRAIN, at / "o.pt")


@pytest.fixture(autouse=True)
def _called_from_python() -> Iterator[None]:
    with on_command_line(False):
        yield


@pytest.fixture
def room(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}}, tmp_path / "two.pt")
    (tmp_path / "there.pt").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize("call", CALLS)
def test_an_error_has_the_words_of_its_caller(call, room):
    in_python, words, ours, theirs = CALLS[call]
    with pytest.raises(CheckpointError) as raised:
        in_python(room)
    assert ours in str(raised.value) and "--" not in str(raised.value)
    done = run(*words, cwd=room)
    assert theirs in done.err and ours not in done.err


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_a_job_of_a_batch_has_the_words_of_who_began_the_batch(engine, room):
    done = run("batch", "two.pt", "--out-dir", "o", "--to", "safetensors", "--jobs",
               "1" if engine == "serial" else "2", cwd=room)  # fmt: skip
    assert "--only a or --only b" in done.out + done.err
    jobs = [Job(room / "two.pt", room / f"{n}.safetensors") for n in range(2)]
    for receipt in convert_many(jobs, executor=engine):
        assert 'only="a" or only="b"' in receipt.error.message
