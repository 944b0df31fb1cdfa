"""Files of key rules: JSON, TOML and YAML say what the command line says; what is wrong in them is
told with its line.
"""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptconv import CheckpointError, KeyRules, load_portable, read_key_rules
from ckptconv.keys.key_map import RULE_WORDS
from ckptconv.support.errors import KeyConflict, MissingDependency
from helpers.examples import examples
from helpers.program import SAMPLES, assert_one_error, run

DDP = SAMPLES / "ddp_cuda3.pt"
WORDS = [
    ("strip-prefix", "features."),
    ("regex", r"^(\d)\.=>f\1."),
    ("rename", "classifier.=head."),
    ("add-prefix", "net."),
    ("exclude", "*.bias"),
    ("exclude", "*.running_var"),
]
JSON = r"""{"about": ["[", {"rules": 1}], "rules": [
  {"strip-prefix": "features."},
  {"regex": {"^(\\d)\\.": "f\\1."}},
  {"rename": {"classifier.": "head."}},
  {"add-prefix": "net."},
  {"exclude": ["*.bias", "*.running_var"]}
]}"""
TOML = r"""
[[rules]]
strip-prefix = "features."
[[rules]]  # groups as in Python
regex = '^(\d)\.=>f\1.'
[[rules]]
rename = {"classifier." = "head."}
[[rules]]
add-prefix = "net."
[[rules]]
exclude = ["*.bias", "*.running_var"]
"""
YAML = r"""
rules:
  - strip-prefix: features.
  - regex: '^(\d)\.=>f\1.'
  - rename: [classifier.=head.]
  - add-prefix: net.
  - exclude:
    - '*.bias'
    - '*.running_var'
"""
FILES = {"rules.json": JSON, "list.json": json.dumps(json.loads(JSON)["rules"]), "rules.toml": TOML}
FILES |= {"rules.yaml": YAML, "rules.yml": YAML}


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_what_the_command_line_says(name, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    assert read_key_rules(tmp_path / name) == KeyRules.of(WORDS)
    pytest.importorskip("torch")
    found = load_portable(DDP, keys=read_key_rules(tmp_path / name))
    assert list(found) == [
        "net.f0.weight",
        "net.f1.weight",
        "net.f1.running_mean",
        "net.f1.num_batches_tracked",
        "net.head.weight",
    ]


def test_a_table_renames_names_with_equals_signs(tmp_path):
    (tmp_path / "rules.json").write_text('[{"rename": {"a=b": "c=d"}}]')
    (rule,) = read_key_rules(tmp_path / "rules.json").rules
    assert (rule.old, rule.new) == ("a=b", "c=d")


def test_a_file_takes_its_place_among_the_options(tmp_path):
    (tmp_path / "rules.json").write_text('[{"strip-prefix": "a."}, {"add-prefix": "b."}]')
    options = (
        "--add-prefix",
        "a.",
        "--rules",
        "rules.json",
        "--rename",
        "b.features.=f.",
        "-n",
        "--json",
    )
    renamed = run("convert", DDP, "out.pt", *options, cwd=tmp_path).json()["keys"][0]["renamed"]
    assert ["module.features.0.weight", "f.0.weight"] in renamed
    assert ["module.classifier.bias", "b.classifier.bias"] in renamed


WRONG = {
    "no_rule.json": ('[\n {"add-prefix": "x."},\n\n {"strip-prefx": "y."}]', "line 4: "
                                                                             "strip-prefx: there "
                                                                             "is no rule"),
    "no_text.json": ('{"n": {"rules": []},\n"rules": [{"exclude": "x"}, \n{"rename": {"a": 3}}]}',
        "line 3: rename: its value"),
    "two.json": ('[\n{"add-prefix": "x.", "exclude": "y"}]', "line 2: a rule is one name"),
    "empty.json": ('[{"rename": {"": "x"}}]', "line 1: a rule is one name"),
    "none.json": ('[{"exclude": []}]', "line 1: a rule is one name"),
    "long.json": ("[" + "9" * 10_000 + "]", "a number that is too long"),
    "long.toml": ("rules = [" + "9" * 10_000 + "]", "a number that is too long"),
    "deep.toml": ("rules = " + "[" * 100_000, "nests too deeply"),
    "twice.json": ('[{"exclude": "x", "exclude": "y"}]', "'exclude' occurs twice"),
    "broken.json": ('[\n{"exclude": "x"},\n?]', "line 3: is not valid JSON"),
    "deep.json": ("[" * 100_000, "nests too deeply"),
    "nothing.json": ("[]", "has no list of rules"),
    "number.json": ("7", "has no list of rules"),
    "regex.json": ('[{"regex": "(=>x"}]', "line 1: regex: --regex '(=>x' is not a valid pattern"),
    "preset.json": ('[{"preset": "horovod"}]', "line 1: preset: there is no preset 'horovod'"),
    "regex.toml": ('[[rules]]\nexclude = "x"\n\n[[rules]]\nregex = "(=>x"', "line 4: regex: "
                                                                            "--regex '(=>x' is "
                                                                            "not a valid"),
    "broken.toml": ("rules = [\n{exclude = 3", "is not valid TOML"),
    "empty.toml": ("", "has no list of rules"),
    "rules.txt": ("exclude x", "does not look like a file of key rules"),
    "version.json": ('{"mapping": 2, "state_dicts": []}', "is a mapping of version 2"),
    "empty_mapping.json": ('{"mapping": 1, "state_dicts": []}',
        "is a mapping without a state dict"),
    "odd_mapping.json": ('{"mapping": 1, "state_dicts": [{"path": "", "keys": {"a": 1}}]}',
        "is not a mapping that ckptconv"),
    **{
        f"odd_move_{at}.json": (
            '{"mapping": 1, "state_dicts": [{"path": "", "keys": {}, "left_out": [], '
            '"modules": {}, "order": ["a"], "tensors": [{"from": ["a"], "moves": ["' + move + '"], '
            '"to": ["b"]}]}]}', "is not a mapping that ckptconv")
        for at, move in enumerate(["stack - 1", "sort", "stack 0"])
    },
    "double_mapping.json": (
        '{"mapping": 1, "state_dicts": [{"path": "", "keys": {"a": "c", "b": "c"}, "left_out": '
        '[], "modules": {}}]}',
        "two keys become one",
    ),
    "twice_mapping.json": (
        '{"mapping": 1, "state_dicts": [{"path": "", "keys": {"a": "c", "a": "d"}, "left_out": '
        '[], "modules": {}}]}',
        "a name occurs twice in it",
    ),
    "no_rule.yaml": ("rules:\n- add-prefix: x.\n\n- strip-prefx: y.\n", "line 4: strip-prefx: "
                                                                        "there is no rule"),
    "broken.yaml": ("rules:\n- {exclude: [x\n", "is not valid YAML"),
    "object.yaml": ("rules:\n- !!python/object/apply:os.system [true]\n", "line 2: is not valid "
                                                                          "YAML: it has the tag"),
    "empty.yaml": ("", "has no list of rules"),
    "alias.yaml": ("a: &a [x]\nrules:\n- exclude: *a\n", "line 1: is used again through an alias"),
    "twice.yaml": ("rules:\n- rename: {a: b, a: c}\n", "line 2: a name occurs twice in it"),
    "number.yaml": ("rules:\n- add-prefix: 1\n", "line 2: add-prefix: its value is not text"),
    "sum.json": ('[\n{"from": "a", "to": "b", "operations": "sum 0"}]', "line 2: there is no"),
    "maybe.yaml": ("rules:\n- {from: a, to: b, optional: maybe}\n", "line 2: optional is true or "),
    "text_mapping.json": ('{"mapping": 1, "state_dicts": ["a"]}', "is not a mapping that ckptconv"),
    "numbers.yaml": ("rules:\n- 1: 2\n", "line 2: 1: its value is not text"),
}  # fmt: skip


MAPPING = {"path": "", "keys": {"a": "x"}, "left_out": [], "modules": {}, "order": ["x", "y"]}


@pytest.mark.parametrize(
    "odd",
    [
        {"filled": {"y": "z"}},  # a twin that no key becomes
        {"filled": {"y": 1}},
        {"modules": {"m": []}},
        {"modules": {"m": 3}},
        {"tensors": [{"from": ["b"], "to": ["y"]}]},
        {"tensors": [{"from": [], "moves": [], "to": ["y"]}]},
        {"tensors": [{"from": [7], "moves": [], "to": ["y"]}]},  # 7 is made by no row before it
        {"tensors": [{"from": ["b"], "moves": [], "to": [0.5]}]},
    ],
)
def test_a_mapping_that_says_what_none_says_is_refused(odd, tmp_path):
    path = tmp_path / "mapping.json"
    for filled in ({"y": "x"}, ["y"]):  # a list, without twins, as mappings had once
        path.write_text(json.dumps({"mapping": 1, "state_dicts": [{**MAPPING, "filled": filled}]}))
        [rule] = read_key_rules(path).rules
        [found] = rule.state_dicts
        assert found.filled == {"y": "x" if isinstance(filled, dict) else None}
    path.write_text(json.dumps({"mapping": 1, "state_dicts": [{**MAPPING, **odd}]}))
    with pytest.raises(KeyConflict, match="is not a mapping that ckptconv"):
        read_key_rules(path)


def test_flags_and_numbers_of_yaml_are_those_of_json(tmp_path):
    written = {"from": "a.{e}", "to": "b", "optional": True}
    written["operations"] = [{"stack": {"dim": -1, "over": "e"}}]
    (tmp_path / "rules.json").write_text(json.dumps([written]))
    (tmp_path / "rules.yaml").write_text(
        "rules:\n- from: a.{e}\n  to: b\n  optional: True\n"
        "  operations: [{stack: {dim: -1, over: e}}]\n"
    )
    found = read_key_rules(tmp_path / "rules.yaml")
    assert found == read_key_rules(tmp_path / "rules.json")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_file_is_told_with_its_line_and_name(name, tmp_path):
    text, expected = WRONG[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_key_rules(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert expected in str(caught.value)
    line = assert_one_error(run("convert", DDP, "out.pt", "--rules", name, cwd=tmp_path), code=2)
    assert line.startswith(f"error: {name}: ")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_yaml_without_pyyaml_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "rules.yaml").write_text(YAML)
    with pytest.raises(
        MissingDependency, match=r"needs PyYAML; pip install 'pyyaml.*as JSON or TOML"
    ):
        read_key_rules(tmp_path / "rules.yaml")


_WORDS = st.sampled_from(
    [
        *RULE_WORDS,
        "rules",
        "mapping",
        "state_dicts",
        "path",
        "keys",
        "left_out",
        "modules",
        "",
        "(",
        "a=>\\1",
    ]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.floats() | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=5),
    max_leaves=12,
)
_STATE_DICT = st.fixed_dictionaries(dict.fromkeys(("path", "keys", "left_out", "modules"), _JSON))


@settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    _JSON
    | st.lists(st.dictionaries(_WORDS, _JSON, min_size=1, max_size=1), min_size=1)
    | st.fixed_dictionaries(
        {
            "mapping": st.just(1),
            "state_dicts": st.lists(_JSON | _STATE_DICT, min_size=1, max_size=2),
        }
    ),
    st.booleans(),
)
def test_whatever_stands_in_a_file_gives_rules_or_one_error(tmp_path, document, reverse):
    (tmp_path / "rules.json").write_text(json.dumps(document))
    try:
        found = read_key_rules(tmp_path / "rules.json", reverse=reverse)
        load_portable(DDP, keys=found)
    except CheckpointError as error:
        assert str(error).isprintable()
    else:
        assert isinstance(document, (list, dict))


def test_only_a_mapping_is_undone(tmp_path):
    (tmp_path / "rules.json").write_text('[{"exclude": "x"}]')
    with pytest.raises(KeyConflict, match="only a mapping can be undone"):
        read_key_rules(tmp_path / "rules.json", reverse=True)
    line = assert_one_error(run("convert", DDP, "out.pt", "--reverse", cwd=tmp_path), code=2)
    assert "--rules FILE" in line


@pytest.mark.parametrize(
    ("name", "code"), [("absent.json", 1), ("folder.json", 1), ("latin.json", 2)]
)
def test_a_file_that_cannot_be_read_is_told(name, code, tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "latin.json").write_bytes('["é"]'.encode("latin1"))
    assert name in assert_one_error(
        run("convert", DDP, "out.pt", "--rules", name, cwd=tmp_path), code=code
    )
