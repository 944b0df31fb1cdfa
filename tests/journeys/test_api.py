"""The public names: typed, documented; their errors and results show themselves escaped, and travel
in pickles.
"""

from __future__ import annotations

import copy
import errno
import html
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

import ckptconv
from ckptconv.support import errors
from ckptconv.support.errors import CheckpointError, LimitExceeded, MissingDependency
from helpers import user_code
from helpers.api_page import facts, signature_text
from helpers.program import ROOT, SAMPLES, assert_one_error, environment, run

PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")


@pytest.fixture
def room(tmp_path, monkeypatch) -> Path:
    """A folder with the samples in it, the current one."""
    for sample in SAMPLES.glob("*.pt"):
        shutil.copy(sample, tmp_path)
    shutil.copy(SAMPLES / "ddp_cuda3_train.pt", tmp_path / "train.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Net(nn.Module):
    """The model of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.classifier = nn.Linear(144, 3)


# -------------------------------------------------------------------------------------------- names


def test_the_names_written_out_are_those_that_can_be_had():
    assert ckptconv.__all__ == sorted([*ckptconv._HOMES, "__version__"])
    source = (ROOT / "ckptconv/__init__.py").read_text()
    for name, home in ckptconv._HOMES.items():
        assert f"    from ckptconv.{home} import {name} as {name}\n" in source, (
            f"type checkers do not see {name}"
        )
        assert getattr(ckptconv, name).__module__ == f"ckptconv.{home}"


def test_a_program_of_a_user_runs(room):
    user_code.main(room / "ddp_cuda3.pt", room)


def test_no_function_hides_a_package_and_the_first_names_go_on_working():
    from ckptconv import diff, scan

    assert diff.__name__ == "ckptconv.diff" and scan.__name__ == "ckptconv.scan"
    packages = {path.parent.name for path in (ROOT / "ckptconv").glob("*/__init__.py")}
    assert not packages & {*ckptconv.__all__, *ckptconv._EARLIER}
    for name in ckptconv._EARLIER:
        assert name not in ckptconv.__all__
        assert getattr(ckptconv, name).__name__ in ckptconv.__all__


def test_every_error_is_public():
    own = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, CheckpointError)
    }
    everywhere = {
        kind.__name__
        for kind in all_kinds(CheckpointError)
        if kind.__module__.startswith("ckptconv.")
    }
    assert own == everywhere <= set(ckptconv.__all__)


def all_kinds(kind: type) -> set[type]:
    return {kind, *(one for inner in kind.__subclasses__() for one in all_kinds(inner))}


def test_every_public_name_has_a_docstring_that_begins_with_a_sentence():
    for name in ckptconv.__all__[1:]:
        first = (
            (inspect.getdoc(getattr(ckptconv, name)) or "").split("\n\n")[0]
            if name != "__version__"
            else "None."
        )
        assert re.search(r"[.:;]( |$)", first.replace("\n", " ")), name


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("Scan", "level"), ("Diagnosis", "loads"), ("Fit", "fits"), ("Difference", "same")],
)
def test_a_verdict_is_asked_by_its_name(kind, asked):
    results = {
        "Scan": lambda path: ckptconv.scan_checkpoint(path),
        "Diagnosis": lambda path: ckptconv.diagnose_checkpoint(path),
        "Fit": lambda path: ckptconv.fit_keys({}, {"w": (1,)}),
        "Difference": lambda path: ckptconv.diff_checkpoints(path, path),
    }
    with pytest.raises(TypeError, match=rf"a {kind} is neither true nor false: write \.{asked}"):
        bool(results[kind](SAMPLES / "tied.pt"))


def test_the_types_of_parameters_can_be_asked_for():
    later = {"execute_plan", "load_into", "load_portable"}  # torch, and what is seldom imported
    for name in {*ckptconv.__all__} - later - {"__version__"}:
        get_type_hints(getattr(ckptconv, name))
    hints = get_type_hints(ckptconv.Options)
    assert hints["with_files"] is bool and ckptconv.KeyRules in get_args(hints["keys"])


# --------------------------------------------------------------------------------------------- page


def test_the_page_has_each_name_with_its_signature_and_an_example():
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
    table = dict(error_rows(PAGE))
    assert sorted([*sections, *table]) == ckptconv.__all__
    for name, section in sections.items():
        (told,) = re.findall(r"```text\n(.*?)\n```", section)
        assert "```py\n" in section
        assert told == signature_text(name)
        thing = getattr(ckptconv, name)
        if isinstance(thing, type) and not issubclass(thing, Warning):
            said = {*re.findall(r"\w+", section)}
            assert {fact.removesuffix("()") for fact in facts(thing)} <= said, name
    for name, (told, _) in table.items():
        assert told == signature_text(name)


def error_rows(page: str) -> list[tuple[str, tuple[str, str]]]:
    """The errors of the page: name, then (how it is written, the example)."""
    found = re.findall(r"^\| `(.+)` \| [^|]+ \| `(.+)` \|$", page, re.MULTILINE)
    return [(told.split("(")[0], (told, call)) for told, call in found]


def test_the_examples_of_the_page_run(room):
    space: dict[str, Any] = {"model": Net(), "torch": torch}
    exec("from ckptconv import *", space)
    for block in re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL):
        exec(block, space)
    saved = torch.load("ddp_cuda3.pt", map_location="cpu", weights_only=True)
    assert {f"module.{key}" for key in space["state_dict"]} == set(saved)
    assert torch.equal(space["model"].classifier.weight, saved["module.classifier.weight"])


ELSEWHERE = {
    "IncompleteCheckpoint",
    "MissingDependency",
    "VerificationFailed",
    *(["UnreadableFile"] if os.geteuid() == 0 else []),
}
"""Errors whose examples need more than the samples; other tests raise them."""


@pytest.mark.parametrize(
    ("name", "call"),
    [(name, call) for name, (_, call) in error_rows(PAGE) if name not in ELSEWHERE],
)
def test_the_examples_of_errors_raise_them(name, call, room):
    (room / "damaged.pt").write_bytes((room / "train.pt").read_bytes()[:3000])
    (room / "notes.txt").write_text("some words\n")
    (room / "folder").mkdir()
    (room / "secret.pt").touch(0)
    torch.save({"epoch": 3}, room / "numbers.pt")
    space: dict[str, Any] = {"torch": torch}
    exec("from ckptconv import *", space)
    with pytest.raises(CheckpointError) as caught:
        exec(call, space)
    assert type(caught.value).__name__ == name, repr(caught.value)


# -------------------------------------------------------------------------------------------- types

SNIPPET = """
import ckptconv
from ckptconv import CheckpointError, Options, Progress
reveal_type(ckptconv.load_portable("a.pt"))
reveal_type(ckptconv.load_portable("a.pt", whole=False))
reveal_type(ckptconv.load_portable("a.pt", whole=True))
reveal_type(ckptconv.inspect_checkpoint("a.pt").tensor_list[0].shape)
reveal_type(ckptconv.convert_checkpoint("a.pt", "b.pt", dtype="bf16").verified)
reveal_type(ckptconv.diff_checkpoints("a.pt", "b.pt").same)
reveal_type(ckptconv.scan_checkpoint("a.pt").level)
reveal_type(ckptconv.diagnose("a.pt").findings[0].command)
reveal_type(Options(dtype="bf16").device)
def tell(progress: Progress) -> None: ...
ckptconv.load_portable("a.pt", on_progress=tell)
ckptconv.convert_checkpoint("a.pt", "b.pt", dtyp="bf16")
Options(to="onnx")
Options("torch")
ckptconv.load_portable("a.pt", keys="stripp")
"""
REVEALED = [
    "collections.OrderedDict[str, torch._tensor.Tensor]",
    "collections.OrderedDict[str, torch._tensor.Tensor]", "Any",
    "tuple[int, ...]", "int | None", "bool",
    "Literal['plain'] | Literal['unknown'] | Literal['dangerous']",
    "str | None", "str | ckptconv.support.choices.TorchDevice | None",
]  # fmt: skip


@pytest.mark.trust
def test_the_types_of_the_library_are_those_that_a_user_sees(tmp_path):
    (tmp_path / "user.py").write_text(SNIPPET)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(tmp_path / "cache"),
        "user.py",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(MYPYPATH=""),
        capture_output=True,
        text=True,
        check=False,
    )
    told = re.findall(r'Revealed type is "(.*)"', done.stdout)
    wanted = [re.sub(r"Literal\['(\w+)'\]", r"Literal['\1']", text) for text in REVEALED]
    assert [plain_type(text) for text in told] == [plain_type(text) for text in wanted], done.stdout
    wrong = re.findall(r"^user.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    assert [code for _, code in wrong] == ["call-arg", "arg-type", "call-arg", "call-overload"], (
        done.stdout
    )


def plain_type(text: str) -> str:
    """A type as all versions of mypy write it."""
    found = re.fullmatch(r"(?:Union|Literal)\[(.*)\]", text)
    text = text.replace("builtins.", "").replace("typing.", "").replace("None", "null")
    text = re.sub(r"Union\[(.*), null\]", r"\1 | null", text)
    words = (
        re.findall(r"Literal\[((?:'\w+'(?:, )?)+)\]", text) if found or "Literal" in text else []
    )
    return (
        " | ".join(sorted(word for group in words for word in re.findall(r"\w+", group)))
        if words
        else text
    )


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "ckptconv/py.typed").exists()
    for name in ckptconv.__all__:
        thing = getattr(ckptconv, name)
        if not inspect.isfunction(thing):
            continue
        hinted = inspect.signature(inspect.unwrap(thing))
        assert hinted.return_annotation is not inspect.Signature.empty, name
        bare = [
            one.name
            for one in hinted.parameters.values()
            if one.annotation is inspect.Parameter.empty
        ]
        assert bare == [], f"{name}: {bare}"


# ------------------------------------------------------------------------------------------- errors


def test_a_missing_file_is_a_file_not_found_error(room):
    for call in (
        lambda: ckptconv.load_portable("no.pt"),
        lambda: ckptconv.convert_checkpoint("no.pt", "out.pt"),
        lambda: ckptconv.open_checkpoint(Path("no.pt")),
        lambda: ckptconv.inspect_checkpoint("no.pt"),
        lambda: ckptconv.scan_checkpoint("no.pt"), lambda: ckptconv.diagnose("no.pt"),
        lambda: ckptconv.diff_checkpoints("train.pt", "no.pt"),
        lambda: ckptconv.load_into(Net(), "no.pt"),
        lambda: ckptconv.read_key_rules("no.json"),
        lambda: ckptconv.convert_checkpoint("train.pt", "o.pt", like="no.pt"),
    ):  # fmt: skip
        with pytest.raises(FileNotFoundError) as caught:
            call()
        error = caught.value
        assert isinstance(error, ckptconv.MissingFile) and isinstance(
            error, ckptconv.UnsupportedCheckpoint
        )
        assert error.errno == errno.ENOENT and error.strerror == os.strerror(errno.ENOENT)
        assert error.filename in ("no.pt", "no.json") and "no such file" in str(error)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_file_that_may_not_be_read_is_a_permission_error(number, room, monkeypatch):
    sound = os.open

    def closed(path: Any, *rest: Any, **named: Any) -> int:
        if Path(path).name == "train.pt":
            raise PermissionError(number, os.strerror(number), str(path))
        return sound(path, *rest, **named)

    monkeypatch.setattr(os, "open", closed)
    with pytest.raises(PermissionError) as caught:
        ckptconv.load_portable("train.pt")
    assert isinstance(caught.value, CheckpointError) and caught.value.errno == number
    assert caught.value.filename == "train.pt" and os.strerror(number) in str(caught.value)


def test_a_folder_is_an_is_a_directory_error(room):
    (room / "rules.json").mkdir()
    for call in (
        lambda: ckptconv.read_key_rules("rules.json"),
        lambda: ckptconv.open_checkpoint("rules.json"),
    ):
        with pytest.raises(IsADirectoryError) as caught:
            call()
        assert isinstance(caught.value, CheckpointError) and caught.value.filename == "rules.json"


def made_errors() -> list[CheckpointError]:
    """One of each kind, with all that it may carry."""
    fit = ckptconv.fit_keys({"a.w": (2,)}, {"b.x": (3,)})
    special: dict[type, CheckpointError] = {
        LimitExceeded: LimitExceeded(
            "is large", limit="nodes", allowed=3, needed=9, path="a.pt", where="key", advice="wait"
        ),
        errors.KeyMismatch: errors.KeyMismatch("differs", path="a.pt", fit=fit),
        errors.MissingFile: errors.not_opened(errno.ENOENT, "a.pt"),
        errors.UnreadableFile: errors.not_opened(errno.EACCES, "a.pt"),
        errors.IsFolder: errors.not_opened(errno.EISDIR, "a.pt"),
        errors.BatchRefused: errors.BatchRefused(["job 1: is odd", "job 2: is odd too"]),
    }
    kinds = sorted(all_kinds(CheckpointError), key=lambda kind: kind.__name__)
    return [
        special.get(kind) or kind("is odd", path="a.pt", where="k\x1b", hint="do this")
        for kind in kinds
    ]


@pytest.mark.parametrize("error", made_errors(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "way",
    [
        copy.copy,
        copy.deepcopy,
        *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in (0, 2, 5)),
    ],
)
def test_an_error_is_the_same_behind_a_pickle_and_a_copy(error, way):
    error.note = "mine"
    again = way(error)
    assert type(again) is type(error) and str(again) == str(error) and repr(again) == repr(error)
    assert again.args == error.args and again.note == "mine"
    for name in (
        "what",
        "path",
        "where",
        "hint",
        "limit",
        "allowed",
        "needed",
        "errno",
        "filename",
        "strerror",
        "fit",
    ):
        assert getattr(again, name, None) == getattr(error, name, None), name
    assert repr(error) == f"{type(error).__name__}({str(error)!r})"


# ------------------------------------------------------------------------------------ without torch

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise {error}
sys.meta_path.insert(0, Blocked())
"""
ABSENT = 'ModuleNotFoundError("No module named \'torch\'", name="torch")'
BROKEN = {
    "a library is missing": 'ImportError("libcudart.so.12: cannot open shared object file", '
    'name="torch._C")',
    "the loader fails": 'OSError("libtorch_cpu.so: undefined symbol")',
    "it fails anyhow": "AttributeError(\"partially initialized module 'torch' has no attribute "
    "'version'\")",
}


def in_process(code: str, room: Path, error: str = ABSENT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED.format(error=error) + code]
    return subprocess.run(
        command, cwd=room, env=environment(), capture_output=True, text=True, check=False
    )


CALLS = """
import ckptconv
from pathlib import Path
Path("models.py").write_text("def build(): ...")
for call in (
    lambda: ckptconv.load_portable("train.pt"),
    lambda: ckptconv.load_portable("train.pt", whole=True, map_location=None),
    lambda: ckptconv.load_into(None, "train.pt"), lambda: ckptconv.save_portable({}, "out.pt"),
    lambda: ckptconv.convert_checkpoint("train.pt", "folder", to="dcp"),
    lambda: ckptconv.convert_checkpoint("train.pt", "out.pt", model="models:build"),
    lambda: ckptconv.diagnose("train.pt", model="models:build"),
):
    try:
        call()
    except ImportError as error:
        assert isinstance(error, ckptconv.MissingDependency)
        assert isinstance(error, ckptconv.CheckpointError)
        print(error)
    else:
        print("nothing was raised")
assert not Path("out.pt").exists() and not Path("folder").exists()
"""


def test_without_torch_what_needs_it_says_how_to_install_it(room):
    done = in_process(CALLS, room)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    for line in lines:
        assert line.endswith("needs torch, which is not installed; pip install 'torch>=2.1'"), line


@pytest.mark.parametrize("error", BROKEN.values(), ids=BROKEN)
def test_a_broken_torch_is_told_from_none(error, room):
    done = in_process(CALLS, room, error)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert (
            "needs torch, and torch is installed but cannot be imported: " in line
            and "--force-reinstall torch" in line
        )


def test_an_empty_folder_called_torch_is_a_broken_one(room, monkeypatch):
    (room / "torch").mkdir()
    code = (
        "import sys; sys.path = ['.'] + [p for p in sys.path if 'site-packages' not in p]\n"
        "from ckptconv.devices.host import *\n"
    )
    code += "try:\n    require_torch('this')\nexcept ImportError as error:\n    print(error)"
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}",
    ]
    done = subprocess.run(command, cwd=room, capture_output=True, text=True, check=False)
    assert (
        "this needs torch, and torch is installed but cannot be imported: it is empty"
        in done.stdout
    ), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("train.pt", "folder", "--to", "dcp"), ("train.pt", "out.pt", "--model", "models:build")],
    ids=" ".join,
)
def test_the_command_line_without_torch_says_it_too(arguments, room):
    (room / "models.py").write_text("def build(): ...")
    code = (
        f"import sys; sys.argv = ['ckptconv', 'convert', *{arguments!r}]\n"
        "from ckptconv.cli.main import main\nmain()"
    )
    done = in_process(code, room)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.endswith("pip install 'torch>=2.1'\n")
    assert done.stderr.count("\n") == 1


