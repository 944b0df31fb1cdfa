"""What keys are fitted to, on the command line: another checkpoint, an index, a list of keys, a
model that is named.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from ckptconv import (
    convert_checkpoint,
    diagnose,
    diff_checkpoints,
    inspect_checkpoint,
    load_into,
    load_portable,
    open_checkpoint,
    read_key_rules,
)
from ckptconv.convert.key_targets import shapes_like
from ckptconv.support.errors import (
    AmbiguousStateDict,
    CheckpointError,
    KeyMismatch,
    MalformedCheckpoint,
    OptionRefused,
    UnsupportedCheckpoint,
)
from helpers.program import SAMPLES, assert_one_error, run

torch = pytest.importorskip("torch")
safe_open = pytest.importorskip("safetensors").safe_open
save_model = pytest.importorskip("safetensors.torch").save_model
load_file = pytest.importorskip("safetensors.torch").load_file
load_model = pytest.importorskip("safetensors.torch").load_model

DDP, BARE, COMPILED, TRAIN, TIED = (
    SAMPLES / name
    for name in ("dp_cuda0.pt", "fp16.pt", "compiled.pt", "ddp_cuda3_train.pt", "tied.pt")
)


def keys_of(path: Path) -> list[str]:
    return list(torch.load(path, map_location="cpu", weights_only=True))


@pytest.fixture
def listed(tmp_path) -> Path:
    path = tmp_path / "keys.txt"
    path.write_text("\ufeff" + "\r\n".join(keys_of(COMPILED)) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture
def index(tmp_path) -> Path:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(
        json.dumps(
            {"weight_map": dict.fromkeys(keys_of(COMPILED), "model-00001-of-00002.safetensors")}
        )
    )
    return path


@pytest.fixture
def package(tmp_path) -> Path:
    """A folder with a module of the user's, which tells when it is imported."""
    (tmp_path / "zoo.py").write_text(
        "import pathlib, sys, torch\n"
        "pathlib.Path('imported').touch()\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body = torch.nn.Module()\n"
        "        self.body.linears = torch.nn.ModuleList(torch.nn.Linear(*s) for s in ((8, 16), "
        "(16, 16), (16, 4)))\n"
        "        self.body.norm = torch.nn.BatchNorm1d(4)\n"
        "        self.device = self.body.norm.weight.device\n"
        "class Zoo:\n"
        "    net = Net\n"
        "def other():\n"
        "    return Net().body.norm\n"
        "def raises():\n"
        "    raise ValueError('two\\nlines')\n"
        "def leaves():\n"
        "    sys.exit(0)\n"
        "def nothing():\n"
        "    return {}\n"
        "def on_meta():\n"
        "    assert Net().device.type == 'meta'\n"
        "    return Net()\n"
        "number = 3\n"
    )
    return tmp_path


@pytest.mark.parametrize("like", ["checkpoint", "list", "index", "folder"])
def test_keys_become_those_of_what_is_named(like, listed, index, tmp_path):
    (tmp_path / "shards").mkdir()
    convert_checkpoint(
        COMPILED, tmp_path / "shards", to="safetensors", keys="keep", max_shard_size=1000
    )
    other = {"checkpoint": COMPILED, "list": listed, "index": index, "folder": tmp_path / "shards"}[
        like
    ]
    done = run("convert", DDP, "out.pt", "--like", other, "--verify", cwd=tmp_path)
    assert done.exit == 0, done.err
    found, source = (
        torch.load(path, map_location="cpu", weights_only=True)
        for path in (tmp_path / "out.pt", DDP)
    )
    assert list(found) == keys_of(COMPILED)
    assert all(torch.equal(a, b) for a, b in zip(found.values(), source.values(), strict=True))


def test_shapes_are_known_of_checkpoints_and_not_of_lists(listed, index):
    expected = {
        key: tuple(value.shape)
        for key, value in torch.load(BARE, map_location="cpu", weights_only=True).items()
    }
    assert shapes_like(BARE) == (expected, [])
    assert shapes_like(listed) == shapes_like(index) == (dict.fromkeys(keys_of(COMPILED)), ())


