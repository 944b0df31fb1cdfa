"""Keys of hundreds of thousands of segments: each rule does what its definition says, in time that
grows with the length.
"""

from __future__ import annotations

import json
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ckptconv import limits
from ckptconv.keys.fitting import fit_keys
from ckptconv.keys.key_map import KeyRules, map_keys
from ckptconv.keys.mappings import Followed
from ckptconv.keys.rules import UNMISTAKABLE, find_wrappers
from ckptconv.support.errors import LimitExceeded
from ckptconv.tree.fitted_keys import module_paths
from helpers.examples import crossed, some
from helpers.program import run

COUNT = 200_000
LONG = "module." * COUNT
SECONDS = 5.0  # each took 10 s and more

KEYS = st.lists(
    st.lists(
        st.sampled_from(["module", "a", "b", "modul", "", *UNMISTAKABLE]), min_size=1, max_size=7
    ).map(".".join),
    min_size=1,
    max_size=4,
    unique=True,
)


# ------------------------------------------------------------------- the rules by their definitions


def defined_depth(keys: Sequence[str]) -> int:
    """How often ``module.`` is the first segment of every key: once more than when it is taken off
    them.
    """
    if keys and all(key.startswith("module.") and key != "module." for key in keys):
        return 1 + defined_depth([key.removeprefix("module.") for key in keys])
    return 0


def without_unmistakable(key: str) -> str:
    *modules, last = key.split(".")
    return ".".join([*(name for name in modules if name not in UNMISTAKABLE), last])


def stripped(key: str) -> str:
    return stripped(key.removeprefix("module.")) if key.startswith("module.") else key


@given(KEYS)
def test_wrappers_are_found_as_defined(keys):
    inside = [name for name in UNMISTAKABLE if any(name in key.split(".")[:-1] for key in keys)]
    depth = defined_depth([without_unmistakable(key) for key in keys])
    assert find_wrappers(keys) == (*["module"] * depth, *inside)


@given(KEYS)
@example(["module.module._orig_mod."])
def test_leading_modules_are_stripped_as_defined(keys):
    assert [map_keys([key], KeyRules("module")).new for key in keys if stripped(key)] == [
        (stripped(key),) for key in keys if stripped(key)
    ]


PATHS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=5).map(".".join)
SHORT = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=6).map(".".join)
RENAMES = st.dictionaries(SHORT, SHORT, min_size=1, max_size=5)


def around(key: str) -> Iterator[tuple[str, str]]:
    """The modules that a key is in, the root first, and what of the key is inside each."""
    yield "", key
    parts = key.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count]), ".".join(parts[count:])


def defined_paths(renames: Mapping[str, str]) -> dict[str, set[str | None]]:
    """Each module with all that its keys say of where it went; None where a key does not say it."""
    found: dict[str, set[str | None]] = {}
    for old, new in renames.items():
        for path, rest in around(old):
            inside = new == rest or rest.endswith(f".{new}")
            there = "" if inside else new[: -len(rest) - 1] if new.endswith(f".{rest}") else None
            found.setdefault(path, set()).add(there)
    return found


@given(RENAMES, PATHS)
def test_a_module_goes_where_all_of_its_keys_went(renames, path):
    said = defined_paths(renames).get(path, {None})
    assert Followed([*renames, None], [*renames.values(), "x"]).get(path) == (
        said.pop() if len(said) == 1 else None
    )