def test_without_torch_the_rest_works(room):
    code = (
        "import ckptconv\nckptconv.convert_checkpoint('train.pt', 'o.safetensors', verify=True)\n"
    )
    code += (
        "ckptconv.inspect_checkpoint('train.pt').tensor_list[0]; ckptconv.scan_checkpoint('.'); "
        "ckptconv.diagnose('train.pt')\n"
    )
    code += (
        "assert ckptconv.diff_checkpoints('train.pt', 'o.safetensors', keys='strip').same\n"
        "assert 'torch' not in sys.modules"
    )
    done = in_process(code, room)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------ options


def test_options_and_convert_checkpoint_take_the_same_words():
    options = list(inspect.signature(ckptconv.Options).parameters.values())
    converts = inspect.signature(ckptconv.convert_checkpoint).parameters
    for option in options:
        assert option.kind is option.KEYWORD_ONLY
        assert (converts[option.name].default, converts[option.name].annotation) == (
            option.default,
            option.annotation,
        )
    rest = set(converts) - {option.name for option in options}
    assert rest == {"source", "output", "tag", "force", "fsync", "verify", "on_progress"}


def test_the_words_are_those_of_the_command_line():
    from ckptconv.cli.converting import convert

    shown = {
        name.lstrip("-").replace("-", "_")
        for param in convert.params
        for name in param.opts
        if name.startswith("--")
    }
    of_the_terminal = {"json", "quiet", "dry_run", "limit", "no_fsync", "allow_hosts", "unpinned"}
    # limits(...), fsync=False, CKPTCONV_ALLOW_HOSTS; execute_plan(..., share_out=...)
    of_the_terminal |= {"jobs", "engine", "address"}
    taken = set(inspect.signature(ckptconv.convert_checkpoint).parameters)
    assert shown - of_the_terminal == taken - {"source", "output", "fsync", "on_progress"}