@pytest.mark.parametrize("name", ["Net", "Zoo.net", "on_meta"])
def test_keys_become_those_of_a_model_that_is_named(name, package):
    done = run("convert", DDP, "out.pt", "--model", f"zoo:{name}", cwd=package)
    assert done.exit == 0, done.err
    found = torch.load(package / "out.pt", weights_only=True)
    assert list(found) == [key.replace("module.", "body.") for key in keys_of(DDP)]
    assert found._metadata["body.norm"] == {"version": 2}
    assert (package / "imported").exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("zoo:raises", r"cannot be built on the meta device \(ValueError: two\\nlines\)"),
        ("zoo:leaves", r"cannot be built on the meta device \(SystemExit: 0\)"),
        ("zoo:nothing", "returns dict, not a torch.nn.Module"),
        ("zoo:number", "is int, which is not callable"),
        ("zoo:absent", "cannot be imported"),
        ("no_such_zoo:Net", "cannot be imported"),
        ("zoo", "is not a name of a callable"),
        ("zoo:", "is not a name of a callable"),
    ],
)
def test_a_name_that_gives_no_model_is_one_error(name, what, package):
    done = run("convert", DDP, "out.pt", "--model", name, cwd=package)
    assert re.search(what, assert_one_error(done))
    assert not (package / "out.pt").exists()


def test_nothing_is_imported_that_is_not_named(package):
    assert run("convert", DDP, "out.pt", "--like", BARE, cwd=package).exit == 0
    assert not (package / "imported").exists()


def test_what_does_not_fit_is_one_line_and_all_of_it_in_json(tmp_path):
    source = torch.load(DDP, map_location="cpu", weights_only=True)
    del source["module.linears.0.bias"]
    source["module.linears.1.weight"] = torch.ones(3, 3)
    source["module.extra.scale"] = torch.ones(7)
    torch.save(source, tmp_path / "in.pt")
    done = run("convert", "in.pt", "out.pt", "--like", BARE, cwd=tmp_path)
    line = assert_one_error(done)
    assert (
        "1 of 11 missing (linears.0.bias)" in line and "1 unexpected (module.extra.scale)" in line
    )
    assert "1 of another shape (module.linears.1.weight is [3, 3], not [16, 16])" in line
    found = run("convert", "in.pt", "out.pt", "--like", BARE, "--json", cwd=tmp_path)
    assert found.exit == 1 and found.json()["error"]["kind"] == "KeyMismatch"
    fit = found.json()["fit"]
    assert (fit["missing"], fit["unexpected"]) == (["linears.0.bias"], ["module.extra.scale"])
    assert fit["mismatched"] == [
        {
            "key": "linears.1.weight",
            "source_key": "module.linears.1.weight",
            "source": [3, 3],
            "target": [16, 16],
        }
    ]
    assert len(fit["renames"]) == 9 and not fit["fits"] and not fit["covers"]
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_unexpected_keys_are_left_out_only_when_asked(name, tmp_path):
    source = {
        f"model.{key}": value
        for key, value in torch.load(BARE, map_location="cpu", weights_only=True).items()
    }
    torch.save({**source, "criterion.scale": torch.ones(7)}, tmp_path / "in.pt")
    refused = run("convert", "in.pt", name, "--like", BARE, cwd=tmp_path)
    assert (
        "1 unexpected (criterion.scale)" in assert_one_error(refused)
        and "--drop-unexpected" in refused.err
    )
    done = run("convert", "in.pt", name, "--like", BARE, "--drop-unexpected", cwd=tmp_path)
    assert done.exit == 0 and "criterion.scale" in done.err
    with open_checkpoint(tmp_path / name) as found:
        assert sorted(found.state_dict().keys) == sorted(keys_of(BARE))


