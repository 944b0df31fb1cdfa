"""Files that are given to an option beside a good checkpoint: key rules, mappings, and what keys
are to fit.
"""

from __future__ import annotations

import json

from hostile.cases import DOUBLED, Family, bad, beside, entry, one, raw, tensor

FAMILY = Family("Files given to an option")
RULES, LIKE = "--rules", "--like"


def rules(file: str, expected: str, what: str, text: str | bytes, field: str = "") -> None:
    """A file of rules or a mapping."""
    content = text if isinstance(text, bytes) else text.encode()
    FAMILY.add(file, expected, what, lambda: content, field=field, option=RULES)


def like(file: str, expected: str, what: str, build, field: str = "") -> None:
    FAMILY.add(file, expected, what, build, field=field, option=LIKE)


def bomb(levels: int, first: str, line: str) -> str:
    """A YAML text of anchors each of which holds the one before it nine times."""
    head = f"a0: &a0 {first}\n"
    return (
        head
        + "".join(line.format(now=level, before=level - 1) for level in range(1, levels))
        + f"rules: [*a{levels - 1}]\n"
    )


NINE = "a{now}: &a{now} [" + ", ".join(["*a{before}"] * 9) + "]\n"
MERGED = "a{now}: &a{now} {{<<: [" + ", ".join(["*a{before}"] * 9) + "]}}\n"

# YAML.
rules(
    "rules_bomb.yaml", "reject", "aliases of aliases: 9**12 texts", bomb(12, "[lol]", NINE), "rules"
)
rules(
    "rules_merge_bomb.yaml",
    "reject",
    "merge keys of merge keys: 9**12 pairs",
    bomb(12, "{k: v}", MERGED),
)
rules(
    "rules_key_bomb.yaml",
    "reject",
    "a bomb as the name of a rule",
    bomb(12, "[lol]", NINE).replace("rules: [", "rules: [? [") + "]",
)
rules("rules_alias_itself.yaml", "reject", "a list that holds itself", "rules: &a [*a]\n", "line 1")
rules(
    "rules_alias_rule.yaml",
    "reject",
    "a rule whose value is itself",
    "rules:\n- rename: &a {x: *a}\n",
    "line 2",
)
rules(
    "rules_runs.yaml",
    "reject",
    "a tag that calls os.mkdir",
    "rules:\n- !!python/object/apply:os.mkdir [CKPTCONV_PWNED]\n",
    "line 2",
)
rules(
    "rules_runs_name.yaml",
    "reject",
    "a tag that imports a module",
    "rules: !!python/module:antigravity\n",
    "line 1",
)
rules("rules_deep.yaml", "reject", "100,000 nested lists", "rules: " + "[" * 100_000)
rules("rules_large.yaml", "reject", "100 kB of list", "rules:\n" + "- strip-prefix: x\n" * 5_000)
rules("rules_two.yaml", "reject", "two documents", "rules: []\n---\nrules: []\n")
rules(
    "rules_escape.yaml",
    "reject",
    "escapes in the name of a rule",
    'rules:\n- "\\e[2J\\n": x\n',
    "line 2",
)
rules(
    "rules_float.yaml",
    "reject",
    "a number that takes for ever to read",
    "rules: [" + "1:" * 100_000 + "1]\n",
)

# JSON and TOML.
rules("rules_deep.json", "reject", "100,000 nested lists", "[" * 100_000)
rules(
    "rules_digits.json",
    "reject",
    "a number of 100,000 digits",
    '[{"strip-prefix": ' + "9" * 100_000 + "}]",
)
rules(
    "rules_twice.json",
    "reject",
    "one name twice in one rule",
    '[{"rename": {"a": "b", "a": "c"}}]',
    "a",
)
rules(
    "rules_twice_many.json",
    "reject",
    "50,000 names, one of them twice",
    '[{"rename": {'
    + ", ".join(f'"{number}": "x"' for number in range(50_000))
    + ', "49999": "y"}}]',
    "49999",
)
rules("rules_nothing.json", "reject", "no bytes", b"", "line 1")
rules("rules_not_utf8.json", "reject", "bytes that are not UTF-8", b'[{"strip-prefix": "\xff"}]')
rules(
    "rules_surrogate.json",
    "reject",
    "a name that becomes half a character",
    '[{"add-prefix": "\\ud800"}]',
)
rules(
    "rules_nul.json",
    "reject|accept",
    "a prefix with a NUL and an escape",
    '[{"add-prefix": "\\u0000\\u001b[2J"}]',
)
rules("rules_lists.json", "reject", "30 MB of empty lists", b"[" + b"[]," * 10_000_000 + b"[]]")
rules(
    "rules_many.json",
    "reject|accept",
    "5,000 prefixes, none of which is there",
    json.dumps([{"strip-prefix": str(number)} for number in range(5_000)]),
)
rules(
    "rules_regex_doubles.json",
    "reject|accept",
    "a pattern that tries 2**60 ways",
    '[{"regex": "(a*)*b=>x"}]',
)
rules(
    "rules_regex_key.json",
    "reject",
    "a pattern that tries 2**60 ways with the key at hand",
    '[{"regex": "^(([a-z.]+)+)+!=>x"}]',
    "regex",
)
rules(
    "rules_regex_nested.json",
    "reject",
    "100,000 nested groups",
    '[{"regex": "' + "(" * 100_000 + '=>x"}]',
    "regex",
)
rules(
    "rules_regex_repeat.json",
    "reject",
    "a pattern that repeats 10**9 times a thousandfold",
    '[{"regex": "((x{1000}){1000}){1000}=>x"}]',
    "regex",
)
rules(
    "rules_replacement.json",
    "reject",
    "a replacement by a group that is not there",
    '[{"regex": "(w)=>\\\\9"}]',
    "regex",
)
rules(
    "rules_grows.json",
    "reject",
    "60 replacements that each double a key",
    json.dumps([{"regex": r"^(.*)$=>\1\1"}] * 60),
)
rules(
    "rules_glob.json",
    "reject|accept",
    "a glob of a thousand stars",
    json.dumps([{"exclude": "*a" * 1000}]),
)
rules("rules_deep.toml", "reject", "100,000 nested lists", "rules = " + "[" * 100_000)
rules(
    "rules_digits.toml", "reject", "a number of 100,000 digits", "rules = [" + "9" * 100_000 + "]"
)
rules("rules_dotted.toml", "reject", "a name of 500 parts", ".".join(["a"] * 500) + " = 1\n")
rules("rules_cut.toml", "reject", "a table that does not end", "[[rules]\n", "line 1")
rules(
    "rules_escape.toml",
    "reject",
    "escapes in the name of a rule",
    '[[rules]]\n"\\u001b[2J" = "x"\n',
    "line 1",
)


