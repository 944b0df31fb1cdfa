"""Optimizer states in another form are those that torch itself makes of the same optimizer; a
number that may mean two parameters is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from ckptconv import CheckpointError, FormOptimizer, convert_checkpoint, load_portable
from ckptconv.support.errors import OptionRefused
from helpers.examples import some
from helpers.program import run


class Net(nn.Module):
    """Parameters of equal shapes beside each other, buffers, a tied weight, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("ids", torch.arange(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.second(self.first(self.norm(self.embed(x)))))
        return result


def one_group(model: nn.Module) -> Any:
    return model.parameters()


def by_decay(model: nn.Module) -> Any:
    """Two groups, as the Trainer makes them."""
    flat = [item for item in model.parameters() if item.ndim < 2]
    wide = [item for item in model.parameters() if item.ndim > 1]
    return [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]


def by_betas(model: nn.Module) -> Any:
    """Two groups that differ in a setting of several numbers alone."""
    betas = (0.9, 0.95), (0.8, 0.99)
    parts = by_decay(model)
    return [
        {"params": item["params"], "betas": two} for item, two in zip(parts, betas, strict=True)
    ]


def trained(
    groups: Callable[[nn.Module], Any] = one_group, kind: Any = torch.optim.AdamW
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(groups(model), lr=0.01)
    for _ in range(2):
        model(torch.randint(7, (5,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, the types and the order of dicts included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def converted(folder: Path, tree: dict[str, Any], **options: Any) -> Any:
    torch.save(tree, folder / "in.pt")
    convert_checkpoint(folder / "in.pt", folder / "out.pt", force=True, verify=True, **options)
    return torch.load(folder / "out.pt")


KINDS = [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad]


@pytest.mark.parametrize("groups", [one_group, by_decay, by_betas])
@pytest.mark.parametrize("kind", some(2, KINDS))
def test_forms_are_those_of_torch(groups, kind, tmp_path):
    model, optimizer = trained(groups, kind)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    numbers = optimizer.state_dict()
    names = get_optimizer_state_dict(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    assert same(converted(tmp_path, tree, optimizer="names")["optimizer"], names)
    # torch's own order of a flattened state is that of its walk
    made = converted(tmp_path, tree, optimizer="flat")["optimizer"]
    assert same(dict(sorted(made.items())), dict(sorted(flat.items())))
    tree["optimizer"] = names
    assert same(converted(tmp_path, tree, optimizer="numbers")["optimizer"], numbers)
    made = converted(tmp_path, {**tree, "optimizer": flat}, optimizer="names")["optimizer"]
    assert same(made["state"], names["state"])
    assert sorted(map(str, made["param_groups"])) == sorted(map(str, names["param_groups"]))


def test_torchtitan_has_the_weights_at_the_root(tmp_path):
    model, optimizer = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    made = converted(tmp_path, tree, optimizer="torchtitan")
    assert list(made) == [*model.state_dict(), "optimizer", "step"]
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    assert (
        made["optimizer"].keys()
        == get_optimizer_state_dict(model, optimizer, options=options).keys()
    )


def test_torchtitan_needs_one_model_that_stands_beside_the_rest(tmp_path):
    model, optimizer = trained()
    deep = {"nets": {"model": model.state_dict()}, "optimizer": optimizer.state_dict(), "step": 2}
    assert "no one state dict to be put at the root" in refused(
        tmp_path, deep, optimizer="torchtitan"
    )


def test_a_state_dict_at_the_root_is_there_already(tmp_path):
    model, optimizer = trained()
    names = get_optimizer_state_dict(model, optimizer)
    tree = {**model.state_dict(), "optimizer": names}
    made = converted(tmp_path, tree, optimizer="torchtitan")
    assert list(made) == list(tree)
    assert all(same(made[key], value) for key, value in model.state_dict().items())
    deep = {"model": {**model.state_dict(), "step": torch.ones(2)}, "optimizer": names, "step": 2}
    (tmp_path / "out.pt").unlink()
    told = refused(tmp_path, deep, optimizer="torchtitan")
    assert "step: is a key of the weights and of what stands beside them" in told


def test_numbers_stay_numbers(tmp_path):
    model, optimizer = trained(by_decay)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "in.pt")
    done = convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", optimizer="numbers")
    assert same(torch.load(tmp_path / "out.pt"), tree)
    assert not any("have numbers now" in note for note in done.plan.notes)


def test_an_order_names_parameters_as_the_checkpoint_does(tmp_path):
    """A model in DistributedDataParallel, whose keys the list has without ``module.``."""
    model, optimizer = trained()
    weights = {f"module.{key}": value for key, value in model.state_dict().items()}
    tree = {"model": weights, "optimizer": optimizer.state_dict()}
    names = list(dict(model.named_parameters()))
    (tmp_path / "order.txt").write_text("\n".join(names))
    made = converted(
        tmp_path, tree, optimizer="names", order_from=tmp_path / "order.txt", keys="keep"
    )
    found = made["optimizer"]["state"]
    assert list(found) == [f"module.{name}" for name in names]
    for name, value in model.named_parameters():
        assert torch.equal(found[f"module.{name}"]["exp_avg"], optimizer.state[value]["exp_avg"])
    (tmp_path / "out.pt").unlink()
    (tmp_path / "order.txt").write_text("\n".join([*names, "more.weight"]))
    told = refused(tmp_path, tree, optimizer="names", order_from=tmp_path / "order.txt")
    assert "more.weight: is a parameter of" in told and "not in the checkpoint" in told


@pytest.mark.parametrize("parts", [["model", "optimizer"], ["optimizer"]])
def test_an_edit_takes_the_order_that_python_knows(parts, tmp_path):
    model, optimizer = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({part: tree[part] for part in parts}, tmp_path / "in.pt")
    shapes = [(name, value.shape) for name, value in model.named_parameters()]
    edits = [FormOptimizer("names", ("my model", shapes))]
    made = load_portable(tmp_path / "in.pt", whole=True, edits=edits)
    assert same(made["optimizer"], get_optimizer_state_dict(model, optimizer))


@pytest.mark.parametrize(
    "order", ["a.txt", ("a.txt",), ("a.txt", ["w"]), ("a.txt", [("w", 3)]), ("a", [(0, (3,))])]
)
def test_an_edit_refuses_what_is_not_an_order(order):
    with pytest.raises(OptionRefused, match=r"is not \(SOURCE, \[\(NAME, SHAPE\)"):
        FormOptimizer("names", order)


def test_what_is_not_an_optimizers_state_is_refused(tmp_path):
    model, optimizer = alike(["0.weight"], ["1.weight"])
    weights, state = model.state_dict(), optimizer.state_dict()
    for group in state["param_groups"]:
        del group["param_names"]  # by which numbers would have names
    told = refused(tmp_path, {"optimizer": state}, optimizer="names")
    assert "no state dict beside them tells the order of model.parameters()" in told
    first, second = state["param_groups"]
    for change, words in (
        ({"state": {**state["state"], 7: state["state"][0]}}, "of parameter 7, which is in none"),
        ({"state": {0: torch.ones(2)}}, "is not a dict of what an optimizer keeps"),
        ({"state": {0: {3: torch.ones(2)}}}, "is not a dict of what an optimizer keeps"),
        (
            {"param_groups": [first, {**second, "params": 1}]},
            "a group without a list of parameters",
        ),
        ({"param_groups": [first, {**second, "params": [1.5]}]}, "a group without a list of param"),
    ):
        tree = {"model": weights, "optimizer": {**state, **change}}
        assert words in refused(tmp_path, tree, optimizer="names")


def test_torch_loads_what_was_numbered_by_a_model(tmp_path, monkeypatch):
    model, optimizer = trained(by_decay)
    (tmp_path / "my_net.py").write_text("from tree.test_optimizer_forms import Net\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = get_optimizer_state_dict(model, optimizer)
    for group in names["param_groups"]:
        group["params"].reverse()  # as one that was gathered out of order
    tree = {"model": model.state_dict(), "optimizer": names}
    torch.save(model.state_dict(), tmp_path / "order.pt")
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "order.txt").write_text("\n".join(dict(model.named_parameters())))
    for how in (
        {"model": "my_net:Net"},
        {"order_from": tmp_path / "order.pt"},
        {"order_from": tmp_path / "old.pt"},
        {"order_from": str(tmp_path / "order.txt")},
    ):
        again = torch.optim.AdamW(by_decay(Net()), lr=1.0)
        again.load_state_dict(converted(tmp_path, tree, optimizer="numbers", **how)["optimizer"])
        assert same(again.state_dict(), optimizer.state_dict()), how


def test_an_optimizer_alone_is_named_by_a_list(tmp_path):
    model, optimizer = trained(by_decay)
    (tmp_path / "order.txt").write_text("\n".join(dict(model.named_parameters())))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    words = [
        "convert",
        "optimizer.pt",
        "named.pt",
        "--optimizer",
        "names",
        "--order-from",
        "order.txt",
    ]
    done = run(*words, cwd=tmp_path)
    # without shapes, two groups may be laid over the list in many ways
    assert done.exit == 1
    assert "do not tell which number" in done.err
    one = trained()[1]
    torch.save(one.state_dict(), tmp_path / "optimizer.pt")
    done = run(*words, cwd=tmp_path)
    assert done.exit == 0, done.err
    assert same(torch.load(tmp_path / "named.pt"), get_optimizer_state_dict(*trained()))


def test_names_that_its_groups_say_are_taken(tmp_path):
    model, _ = trained()
    optimizer = torch.optim.AdamW(reversed(list(model.named_parameters())), lr=0.01)
    model(torch.arange(7)).sum().backward()
    optimizer.step()
    made = converted(tmp_path, {"optimizer": optimizer.state_dict()}, optimizer="names")
    wanted = {name: optimizer.state[value]["exp_avg"] for name, value in model.named_parameters()}
    assert made["optimizer"]["state"].keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(made["optimizer"]["state"][name]["exp_avg"], value)


def refused(folder: Path, tree: dict[str, Any], **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        converted(folder, tree, **options)
    assert not (folder / "out.pt").exists()
    return str(error.value)


def test_what_may_mean_two_parameters_is_refused(tmp_path):
    model, optimizer = trained()
    weights = {"model": model.state_dict()}
    # some of equal parameters are frozen, and nothing says which
    few = torch.optim.AdamW(model.first.parameters(), lr=0.01)
    model(torch.arange(7)).sum().backward()
    few.step()
    told = refused(tmp_path, {**weights, "optimizer": few.state_dict()}, optimizer="names")
    assert "do not tell which number" in told
    assert "--order-from" in told
    # groups that halve equal ones
    halves = [{"params": model.first.parameters()}, {"params": model.second.parameters()}]
    state = torch.optim.SGD(halves, lr=0.01).state_dict()
    assert "do not tell which" in refused(
        tmp_path, {**weights, "optimizer": state}, optimizer="names"
    )
    # more than there are
    state = optimizer.state_dict()
    state["param_groups"][0]["params"] += [90]
    assert "numbers 8 parameters" in refused(
        tmp_path, {**weights, "optimizer": state}, optimizer="names"
    )
    # other shapes
    state = trained()[1].state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg_sq"] = torch.zeros(3, 3)
    assert "does not fit" in refused(tmp_path, {**weights, "optimizer": state}, optimizer="names")


def test_an_order_that_is_not_known_is_refused(tmp_path):
    model, optimizer = trained(by_decay)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    tree = {"model": model.state_dict(), "optimizer": flat}
    assert "the order of its parameters is not known" in refused(
        tmp_path, tree, optimizer="numbers"
    )
    torch.save(model.state_dict(), tmp_path / "order.pt")
    told = refused(tmp_path, tree, optimizer="numbers", order_from=tmp_path / "order.pt")
    assert "the order of its 2 groups is not known" in told
    convert_checkpoint(tmp_path / "order.pt", tmp_path / "order.safetensors")
    told = refused(tmp_path, tree, optimizer="numbers", order_from=tmp_path / "order.safetensors")
    assert "does not keep the order of model.parameters()" in told
    two = {name: {"w": torch.ones(2), "b": torch.zeros(2)} for name in ("model", "ema")}
    for name, other in (("states", optimizer.state_dict()), ("two", two)):
        torch.save(other, tmp_path / f"{name}.pt")
        told = refused(tmp_path, tree, optimizer="numbers", order_from=tmp_path / f"{name}.pt")
        assert f"{name}.pt: holds" in told
        assert "; name a file of torch.save(model.state_dict()), or a text with one key" in told
    (tmp_path / "order.txt").write_text("embed.weight\n")
    named = get_optimizer_state_dict(model, optimizer)
    told = refused(
        tmp_path,
        {**tree, "optimizer": named},
        optimizer="numbers",
        order_from=tmp_path / "order.txt",
    )
    assert "is in the optimizer's state, and not in" in told
    numbered = {**tree, "optimizer": optimizer.state_dict()}
    told = refused(tmp_path, numbered, optimizer="numbers", order_from=tmp_path / "order.pt")
    assert "numbers its parameters already" in told
    assert "no optimizer state" in refused(tmp_path, {"model": tree["model"]}, optimizer="names")
    assert "--order-from" in refused(tmp_path, tree, order_from=tmp_path / "order.txt")


def test_a_dcp_folder_of_numbers_tells_that_fsdp2_looks_for_names(tmp_path):
    model, optimizer = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "run.pt")
    torch.save({**tree["model"], "counts": {0: 1}}, tmp_path / "plain.pt")
    told = "looks for names of parameters: --optimizer names"
    for name, words in (("run", ()), ("run", ("--optimizer", "names")), ("plain", ())):
        out = f"{name}{len(words)}"
        done = run("convert", f"{name}.pt", out, "--to", "dcp", *words, cwd=tmp_path)
        assert done.exit == 0 and (told in done.err) is (out == "run0")


def test_all_ways_of_small_models_are_told_apart(tmp_path):
    """Held against a search through all assignments that keep the order within groups."""
    from ckptconv.support.errors import RefusedObject
    from ckptconv.tree.optimizer_forms import Parameter, ParameterOrder, names_of_numbers
    from ckptconv.tree.optimizer_parts import OptimizerParts
    from ckptconv.tree.optimizer_states import ParamGroup

    draws = torch.Generator().manual_seed(0)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=draws))

    outcomes = set()
    for _ in range(300):
        shapes = [(1 + draw(2),) for _ in range(1 + draw(5))]
        count = 1 + draw(len(shapes))
        cut = draw(count + 1)
        taken = sorted(torch.randperm(len(shapes), generator=draws)[:count].tolist())
        mine = [taken[at] for at in torch.randperm(count, generator=draws).tolist()]
        groups = [sorted(mine[:cut]), sorted(mine[cut:])]
        numbered = [*groups[0], *groups[1]]
        ways = [
            way
            for way in itertools.permutations(range(len(shapes)), count)
            if list(way[:cut]) == sorted(way[:cut])
            and list(way[cut:]) == sorted(way[cut:])
            and all(shapes[a] == shapes[b] for a, b in zip(way, numbered, strict=True))
        ]
        order = ParameterOrder("x", [Parameter(f"p{at}", s) for at, s in enumerate(shapes)])
        numbers = list(range(count))
        tensors = {at: {"exp_avg": of_shape(shapes[n])} for at, n in enumerate(numbered)}
        parts = OptimizerParts(
            tensors, [ParamGroup({}, numbers[:cut]), ParamGroup({}, numbers[cut:])]
        )
        try:
            found = names_of_numbers(parts, order, "optimizer")
        except RefusedObject:
            assert len(ways) > 1
            outcomes.add("refused")
        else:
            assert [found[at] for at in numbers] == [f"p{at}" for at in ways[0]]
            assert len(ways) == 1
            outcomes.add("named")
    assert outcomes == {"refused", "named"}


def of_shape(shape: tuple[int, ...]) -> Any:
    from ckptconv.io.source import MemorySource
    from ckptconv.tensors.dtypes import BY_NAME
    from ckptconv.tensors.refs import Storage, whole_view

    source = MemorySource(bytes(4 * shape[0]), Path("memory"))
    storage = Storage(source, 0, 4 * shape[0], "cpu", "0")
    return whole_view(storage, BY_NAME["float32"], shape)


def by_name(model: nn.Module, *names: list[str]) -> list[dict[str, Any]]:
    there = dict(model.named_parameters())
    return [{"params": [(name, there[name]) for name in group]} for group in names]


def alike(*names: list[str]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Three weights of one shape, in groups that are not in the model's order."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    optimizer = torch.optim.Adam(by_name(model, *names), lr=0.01)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_names_beside_the_numbers_go_with_them(tmp_path):
    model, optimizer = alike(["2.weight", "0.weight"], ["1.weight"])
    tree = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    (tmp_path / "order.txt").write_text("0.weight\n1.weight\n2.weight\n")
    made = converted(tmp_path, tree, optimizer="numbers", order_from=tmp_path / "order.txt")
    told = made["optimizer"]["param_groups"]
    assert [group["param_names"] for group in told] == [["0.weight", "2.weight"], ["1.weight"]]
    states = {id(p): state for p, state in optimizer.state.items()}
    for group in told:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            wanted = states[id(model.get_parameter(name))]["exp_avg"]
            assert torch.equal(made["optimizer"]["state"][number]["exp_avg"], wanted)


def test_two_parameters_of_one_name_are_refused(tmp_path):
    model, optimizer = alike(["0.weight", "1.weight"], ["2.weight"])
    state = optimizer.state_dict()
    state["param_groups"][1]["param_names"] = ["1.weight"]
    with pytest.raises(CheckpointError, match=r"groups have 1\.weight more than once"):
        converted(tmp_path, {"model": model.state_dict(), "optimizer": state}, optimizer="names")
    state["param_groups"][1]["params"] = [1]
    with pytest.raises(CheckpointError, match="groups have 1 more than once"):
        converted(tmp_path, {"model": model.state_dict(), "optimizer": state}, optimizer="names")


def test_sorted_keys_are_not_the_order_of_a_module(tmp_path):
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(11)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    weights = dict(sorted(model.state_dict().items()))  # 0, 1, 10, 2, …
    tree = {"model": weights, "optimizer": optimizer.state_dict()}
    with pytest.raises(CheckpointError, match="the keys beside them are sorted"):
        converted(tmp_path, tree, optimizer="names")
    made = converted(tmp_path, {**tree, "model": model.state_dict()}, optimizer="names")
    assert list(made["optimizer"]["state"]) == list(model.state_dict())


def test_a_flat_state_alone_is_an_optimizers(tmp_path):
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    torch.save(flat, tmp_path / "flat.pt")
    with pytest.raises(CheckpointError, match="state: no weights"):
        convert_checkpoint(tmp_path / "flat.pt", tmp_path / "flat.safetensors")
    made = converted(tmp_path, flat, optimizer="names")
    assert same(made["state"], get_optimizer_state_dict(model, optimizer)["state"])
    # a model may have a part of one of the names
    part = {"state.weight": torch.ones(2), "state.bias": torch.ones(1)}
    torch.save(part, tmp_path / "part.pt")
    convert_checkpoint(tmp_path / "part.pt", tmp_path / "part.safetensors")


def as_share(state: dict[str, Any]) -> dict[str, Any]:
    """What a rank of two keeps for its half of the elements, where it does not say so."""
    for each in state["state"].values():
        each["exp_avg"], each["exp_avg_sq"] = torch.rand(8), torch.rand(8)
    return state


SHARE = r"has exp_avg of shape \[8\] for 0\.weight, which is \[4, 4\]; this may be the share of one"


@pytest.mark.parametrize(
    "options", [{"optimizer": "numbers"}, {"optimizer": "flat"}, {"to": "dcp"}]
)
def test_the_share_of_a_rank_is_not_the_state_of_a_parameter(options, tmp_path):
    model, optimizer = alike(["0.weight", "1.weight", "2.weight"])
    named = as_share(get_optimizer_state_dict(model, optimizer))
    torch.save({"model": model.state_dict(), "optimizer": named}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=SHARE):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", **options)
    assert not (tmp_path / "out.pt").exists()
    numbers = as_share(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=SHARE):
        converted(tmp_path, {"model": model.state_dict(), "optimizer": numbers}, optimizer="names")


def test_the_share_of_a_rank_without_weights_is_told_by_those_of_the_order(tmp_path):
    model, optimizer = alike(["0.weight", "1.weight", "2.weight"])
    torch.save(model.state_dict(), tmp_path / "model.pt")
    named = as_share(get_optimizer_state_dict(model, optimizer))
    with pytest.raises(CheckpointError, match=SHARE):
        converted(tmp_path, named, optimizer="numbers", order_from=tmp_path / "model.pt")


def test_moments_of_low_rank_have_shapes_of_their_own(tmp_path):
    """As GaLore's optimizers keep them, with the settings of their groups."""
    model, optimizer = alike(["0.weight", "1.weight"])
    state = get_optimizer_state_dict(model, optimizer)
    for each in state["state"].values():
        each["exp_avg"], each["exp_avg_sq"] = torch.rand(2, 4), torch.rand(2, 4)
    tree = {"model": model.state_dict(), "optimizer": state}
    with pytest.raises(CheckpointError, match=r"exp_avg of shape \[2, 4\] for 0\.weight"):
        converted(tmp_path, tree, optimizer="numbers")
    state["param_groups"][0] |= {"rank": 2, "update_proj_gap": 200, "scale": 0.25}
    made = converted(tmp_path, tree, optimizer="numbers")["optimizer"]
    assert torch.equal(made["state"][1]["exp_avg"], state["state"]["1.weight"]["exp_avg"])


def test_a_state_of_no_group_gets_no_number(tmp_path):
    model, optimizer = alike(["0.weight", "1.weight", "2.weight"])
    state = get_optimizer_state_dict(model, optimizer)
    state["param_groups"][0]["params"] = ["0.weight", "2.weight"]
    with pytest.raises(CheckpointError, match=r"state of 1\.weight belongs to none"):
        converted(tmp_path, {"model": model.state_dict(), "optimizer": state}, optimizer="numbers")