def test_candidates_are_named_where_the_choice_is_the_users(tmp_path):
    source = torch.load(BARE, map_location="cpu", weights_only=True)
    both = {f"{prefix}.{key}": value for prefix in ("net", "ema") for key, value in source.items()}
    torch.save(both, tmp_path / "in.pt")
    line = assert_one_error(run("convert", "in.pt", "out.pt", "--like", BARE, cwd=tmp_path))
    assert "linears.0.weight: could be net.linears.0.weight or ema.linears.0.weight" in line
    done = run("convert", "in.pt", "out.pt", "--like", BARE, "--exclude", "ema.*", cwd=tmp_path)
    assert done.exit == 0, done.err
    assert keys_of(tmp_path / "out.pt") == keys_of(BARE)


def test_rules_come_first(tmp_path):
    done = run("convert", BARE, "out.pt", "--exclude", "norm.bias", "--like", BARE, cwd=tmp_path)
    assert "1 of 11 missing (norm.bias)" in assert_one_error(done)


def test_the_mapping_is_saved_and_undone(tmp_path):
    done = run(
        "convert", DDP, "there.pt", "--like", COMPILED, "--save-mapping", "map.json", cwd=tmp_path
    )
    assert done.exit == 0, done.err
    done = run(
        "convert",
        "there.pt",
        "back.pt",
        "--keys",
        "keep",
        "--rules",
        "map.json",
        "--reverse",
        cwd=tmp_path,
    )
    assert done.exit == 0, done.err
    assert keys_of(tmp_path / "back.pt") == keys_of(DDP)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--like", BARE, "--model", "zoo:Net"], "can fit only one"),
        (["--drop-unexpected"], "needs --like or --model"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(arguments, what, tmp_path):
    assert what in assert_one_error(
        run("convert", BARE, "out.pt", *arguments, cwd=tmp_path), code=2
    )
    with pytest.raises(CheckpointError):
        named = dict(zip(arguments[::2], arguments[1::2], strict=False))
        convert_checkpoint(
            BARE, tmp_path / "out.pt", like=named.get("--like"), model=named.get("--model"),
            drop_unexpected="--drop-unexpected" in arguments,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("page.html", b"<!doctype html>\n<html>\n", UnsupportedCheckpoint),
        ("prose.txt", b"the keys of the model\nare these\n", UnsupportedCheckpoint),
        ("config.json", b'{"hidden_size": 768}', UnsupportedCheckpoint),
        ("empty.txt", b"", UnsupportedCheckpoint),
        ("binary.bin", bytes(range(256)), UnsupportedCheckpoint),
        ("twice.txt", b"a.w\nb.w\na.w\n", MalformedCheckpoint),
        ("empty.index.json", b'{"weight_map": {}}', MalformedCheckpoint),
        ("none.index.json", b"[]", MalformedCheckpoint),
        ("odd.index.json", b'{"weight_map": ["a"]}', MalformedCheckpoint),
    ],
)
def test_what_holds_no_keys_is_refused_by_its_name(name, content, error, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error) as caught:
        shapes_like(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)


def test_a_pipeline_without_a_model_that_has_adapters_is_refused(tmp_path):
    (tmp_path / "vae").mkdir()
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(UnsupportedCheckpoint, match=r"of which none of unet, transformer, .* is t"):
        shapes_like(tmp_path)


def test_one_of_several_state_dicts_is_not_chosen(tmp_path):
    values = torch.load(BARE, map_location="cpu", weights_only=True)
    torch.save({"model": values, "ema": dict(values)}, tmp_path / "two.pt")
    with pytest.raises(AmbiguousStateDict, match="convert --only"):
        shapes_like(tmp_path / "two.pt")
    with pytest.raises(UnsupportedCheckpoint, match="no such file"):
        shapes_like(tmp_path / "absent.pt")