def test_words_do_what_they_do_on_the_command_line(room):
    words = {
        "strip_prefix": "module.", "rename": ["features.0=conv", "classifier.=head."],
        "regex": r"^conv\.=>first.",
        "add_prefix": "net.", "exclude": ["*.num_batches_tracked"], "include": ("net.*",),
        "preset": [],
        "map_location": {"cuda:3": "cuda:1"}, "dtype": "bf16", "only": "state_dict",
        "max_shard_size": None, "keys": "keep",
    }  # fmt: skip
    ckptconv.convert_checkpoint("train.pt", "api.pt", **words)
    line = [
        "--keys",
        "keep",
        "--strip-prefix",
        "module.",
        "--rename",
        "features.0=conv",
        "--rename",
        "classifier.=head.",
    ]
    line += [
        "--regex",
        r"^conv\.=>first.",
        "--add-prefix",
        "net.",
        "--include",
        "net.*",
        "--exclude",
        "*.num_batches_tracked",
    ]
    line += ["--map-location", "cuda:3=cuda:1", "--dtype", "bf16", "--only", "state_dict"]
    done = run("convert", "train.pt", "cli.pt", *line, cwd=room)
    assert done.exit == 0, done.err
    assert (room / "api.pt").read_bytes() == (room / "cli.pt").read_bytes()
    saved = torch.load("api.pt", map_location="cpu", weights_only=True)
    assert (
        "net.first.weight" in saved
        and "net.features.1.weight" in saved
        and saved["net.head.bias"].dtype is torch.bfloat16
    )
    with ckptconv.open_checkpoint("train.pt") as checkpoint:
        plan = ckptconv.plan_conversion(checkpoint, "plan.pt", ckptconv.Options(**words))
        ckptconv.execute_plan(plan)
    assert (room / "plan.pt").read_bytes() == (room / "cli.pt").read_bytes()


