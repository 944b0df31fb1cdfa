"""Manifests: one JSON object a line, each a job in the words of the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ckptconv.convert.job import Job
from ckptconv.convert.options import Options
from ckptconv.io.appended import lines_of
from ckptconv.support.errors import BatchRefused, CheckpointError, MissingFile, printable
from ckptconv.support.records import dataclass, given_fields

_OWN = ("source", "output", "tag", "force", "verify", "no_fsync")
_OPTIONS = tuple(item.name for item in fields(Options))
_FLAGS = {"force", "verify", "no_fsync", *(
    item.name for item in fields(Options) if item.type == "bool"
)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ListedJobs:
    """Jobs, and what each is called in messages: its line in a manifest."""

    jobs: tuple[Job, ...]
    names: tuple[str, ...]


def read_manifest(path: Path, common: Job) -> ListedJobs:
    """The jobs of a manifest. What a line does not say is as in `common`, the options of the
    command.

    Empty lines, and those that begin with ``#``, are passed over. Raises `BatchRefused` with all
    that is wrong: no line, lines that are not objects, unknown words, values that are none.
    """
    if not path.exists():
        raise MissingFile("no such file", path=path, hint="check the path")
    jobs: list[Job] = []
    names: list[str] = []
    problems: list[str] = []
    for number, raw in enumerate(lines_of(path), 1):
        if not raw.strip() or raw.lstrip().startswith(b"#"):
            continue
        name = f"{path.name}:{number}"
        try:
            jobs.append(job_of(_object(raw), common))
            names.append(name)
        except CheckpointError as error:
            problems.append(f"{name}: {error}")
    # a crash may leave an empty manifest: exit code 0 would be taken for "all is done"
    if not jobs and not problems:
        problems.append(f"{path}: does not name a job: it is empty or was cut off")
    if problems:
        raise BatchRefused(problems)
    return ListedJobs(tuple(jobs), tuple(names))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not a JSON object: {printable(error)}") from None
    if not isinstance(found, dict):
        raise CheckpointError("is not a JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    # json keeps the last of two equal names without a word
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in it")
    return found


def job_of(words: Mapping[str, Any], common: Job) -> Job:
    """The job that a line's words say, with what is `common` to all.

    A word is that of the command line, without its dashes in front; ``-`` and ``_`` are the same.
    `CheckpointError` says what is wrong.
    """
    given: dict[str, Any] = {}
    for word, value in words.items():
        name = word.replace("-", "_")
        if name not in (*_OWN, *_OPTIONS):
            near = get_close_matches(name, (*_OWN, *_OPTIONS), 1)
            hint = f"did you mean {near[0]}?" if near else None
            raise CheckpointError(f"there is no option {word!r}", hint=hint)
        # in two spellings, which differ to JSON: no-fsync, no_fsync
        if name in given:
            raise CheckpointError(f"{word!r} occurs twice in it")
        # the text "false" is true to Python
        if name in _FLAGS and type(value) is not bool:
            raise CheckpointError(f"{word!r} is true or false, not {value!r:.100}")
        given[name] = value
    for name in ("source", "output"):
        if name not in given:
            raise CheckpointError(f"has no {name!r}")
    source, output = given.pop("source"), given.pop("output")
    _refuse_no_names(source, output)
    own = {name: given.pop(name) for name in _OWN if name in given}
    fsync = not own.pop("no_fsync") if "no_fsync" in own else common.fsync
    options = common.options
    assert isinstance(options, Options)
    if given and options.rules:
        given["rules"] = _rules(given, options)
    options = replace(options, **given) if given else options
    return replace(common, source=source, output=output, fsync=fsync, options=options, **own)


def _rules(given: Mapping[str, Any], common: Options) -> list[Any]:
    """The rules of the command, but for those of the kinds that a line has itself, and then the
    rules of the line.

    The command's have an order, and so all kinds of them are in its `rules`.
    """
    own = _listed(given.get("rules", ()))
    # a line that --dry-run --json wrote has all kinds in its rules, too
    kinds = {*given, *map(_kind, own)}
    return [*(rule for rule in _listed(common.rules) if _kind(rule) not in kinds), *own]


def _listed(rules: Any) -> Sequence[Any]:
    return rules if isinstance(rules, (list, tuple)) else (rules,)


def _kind(rule: Any) -> str:
    """The option that one of `rules` is of: (rule, value), or a file of rules."""
    if isinstance(rule, (list, tuple)) and rule and isinstance(rule[0], str):
        return rule[0].replace("-", "_")
    return "rules"


def _refuse_no_names(source: Any, output: Any) -> None:
    several = isinstance(source, list) and source and all(type(item) is str for item in source)
    if not (several or (type(source) is str and source)):
        raise CheckpointError("'source' is not a name, or a list of the files of all ranks")
    if type(output) is not str or not output:
        raise CheckpointError("'output' is not a name")


def manifest_line(job: Job) -> dict[str, Any]:
    """The words of a job, as a line of a manifest."""
    options = job.options
    assert isinstance(options, Options)
    named: Any = job.source
    one = isinstance(named, (str, os.PathLike))
    told: dict[str, Any] = {"source": str(named) if one else [str(item) for item in named]}
    told["output"] = str(job.output)
    told |= {name: True for name in ("force", "verify") if getattr(job, name)}
    if job.tag is not None:
        told["tag"] = job.tag
    return told | {name: _word(value) for name, value in given_fields(options).items()}


def _word(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_word(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, (bool, int, float)) else str(value)
