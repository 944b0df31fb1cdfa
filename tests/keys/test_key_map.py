"""Key rules: each does to torch's own state dicts what its words say, in the order given, and a
saved mapping undoes them.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from ckptconv import (
    KeyRules,
    RenameKeys,
    convert_checkpoint,
    limits,
    load_portable,
    read_key_rules,
)
from ckptconv.convert import words
from ckptconv.keys.key_map import RULE_WORDS, map_keys, rules_of
from ckptconv.keys.mappings import Mapped, MappedKeys
from ckptconv.keys.presets import PRESETS
from ckptconv.support.errors import (
    AmbiguousStateDict,
    KeyConflict,
    LimitExceeded,
    OptionRefused,
    OutputRefused,
)
from helpers import oracle
from helpers.examples import examples
from helpers.program import SAMPLES, assert_one_error, run
from helpers.trees import wrapped_keys

DDP = SAMPLES / "ddp_cuda3.pt"
W = torch.arange(6.0).reshape(2, 3)


def renamed(keys: list[str], *rules: tuple[str, str], wrappers: str = "keep") -> list[str | None]:
    return list(map_keys(keys, KeyRules.of(rules, wrappers)).new)


def saved(tree: object, folder: Path, name: str = "in.pt") -> Path:
    torch.save(tree, folder / name)
    return folder / name


def assert_equal(found: OrderedDict, expected: OrderedDict) -> None:
    """Keys and their order, tensors bit for bit, and `_metadata` with its order."""
    assert list(found) == list(expected)
    oracle_rows, rows = oracle.value_rows(expected), oracle.value_rows(found)
    assert rows == oracle_rows
    assert list(getattr(found, "_metadata", {}).items()) == list(
        getattr(expected, "_metadata", {}).items()
    )


# ------------------------------------------------------------------------------------- single rules


def test_a_rename_is_of_a_whole_key_where_there_is_one_and_of_a_prefix_where_not():
    assert renamed(["in_proj", "in_proj_bias"], ("rename", "in_proj=proj")) == [
        "proj",
        "in_proj_bias",
    ]
    assert renamed(["in_proj.w", "in_proj_bias"], ("rename", "in_proj=proj")) == [
        "proj.w",
        "proj_bias",
    ]


def test_a_regex_has_groups_names_and_lookarounds():
    keys = ["encoder.layer.0.attn.q.weight", "encoder.layer.11.attn.q.bias"]
    rules = (r"layer\.(?P<n>\d+)\.=>blocks.\g<n>.", r"(?<=attn\.)q=>query", r"^encoder\.=>")
    assert renamed(keys, *(("regex", rule) for rule in rules)) == [
        "blocks.0.attn.query.weight",
        "blocks.11.attn.query.bias",
    ]


@pytest.mark.parametrize(
    "broken",
    ["(=>x", "a=>\\2", "a=>\\g<no>", "a{99999999999999999}=>b", "[z-a]=>x", "no arrow", "=>x"],
)
def test_a_broken_regex_is_a_usage_error_that_names_it(broken, tmp_path):
    line = assert_one_error(run("convert", DDP, "out.pt", "--regex", broken, cwd=tmp_path), code=2)
    assert broken in line and "--regex" in line
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_that_takes_for_ever_is_stopped():
    begin = time.monotonic()
    with (
        limits(regex_seconds=0.3),
        pytest.raises(LimitExceeded, match=r"\(a\+\)\+\$.*takes more than 0\.3 s"),
    ):
        renamed(["a" * 60 + "!"], ("regex", "(a+)+$=>x"))
    assert time.monotonic() - begin < 5


def test_globs_between_renamings_choose_among_the_same_keys():
    keys = ["a.w", "b.w", "b.m", "c.w"]
    chosen = [("include", "a.*"), ("include", "b.*"), ("exclude", "*.m")]
    assert renamed(keys, *chosen) == ["a.w", "b.w", None, None]
    assert renamed(keys, ("include", "a.*"), ("add-prefix", "x."), ("exclude", "y.*"),
        wrappers="keep") == [
        "x.a.w", None, None, None,
    ]  # fmt: skip


def test_the_short_forms_are_the_same_rules():
    short = KeyRules(
        strip_prefixes=("a.",),
        renames=(("b", "c"),),
        add_prefix="d.",
        include=("*",),
        exclude=("e",),
    )
    words = [
        ("strip-prefix", "a."),
        ("rename", "b=c"),
        ("add-prefix", "d."),
        ("include", "*"),
        ("exclude", "e"),
    ]
    assert short == KeyRules.of(words)
    assert KeyRules() == KeyRules.of([])


def test_the_globs_of_rules_choose_without_renaming():
    rules = KeyRules(strip_prefixes=("a.",), include=("b*",), exclude=("*.m",))
    assert map_keys(["b.w", "b.m", "c.w"], rules.globs).new == ("b.w", None, None)
    assert KeyRules(add_prefix="x.").globs == KeyRules("keep")


def test_the_command_line_knows_all_rules_and_presets():
    assert {name.replace("_", "-") for name in words.RULES} == set(RULE_WORDS)
    assert tuple(PRESETS) == words.PRESETS


@pytest.mark.parametrize(
    ("word", "text"),
    [("rename", "a"), ("preset", "horovod"), ("frobnicate", "x"), ("strip-prefix", "")],
)
def test_what_is_no_rule_is_refused(word, text):
    with pytest.raises(KeyConflict, match=text or word):
        KeyRules.of([(word, text)])


@pytest.mark.parametrize("given", ["rename=a=b", ("rename", 3), ("rename",), 3, None])
def test_a_rule_of_a_wrong_type_is_refused(given):
    with pytest.raises(KeyConflict, match=r"is not a rule; write it as \('rename', 'OLD=NEW'\)"):
        KeyRules.of([given])


@pytest.mark.parametrize("given", [3, None, "strip", [("rename", "a=b")]])
def test_what_is_not_key_rules_is_no_edit(given):
    with pytest.raises(OptionRefused, match="is not KeyRules"):
        RenameKeys(given)


@pytest.mark.parametrize("given", [3, None, "rename", ("rename", "a=b"), {"from": "a"}, KeyRules()])
def test_what_is_no_list_of_rules_is_refused(given):
    with pytest.raises(KeyConflict, match=r"is not a list of rules; write it as \[\('rename', "):
        KeyRules.of(given)


# -------------------------------------------------------------------------------------------- order

STEPS = {
    "--strip-prefix": lambda keys, text: {old: now.removeprefix(text) for old, now in keys.items()},
    "--add-prefix": lambda keys, text: {old: text + now for old, now in keys.items()},
    "--regex": lambda keys,
    text: {old: re.sub(*text.split("=>"), now) for old, now in keys.items()},
    "--exclude": lambda keys,
    text: {old: now for old, now in keys.items() if not now.startswith(text[:-1])},
    "--include": lambda keys,
    text: {old: now for old, now in keys.items() if now.startswith(text[:-1])},
}  # fmt: skip


@pytest.mark.parametrize(
    "rules",
    [
        (
            "--add-prefix",
            "x.",
            "--strip-prefix",
            "x.features.",
            "--add-prefix",
            "y.",
            "--exclude",
            "y.x.*",
        ),
        ("--exclude", "classifier.*", "--add-prefix", "classifier.", "--include", "classifier.*"),
        (
            "--strip-prefix",
            "features.",
            "--regex",
            r"^(\d)=>f\1",
            "--strip-prefix",
            "f1.",
            "--add-prefix",
            "z.",
        ),
        ("--add-prefix", "z.", "--regex", "^z\\.features=>features", "--strip-prefix", "features."),
    ],
)
def test_the_order_of_the_options_is_the_order_of_application(rules, tmp_path):
    done = run(
        "convert", DDP, "out.pt", "--quiet", *rules[:4], "--device", "cpu", *rules[4:], cwd=tmp_path
    )
    assert done.exit == 0, done.err
    keys = {key: key.removeprefix("module.") for key in oracle.load(DDP)}
    for option, text in zip(rules[::2], rules[1::2], strict=True):
        keys = STEPS[option](keys, text)
    found, source = oracle.load(tmp_path / "out.pt"), oracle.load(DDP)
    assert list(found) == list(keys.values())
    assert all(torch.equal(found[now], source[old]) for old, now in keys.items())


# ---------------------------------------------------------------------------- rules that do nothing

IDLE = {
    "strip-prefix": "backbone.",
    "rename": "backbone.=x.",
    "regex": r"^backbone\.=>",
    "include": "backbone.*",
    "exclude": "backbone.*",
    "preset": "peft",
}


@pytest.mark.parametrize("word", IDLE)
@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
def test_a_rule_that_meets_no_key_is_an_error_that_names_it(word, output, tmp_path):
    options = ("--exclude", "classifier.bias", f"--{word}", IDLE[word])
    if word == "include":
        options = ("--include", "classifier.*", *options)
    line = assert_one_error(run("convert", DDP, output, *options, cwd=tmp_path))
    assert (
        f"--{word}" in line
        and IDLE[word].replace("\\", "") in line.replace("\\", "")
        and "matches no key" in line
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyConflict, match=r"matches no key|no key is left"):
        load_portable(
            DDP,
            keys=KeyRules.of(
                [(word, IDLE[word]), *([("include", "*")] if word == "include" else [])]
            ),
        )


def test_rules_for_a_file_without_a_state_dict_are_an_error(tmp_path):
    model = torch.nn.Linear(2, 3)
    model(torch.ones(2)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    source = saved(optimizer.state_dict(), tmp_path)
    with pytest.raises(
        AmbiguousStateDict, match=rf"could be changed; .* ckptconv inspect {source}$"
    ):
        convert_checkpoint(source, tmp_path / "out.pt", keys=KeyRules(add_prefix="net."))
    convert_checkpoint(source, tmp_path / "out.pt")


def test_a_rule_may_meet_the_keys_of_one_state_dict_of_several(tmp_path):
    source = saved(
        {"model": {"net.w": W, "net.b": W}, "ema": {"avg.w": W, "avg.b": W + 1}}, tmp_path
    )
    convert_checkpoint(source, tmp_path / "out.pt", keys=KeyRules(strip_prefixes=("avg.",)))
    assert [list(part) for part in oracle.load(tmp_path / "out.pt").values()] == [
        ["net.w", "net.b"],
        ["w", "b"],
    ]


@pytest.mark.parametrize("rule", [("strip-prefix", "module."), ("preset", "ddp")])
def test_taking_off_a_wrapper_that_is_taken_off_anyway_is_no_error(rule):
    assert list(load_portable(DDP, keys=KeyRules.of([rule]))) == list(load_portable(DDP))


def test_a_prefix_with_a_wrapper_in_it_is_told_to_keep_the_wrapper(tmp_path):
    source = saved({"module.model.w": W, "module.model.b": W}, tmp_path)
    with pytest.raises(KeyConflict, match=r"module\.model\..*matches no key.*--keys keep"):
        load_portable(source, keys=KeyRules(strip_prefixes=("module.model.",)))
    assert list(
        load_portable(source, keys=KeyRules("keep", strip_prefixes=("module.model.",)))
    ) == ["w", "b"]


# ------------------------------------------------------------------------------------------ presets


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)


class Held(nn.Module):
    """A module that keeps another under a name."""

    def __init__(self, name: str, held: nn.Module) -> None:
        super().__init__()
        self.add_module(name, held)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


def averaged_with_steps(model: nn.Module) -> nn.Module:
    made = Held("module", model)
    made.register_buffer("steps", torch.tensor(7))
    return made


def averaged_beside_the_online_one(model: nn.Module) -> nn.Module:
    made = Held("online_model", Net())
    made.add_module("ema_model", model)
    made.register_buffer("initted", torch.tensor(True))
    return made


WRAPPED = {
    "ddp": nn.DataParallel,
    "compile": torch.compile,
    "fsdp": lambda model: Held("_fsdp_wrapped_module", model),
    "checkpoint-wrapper": lambda model: Held("_checkpoint_wrapped_module", model),
    "lightning": lambda model: Held("model", model),
    "peft": lambda model: Held("base_model", Held("model", model)),
    "swa": averaged,
    "timm-ema": lambda model: Held("ema", Held("module", model)),
    "mmengine": averaged_with_steps,
    "ema-pytorch": averaged_beside_the_online_one,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_the_keys_that_the_bare_model_loads(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Net()
        source = saved(WRAPPED[name](model).state_dict(), tmp_path)
    assert list(oracle.load(source)) != list(model.state_dict())
    for wrappers in ("keep", "strip"):
        found = load_portable(source, keys=KeyRules.of([("preset", name)], wrappers))
        bare = oracle.load(saved(model.state_dict(), tmp_path, "bare.pt"))
        assert list(found) == list(bare)
        assert all(torch.equal(found[key], bare[key]) for key in bare)
        assert bare._metadata.items() <= found._metadata.items()
        Net().load_state_dict(found)


def test_presets_stand_in_the_help(tmp_path):
    shown = run("convert", "--help", cwd=tmp_path).out
    assert all(name in shown.replace("\n", " ").replace(" ", "") for name in PRESETS)


# ---------------------------------------------------------------------------- metadata and mappings


def test_metadata_follows_a_regex_into_containers(tmp_path):
    class Blocks(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.ModuleList(nn.BatchNorm1d(2) for _ in range(2)))

    source = saved(Blocks("blocks").state_dict(), tmp_path)
    found = load_portable(source, keys=KeyRules.of([("regex", r"blocks\.(\d+)=>layers.\1")]))
    assert list(found._metadata.items()) == list(Blocks("layers").state_dict()._metadata.items())


_PARTS = st.sampled_from(
    ["module.", "fc", "0", "1", "weight", "_orig_mod.", "attn.", "A", "", "größe"]
)
_RULES = st.one_of(
    st.tuples(st.just("strip-prefix"), _PARTS.filter(bool)),
    st.tuples(st.just("add-prefix"), st.sampled_from(["net.", "x", "ü."])),
    st.builds(lambda old, new: ("rename", f"{old}={new}"), _PARTS.filter(bool), _PARTS),
    st.sampled_from([
        ("regex", r"(\d+)=>n\1"), ("regex", r"^([^.]+)\.=>\1_"), ("regex", r"\.=>/"),
        ("regex", r"(?i)W(.*)$=>\1w"),
        ("exclude", "*0"), ("exclude", "module.*"), ("include", "*[12]"), ("include", "*t*"),
        ("exclude", "*bias*"),
    ]),
)  # fmt: skip


def by_hand(keys: list[str], rules: list[tuple[str, str]]) -> dict[str, str]:
    """Old key → new key by the words of the rules, one key after the other."""
    now = {key: key for key in keys}
    for word, text in rules:
        if word == "rename":
            old, _, new = text.partition("=")
            whole = old in now.values()
            now = {
                key: new + name[len(old) :]
                if (name == old if whole else name[: len(old)] == old)
                else name
                for key, name in now.items()
            }
        elif word in ("include", "exclude"):
            glob = re.compile(text.replace(".", r"\.").replace("*", ".*"))
            now = {
                key: name
                for key, name in now.items()
                if bool(glob.fullmatch(name)) == (word == "include")
            }
        else:
            now = STEPS[f"--{word}"](now, text)
    return now


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(
    data=st.data(),
    rules=st.lists(_RULES, min_size=1, max_size=4),
    suffix=st.sampled_from([".pt", ".safetensors"]),
)
def test_rules_do_what_their_words_say_and_their_mapping_undoes_them_exactly(
    data, rules, suffix, tmp_path
):
    # that is a choice of both
    assume(not any(first[0] == second[0] == "include" for first, second in pairwise(rules)))
    keys = data.draw(wrapped_keys(data.draw(st.integers(1, 6))))
    source = OrderedDict((key, torch.full((2,), float(index))) for index, key in enumerate(keys))
    paths = dict.fromkeys(
        ".".join(key.split(".")[:depth]) for key in keys for depth in range(key.count(".") + 1)
    )
    source._metadata = OrderedDict((path, {"version": 1}) for path in paths)
    path, output, back = saved(source, tmp_path), tmp_path / f"out{suffix}", tmp_path / "back.pt"
    expected = by_hand(keys, rules)
    # a segment without a name is not a module
    assume(not any("" in new.split(".") for new in expected.values() if "." in new))
    always = {"fsync": False, "force": True}
    try:
        convert_checkpoint(
            path,
            output,
            keys=KeyRules.of(rules, "keep"),
            save_mapping=tmp_path / "map.json",
            **always,
        )
    except KeyConflict as error:
        names = list(expected.values())
        idle = (
            "matches no key" in str(error)
            and len(renamed_by_all_but_one(keys, rules, expected)) > 0
        )
        assert idle or not names or len(set(names)) < len(names) or "" in names
        return
    assert [*load_portable(output, keys="keep")] == [*expected.values()] or suffix == ".safetensors"
    assert {key: value[0].item() for key, value in load_portable(output, keys="keep").items()} == {
        new: source[old][0].item() for old, new in expected.items()
    }
    undo = read_key_rules(tmp_path / "map.json", reverse=True)
    convert_checkpoint(output, back, keys=undo, **always)
    found = oracle.load(back)
    assert {key: value[0].item() for key, value in found.items()} == {
        key: source[key][0].item() for key in expected
    }
    if suffix == ".pt":
        assert list(found) == list(expected)
        assert list(found._metadata.items()) == list(source._metadata.items())
    again = load_portable(path, keys=read_key_rules(tmp_path / "map.json"))
    assert list(again) == list(expected.values())


def test_undoing_brings_modules_that_became_one_back_to_their_places(tmp_path):
    keys = ("weight0", "module.weight4", "_orig_mod.weight5")
    source = OrderedDict((key, torch.ones(2)) for key in keys)
    source._metadata = OrderedDict(
        (path, {"version": number}) for number, path in enumerate(("", "module", "_orig_mod"))
    )
    convert_checkpoint(
        saved(source, tmp_path),
        tmp_path / "out.pt",
        keys=KeyRules.of([("strip-prefix", "_orig_mod.")], "keep"),
        save_mapping=tmp_path / "map.json",
    )
    undo = read_key_rules(tmp_path / "map.json", reverse=True)
    convert_checkpoint(tmp_path / "out.pt", tmp_path / "back.pt", keys=undo)
    assert [*oracle.load(tmp_path / "back.pt")._metadata] == ["", "module", "_orig_mod"]


def test_undoing_brings_back_a_module_all_of_whose_keys_were_left_out(tmp_path):
    source = OrderedDict((key, torch.ones(2)) for key in ("weight1", "module.weight3"))
    source._metadata = OrderedDict((path, {"version": 1}) for path in ("", "module"))
    convert_checkpoint(
        saved(source, tmp_path),
        tmp_path / "out.pt",
        keys=KeyRules.of([("strip-prefix", "module."), ("include", "*1")], "keep"),
        save_mapping=tmp_path / "map.json",
    )
    undo = read_key_rules(tmp_path / "map.json", reverse=True)
    convert_checkpoint(tmp_path / "out.pt", tmp_path / "back.pt", keys=undo)
    back = oracle.load(tmp_path / "back.pt")
    assert [*back] == ["weight1"] and [*back._metadata] == ["", "module"]


def renamed_by_all_but_one(
    keys: list[str], rules: list[tuple[str, str]], expected: dict[str, str]
) -> list[int]:
    """The rules without which the outcome is the same."""
    return [
        index
        for index in range(len(rules))
        if by_hand(keys, rules[:index] + rules[index + 1 :]) == expected
    ]


def test_a_mapping_of_several_state_dicts_and_left_out_keys_is_undone(tmp_path):
    part = nn.DataParallel(Net()).state_dict()
    tree = {
        "model": part,
        "ema": OrderedDict((key, value + 1) for key, value in part.items()),
        "epoch": 3,
    }
    source = saved(tree, tmp_path)
    rules = (
        "--exclude",
        "*.num_batches_tracked",
        "--rename",
        "head.=classifier.",
        "--add-prefix",
        "net.",
    )
    assert (
        run("convert", source, "out.pt", *rules, "--save-mapping", "map.json", cwd=tmp_path).exit
        == 0
    )
    assert set(oracle.load(tmp_path / "out.pt")["ema"]) > {"net.classifier.weight"}
    done = run("convert", "out.pt", "back.pt", "--rules", "map.json", "--reverse", cwd=tmp_path)
    assert done.exit == 0, done.err
    found = oracle.load(tmp_path / "back.pt")
    for name in ("model", "ema"):
        kept = OrderedDict(
            (key, value) for key, value in tree[name].items() if not key.endswith("tracked")
        )
        if name == "model":
            kept._metadata = part._metadata
        assert_equal(found[name], kept)
    assert found["epoch"] == 3


def test_a_mapping_of_the_part_that_was_taken_is_undone(tmp_path):
    source = SAMPLES / "ddp_cuda3_train.pt"
    for output in ("out.safetensors", "out.pt"):
        rules, mapping = KeyRules(add_prefix="net."), tmp_path / f"{output}.json"
        convert_checkpoint(
            source, tmp_path / output, only="state_dict", keys=rules, save_mapping=mapping
        )
        found = load_portable(tmp_path / output, keys=read_key_rules(mapping, reverse=True))
        expected = oracle.load(source)["state_dict"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_mapping_knows_that_an_output_holds_no_plain_values(tmp_path):
    source = saved({"module.w": W, "module.note": "text", "module.b": W + 1}, tmp_path)
    convert_checkpoint(source, tmp_path / "out.safetensors", save_mapping=tmp_path / "map.json")
    (found,) = json.loads((tmp_path / "map.json").read_text())["state_dicts"]
    assert (found["keys"], found["left_out"]) == (
        {"module.w": "w", "module.b": "b"},
        ["module.note"],
    )


def test_a_mapping_does_not_fit_another_checkpoint(tmp_path):
    convert_checkpoint(DDP, tmp_path / "out.pt", save_mapping=tmp_path / "map.json")
    with pytest.raises(KeyConflict, match="are not in the mapping"):
        load_portable(SAMPLES / "rnn_classifier.pt", keys=read_key_rules(tmp_path / "map.json"))
    with pytest.raises(KeyConflict, match=r"not in the mapping.*--reverse"):
        load_portable(tmp_path / "out.pt", keys=read_key_rules(tmp_path / "map.json"))


def test_a_mapping_appears_with_its_output_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "out.pt").write_bytes(b"mine")
    with pytest.raises(OutputRefused):
        convert_checkpoint(DDP, tmp_path / "out.pt", save_mapping=tmp_path / "map.json")
    damaged = bytearray(DDP.read_bytes())
    at = damaged.find(oracle.load(DDP)["module.features.0.weight"].numpy().tobytes())
    damaged[at] ^= 1
    (tmp_path / "in.pt").write_bytes(damaged)
    with pytest.raises(Exception, match=r"checksum|CRC"):
        convert_checkpoint(
            tmp_path / "in.pt", tmp_path / "new.pt", save_mapping=tmp_path / "map.json"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out.pt"]


@pytest.mark.parametrize("name", ["in.pt", "out.pt", "there.json"])
def test_a_mapping_replaces_nothing_that_it_must_not(name, tmp_path):
    (tmp_path / "in.pt").write_bytes(DDP.read_bytes())
    (tmp_path / "there.json").write_text("mine")
    force = () if name == "there.json" else ("--force",)
    assert_one_error(
        run("convert", "in.pt", "out.pt", "--save-mapping", name, *force, cwd=tmp_path)
    )
    assert (tmp_path / "in.pt").read_bytes() == DDP.read_bytes()
    assert (tmp_path / "there.json").read_text() == "mine"
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("options", [("--max-shard-size", "300B"), ("--to", "dcp")])
def test_folders_have_mappings_too(options, tmp_path):
    done = run(
        "convert",
        DDP,
        "folder",
        *options,
        "--add-prefix",
        "net.",
        "--save-mapping",
        "map.json",
        cwd=tmp_path,
    )
    assert done.exit == 0, done.err
    found = load_portable(
        tmp_path / "folder", keys=read_key_rules(tmp_path / "map.json", reverse=True)
    )
    expected = oracle.load(DDP)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


ENTRIES = oracle.corpus_folder() / "manifest.json"
REAL = [
    entry["file"]
    for entry in (json.loads(ENTRIES.read_text()) if ENTRIES.is_file() else [])
    if entry["container"] == "zip" and entry["structure"].startswith("state_dict")
]


@pytest.mark.corpus
@pytest.mark.parametrize(
    "name", REAL or [pytest.param("", marks=pytest.mark.skip("the corpus is not here"))]
)
def test_real_checkpoints_come_back_as_they_were(name, tmp_path):
    source = oracle.corpus_folder() / "files" / name
    rules = KeyRules.of(
        [("regex", r"^([^.]+)=>x_\1"), ("regex", r"([^.]+)$=>\1_"), ("add-prefix", "net.")]
    )
    convert_checkpoint(
        source, tmp_path / "out.pt", keys=rules, save_mapping=tmp_path / "map.json", fsync=False
    )
    assert all(key.startswith("net.") for key in oracle.load(tmp_path / "out.pt"))
    undo = read_key_rules(tmp_path / "map.json", reverse=True)
    convert_checkpoint(tmp_path / "out.pt", tmp_path / "back.pt", keys=undo, fsync=False)
    assert_equal(oracle.load(tmp_path / "back.pt"), oracle.load(source))


# ----------------------------------------------------------------------------------------- dry runs


def test_a_dry_run_shows_which_key_becomes_which_and_counts_the_others(tmp_path):
    source = saved({"a.w": W, "b.w": W, "b.m": W, "c.w": W, "c.b": W}, tmp_path)
    done = run(
        "convert", source, "out.pt", "-n", "--rename", "a.=x.", "--exclude", "*.m", cwd=tmp_path
    )
    assert re.search(r"^ +a\.w +→ x\.w$", done.err, re.MULTILINE)
    assert re.search(r"^ +b\.m +→ \(left out\)$", done.err, re.MULTILINE)
    assert "3 keys untouched" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def rows_of(done) -> dict[str, str]:
    """The rows of a summary by their labels."""
    return dict(line.split(None, 1) for line in done.err.splitlines()[1:])


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "out.npz"])
def test_the_summary_counts_the_keys_that_are_written(out, tmp_path):
    tied = torch.ones(3)
    state = {"emb": tied, "a.w": W, "lm_head.w": tied, "lm_head.b": tied[:2], "_extra_state": 1}
    source = saved({"model": state, "epoch": 1}, tmp_path)
    flat = out != "out.pt"
    done = run("convert", source, out, "--exclude", "lm_head.*", cwd=tmp_path)
    counted = len(load_portable(tmp_path / out, keys="keep", only=None if flat else "model"))
    assert counted == (2 if flat else 3)
    shown = rows_of(done)
    assert shown["keys"].startswith(f"{counted} keys") and "shared" not in shown
    assert "none renamed" in shown["keys"]
    done = run("convert", source, out, "--exclude", "lm_head.b", "-f", cwd=tmp_path)
    assert rows_of(done)["keys"].startswith(f"{counted + 1} keys")
    assert rows_of(done).get("shared", "1 key").startswith("1 key")
    (document,) = run("convert", source, out, "--json", "-f", cwd=tmp_path).json()["keys"]
    assert document["left_out"] == (["_extra_state"] if flat else [])
    assert document["untouched"] == counted + 2


def test_a_dry_run_does_not_say_twice_that_nothing_changes(tmp_path):
    source = saved({"a.w": W, "b.w": W}, tmp_path)
    done = run("convert", source, "out.pt", "-n", cwd=tmp_path)
    assert done.err.count("2 keys") == 1 and "untouched" not in done.err
    done = run("convert", source, "out.pt", "-n", "--add-prefix", "x.", cwd=tmp_path)
    assert "untouched" not in done.err and "→ x.b.w" in done.err


def test_a_long_table_is_cut_with_a_count_and_the_document_has_all(tmp_path):
    source = saved({f"layer.{index}.w": W for index in range(1000)} | {"head.w": W}, tmp_path)
    options = ("-n", "--rename", "layer.=block.")
    done = run("convert", source, "out.pt", *options, cwd=tmp_path)
    assert len(done.lines) < 60
    assert (
        done.err.count("block.")
        - 1
        + int(re.search(r"… ([\d,]+) more", done.err)[1].replace(",", ""))
        == 1000 + 0
    )
    (document,) = run("convert", source, "out.pt", *options, "--json", cwd=tmp_path).json()["keys"]
    assert document["renamed"] == [
        [f"layer.{index}.w", f"block.{index}.w"] for index in range(1000)
    ]
    assert (document["left_out"], document["untouched"]) == ([], 1)


def test_a_mapping_names_the_tensor_of_a_tied_key_that_was_filled():
    mapping = Mapped(
        (MappedKeys("", {"a.w": "embed.w"}, {}, {"head.w": "embed.w", "old.w": None}),)
    )
    made = map_keys(["a.w"], KeyRules(rules=(mapping,)))
    assert made.new == ("embed.w",)
    assert made.filled == (("head.w", "embed.w"),)


@pytest.mark.parametrize(
    ("cut", "path", "after"),
    [
        ({"net.a.w": "a.w", "net.a.b": "a.b"}, "net", ""),
        ({"net.a.w": "a.w", "net.a.b": "a.b"}, "net.a", "a"),
        ({"net.w": "w", "net.b": "b"}, "net", ""),
        ({"net.weight": "eight", "net.wight": "ight"}, "net", "net"),
        ({"net.w": "wx", "net.b": "bx"}, "net", "net"),
        ({"net.w": "w", "net.b": "other.b"}, "net", "net"),
    ],
)
def test_a_module_follows_its_keys_where_all_go_one_way(cut, path, after):
    made = map_keys(list(cut), rules_of(cut.get))
    assert made.renamed_modules([path]) == [(path, after)]