def mapping(**fields: object) -> str:
    usual = {"path": "", "keys": {"w": "v"}, "left_out": [], "modules": {}}
    return json.dumps({"mapping": 1, "state_dicts": [usual | fields]})


# Mappings.
rules("mapping_collision.json", "reject", "two keys become one", mapping(keys={"w": "v", "u": "v"}))
rules("mapping_both.json", "reject", "a key that is kept and left out", mapping(left_out=["w"]))
rules(
    "mapping_twice.json",
    "reject",
    "one key with two names",
    mapping().replace('"w": "v"', '"w": "v", "w": "u"'),
    "mapping",
)
rules(
    "mapping_surrogate.json",
    "reject",
    "a name that is half a character",
    mapping(keys={"w": "\ud800"}),
)
rules("mapping_number.json", "reject", "a name that is a number", mapping(keys={"w": 1}))
rules("mapping_modules.json", "reject", "modules that are a list", mapping(modules=[["a"]]))
rules(
    "mapping_path.json",
    "accept",
    "a part of the file that is not there: its one state dict is taken",
    mapping(path="../../etc/passwd"),
)
rules(
    "mapping_other.json",
    "reject",
    "names of keys that the file does not have",
    mapping(keys={"nope": "v"}),
)
rules(
    "mapping_version.json", "reject", "version 2", mapping().replace('"mapping": 1', '"mapping": 2')
)
rules(
    "mapping_version_list.json",
    "reject",
    "a version of a megabyte of lists",
    mapping().replace('"mapping": 1', '"mapping": [' + "[]," * 300_000 + "[]]"),
)
rules("mapping_none.json", "reject", "no state dict", '{"mapping": 1, "state_dicts": []}')

# What keys are to fit.
like(
    "like_runs.pt",
    "reject|accept",
    "a checkpoint that calls posix.mkdir beside its tensor",
    lambda: beside(bad.PWN),
)
like(
    "like_runs_alone.pt",
    "reject",
    "a checkpoint that is nothing but the call",
    lambda: bad.ckpt(bad.P2 + bad.PWN + bad.STOP),
)
like(
    "like_deep.pt",
    "reject",
    "a million nested lists",
    lambda: raw(b"]" * 1_000_000 + b"a" * 999_999),
    "data.pkl",
)
like(
    "like_doubled.pt", "reject", "a key that doubles 60 times", lambda: raw(b"}" + DOUBLED + b"Ns")
)
like(
    "like_huge_view.pt",
    "reject|accept",
    "a view of 2**40 elements",
    lambda: one(tensor(size=(1 << 40,), stride=(0,))),
)
like(
    "like_other_shape.pt",
    "reject",
    "the same key with another shape",
    lambda: one(tensor(size=(2, 2), stride=(2, 1))),
    "w",
)
like(
    "like_terminal.pt",
    "reject",
    "keys with escapes",
    lambda: one(tensor(size=(2, 2), stride=(2, 1)), "\x1b[2J\nw"),
)
like(
    "like_keys.txt",
    "reject",
    "100,000 keys, one of which fits",
    lambda: "".join(f"layer.{number}.w\n" for number in range(100_000)).encode(),
)
like("like_key_twice.txt", "reject", "one key twice", lambda: b"w\nw\n", "w")
like("like_key_long.txt", "reject", "a key of 50 MB", lambda: b"w" * 50_000_000)
like("like_key_lines.txt", "reject", "30 million lines of one letter", lambda: b"w\n" * 30_000_000)
like(
    "like_key_bidi.txt",
    "reject",
    "a key with a right-to-left override",
    lambda: "w\u202e\n".encode(),
)
like("like_nothing.txt", "reject", "no bytes", lambda: b"")
like("like_cut.safetensors", "reject", "a header that is cut off", lambda: bad.st(bad.OK16)[:-3])
like("like_negative.safetensors", "reject", "shape [-4]", lambda: entry(shape=[-4]), "w")
like(
    "like_list.index.json",
    "reject",
    "an index whose weight_map is a list",
    lambda: b'{"weight_map":[1]}',
    "weight_map",
)
like(
    "like_numbers.index.json",
    "reject|accept",
    "an index whose shards are numbers",
    lambda: b'{"weight_map":{"w":1}}',
)
like("like_deep.index.json", "reject", "100,000 nested lists", lambda: b"[" * 100_000, "index")
like(
    "like_climbs.index.json",
    "reject",
    "an index whose shard is outside",
    lambda: b'{"weight_map":{"w":"../../../../../../../../../etc/passwd"}}',
    "w",
)
like(
    "like_nul.index.json",
    "reject|accept",
    "an index whose shard's name has a NUL",
    lambda: b'{"weight_map":{"w":"a\\u0000"}}',
)
