"""What a conversion says of optimizer states that do not go with its model any more; torch's own
`load_state_dict` says whether they still fit.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ckptconv import (
    Checkpoint,
    CheckpointError,
    KeyRules,
    RenameKeys,
    convert_checkpoint,
    load_portable,
    merge,
)
from ckptconv.pickles.nodes import Node, mapping_pairs
from ckptconv.tree.optimizer_states import ParamGroup, named_optimizer
from helpers import oracle
from helpers.examples import crossed
from helpers.paths import PRODUCED
from helpers.program import run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4))
        self.fc = nn.Linear(4, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(self.stem(x).mean(2)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.randn(6, 3, 9)).sum().backward()
    optimizer.step()
    return optimizer


def told(folder: Path, tree: dict[str, Any], **options: Any) -> tuple[list[str], dict[str, Any]]:
    """The notes of a conversion about optimizer states, and the output as torch reads it."""
    torch.save(tree, folder / "train.pt")
    output = folder / "out.pt"
    made = convert_checkpoint(folder / "train.pt", output, force=True, fsync=False, **options)
    notes = [note for note in made.plan.notes if "optim" in note and " is dropped" not in note]
    return notes, torch.load(output, weights_only=True)


ADAMS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam": lambda model: torch.optim.Adam(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "groups": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
    ),
}


@pytest.fixture(params=ADAMS)
def numbered(request):
    """A wrapped model, and what an optimizer of numbered parameters keeps for it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = step(model, ADAMS[request.param](model))
    wrapped = {f"module.{key}": value for key, value in model.state_dict().items()}
    return optimizer, {"model": wrapped, "optimizer": optimizer.state_dict()}


def fits(state: dict[str, Any], kept: set[str]) -> bool:
    """Whether torch loads an optimizer state into one of the parameters that are kept."""
    params = [value for key, value in Net().named_parameters() if key in kept]
    groups = [params]
    if len(state["param_groups"]) == 2:
        groups = [[p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]]
    optimizer = torch.optim.SGD([{"params": group} for group in groups if group], lr=0.1)
    try:
        optimizer.load_state_dict(state)
    except ValueError:
        return False
    return True


RULES = [
    ({}, False),
    ({"rename": ["fc.=linear."]}, False),
    ({"exclude": ["*.num_batches_tracked"]}, False),
    ({"exclude": ["*.running_*"]}, False),
    ({"exclude": ["head.*"]}, True),
    ({"exclude": ["head.bias"]}, True),
    ({"include": ["stem.*"]}, True),
    ({"drop": ["model.module.head.*"]}, True),
    ({"drop": ["model.*.num_batches_tracked"]}, False),
    ({"exclude": ["head.*"], "drop": ["optimizer"]}, False),
    ({"exclude": ["head.*"], "only": "model"}, False),
]


@pytest.mark.parametrize(
    ("numbered", "rule"), crossed(ADAMS, RULES), ids=str, indirect=["numbered"]
)
def test_numbers_are_spoken_of_where_parameters_are_left_out(numbered, rule, tmp_path):
    (_, tree), (options, expected) = numbered, rule
    notes, out = told(tmp_path, tree, **options)
    assert bool(notes) is expected, notes
    if expected:
        assert notes == [
            "optimizer knows its 8 parameters by number only, and some of them are left out: it "
            "no longer fits the model"
        ]
    if "optimizer" in out:
        names = {key.replace("linear.", "fc.") for key in out["model"]}
        assert fits(out["optimizer"], names) is not expected


def test_frozen_parameters_are_none_of_the_optimizer(tmp_path):
    model = Net()
    optimizer = torch.optim.Adam(model.head.parameters())
    step(model, optimizer)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert told(tmp_path, tree, exclude=["stem.*"])[0] == []
    assert len(told(tmp_path, tree, exclude=["head.weight"])[0]) == 1


def test_tied_weights_are_one_parameter(tmp_path):
    model = Net()
    optimizer = step(model, torch.optim.Adam(model.parameters()))
    tree = {
        "model": {**model.state_dict(), "tied.weight": model.head.weight},
        "optimizer": optimizer.state_dict(),
    }
    assert told(tmp_path, tree, exclude=["tied.*"])[0] == []
    assert len(told(tmp_path, tree, exclude=["fc.weight"])[0]) == 1


