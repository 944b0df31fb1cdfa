"""Whatever the layout of a checkpoint, what docs/state-dicts.md means is taken, or an error lists
the choices.

Layouts are made up from seeds (`layouts`). The rule in plain Python says what is right; it is held
against examples here. A seed that fails is tried again with ``PYTHONPATH=tests:tests/trust python
-m layouts SEED``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptconv import load_portable
from ckptconv.support.errors import AmbiguousStateDict
from helpers.examples import examples, some
from layouts import rule
from layouts.checks import decision, differences, same, save
from layouts.compose import Layout, draw
from layouts.labels import table
from layouts.rule import Refused, Taken, decide
from layouts.showing import shown, told

pytestmark = pytest.mark.filterwarnings("ignore")

# ----------------------------------------------------------------------------------------- examples

_numbers: Iterator[int] = iter(range(1, 1_000_000, 10))


def t(numel: int = 3) -> torch.Tensor:
    """A tensor that no other equals; of one element: without dimensions."""
    made = torch.arange(numel, dtype=torch.float32) + next(_numbers)
    return made if numel > 1 else made.reshape(())


def sd(*keys: str) -> dict[str, Any]:
    return {key: t() for key in keys or ("fc.weight", "fc.bias")}


def adam() -> dict[str, Any]:
    return {
        "state": {0: {"step": t(1), "exp_avg": t()}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }


def marked(state_dict: dict[str, Any]) -> dict[str, Any]:
    """With the `_metadata` of a module."""
    made = OrderedDict(state_dict)
    made._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return made


_BOTH = sd("w")
_LIGHTNING = {
    "pytorch-lightning_version": "2.5.5",
    "epoch": 1,
    "global_step": 2,
    "callbacks": {},
    "loops": {},
}
_TIMM = {"epoch": 3, "arch": "resnet18", "version": 2, "args": None}
_NETWORKS = ("upscaler", "optimized_model", "random_encoder", "scheduler_net", "resampler")

EXAMPLES: dict[str, tuple[Any, str]] = {
    # parts that are never the model
    "an optimizer beside the model": (
        {"model": sd(), "optimizer": adam(), "epoch": 3},
        "model: fc.weight fc.bias",
    ),
    "an optimizer at the root's weights": (
        {**sd(), "optimizer": adam(), "epoch": 3},
        ".: fc.weight fc.bias",
    ),
    "an optimizer by its label alone": (
        {"net": sd("w"), "Adam-Optimizer_2": {"layer.weight": t()}},
        "net: w",
    ),
    "an optimizer under any label": ({"net": sd("w"), "optimizer_G": adam()}, "net: w"),
    "a model below an optimizer": (
        {"net": sd("w"), "optim": {"model": sd(), "state_dict": sd()}},
        "net: w",
    ),
    "random states at the root": (
        {"net": sd("w"), "cuda_rng_state_all": [t(8), t(8)], "rng_state": t(8)},
        "net: w",
    ),
    "nothing but an optimizer": (adam(), "error"),
    "nothing but training states": (
        {"optimizer": {"layer.weight": t()}, "rng_states": [t(8)], "epoch": 3},
        "error",
    ),
    "nothing but the tensor of a training state": (
        {"optimizer": {"layer.weight": t()}, "rng_state": t(8)},
        ".: rng_state",
    ),
    "two things in one label": (
        {"model": sd("w"), "model_and_optimizer": sd("b.w")},
        "error: model model_and_optimizer",
    ),
    "a key of a module whose last word is an optimizer's": (
        {**sd("fc.w", "net.optim"), "rng": t(8)},
        ".: fc.w net.optim rng",
    ),
    "opt and sched": (
        {"model": sd("w"), "opt": sd("b"), "sched": sd("c")},
        "error: model opt sched",
    ),
    "random states of two scripts": (
        {"model": sd("w"), "random": [t(), t()], "np_random_state": [t(), t()]},
        "model: w",
    ),
    "random by itself": ({"model": sd("w"), "random_samples": [t(), t()]}, "error: model"),
    **{
        f"a network called {name}": ({name: sd("w"), "optimizer": adam()}, f"{name}: w")
        for name in _NETWORKS
    },
    # numbers of the training
    "the accuracy as a tensor": (
        {"state_dict": sd(), "best_acc1": t(1)},
        "state_dict: fc.weight fc.bias",
    ),
    "metrics beside weights": ({**sd("module.w"), "metrics": {"loss": t(1)}}, ".: w"),
    "losses in a list": ({"model": sd("w"), "train_losses": [t(1) for _ in range(9)]}, "model: w"),
    "a number that is not a number of the training": (
        {"model": sd(), "logit_scale": t(1)},
        "error: . model",
    ),
    "a number whose key a module could have": (
        {"model": sd("w"), "best": {"loss.weight": t(1)}},
        "error: model best",
    ),
    "a number whose label is a path": ({"model": sd("w"), "val/acc@0.5": t(1)}, "model: w"),
    "numbers in a list in a dict": (
        {"model": sd("w"), "history": {"losses": [t(1), t(1)]}},
        "model: w",
    ),
    "a loss of many elements": ({"model": sd(), "loss": t(3)}, "error: . model"),
    "nothing but numbers": ({"metrics": {"loss": t(1)}, "epoch": 3}, "metrics: loss"),
    # candidates
    "weights beside an average": ({**sd(), "ema": sd()}, "error: . ema"),
    "the root alone": (
        {**sd("module.fc.weight", "module.fc.bias"), "optimizer": adam()},
        ".: fc.weight fc.bias",
    ),
    "tensors at two levels": (
        {"model": {**sd("w"), "encoder": sd("k")}},
        "error: model. model.encoder model",
    ),
    "extra states and packed parameters": (
        {
            "model": {
                "fc.weight": t(),
                "fc._extra_state": {"scale": t()},
                "q._packed_params": (t(), None),
            }
        },
        "model: fc.weight fc._extra_state q._packed_params",
    ),
    "a list under a key with a dot": (
        {"fc.weight": t(), "attn.masks": [t(), t()]},
        ".: fc.weight attn.masks",
    ),
    "a dict under a key with a dot": (
        {"model": {"w": t(), "fc.stats": {"mean": t()}}},
        "error: model. model.fc.stats model",
    ),
    "keys that are tuples": ({"model": sd("w"), "places": {(0, 1): t()}}, "error: model"),
    "keys that are numbers": ({0: t(), 1: t()}, ".: 0 1"),
    # the choice
    "a usual label": ({"model": sd("w"), "extras": sd("a")}, "error: model extras"),
    "metadata": ({"first": marked(sd("w")), "second": sd("a")}, "error: first second ."),
    "a key with a dot": ({"first": sd("a"), "second": sd("fc.w", "b")}, "error: first second ."),
    "a word of a module": (
        {"first": sd("a"), "second": sd("weight_ih_l0")},
        "error: first second .",
    ),
    "tensors before arrays": (
        {"first": {"w": np.ones(3)}, "second": sd("v")},
        "error: first second .",
    ),
    "two of one rank": ({"model": sd(), "ema": sd(), "first": sd("a")}, "error: model ema"),
    "statistics above the model": ({"model": sd(), "mean": t(), "std": t()}, "error: . model"),
    "statistics in a dict of their own": (
        {"model": sd(), "stats": {"mean": t(), "std": t()}},
        "error: model stats",
    ),
    "statistics above, deeper": (
        {"run": {"model": sd(), "mean": t()}, "epoch": 3},
        "error: run. run.model",
    ),
    "more tensors than the model has": (
        {"model": sd(), "data": {"samples": [t() for _ in range(3)]}},
        "error: model",
    ),
    "as many tensors as the model has": (
        {"model": sd(), "data": {"samples": [t(), t()]}},
        "error: model",
    ),
    "a list above the model": ({"model": sd(), "samples": [t()]}, "error: model"),
    "a list beside the model in a list": ({"nets": [sd(), t()]}, "error: nets.0"),
    "packed values count": (
        {
            "model": {**sd("fc.w"), "q._packed_params": (t(), t())},
            "stats": {"a": t(), "b": t(), "c": t()},
        },
        "error: model stats",
    ),
    "a key in common": ({"model": sd("w", "v"), "extras": sd("v")}, "error: model extras"),
    "the rest of an average": ({"model": sd("w"), "net_ema": {"shadow": [t()]}}, "error: model"),
    "the same model under the name of an average": ({"model": _BOTH, "ema": _BOTH}, "model: w"),
    "a usual label spelled otherwise": (
        {"Model": sd("w"), "extras": sd("a")},
        "error: Model extras .",
    ),
    "others that look like a module": (
        {"model": sd(), "ema": sd(), "best": sd("a.b")},
        "error: model ema best",
    ),
    "what looks like a module": ({"model": sd(), "refiner": sd("conv.w")}, "error: model refiner"),
    "one and the same twice": ({"best": _BOTH, "last": _BOTH}, "best: w"),
    "first below an optimizer": ({"optimizer": {"params": _BOTH}, "weights": _BOTH}, "weights: w"),
    "two in a list": ([sd(), sd()], "error: 0 1"),
    "one in a list": ([sd(), adam(), 7], "0: fc.weight fc.bias"),
    # wrappers
    "numbers beside a wrapped model": (
        {**sd("module.w", "module.v"), "epoch": t(1), "arch": "r50"},
        ".: w v epoch",
    ),
    "a key without the wrapper": ({**sd("module.w"), "scale": t()}, ".: module.w scale"),
    "a number with a dot": ({**sd("module.w"), "best.epoch": t(1)}, ".: module.w best.epoch"),
    "numbers by the label above": ({"best": {**sd("module.w"), "alpha": t(1)}}, "best: w alpha"),
    # frameworks
    "timm with an average": (
        {**_TIMM, "state_dict": sd(), "state_dict_ema": sd()},
        "state_dict_ema: fc.weight fc.bias",
    ),
    "Lightning with averages": (
        {
            **_LIGHTNING,
            "state_dict": sd(),
            "callbacks": {"EMA": {"weights": sd()}},
            "optimizer_states": [adam()],
        },
        "state_dict: fc.weight fc.bias",
    ),
    "Lightning with weights above": (
        {**_LIGHTNING, "state_dict": sd(), "mean": t()},
        "error: . state_dict",
    ),
    "MMEngine with its own weights": (
        {
            "meta": {"mmengine_version": "0.10.7"},
            "state_dict": sd(),
            "ema_state_dict": sd("module.fc.weight"),
        },
        "state_dict: fc.weight fc.bias",
    ),
    "accelerate": (
        {"model": sd(), "random_states_0": {"torch": t()}, "loss_scale": t(1)},
        "model: fc.weight fc.bias",
    ),
    "accelerate with a part that it does not write": (
        {"model": sd(), "ema": sd(), "random_states_0": {"torch": t()}},
        "error: model ema",
    ),
    "a codebook of one tensor": (
        {"model": sd("a.w", "b.w", "c.w"), "quantizer": {"codebook": t()}, "epoch": 3},
        "error: model quantizer",
    ),
    "a generator's state, and a generator": (
        {"model": sd("w"), "generator_state": torch.zeros(5056, dtype=torch.uint8)},
        "model: w",
    ),
    "the state of a generator that is a network": (
        {"model": sd("w"), "generator_state": sd("w.w")},
        "error: model generator_state",
    ),
    "nanoGPT with an average": (
        {"model": sd(), "model_args": {}, "iter_num": 3, "ema": sd()},
        "error: model ema",
    ),
    "Megatron's parts": (
        {
            "model": {"embedding": sd("words.weight"), "encoder": sd("layers.0.w")},
            "optimizer": adam(),
            "iteration": 3,
        },
        "error: model.embedding model.encoder model",
    ),
    # whole files
    "a tensor": (t(), ": tensor"),
    "a list of tensors": ([t(), t()], ": 0 1"),
}


def in_short(verdict: Taken | Refused) -> str:
    if isinstance(verdict, Taken):
        return f"{verdict.name}: {' '.join(verdict.state_dict)}"
    return f"error: {' '.join(verdict.choices)}" if verdict.choices else "error"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_rule_in_python_says_of_examples_what_the_page_says(name):
    tree, expected = EXAMPLES[name]
    assert in_short(decide(tree)) == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_decided_so(name, tmp_path):
    tree, _ = EXAMPLES[name]
    assert list(decision(save(Layout(0, name, tree), tmp_path), decide(tree))) == []


_INNER = sd("fc.w")
AVERAGES: dict[str, dict[str, Any]] = {
    "timm": {**_TIMM, "state_dict": sd(), "state_dict_ema": _INNER},
    "a script": {"model": sd(), "ema": _INNER, "ema_decay": 0.99, "use_ema": True},
    "a callback": {**_LIGHTNING, "state_dict": sd(), "callbacks": {"EMAWeights": _INNER}},
    "below another part": {"model": sd(), "trainer": {"part": {"net_ema": _INNER}},
        "emanate": sd()},
    "MMEngine's hook": {
        "meta": {"mmengine_version": "0.10.7"}, "state_dict": _INNER,
        "ema_state_dict": {**sd("module.fc.w"), "steps": t(1)}, "message_hub": {},
    },
    "beside a buffer with the word": {"state_dict": sd("vq.ema_w"),
        "callbacks": {"x": {"EMA": _INNER}}},
    "beside numbers": {"model": sd(), "x": {"ema": _INNER}, "ema_decay": t(1),
        "ema_metrics": {"loss": t(1)}},
    "Lightning's weight averaging": {
        **_LIGHTNING, "state_dict": _INNER, "current_model_state": sd(),
        "averaging_state": {"n_averaged": t(1)},
        "callbacks": {"EMAWeightAveraging": {"latest_update_step": 3}},
    },
}  # fmt: skip
"""By who writes it, a tree of which `_INNER` is the average."""


@pytest.mark.parametrize("name", AVERAGES)
def test_only_ema_takes_the_average_whatever_it_is_called(name, tmp_path):
    loaded = load_portable(save(Layout(0, name, AVERAGES[name]), tmp_path), only="ema")
    assert same(dict(loaded), _INNER)


# ------------------------------------------------------------------------------------------- labels


def test_the_rule_in_python_reads_labels_as_people_do():
    read = [
        (label, rule.names_training(label), rule.names_number(label)) for label, _, _ in table()
    ]
    assert read == table()


def test_labels_split_into_words():
    split = {
        "EMAModel": "ema model", "stateDict": "state dict", "acc1": "acc 1",
        "rng-state 0": "rng state 0",
        "HTTPServerV2": "http server v 2", "_orig_mod.fc": "orig mod fc", "größeNetz": "größe netz",
        "PSNR": "psnr", "": "", "0": "0",
    }  # fmt: skip
    assert {label: " ".join(rule.words(label)) for label in split} == split


def _is_taken(tree: Any, folder: Path) -> bool:
    try:
        load_portable(save(Layout(0, "", tree), folder))
    except AmbiguousStateDict:
        return False
    return True


def test_a_label_names_a_training_state_by_its_last_word(tmp_path):
    def is_state(label: str) -> bool:
        return _is_taken({"model": sd(), label: sd("layer.weight", "layer.bias")}, tmp_path)

    assert {label for label, _, _ in table() if is_state(label)} == {
        label for label, training, _ in table() if training
    }


def test_a_label_names_a_number_of_the_training_by_any_of_its_words(tmp_path):
    def is_left(label: str) -> bool:
        return _is_taken({"model": sd(), label: t(1)}, tmp_path)

    left = {label for label, training, number in table() if training or number}
    assert {label for label, _, _ in table() if is_left(label)} == left


# ------------------------------------------------------------------------------------------ layouts

QUICK, MANY, CHUNK, FULL = 350, 10_000, 50, 8
"""Layouts of a run, of the long one, of one test, and every how many of them the outputs are made
too.
"""


def wrong_layouts(seeds: range, folder: Path) -> list[str]:
    """Of each layout that is decided otherwise than the rule says: its tree, what the rule says,
    and what ckptconv does.
    """
    told_of = []
    for seed in seeds:
        layout = draw(seed)
        if found := differences(layout, folder, full=seed % FULL == 0):
            lines = [
                f"seed {seed} ({layout.kind}): {shown(layout.tree)}",
                f"rule: {told(decide(layout.tree))}",
                *found,
            ]
            told_of.append("\n  ".join(lines))
    return told_of


def _chunks(begin: int, end: int) -> list[range]:
    return [range(first, min(first + CHUNK, end)) for first in range(begin, end, CHUNK)]


def _expect_right(seeds: range, folder: Path, figure: Callable[..., None]) -> None:
    wrong = wrong_layouts(seeds, folder)
    assert not wrong, f"{len(wrong)} of {len(seeds)} layouts:\n" + "\n\n".join(wrong[:3])
    figure("layouts decided by the rule", len(seeds))


@pytest.mark.parametrize("seeds", some(3, _chunks(0, QUICK)), ids=str)
def test_layouts_are_decided_by_the_rule(seeds, tmp_path, figure):
    _expect_right(seeds, tmp_path, figure)


LONG = _chunks(QUICK, MANY)


@pytest.mark.trust
@pytest.mark.parametrize("seeds", some(examples(len(LONG)), LONG), ids=str)
def test_thousands_of_layouts_are_decided_by_the_rule(seeds, tmp_path, figure):
    _expect_right(seeds, tmp_path, figure)


# --------------------------------------------------------------------- the generator and the checks


def test_a_layout_is_that_of_its_seed():
    assert shown(draw(7).tree) == shown(draw(7).tree)
    assert shown(draw(7).tree) != shown(draw(8).tree)


def test_the_layouts_are_of_all_kinds():
    layouts = [draw(seed) for seed in range(QUICK)]
    verdicts = [decide(layout.tree) for layout in layouts]
    refused = [verdict for verdict in verdicts if isinstance(verdict, Refused)]
    taken = [verdict for verdict in verdicts if isinstance(verdict, Taken)]
    assert {layout.kind.partition(",")[0] for layout in layouts} == {
        "plain", "script", "flat", "several", "part in part", "framework", "nothing", "bare"
    }  # fmt: skip
    assert min(len(refused), len(taken)) > QUICK / 5
    assert sum(not verdict.choices for verdict in refused) > 5
    assert sum(bool(verdict.left_out) for verdict in taken) > QUICK / 20
    assert sum(verdict.name.endswith(".") for verdict in taken) > QUICK / 20


def test_all_tensors_of_a_layout_differ():
    for seed in range(100):
        tensors = {
            id(value): value
            for _, value in rule.leaves_of(draw(seed).tree)
            if isinstance(value, torch.Tensor)
        }
        assert len(
            {(tensor.dtype, *tensor.reshape(-1).tolist()) for tensor in tensors.values()}
        ) == len(tensors)


@pytest.mark.parametrize(
    "tamper", ["another part", "a key", "a value", "a choice", "no error", "an error"]
)
def test_a_decision_that_differs_is_noticed(tamper, tmp_path):
    tree: Any = {"model": sd(), "metrics": {"loss": t(1)}}
    verdict = decide(tree)
    assert isinstance(verdict, Taken)
    path = save(Layout(0, "", tree), tmp_path)
    if tamper in ("another part", "a key"):
        verdict.state_dict = (
            sd("w") if tamper == "another part" else {**verdict.state_dict, "more": t()}
        )
    if tamper == "a value":
        verdict.state_dict["fc.bias"] = t()
    if tamper == "no error":
        assert list(decision(path, Refused({"model": verdict.state_dict})))
        return
    if tamper in ("a choice", "an error"):
        choices = decide({"model": tree["model"], "ema": (ema := sd())})
        path = save(Layout(0, "", {"model": tree["model"], "ema": ema}), tmp_path)
        assert isinstance(choices, Refused)
        assert list(decision(path, choices)) == []
        choices.choices["student"] = sd()
        assert list(decision(path, choices if tamper == "a choice" else verdict))
        return
    assert list(decision(path, verdict))