def test_rules_in_files_mappings_and_pairs_keep_their_order(room):
    (room / "rules.json").write_text('[{"rename": {"features.": "f."}}]')
    ckptconv.convert_checkpoint(
        "ddp_cuda3.pt", "a.pt", rules=["rules.json", ("add-prefix", "x."), ("rename", "x.f.=y.")]
    )
    assert "y.0.weight" in torch.load("a.pt", map_location="cpu", weights_only=True)
    ckptconv.convert_checkpoint(
        "ddp_cuda3.pt", "b.pt", rules=("add-prefix", "x."), save_mapping="map.json"
    )
    ckptconv.convert_checkpoint("b.pt", "c.pt", rules="map.json", reverse=True, device="cuda:3")
    assert ckptconv.diff_checkpoints("ddp_cuda3.pt", "c.pt", strict_device=True).same
    for wrong, says in (
        ({"rules": "no.json"}, "no such file"),
        ({"reverse": True}, "--reverse undoes a mapping"),
        ({"rules": [("renam", "a=b")]}, "there is no rule 'renam'"),
        ({"rules": 3}, "rules=3 is not a list of rules"),
        ({"rename": "ab"}, "is not of the form OLD=NEW"),
        ({"include": 3}, "include=3 is not a text"),
        ({"preset": ["nonsense"]}, "nonsense"), ({"exclude": [""]}, "is not a text"),
        ({"device": "gpu"}, "'gpu' is not a device tag"),
        ({"map_location": {"cuda:3": "keep"}}, "'keep' is not a device tag"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=re.escape(says)):
            ckptconv.convert_checkpoint("ddp_cuda3.pt", "d.pt", **wrong)
    assert not (room / "d.pt").exists()


MISSPELT = [
    (ckptconv.Options, (), "dtyp", "dtype"),
    (ckptconv.convert_checkpoint, ("a", "b"), "devise", "device"),
    (ckptconv.load_portable, ("a",), "maplocation", "map_location"),
    (ckptconv.save_portable, ({}, "a"), "Force", "force"),
    (ckptconv.load_into, (None, "a"), "stric", "strict"),
    (ckptconv.diff_checkpoints, ("a", "b"), "only_c", "only_b or only"),
    (ckptconv.scan_checkpoint, ("a",), "progress", "on_progress"),
    (ckptconv.diagnose, ("a",), "value", "values"),
    (ckptconv.inspect_checkpoint, ("a",), "deepth", "depth"),
    (ckptconv.open_checkpoint, ("a",), "tags", "tag"),
    (ckptconv.execute_plan, (None,), "verfy", "verify"),
    (ckptconv.read_key_rules, ("a",), "reversed", "reverse"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "given", "name", "meant"),
    MISSPELT,
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_misspelt_option_is_told_the_nearest(function, given, name, meant):
    with pytest.raises(TypeError) as caught:
        function(*given, **{name: 1})
    assert isinstance(caught.value, ckptconv.OptionRefused)
    assert str(caught.value) == f"unknown option '{name}'; did you mean {meant}?"


def test_a_name_like_no_option_is_told_all():
    with pytest.raises(
        ckptconv.UnknownOption, match=r"unknown option 'zzz'; there are source, on_progress"
    ):
        ckptconv.scan_checkpoint("a", zzz=1)
    with pytest.raises(TypeError):
        ckptconv.Options("torch")


def test_what_is_not_a_plan_is_refused():
    with pytest.raises(ckptconv.OptionRefused, match=r"plan='out\.pt' is not a"):
        ckptconv.execute_plan("out.pt")


# ----------------------------------------------------------------------------------------- progress


def test_progress_is_told_in_one_form_by_all_that_read_or_write(room):
    torch.save({"w": torch.randn(2 << 20), "s": torch.ones(3).to_sparse()}, "large.pt")
    shutil.copy("large.pt", "copy.pt")
    with ckptconv.open_checkpoint("large.pt") as checkpoint:
        plan = ckptconv.plan_conversion(checkpoint, "planned.pt")
        calls = {
            "load_portable": lambda tell: ckptconv.load_portable(
                "large.pt", mmap=False, on_progress=tell
            ),
            "load_into": lambda tell: ckptconv.load_into(
                nn.Linear(1, 1), "large.pt", strict=False, on_progress=tell
            ),
            "save_portable": lambda tell: ckptconv.save_portable(
                {"w": torch.ones(2 << 20)}, "saved.pt", on_progress=tell
            ),
            "convert": lambda tell: ckptconv.convert_checkpoint(
                "large.pt", "converted.pt", on_progress=tell
            ),
            "execute_plan": lambda tell: ckptconv.execute_plan(plan, on_progress=tell),
            "diff": lambda tell: ckptconv.diff_checkpoints("large.pt", "copy.pt", on_progress=tell),
            "scan": lambda tell: ckptconv.scan_checkpoint("large.pt", on_progress=tell),
            "diagnose": lambda tell: ckptconv.diagnose("large.pt", values=True, on_progress=tell),
        }
        for name, call in calls.items():
            seen: list[ckptconv.Progress] = []
            call(seen.append)
            assert seen and all(type(one) is ckptconv.Progress for one in seen), name
            for phase in {one.phase for one in seen}:
                steps = [one for one in seen if one.phase == phase]
                assert steps[0].done == 0 and steps[-1].done == steps[-1].total, (name, phase)
                assert [one.done for one in steps] == sorted(one.done for one in steps), (
                    name,
                    phase,
                )
            if name not in ("load_into",):  # what is mapped is not read
                assert max(one.total for one in seen) >= 4 * (2 << 20), name


# --------------------------------------------------------------------------------------- inspection


def test_the_records_of_tensors_are_what_torch_has(room):
    found = ckptconv.inspect_checkpoint("train.pt")
    saved = torch.load("train.pt", map_location="cpu", weights_only=True)["state_dict"]
    mine = {one.key: one for one in found.tensor_list if one.path.startswith("state_dict.")}
    assert list(mine) == list(saved)
    for key, value in saved.items():
        assert mine[key].dtype == str(value.dtype).removeprefix("torch.") and mine[
            key
        ].shape == tuple(value.shape)
        assert (
            mine[key].nbytes == value.nbytes
            and mine[key].device == "cuda:3"
            and mine[key].path == f"state_dict.{key}"
        )
    momentum = [one for one in found.tensor_list if one.path.startswith("optimizer.")]
    assert momentum and all(one.key is None for one in momentum)
    assert (
        len(found.tensor_list) == found.tensors == 27
        and found.tensor_list[-1] == list(found.tensor_list)[26]
    )


def test_inspect_takes_a_path_several_or_what_is_open(room):
    (room / "run" / "checkpoint-5").mkdir(parents=True)
    shutil.copy("ddp_cuda3.pt", "run/checkpoint-5/pytorch_model.bin")
    with ckptconv.open_checkpoint("train.pt") as checkpoint:
        opened = ckptconv.inspect_checkpoint(checkpoint)
        with pytest.raises(ckptconv.OptionRefused, match="is open already"):
            ckptconv.inspect_checkpoint(checkpoint, tag="5")
    assert (
        opened
        == ckptconv.inspect_checkpoint(Path("train.pt"))
        == ckptconv.inspect_checkpoint(["train.pt"])
    )
    assert ckptconv.inspect_checkpoint("run", tag="5").tensors == 9
    assert [reason.code for reason in opened.reasons] == [
        "device",
        "wrapper",
    ] and not opened.portable
    ckptconv.convert_checkpoint("train.pt", "portable.pt")
    assert ckptconv.inspect_checkpoint("portable.pt").portable
    for wrong in (-1, "2", True):
        with pytest.raises(ckptconv.OptionRefused, match="is not a number of levels"):
            ckptconv.inspect_checkpoint("train.pt", wrong)


def test_records_of_tensors_are_made_only_when_they_are_looked_at(room, monkeypatch):
    from ckptconv.inspect import facts as inspection

    made = []
    monkeypatch.setattr(inspection, "_tensor_list", lambda *_: made.append(1) or ())
    found = ckptconv.inspect_checkpoint("train.pt")
    repr(found), found.portable, found._repr_html_()
    assert made == []
    assert len(found.tensor_list) == 0 and made == [1]
    list(found.tensor_list)
    assert made == [1]


# -------------------------------------------------------------------------------- results that show


HOSTILE = "<script>alert(1)</script>\x1b[31m" + "x" * 5000


def results(room: Path) -> dict[str, Any]:
    """One of each result, made of a file whose keys are hostile."""
    state_dict = {
        HOSTILE: torch.full((2,), 1e10),
        f"{HOSTILE}2": torch.ones(2),
        **{f"k{i}": torch.ones(1) for i in range(99)},
    }
    torch.save(state_dict, room / "<b>a.pt")
    torch.save({**state_dict, HOSTILE: torch.zeros(2), "more": torch.ones(1)}, room / "b.pt")
    name = "<b>a.pt"
    fit = ckptconv.fit_keys({HOSTILE: (2,)}, {"other": (3,)})
    with ckptconv.open_checkpoint(name) as checkpoint:
        found = {
            "checkpoint": checkpoint, "state_dict": checkpoint.state_dict(),
            "plan": ckptconv.plan_conversion(
                checkpoint, "p.pt", ckptconv.Options(add_prefix="<i>")), "fit": fit,
            "inspection": ckptconv.inspect_checkpoint(checkpoint),
        }  # fmt: skip
    return {
        **found,
        "result": ckptconv.convert_checkpoint(name, "out.pt", dtype="f16", verify=True),
        "diagnosis": ckptconv.diagnose(name, like="b.pt"),
        "difference": ckptconv.diff_checkpoints(name, "b.pt"),
        "scan": ckptconv.scan_checkpoint(room),
        "load_result": ckptconv.load_into(nn.Linear(1, 1), name, strict=False),
        "options": ckptconv.Options(only=HOSTILE, rename=[f"{HOSTILE}=a"]),
        "rules": ckptconv.KeyRules.of([("strip-prefix", HOSTILE)]),
        "ref": next(checkpoint.tensors())[1],
        "error": errors.KeyMismatch("differs", where=HOSTILE, fit=fit),
    }


def test_results_show_themselves_in_one_line(room):
    for name, result in results(room).items():
        shown = repr(result)
        assert shown.isprintable() and type(result).__name__ in shown, name
        if name != "error":
            assert len(shown) <= 120, (name, len(shown), shown)


def test_tables_in_notebooks_are_escaped_and_small(room):
    tabled = set()
    for name, result in results(room).items():
        if (make := getattr(result, "_repr_html_", None)) is None:
            continue
        tabled.add(name)
        shown = make()
        assert shown.startswith("<table>") and shown.count("<table") == 1 and len(shown) < 30_000, (
            name,
            len(shown),
        )
        assert set(re.findall(r"<(\w+)", shown)) <= {"table", "caption", "tr", "th", "td"}, name
        assert "\x1b" not in shown
        if name in (
            "state_dict",
            "plan",
            "fit",
            "difference",
            "load_result",
            "inspection",
            "result",
        ):
            assert html.escape("<script>alert(1)</script>") in shown, name
    wanted = {
        "checkpoint",
        "state_dict",
        "plan",
        "fit",
        "inspection",
        "result",
        "diagnosis",
        "difference",
        "scan",
        "load_result",
    }
    assert tabled == wanted


def test_results_travel_in_pickles(room):
    for name, result in results(room).items():
        if name in ("checkpoint", "state_dict", "ref"):
            with pytest.raises(TypeError, match="an open file cannot be pickled or copied"):
                pickle.dumps(result)
            continue
        again = pickle.loads(pickle.dumps(result))
        assert type(again) is type(result) and repr(again) == repr(result)
        if name not in ("plan", "result", "error"):
            assert again == result, name
        if name == "inspection":
            assert list(again.tensor_list) == list(result.tensor_list)
        if hasattr(result, "_repr_html_"):
            assert again._repr_html_() == result._repr_html_()


def test_a_plan_out_of_a_pickle_tells_all_and_is_not_executed(room):
    from ckptconv.convert.report import PLAN

    with ckptconv.open_checkpoint("train.pt") as checkpoint:
        plan = ckptconv.plan_conversion(
            checkpoint,
            "out",
            ckptconv.Options(max_shard_size=500, dtype="f16", save_mapping="m.json"),
        )
        again = pickle.loads(pickle.dumps(plan))
        assert PLAN.of(again) == PLAN.of(plan)
        for verify in (False, True):
            with pytest.raises(CheckpointError, match="the plan was pickled"):
                ckptconv.execute_plan(again, verify=verify)
        assert copy.copy(plan) is plan and copy.deepcopy(plan) is plan
        ckptconv.execute_plan(copy.deepcopy(plan))
    assert (
        sorted(path.name for path in (room / "out").iterdir())[-1] == "model.safetensors.index.json"
    )


def test_an_error_of_a_worker_process_comes_back_whole(room):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(ckptconv.inspect_checkpoint, str(room / "train.pt")).result()
        assert found.tensors == 27 and found.tensor_list[0].device == "cuda:3"
        with pytest.raises(ckptconv.MissingFile) as caught:
            pool.submit(ckptconv.inspect_checkpoint, str(room / "no.pt")).result()
        assert caught.value.filename == str(room / "no.pt")


def test_the_program_tells_a_missing_dependency_by_its_kind(room):
    (room / "rules.yaml").write_text("- strip-prefix: module.\n")
    arguments = ["ckptconv", "convert", "train.pt", "o.pt", "--rules", "rules.yaml"]
    code = (
        f"import sys; sys.modules['yaml'] = None; sys.argv = {arguments!r}\n"
        "from ckptconv.cli.main import main\nmain()"
    )
    done = in_process(code, room)
    assert "pip install 'pyyaml>=6'" in done.stderr
    assert issubclass(MissingDependency, ImportError)
    assert_one_error(run("inspect", "no.pt", cwd=room))