def pairs_of_modules(old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    """The paths before and after, the innermost module first; segments of the longer side are
    passed over.
    """
    if not old or not new or (old[-1] != new[-1] and len(old) == len(new)):
        return
    if old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    elif len(old) > len(new):
        old = old[:-1]
    else:
        new = new[:-1]
    yield ".".join(old), ".".join(new)
    yield from pairs_of_modules(old, new)


@given(RENAMES, PATHS)
def test_fitted_modules_follow_the_first_key_of_the_innermost_known_one(renames, path):
    known: dict[str, str] = {}
    for old, new in renames.items():
        for before, after in pairs_of_modules(old.split("."), new.split(".")):
            known.setdefault(before, after)
    expected, parts = path, path.split(".") if path else []
    for count in range(len(parts) + 1):
        around = ".".join(parts[:count])
        if around in known and (count or not parts):
            expected = ".".join([*filter(None, [known[around]]), *parts[count:]])
    assert module_paths(renames)(path) == expected


# --------------------------------------------------------------------------------------- their time


def in_time(begin: float) -> bool:
    return time.process_time() - begin < SECONDS


@pytest.mark.parametrize(
    ("key", "wrappers"),
    crossed(
        [
            LONG + "w",
            "module._orig_mod." * COUNT + "w",
            "." * COUNT + "w",
            "x" * 1_000_000,
            "a." * COUNT,
        ],
        ["strip", "module", "add-module"],
    ),
    ids=lambda text: text[:20],
)
def test_a_key_of_many_segments_is_renamed_in_linear_time(key, wrappers):
    begin = time.process_time()
    (new,) = map_keys([key], KeyRules(wrappers)).new
    assert in_time(begin)
    if key is LONG + "w" and wrappers != "add-module":
        assert new == "w"


RULES = [
    ("strip-prefix", LONG),
    ("strip-prefix", "module."),
    ("add-prefix", "x."),
    ("rename", "module.=q."),
    ("regex", r"module\.=>q."),
    ("regex", r"^(module\.)+=>"),
    ("include", "*module*w"),
    ("exclude", "*.module.b"),
    ("preset", "ddp"),
    ("preset", "compile"),
    ("preset", "swa"),
]


@pytest.mark.parametrize("rule", some(5, RULES))
def test_every_rule_and_the_module_paths_behind_it_take_linear_time(rule):
    keys = [LONG + "w", LONG + "module.b", "module._orig_mod." * COUNT + "n"]
    begin = time.process_time()
    mapped = map_keys(keys, KeyRules.of([rule], "keep"))
    for path in ("", "module", LONG[:-1], LONG + "module", "module._orig_mod"):
        mapped.renamed_modules([path])
    assert in_time(begin)


def test_a_name_followed_through_many_modules_takes_linear_time():
    key = "a." * COUNT + "w"
    begin = time.process_time()
    followed = Followed([key, "b"], ["x." + key, "x.b"])
    assert followed.get(key[:-2]) == "x." + key[:-2]
    assert followed.get("") == "x"
    follow = module_paths({key: "x." + key, "b": "x.b"})
    assert follow(key[:-2]) == "x." + key[:-2]
    assert follow("") == "x"
    assert in_time(begin)


@pytest.mark.trust
def test_many_modules_with_a_version_each_are_followed_in_linear_time():
    keys = [f"model.l{index}.a.w" for index in range(COUNT)]
    begin = time.process_time()
    mapped = map_keys(keys, KeyRules.of([("regex", r"^model\.=>m."), ("strip-prefix", "m.")]))
    modules = ["", "model", *(key[:-2] for key in keys)]
    paths = [new for _, new in mapped.renamed_modules(modules)]
    assert time.process_time() - begin < 4 * SECONDS
    assert paths == ["", "", *(key[len("model.") : -2] for key in keys)]


@pytest.mark.parametrize(
    ("source", "target"), [(LONG + "w", "b"), ("b", LONG + "w"), ("x.y", "a." * COUNT + "z")]
)
def test_what_does_not_fit_is_refused_before_its_suffixes_are_made(source, target):
    # Each was made to name the nearest one: 280 GB of them.
    begin = time.process_time()
    with pytest.raises(LimitExceeded, match="too long to be fitted") as caught:
        fit_keys({source: (1,)}, {target: (1,)})
    assert caught.value.limit == "names"
    assert in_time(begin)


def test_a_pattern_has_its_seconds_for_keys_and_modules_together():
    paths = [f"{'a' * 26}{index}" for index in range(200)]  # some 20 ms each
    mapped = None
    begin = time.process_time()
    with limits(regex_seconds=0.5), pytest.raises(LimitExceeded, match=r"takes more than 0\.5 s"):
        mapped = map_keys(
            ["w"], KeyRules.of([("regex", "^(a|aa)+!=>x"), ("add-prefix", "y.")], "keep")
        )
        mapped.renamed_modules(paths)
    assert time.process_time() - begin < SECONDS


def headed(path: Path, keys: Sequence[str]) -> Path:
    header = {
        key: {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]}
        for at, key in enumerate(keys)
    }
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4 * len(keys)))
    return path


COMMANDS = [
    ("convert", "in.safetensors", "out.pt"),
    ("convert", "in.pt", "out.safetensors"),
    ("convert", "in.pt", "out.pt", "--like", "bare.safetensors"),
    ("strip-module", "in.pt", "out.pt"),
    ("add-module", "in.pt", "out.pt"),
    ("inspect", "in.pt"),
    ("doctor", "in.pt"),
    ("doctor", "in.pt", "--like", "other.safetensors"),
    ("diff", "in.pt", "bare.safetensors", "--keys", "strip"),
    ("diff", "in.pt", "in.safetensors"),
    ("scan", "in.pt"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A key of 200,000 wrappers, and `_metadata` for the module inside."""
    made = tmp_path_factory.mktemp("long")
    state_dict = OrderedDict([(LONG + "w", torch.zeros(1))])
    state_dict._metadata = OrderedDict([("", {"version": 1}), (LONG[:-1], {"version": 2})])
    torch.save(state_dict, made / "in.pt")
    headed(made / "in.safetensors", [LONG + "w"])
    headed(made / "bare.safetensors", ["w"])
    headed(made / "other.safetensors", ["b"])
    return made


@pytest.mark.parametrize("command", some(5, COMMANDS), ids=" ".join)
def test_every_command_answers_a_key_of_many_wrappers_at_once(command, folder, tmp_path):
    given = [folder / word if (folder / word).is_file() else word for word in command]
    done = run(*given, cwd=tmp_path, alone=True)
    assert done.exit in (0, 1) and "Traceback" not in done.err, done.err
    assert done.seconds < 2 * SECONDS
    assert done.rss < 400_000_000  # of which a fork that has torch, as doctor has, takes 300 MB
    assert len(done.out) + len(done.err) < 10_000, "a name is shown whole"
    if command[0] in ("convert", "strip-module"):
        output = tmp_path / command[2]
        kept = torch.load(output) if output.suffix == ".pt" else {"w": None}
        assert list(kept) == ["w"]
        if output.suffix == ".pt" and command[1] == "in.pt":
            assert set(kept._metadata) == {""}