def test_of_two_models_the_optimizer_is_that_of_the_one_that_fits(tmp_path):
    model = Net()
    optimizer = step(model, torch.optim.Adam(model.parameters()))
    tree = {
        "model": model.state_dict(),
        "ema_model": {key: value.clone() for key, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    assert told(tmp_path, tree, drop=["ema_model.head.*"])[0] == []
    assert told(tmp_path, tree, drop=["ema_model"])[0] == []
    assert len(told(tmp_path, tree, drop=["*model.head.*"])[0]) == 1
    assert len(told(tmp_path, tree, drop=["*model"])[0]) == 1
    tree["ema_model"] = {"head.bias": model.head.bias.detach().clone()}
    assert len(told(tmp_path, tree, drop=["model.head.bias"])[0]) == 1  # not that of the other


def test_one_optimizer_of_two_models(tmp_path):
    first, second = nn.Linear(3, 4), nn.Linear(4, 5)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    second(first(torch.randn(2, 3))).sum().backward()
    optimizer.step()
    tree = {
        "generator": {f"a.{key}": value for key, value in first.state_dict().items()},
        "discriminator": {f"b.{key}": value for key, value in second.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    assert told(tmp_path, tree, rename=["a.=c."])[0] == []
    assert len(told(tmp_path, tree, exclude=["b.bias"])[0]) == 1


# ------------------------------------------------------------------------------------------ by name


def named_groups(model: nn.Module) -> dict[str, Any]:
    return step(model, torch.optim.Adam(model.named_parameters())).state_dict()


def by_name(model: nn.Module) -> dict[str, Any]:
    optimizer = step(model, torch.optim.Adam(model.parameters()))
    return get_optimizer_state_dict(model, optimizer)


def flat(model: nn.Module) -> dict[str, Any]:
    optimizer = step(model, torch.optim.Adam(model.parameters()))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


def names_in(state: dict[str, Any]) -> set[str]:
    """The names of parameters in an optimizer state, as torch's readers look for them."""
    if "param_groups" not in state:
        return {key.partition(".")[2].rpartition(".")[0] for key in state}
    groups = state["param_groups"]
    listed = [name for group in groups for name in group.get("param_names", group["params"])]
    return {*listed, *(key for key in state["state"] if isinstance(key, str))}


@pytest.mark.parametrize("state_of", [named_groups, by_name, flat])
def test_names_follow_their_keys(state_of, tmp_path):
    model = Net()
    state = state_of(model)
    tree = {"model": model.state_dict(), "optimizer": state}
    assert told(tmp_path, tree)[0] == []
    notes, out = told(tmp_path, tree, rename=["fc.=linear."])
    parameters = {name.replace("fc.", "linear.") for name, _ in model.named_parameters()}
    assert names_in(out["optimizer"]) == parameters
    assert notes == [
        "optimizer has the new names of 2 parameters too, e.g. fc.weight → linear.weight"
    ]
    notes, out = told(tmp_path, tree, strip_prefix=["head."], exclude=["fc.bias", "*.running_*"])
    assert notes == [
        "optimizer has the new names of 2 parameters too, e.g. head.weight → weight",
        "optimizer still holds 1 parameter that is left out, e.g. fc.bias",
    ]
    assert names_in(out["optimizer"]) - out["model"].keys() == {"fc.bias"}
    notes, _ = told(tmp_path, tree, drop=["model.fc.*"])
    assert notes == ["optimizer still holds 2 parameters that are left out, e.g. fc.weight"]


class Renamed(Net):
    """The same model, whose `fc` is called `linear`, in a wrapper or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = self.fc
        del self.fc

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.linear(self.stem(x).mean(2)))


@pytest.mark.parametrize("state_of", [by_name, flat])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_torch_finds_the_states_of_renamed_parameters(state_of, wrapper, tmp_path):
    """Without names that follow, torch loads such a state without a word, and without moments."""
    model = Net()
    state = state_of(model)
    if wrapper:
        state = wrapped_names(state, wrapper)
    keys = {wrapper + key: value for key, value in model.state_dict().items()}
    _, out = told(tmp_path, {"model": keys, "optimizer": state}, rename=["fc.=linear."])
    again = Renamed()
    optimizer = torch.optim.Adam(again.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=state_of is flat)
    again.load_state_dict(out["model"])
    set_optimizer_state_dict(again, optimizer, out["optimizer"], options=options)
    before = by_names(model, state_of, state, wrapper)
    for name, parameter in again.named_parameters():
        loaded = optimizer.state[parameter]
        assert torch.equal(loaded["exp_avg"], before[name.replace("linear.", "fc.")]), name
        assert loaded["exp_avg"].any()


def wrapped_names(state: dict[str, Any], wrapper: str) -> dict[str, Any]:
    """The same state of a model that stands in a wrapper, as FSDP's `rekey_optim_state_dict` and
    older torch name it.
    """
    if "param_groups" not in state:
        parted = [(key.partition("."), value) for key, value in state.items()]
        return {f"{part}.{wrapper}{rest}": value for (part, _, rest), value in parted}
    groups = [
        {**group, "params": [wrapper + name for name in group["params"]]}
        for group in state["param_groups"]
    ]
    states = {wrapper + name: value for name, value in state["state"].items()}
    return {"state": states, "param_groups": groups}


def by_names(
    model: nn.Module, state_of: Callable[..., Any], state: dict[str, Any], wrapper: str
) -> dict[str, torch.Tensor]:
    """The first moments in a state, by the names of the bare model."""
    names = [name for name, _ in model.named_parameters()]
    if state_of is flat:
        return {name: state[f"state.{wrapper}{name}.exp_avg"] for name in names}
    return {name: state["state"][wrapper + name]["exp_avg"] for name in names}


def test_nested_states_of_a_flattened_optimizer(tmp_path):
    """As torch flattens Shampoo's."""
    model = Net()
    state: dict[str, Any] = {}
    for name, value in model.named_parameters():
        state[f"state.{name}.factors.0.inverse"] = value.detach()
        state[f"param_groups.{name}.lr"] = 0.1
    tree = {"model": model.state_dict(), "optimizer": state}
    _, out = told(tmp_path, tree, rename=["fc.=linear."])
    assert [*out["optimizer"]] == [key.replace(".fc.", ".linear.") for key in state]


@pytest.mark.parametrize("state_of", [by_name, flat])
def test_names_that_would_become_one_stay(state_of, tmp_path):
    """Those of a model that was wrapped later, and of one that was not."""
    model = Net()
    state = state_of(model)
    twice = wrapped_names(state, "module.")
    if state_of is by_name:
        both = {
            "state": {**state["state"], **twice["state"]},
            "param_groups": [*state["param_groups"], *twice["param_groups"]],
        }
    else:
        both = {**state, **twice}
    keys = {f"module.{key}": value for key, value in model.state_dict().items()}
    notes, out = told(tmp_path, {"model": keys, "optimizer": both})
    assert names_in(out["optimizer"]) == names_in(both)
    assert len(notes) == 1 and "still names 8 parameters as before" in notes[0]


def test_parameters_that_rules_stack_are_told_of(tmp_path):
    weights = {f"experts.{number}.w": torch.ones(3, 4) for number in range(2)}
    states = {name: {"exp_avg": value} for name, value in weights.items()}
    optimizer = {"state": states, "param_groups": [{"params": list(weights)}]}
    rule = {"from": "experts.{e}.w", "to": "experts.w", "operations": [{"stack": 0}]}
    tree = {"model": {**weights, "norm.w": torch.ones(4)}, "optimizer": optimizer}
    notes, _ = told(tmp_path, tree, rules=[rule])
    assert notes == [
        "optimizer still holds 2 parameters of which rules made other tensors, e.g. experts.0.w"
    ]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("numbered", [False, True])
def test_a_square_weight_that_rules_turn_has_no_states_any_more(wrapped, numbered, tmp_path):
    """Torch would take the old moments for it: the name and the shape are the same."""
    weights = {"a.w": torch.rand(3, 3), "b.w": torch.rand(3, 3)}
    names = [0, 1] if numbered else ["a.w", "b.w"]
    states = {name: {"exp_avg": value} for name, value in zip(names, weights.values(), strict=True)}
    optimizer = {"state": states, "param_groups": [{"params": names}]}
    start = "module." if wrapped else ""
    model = {start + key: value for key, value in weights.items()}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "in.pt")
    rules = [{"from": "a.w", "to": "a.w", "operations": [{"transpose": [0, 1]}]}]
    for options in ({}, {"only": "optimizer"}):
        with pytest.raises(
            CheckpointError, match="rules make other tensors; leave it out: --drop optimizer"
        ):
            convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", rules=rules, **options)
    with pytest.raises(CheckpointError, match="rules make other tensors"):
        load_portable(tmp_path / "in.pt", whole=True, rules=rules)
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", rules=rules, drop="optimizer")
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["a.w"], weights["a.w"].T)
    if not numbered:
        rules[0]["to"] = "c.w"
        notes, _ = told(tmp_path, {"model": model, "optimizer": optimizer}, rules=rules)
        assert "optimizer still holds 1 parameter of which rules made" in " ".join(notes)


def test_two_parameters_that_swap_their_names(tmp_path):
    model = Net()
    tree = {"model": model.state_dict(), "optimizer": by_name(model)}
    rename = ["fc.=spare.", "head.=fc.", "spare.=head."]
    _, out = told(tmp_path, tree, rename=rename)
    moments = {name: state["exp_avg"].shape for name, state in out["optimizer"]["state"].items()}
    assert moments == {name: out["model"][name].shape for name in moments}


def test_of_two_models_the_names_follow_the_one_that_has_them_all(tmp_path):
    net, other = Net(), nn.Linear(4, 5)
    tree = {
        "generator": {f"module.{key}": value for key, value in net.state_dict().items()},
        # its attribute is called module: no wrapper
        "discriminator": {
            "module.fc.weight": other.weight,
            "module.fc.bias": other.bias,
            "last.weight": other.weight,
        },
        "optimizer": wrapped_names(by_name(net), "module."),
    }
    _, out = told(tmp_path, tree)
    assert names_in(out["optimizer"]) == {name for name, _ in net.named_parameters()}
    assert "module.fc.weight" in out["discriminator"]


def test_names_that_state_dicts_do_not_agree_on_stay(tmp_path):
    net = Net()
    keys = {f"module.{key}": value for key, value in net.state_dict().items()}
    tree = {
        "generator": keys,
        "discriminator": {**keys, "last.weight": torch.ones(2)},
        "optimizer": wrapped_names(by_name(net), "module."),
    }
    notes, out = told(tmp_path, tree)
    assert names_in(out["optimizer"]) == names_in(tree["optimizer"])
    assert notes == [
        "optimizer still names 8 parameters as before, e.g. module.stem.0.weight: it is not clear "
        "which keys are theirs"
    ]


@pytest.mark.parametrize("state_of", [named_groups, by_name, flat])
def test_wrappers_around_names_and_keys(state_of, tmp_path):
    model = Net()
    state = state_of(model)
    wrapped = {f"module.{key}": value for key, value in model.state_dict().items()}
    # the names are those of the bare model, which its keys become
    tree = {"model": wrapped, "optimizer": state}
    assert told(tmp_path, tree)[0] == []
    notes, out = told(tmp_path, tree, rename=["fc.=linear."])
    assert names_in(out["optimizer"]) <= out["model"].keys()
    assert notes == [
        "optimizer has the new names of 2 parameters too, e.g. fc.weight → linear.weight"
    ]


def test_names_with_a_wrapper_lose_it_with_the_keys(tmp_path):
    model = nn.Module()
    model.module = Net()
    model.forward = model.module.forward
    state = named_groups(model)
    notes, out = told(tmp_path, {"model": model.state_dict(), "optimizer": state})
    assert names_in(out["optimizer"]) == {name for name, _ in model.module.named_parameters()}
    assert notes == [
        "optimizer has the new names of 8 parameters too, e.g. module.stem.0.weight → stem.0.weight"
    ]
    # names that never were those of the keys: nothing has changed
    tree = {"model": model.module.state_dict(), "optimizer": state}
    assert told(tmp_path, tree)[0] == []
    assert told(tmp_path, tree, exclude=["*.num_batches_tracked"])[0] == []
    notes, out = told(tmp_path, tree, rename=["head.=out."])
    assert names_in(out["optimizer"]) <= out["model"].keys()
    assert len(notes) == 1 and notes[0].startswith("optimizer has the new names of 8 parameters")


@pytest.mark.parametrize("state_of", [by_name, flat])
def test_an_optimizer_alone_has_the_names_that_it_has_beside_its_model(state_of, tmp_path):
    model = Net()
    keys = {f"module.{key}": value for key, value in model.state_dict().items()}
    tree = {"model": keys, "optimizers": [wrapped_names(state_of(model), "module.")]}
    notes, both = told(tmp_path, tree, rename=["fc.=linear."])
    alone_notes, alone = told(tmp_path, tree, rename=["fc.=linear."], only="optimizers.0")
    assert names_in(alone) == names_in(both["optimizers"][0])
    assert names_in(alone) <= both["model"].keys()
    assert alone_notes == notes and len(notes) == 1
    kept = told(tmp_path, tree, keys="keep", only="optimizers.0")[1]
    assert names_in(kept) == {f"module.{name}" for name, _ in model.named_parameters()}


def test_edits_and_loaders_take_the_names_along(tmp_path):
    model = Net()
    keys = {f"module.{key}": value for key, value in model.state_dict().items()}
    tree = {"model": keys, "optimizer": wrapped_names(by_name(model), "module.")}
    torch.save(tree, tmp_path / "train.pt")
    expected = {name for name, _ in model.named_parameters()}
    loaded = load_portable(tmp_path / "train.pt", whole=True)
    assert names_in(loaded["optimizer"]) == expected
    alone = load_portable(tmp_path / "train.pt", whole=True, only="optimizer")
    assert names_in(alone) == expected
    rules = {"whole": True, "only": "optimizer", "rename": ["fc.=linear."]}
    moved = {name.replace("fc.", "linear.") for name in expected}
    assert names_in(load_portable(tmp_path / "train.pt", **rules)) == moved != expected
    edit = RenameKeys(KeyRules())
    edited = load_portable(tmp_path / "train.pt", whole=True, edits=[edit], keys="keep")
    assert names_in(edited["optimizer"]) == expected


# -------------------------------------------------------------------------------------------- ties


class Twins(nn.Module):
    """An output layer whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.emb(x[:, 0, :4].long() % 7)))


TIE = {"from": "tok.weight", "to": ["emb.weight", "head.weight"], "operations": ["tie"]}


def numbers(model: nn.Module) -> dict[str, Any]:
    return step(model, torch.optim.Adam(model.parameters())).state_dict()


def with_name(state: Any, old: str, new: str) -> Any:
    """A state whose parameter `old` has the name `new`."""
    if isinstance(state, dict):
        return {
            with_name(key, old, new): with_name(value, old, new) for key, value in state.items()
        }
    if isinstance(state, list):
        return [with_name(value, old, new) for value in state]
    return state.replace(old, new) if isinstance(state, str) else state


@pytest.mark.parametrize("state_of", [numbers, named_groups, by_name, flat])
@pytest.mark.parametrize("only", [None, "optimizer"])
def test_a_tied_parameter_has_its_state_under_the_name_that_torch_keeps(state_of, only, tmp_path):
    model = Twins()
    own = state_of(model)
    state = with_name(own, "emb.weight", "tok.weight")
    weights = with_name(model.state_dict(), "emb.weight", "tok.weight")
    del weights["head.weight"]
    tree = {"model": dict(weights), "optimizer": state}
    _, out = told(tmp_path, tree, rules=[TIE], only=only)
    assert oracle.value_rows(out if only else out["optimizer"]) == oracle.value_rows(own)
    loaded = load_portable(tmp_path / "train.pt", whole=True, rules=[TIE], only=only)
    assert oracle.value_rows(loaded if only else loaded["optimizer"]) == oracle.value_rows(own)
    if only is None:
        assert out["model"]["emb.weight"].data_ptr() == out["model"]["head.weight"].data_ptr()
        if state_of in (by_name, flat):
            fresh = Twins()
            set_optimizer_state_dict(fresh, torch.optim.Adam(fresh.parameters()), out["optimizer"])


def doubled(own: dict[str, Any], odd: str = "") -> dict[str, Any]:
    """A state in which the tied weight has a copy under its other name, as of two stages of a
    pipeline; `odd` is what the copies differ in.
    """
    if "state" not in own:
        copies = {key: value for key, value in own.items() if ".emb." in key}
        copies = copy.deepcopy(with_name(copies, "emb.", "head."))
        for key in copies:
            if odd and key.endswith(f".{odd}"):
                copies[key] = copies[key] * 2
        return {**own, **copies}
    state = copy.deepcopy(own)
    moments = state["state"]["head.weight"] = copy.deepcopy(state["state"]["emb.weight"])
    if odd == "lr":
        state["param_groups"].append({"lr": 2.0, "params": ["head.weight"]})
        return state
    state["param_groups"][0]["params"].append("head.weight")
    if odd:
        moments[odd] *= 2
    return state


@pytest.mark.parametrize("state_of", [by_name, flat])
@pytest.mark.parametrize("way", ["dropped", "undone"])
def test_equal_states_of_tied_parameters_are_one(state_of, way, tmp_path):
    tied = {**TIE, "from": "emb.weight"}
    options: dict[str, Any] = {"rules": [{"from": "head.weight", "operations": ["drop"]}, tied]}
    model = Twins()
    own = state_of(model)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    if way == "undone":
        alone = {key: value for key, value in weights.items() if key != "head.weight"}
        torch.save(alone, tmp_path / "alone.pt")
        mapping = tmp_path / "map.json"
        convert_checkpoint(
            tmp_path / "alone.pt", tmp_path / "tied.pt", rules=[tied], save_mapping=mapping
        )
        options = {"rules": mapping, "reverse": True}
    notes, out = told(tmp_path, {"model": weights, "optimizer": doubled(own)}, **options)
    assert oracle.value_rows(out["optimizer"]) == oracle.value_rows(own)
    assert "head.weight → emb.weight" in " ".join(notes)
    for odd in ("exp_avg", "step", "lr"):
        with pytest.raises(CheckpointError, match=r"head\.weight, .* emb\.weight .*leave it out: "):
            told(tmp_path, {"model": weights, "optimizer": doubled(own, odd)}, **options)


def test_a_state_of_another_tensor_is_not_that_of_a_tied_one(tmp_path):
    """The output layer had a state of its own, and the embedding none."""
    model = Twins()
    state = with_name(by_name(model), "emb.weight", "head.weight")
    rules = [
        {"from": "head.weight", "operations": ["drop"]},
        {**TIE, "from": "emb.weight"},
    ]
    with pytest.raises(CheckpointError, match=r"a state of head\.weight.* emb\.weight now"):
        told(tmp_path, {"model": model.state_dict(), "optimizer": state}, rules=rules)


def test_edits_refuse_states_of_other_tensors_too(tmp_path):
    weight = torch.rand(3, 3)
    optimizer = {"state": {"w": {"exp_avg": weight}}, "param_groups": [{"params": ["w"]}]}
    torch.save({"model": {"w": weight}, "optimizer": optimizer}, tmp_path / "train.pt")
    rule = {"from": "w", "to": "w", "operations": [{"transpose": [0, 1]}]}
    edit = RenameKeys(KeyRules.of([rule], "keep"))
    with pytest.raises(CheckpointError, match="rules make other tensors"):
        load_portable(tmp_path / "train.pt", whole=True, edits=[edit], keys="keep")


# ----------------------------------------------------------------------------------------- nestings


def test_optimizers_in_lists_and_inside_others(tmp_path):
    """As Lightning and DeepSpeed nest them."""
    model = Net()
    state = step(model, torch.optim.Adam(model.parameters())).state_dict()
    keys = {f"model.{key}": value for key, value in model.state_dict().items()}
    tree = {
        "state_dict": keys,
        "optimizer_states": [state, named_groups(Net())],
        "engine": {"optimizer": {"base_optimizer_state": state | {"state": dict(state["state"])}}},
    }
    assert told(tmp_path, tree, strip_prefix=["model."])[0] == []
    notes, _ = told(tmp_path, tree, exclude=["model.head.*"])
    assert [note.partition(" ")[0] for note in notes] == [
        "optimizer_states.0",
        "optimizer_states.1",
        "engine.optimizer.base_optimizer_state",
    ]
    many = {"state_dict": keys, "optimizer_states": [dict(state) for _ in range(9)]}
    notes, _ = told(tmp_path, many, exclude=["model.head.*"])
    assert len(notes) == 6 and notes[-1] == "the same is true of 4 more optimizer states"


def test_partitions_of_many_parameters_are_not_taken_for_theirs(tmp_path):
    flat_state = {
        "state": {0: {"exp_avg": torch.zeros(100), "exp_avg_sq": torch.zeros(100)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    tree = {"module": Net().state_dict(), "optimizer": flat_state}
    assert told(tmp_path, tree, exclude=["head.*"])[0] == []


@pytest.mark.parametrize(
    ("name", "rule", "expected"),
    [
        ("lightning.ckpt", ["--exclude", "*.weight"], "optimizer_states.0 knows its "),
        ("lightning.ckpt", ["--strip-prefix", "model."], None),
        (
            "accelerate_fsdp",
            ["--rename", "model.layers.=blocks."],
            "optimizer_0 has the new names of 18 ",
        ),
        ("accelerate_fsdp", ["--exclude", "lm_head.*"], "optimizer_0 still holds 1 parameter"),
        ("accelerate_fsdp", [], None),
        ("torchtitan/new", ["--rename", "bias=b"], "optimizer has the new name of 1 param"),
        ("torchtitan/new", ["--drop", "optimizer", "--rename", "bias=b"], None),
    ],
)
def test_what_frameworks_wrote(name, rule, expected, tmp_path):
    if not (PRODUCED / name).exists():
        pytest.skip("the framework's checkpoint is not here")
    done = run("convert", PRODUCED / name, tmp_path / "out.pt", "--dry-run", *rule, cwd=tmp_path)
    lines = [line for line in done.lines if re.search("optim.*(still|by number|has the new)", line)]
    assert done.exit == 0, done.err
    assert not lines if expected is None else len(lines) == 1 and expected in lines[0], done.err


def test_flat_outputs_and_merges_leave_the_optimizer_out(tmp_path):
    model = Net()
    torch.save({"model": model.state_dict(), "optimizer": by_name(model)}, tmp_path / "train.pt")
    torch.save({"extra": torch.ones(2)}, tmp_path / "more.pt")
    flat_file = convert_checkpoint(
        tmp_path / "train.pt", tmp_path / "o.safetensors", rename=["fc.=linear."], fsync=False
    )
    merged = merge(
        [tmp_path / "train.pt", tmp_path / "more.pt"],
        tmp_path / "o.pt",
        prefix={str(tmp_path / "train.pt"): "a."},
        fsync=False,
    )
    for made in (flat_file, merged):
        assert not any("still" in note for note in made.plan.notes)


def test_names_out_of_the_file_are_escaped(tmp_path):
    model = {"a\x1b[31m.weight": torch.ones(2), "b.weight": torch.ones(2)}
    state = {"state": {key: {"exp_avg": torch.ones(2)} for key in model}, "param_groups": []}
    notes, _ = told(tmp_path, {"model": model, "optimizer": state}, rename=["a\x1b[31m.=c."])
    [note] = notes
    assert note.isprintable() and note.endswith("e.g. a\\x1b[31m.weight → c.weight")


def entries(node: Node) -> dict[str, Node]:
    return dict(mapping_pairs(node) or ())


def remade(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, its root an optimizer state that is made anew of what that one says."""
    parts = entries(checkpoint.root)
    states = {name: entries(state) for name, state in entries(parts["state"]).items()}
    groups = []
    for group in map(entries, parts["param_groups"]):
        params = group.pop("params")
        groups.append(ParamGroup(group, params))
    return replace(checkpoint, root=named_optimizer(states, groups))


@pytest.mark.parametrize("kind", ADAMS)
def test_an_optimizer_state_made_by_names_is_what_torch_gives(tmp_path, kind):
    model = Net()
    optimizer = step(model, ADAMS[kind](model))
    torchs = get_optimizer_state_dict(model, optimizer)
    torch.save(torchs, tmp_path / "optim.pt")
    made = load_portable(tmp_path / "optim.pt", whole=True, edits=[remade])
    assert oracle.flatten(made) == oracle.flatten(torchs)