def test_every_state_dict_of_a_training_checkpoint_is_fitted(tmp_path):
    values = torch.load(DDP, map_location="cpu", weights_only=True)
    torch.save(
        {"model": values, "ema": {f"net.{key}": value for key, value in values.items()}},
        tmp_path / "two.pt",
    )
    done = run("convert", "two.pt", "out.pt", "--like", BARE, cwd=tmp_path)
    assert done.exit == 0, done.err
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(found["model"]) == list(found["ema"]) == keys_of(BARE)


# ------------------------------------------------------------------------------------- tied weights

TIED_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))

def untied():
    model = Net()
    model.head = nn.Linear(4, 11, bias=False)
    return model
"""


@pytest.fixture
def tied_net(tmp_path, monkeypatch):
    """The module of a model with tied weights, which the program can import too."""
    name = f"tied_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TIED_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    del sys.modules[name]


def one_name(folder: Path, net, lead: str, dropped: str) -> Path:
    """What is saved of a tied model under one name: by safetensors' `save_model`, or by torch with
    one key left out.
    """
    torch.manual_seed(0)
    model = net.Net().eval()
    if dropped == "by save_model":
        save_model(
            torch.nn.ModuleDict({"net": model}) if lead else model, folder / "one.safetensors"
        )
        with safe_open(folder / "one.safetensors", "pt") as file:
            assert len(file.keys()) < len(model.state_dict()), "the library drops a name"
        return folder / "one.safetensors"
    state_dict = {
        f"{lead}{key}": value for key, value in model.state_dict().items() if key != dropped
    }
    torch.save(state_dict, folder / "one.pt")
    return folder / "one.pt"


TOKENS = torch.arange(11)


PAIRS = [
    ("head.weight", "", "--model", "out.pt"),
    ("head.weight", "net.", "--like", "out.safetensors"),
    ("head.weight", "", "--like alias", "shards"),
    ("embed.weight", "net.", "--model", "out.safetensors"),
    ("embed.weight", "", "--like", "shards"),
    ("embed.weight", "net.", "--like alias", "out.pt"),
    ("by save_model", "net.", "--model", "shards"),
    ("by save_model", "", "--like", "out.pt"),
    ("by save_model", "", "--like alias", "out.safetensors"),
]
"""Each pair of a dropped name, a lead, a kind of target and a kind of output."""


def test_the_pairs_are_all_there():
    for one, other in itertools.combinations(range(4), 2):
        ways = len({row[one] for row in PAIRS}) * len({row[other] for row in PAIRS})
        assert len({(row[one], row[other]) for row in PAIRS}) == ways


@pytest.mark.parametrize(("dropped", "lead", "named", "out"), PAIRS)
def test_a_tied_name_that_was_not_saved_is_filled(dropped, lead, named, out, tied_net, tmp_path):
    source = one_name(tmp_path, tied_net, lead, dropped)
    torch.save(tied_net.Net().state_dict(), tmp_path / "other.pt")
    convert_checkpoint(tmp_path / "other.pt", tmp_path / "other.safetensors")
    target = {
        "--model": f"{tied_net.__name__}:Net",
        "--like": "other.pt",
        "--like alias": "other.safetensors",
    }[named]
    shards = ["--max-shard-size", "100"] if out == "shards" else []
    done = run("convert", source, out, named.split()[0], target, "--verify", *shards, cwd=tmp_path)
    assert done.exit == 0, done.err
    assert dropped == "by save_model" or f"{dropped} is missing and filled from" in done.err
    torch.manual_seed(0)
    expected, model = tied_net.Net().eval()(TOKENS), tied_net.untied().eval()
    assert load_into(model, tmp_path / out).fits
    assert torch.equal(model(TOKENS), expected)
    if out == "out.pt":
        found = torch.load(tmp_path / out, weights_only=True)
        model.load_state_dict(found, strict=True)
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


@pytest.mark.parametrize("dropped", ["head.weight", "embed.weight", "by save_model"])
def test_one_of_two_tied_names_is_enough_for_a_live_model(dropped, tied_net, tmp_path):
    source = one_name(tmp_path, tied_net, "net.", dropped)
    torch.manual_seed(0)
    expected = tied_net.Net().eval()(TOKENS)
    model = tied_net.Net().eval()
    result = load_into(model, source)
    assert result.fits and result.missing_keys == ()
    assert torch.equal(model(TOKENS), expected)


def test_doctor_knows_that_a_tied_name_can_be_filled(tied_net, tmp_path):
    source = one_name(tmp_path, tied_net, "", "head.weight")
    model = f"{tied_net.__name__}:Net"
    (finding,) = (item for item in diagnose(source, model=model).findings if item.code == "keys")
    with pytest.raises(RuntimeError) as raised:
        tied_net.Net().load_state_dict(torch.load(source))
    assert finding.effect.partition(" says: ")[2] in str(raised.value)
    done = run(*finding.command.split()[1:], cwd=tmp_path)
    assert done.exit == 0, done.err
    assert diagnose(tmp_path / "one-portable.pt", model=model).loads


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
@pytest.mark.parametrize("named", ["--like", "--model"])
def test_tied_names_whose_values_differ_are_told_of(named, out, tied_net, tmp_path):
    state_dict = {f"module.{k}": v.clone() for k, v in tied_net.Net().state_dict().items()}
    torch.save(state_dict, tmp_path / "same.pt")
    state_dict["module.head.weight"] += 1
    torch.save(state_dict, tmp_path / "apart.pt")
    torch.save(tied_net.Net().state_dict(), tmp_path / "net.pt")
    target = {"--like": "net.pt", "--model": f"{tied_net.__name__}:Net"}[named]
    told = "embed.weight and head.weight differ, and are one tensor of"
    for source, is_told in (("same.pt", False), ("apart.pt", True)):
        done = run("convert", source, out, named, target, "--force", cwd=tmp_path)
        assert (done.exit, told in done.err) == (0, is_told), done.err
    found = load_portable(tmp_path / out)  # both are kept
    for key in ("embed.weight", "head.weight"):
        assert torch.equal(found[key], state_dict[f"module.{key}"])


def test_a_name_is_not_filled_where_it_is_not_tied_or_where_a_key_could_be_meant_for_it(
    tied_net, tmp_path
):
    source = one_name(tmp_path, tied_net, "", "head.weight")
    torch.save(tied_net.untied().state_dict(), tmp_path / "untied.pt")
    with pytest.raises(KeyMismatch, match=r"1 of 7 missing \(head.weight"):
        convert_checkpoint(source, tmp_path / "out.pt", like=tmp_path / "untied.pt")
    with pytest.raises(KeyMismatch, match=r"1 of 7 missing \(head.weight"):
        convert_checkpoint(source, tmp_path / "out.pt", model=f"{tied_net.__name__}:untied")
    torch.save({**torch.load(source), "classifier.weight": torch.ones(11, 4)}, tmp_path / "more.pt")
    with pytest.raises(KeyMismatch, match=r"head.weight: nearest is classifier.weight"):
        convert_checkpoint(
            tmp_path / "more.pt",
            tmp_path / "out.pt",
            model=f"{tied_net.__name__}:Net",
            drop_unexpected=True,
        )
    assert not (tmp_path / "out.pt").exists()


def test_undoing_the_mapping_leaves_out_what_was_filled(tied_net, tmp_path):
    source = one_name(tmp_path, tied_net, "net.", "head.weight")
    done = run(
        "convert",
        source,
        "out.pt",
        "--model",
        f"{tied_net.__name__}:Net",
        "--save-mapping",
        "map.json",
        cwd=tmp_path,
    )
    assert done.exit == 0, done.err
    assert (
        run("convert", "out.pt", "back.pt", "--rules", "map.json", "--reverse", cwd=tmp_path).exit
        == 0
    )
    assert keys_of(tmp_path / "back.pt") == keys_of(source)
    # and forward again: one key becomes two, whoever reads by the mapping
    again = run("convert", source, "again.pt", "--rules", "map.json", "--verify", cwd=tmp_path)
    assert again.exit == 0, again.err
    first, second = torch.load(tmp_path / "out.pt"), torch.load(tmp_path / "again.pt")
    loaded = load_portable(source, keys=read_key_rules(tmp_path / "map.json"))
    for found in (second, loaded):
        assert list(found) == list(first)
        assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
        assert all(torch.equal(found[key], value) for key, value in first.items())
    same = run("diff", source, "out.pt", "--rules", "map.json", cwd=tmp_path)
    assert same.exit == 0, same.out + same.err
    leaving = ("--rules", "map.json", "--exclude", "embed.*")
    fewer = run("convert", source, "fewer.pt", *leaving, cwd=tmp_path)
    assert fewer.exit == 1 and "which stay together" in fewer.err


def test_both_names_missing_are_missing(tied_net, tmp_path):
    source = one_name(tmp_path, tied_net, "", "head.weight")
    torch.save(
        {key: value for key, value in torch.load(source).items() if key != "embed.weight"},
        tmp_path / "neither.pt",
    )
    with pytest.raises(KeyMismatch) as caught:
        convert_checkpoint(
            tmp_path / "neither.pt", tmp_path / "out.pt", model=f"{tied_net.__name__}:Net"
        )
    assert (
        set(caught.value.fit.missing) == {"embed.weight", "head.weight"}
        and not caught.value.fit.filled
    )


def test_what_load_file_does_not_give_is_said_and_another_name_may_stay(tied_net, tmp_path):
    torch.save(tied_net.Net().state_dict(), tmp_path / "in.pt")
    seen = {}
    for tied in ("alias", "head.*", "duplicate"):
        done = run("convert", "in.pt", "out.safetensors", "-f", "--tied", tied, cwd=tmp_path)
        assert done.exit == 0, done.err
        lacking = (
            tied_net.Net()
            .load_state_dict(load_file(tmp_path / "out.safetensors"), strict=False)
            .missing_keys
        )
        if lacking:  # which is strict about a second name that is there
            assert load_model(tied_net.Net(), tmp_path / "out.safetensors") == (set(), [])
        assert load_portable(tmp_path / "out.safetensors").keys() >= {"embed.weight", "head.weight"}
        seen[tied] = lacking
        assert ("load_file does not return" in done.err) == bool(lacking)
        assert all(f"{name} = " in done.err for name in lacking)
        for like, severity in ((None, "warning"), ("in.pt", "error")):
            found = diagnose(tmp_path / "out.safetensors", like=like and tmp_path / like)
            told = [item.severity for item in found.findings if item.code == "aliases"]
            assert told == [severity] * bool(lacking)
            assert found.loads == (severity == "warning" or not lacking)
    assert seen == {"alias": ["head.weight"], "head.*": ["embed.weight"], "duplicate": []}


@pytest.mark.parametrize(
    ("tied", "output", "said"),
    [
        ("duplicat", "out.safetensors", "its names are head.weight, embed.weight"),
        ("head.*", "out.pt", "all names of a tied tensor stay in a torch output"),
    ],
)
def test_a_tied_name_that_is_none_is_refused(tied, output, said, tied_net, tmp_path):
    torch.save(tied_net.Net().state_dict(), tmp_path / "in.pt")
    with pytest.raises(OptionRefused, match=said):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / output, tied=tied)
    assert not (tmp_path / output).exists()


def test_a_tied_tensor_counts_under_each_of_its_names_everywhere(tied_net, tmp_path):
    model = tied_net.Net()
    torch.save(dict(model.named_parameters(remove_duplicate=False)), tmp_path / "in.pt")
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors")
    for name in ("in.pt", "out.safetensors"):
        found = inspect_checkpoint(tmp_path / name)
        assert (found.tensors, sum(found.locations.values())) == (4, 3)
        assert sum(found.dtypes.values()) == 4
    same = diff_checkpoints(tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert (same.same, same.tensors) == (True, 4)
