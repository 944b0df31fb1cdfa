"""From a seed a layout: blocks under labels, at the root, nested, in lists, and as frameworks lay
them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layouts.blocks import NETWORKS, ONE_ELEMENT, USUAL, Blocks


@dataclass(frozen=True)
class Layout:
    """A tree, the seed that it is made of, and the name of its kind."""

    seed: int
    kind: str
    tree: Any


def draw(seed: int) -> Layout:
    """The layout of a seed, always the same."""
    blocks = Blocks(seed)
    kind = blocks.random.choices([*_KINDS], [weight for weight, _ in _KINDS.values()])[0]
    tree = _KINDS[kind][1](blocks)
    if kind not in ("bare", "framework") and blocks.chance(0.2):
        kind, tree = kind + ", nested", nested(blocks, tree)
    return Layout(seed, kind, tree)


# -------------------------------------------------------------------------------------------- sides

_STATES = ("training", "training", "training", "number", "config", "metrics")
_ALL = (
    *_STATES,
    "statistics",
    "listed",
    "one",
    "vector",
    "direct",
    "average",
    "network",
    "again",
    "nearly",
    "below",
    "codebook",
    "running",
    "values",
    "latents",
    "anchors",
    "averaged",
    "scaler",
    "generators",
    "tuples",
)


def with_sides(
    blocks: Blocks,
    made: dict[Any, Any],
    models: list[dict[str, Any]],
    kinds: tuple[str, ...],
    most: int,
) -> None:
    """Put up to `most` other things beside what there is, before and behind it; what has a label
    already stays.
    """
    added: dict[Any, Any] = {}
    for _ in range(blocks.random.randint(0, most)):
        for label, value in _side(blocks, blocks.pick(*kinds), models).items():
            added.setdefault(label, value)
    items = [*((label, value) for label, value in added.items() if label not in made)]
    if blocks.chance(0.5):
        made.update(items)
        return
    there = list(made.items())
    made.clear()
    made.update([*items, *there])


def _side(blocks: Blocks, kind: str, models: list[dict[str, Any]]) -> dict[Any, Any]:
    simple: dict[str, Callable[[], tuple[Any, Any]]] = {
        "training": blocks.training_state,
        "number": blocks.number,
        "config": blocks.config,
        "metrics": blocks.metrics,
        "statistics": blocks.statistics,
        "listed": blocks.listed,
        "nearly": blocks.nearly,
        "one": lambda: (blocks.pick(*ONE_ELEMENT), blocks.scalar()),
        "vector": lambda: ("quantizer", {blocks.pick("ema", "ema_size", "codes"): blocks.weight()}),
        "average": lambda: blocks.average(blocks.pick(*models) if models else {"fc.weight": 0}),
        "network": lambda: (blocks.pick(*NETWORKS, *USUAL[:6]), blocks.state_dict()),
        "codebook": lambda: (
            blocks.pick("quantizer", "vq", "vocab", "memory"),
            {blocks.pick("codebook", "vectors", "feats"): blocks.any_size()},
        ),
        "running": lambda: (
            blocks.pick("obs_rms", "ret_rms", "normalizer"),
            blocks.moments("mean", blocks.pick("var", "std"), "count"),
        ),
        "latents": lambda: (
            blocks.pick("latents", "memory", "codes"),
            blocks.pick(
                {"z": blocks.any_size()}, blocks.any_size(), [blocks.any_size(), blocks.any_size()]
            ),
        ),
        "anchors": lambda: ("anchors", blocks.pick(blocks.any_size(), blocks.array())),
        "averaged": lambda: (
            blocks.pick("averaged", "polyak"),
            {"decay": 0.9, "shadow_params": [blocks.any_size(), blocks.any_size()]},
        ),
        "scaler": lambda: (
            blocks.pick("scaler", "target_scaler", "scalers"),
            blocks.pick(
                blocks.moments("mean", "std"),
                {"scale": blocks.scalar(), "growth_tracker": blocks.scalar()},
            ),
        ),
        "generators": lambda: (
            blocks.pick("cuda", "torch_states", "np", "worker_states", "blocks"),
            blocks.pick(
                [blocks.random_bytes()],
                blocks.random_bytes(),
                {"bit_generator": "MT19937", "state": {"key": blocks.array(), "pos": 3}},
            ),
        ),
        "values": lambda: (blocks.pick("value_net", "critic_b"), {"v1": blocks.any_size()}),
        "tuples": lambda: (
            "by_place",
            {("layer", 1): blocks.weight(), ("layer", 2): blocks.weight()},
        ),
    }
    if kind in simple:
        return dict([simple[kind]()])
    if kind == "direct":  # a statistic of the data that stands beside the model itself
        return {
            name: blocks.pick(blocks.weight(), blocks.array())
            for name in blocks.pick(("mean", "std"), ("mean",), ("pos",))
        }
    if kind == "again":  # the very same dict once more
        return {
            blocks.pick("model", "best_weights", "latest", "optim"): blocks.pick(*models)
            if models
            else {}
        }
    inside = dict([blocks.training_state()])
    inside.update(_side(blocks, blocks.pick(*_ALL[:-2]), models))
    return {blocks.pick("trainer", "extra", "callbacks", "loops", "state"): inside}


# -------------------------------------------------------------------------------------------- kinds


def plain(blocks: Blocks) -> Any:
    """A state dict, with numbers beside its tensors at most."""
    made = blocks.state_dict()
    if blocks.chance(0.3):
        with_sides(blocks, made, [], ("number", "config"), 2)
    return made


def script(blocks: Blocks) -> Any:
    """A model under a label, and what a script keeps beside it."""
    model = blocks.state_dict()
    made = {blocks.pick(*USUAL, *USUAL[:3] * 6, *NETWORKS[:12]): model}
    with_sides(blocks, made, [model], blocks.pick(_STATES, _STATES, _ALL), 5)
    return made


def flat(blocks: Blocks) -> Any:
    """Weights at the root, and what a script keeps beside them."""
    made = blocks.pick(blocks.module, blocks.state_dict)()
    weights = dict(made)
    with_sides(blocks, made, [weights], blocks.pick(_STATES, _ALL), 4)
    return made


def several(blocks: Blocks) -> Any:
    """Two to four networks."""
    count = blocks.random.randint(2, 4)
    labels = blocks.pick(USUAL, NETWORKS, [*USUAL, *NETWORKS])
    made = {label: blocks.state_dict() for label in blocks.random.sample(labels, count)}
    with_sides(blocks, made, list(made.values()), blocks.pick(_STATES, _ALL), 3)
    return made


def part_in_part(blocks: Blocks) -> Any:
    """A model whose parts are dicts of their own, as Megatron writes it, or with tensors at two
    levels.
    """
    part = {
        blocks.pick("embedding", "encoder", "trunk"): blocks.state_dict(),
        blocks.pick("output", "head"): blocks.state_dict(),
    }
    if blocks.chance(0.4):
        part = {**blocks.state_dict(), **part}
    made: dict[str, Any] = {blocks.pick("model", "language_model", "net"): part}
    with_sides(blocks, made, [part], _STATES, 3)
    return made


def nothing(blocks: Blocks) -> Any:
    """Training states, numbers and settings, and no model."""
    if blocks.chance(0.2):
        return blocks.optimizer()
    made = dict([blocks.training_state()])
    with_sides(blocks, made, [], _STATES, 4)
    return made


def bare(blocks: Blocks) -> Any:
    """A tensor, a list of tensors, or a list of what saves of several objects hold."""
    return blocks.pick(
        blocks.weight(),
        blocks.tensors(1, 4),
        tuple(blocks.tensors(1, 3)),
        [blocks.state_dict(), blocks.optimizer()],
        (blocks.state_dict(), 7),
        [blocks.state_dict(), blocks.state_dict()],
        dict(enumerate(blocks.tensors(1, 4))),
        {"models": [blocks.state_dict()], "epoch": 3},
        {"w": blocks.array(), "b": blocks.array()},
    )


def nested(blocks: Blocks, tree: Any) -> Any:
    """The tree once or twice deeper, with or without something beside it."""
    for _ in range(blocks.random.randint(1, 2)):
        made = {
            blocks.pick(
                "checkpoint", "payload", "app", "last", "trainer_state", "data", "best", "ema_run"
            ): tree
        }
        if blocks.chance(0.5):
            with_sides(blocks, made, [], blocks.pick(_STATES, _ALL), 2)
        tree = blocks.pick(made, made, made, [tree, 3])
    return tree


# --------------------------------------------------------------------------------------- frameworks


def framework(blocks: Blocks) -> Any:
    """What a framework writes, with or without an average, numbers and more beside the model."""
    write = blocks.pick(
        _lightning, _timm, _mmengine, _nanogpt, _deepspeed, _fvcore, _torchtitan, _accelerate
    )
    model = blocks.module()
    made: dict[str, Any] = write(blocks, model)
    if blocks.chance(0.4):
        with_sides(
            blocks,
            made,
            [model],
            ("average", "number", "statistics", "network", "listed", "direct"),
            2,
        )
    return made


def _lightning(blocks: Blocks, model: dict[str, Any]) -> dict[str, Any]:
    monitor = "ModelCheckpoint{'monitor': 'val_loss', 'mode': 'min', 'every_n_train_steps': 0}"
    best = {
        "best_model_score": blocks.scalar(),
        "best_k_models": {"epoch=1.ckpt": blocks.scalar()},
        "kth_value": blocks.scalar(),
    }
    made: dict[str, Any] = {
        "epoch": 1, "global_step": 5, "pytorch-lightning_version": "2.5.5", "state_dict": model,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {monitor: best}, "optimizer_states": [blocks.optimizer()],
        "lr_schedulers": [blocks.scheduler()],
        "hparams_name": "kwargs", "hyper_parameters": {"lr": 0.1},
    }  # fmt: skip
    if blocks.chance(0.3):
        made["callbacks"]["EMACallback"] = {"ema_weights": blocks.copy(model)}
    if blocks.chance(0.2):
        made["current_model_state"] = blocks.copy(model)
        made["averaging_state"] = {"n_averaged": blocks.scalar()}
    return made


def _timm(blocks: Blocks, model: dict[str, Any]) -> dict[str, Any]:
    made = {
        "epoch": 3,
        "arch": "resnet18",
        "state_dict": model,
        "optimizer": blocks.optimizer(),
        "version": 2,
        "args": None,
    }
    if blocks.chance(0.6):
        made["state_dict_ema"] = blocks.copy(model)
    if blocks.chance(0.5):
        made["amp_scaler"] = {"scale": 65536.0}
        made["metric"] = blocks.scalar()
    return made


def _mmengine(blocks: Blocks, model: dict[str, Any]) -> dict[str, Any]:
    made = {
        "meta": {"epoch": 1, "iter": 7, "mmengine_version": "0.10.7", "seed": 3, "CLASSES": ("a",
            "b")},
        "state_dict": model, "message_hub": {"log_scalars": {"loss": [0.5]},
            "runtime_info": {"iter": 7}},
        "optimizer": blocks.optimizer(), "param_schedulers": [blocks.scheduler()],
    }  # fmt: skip
    if blocks.chance(0.5):
        average = {f"module.{key}": value for key, value in blocks.copy(model).items()}
        made["ema_state_dict"] = {**average, "steps": blocks.scalar()}
    return made


def _nanogpt(blocks: Blocks, model: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model, "optimizer": blocks.optimizer(), "model_args": {"n_layer": 2},
        "iter_num": 7,
        "best_val_loss": blocks.scalar(), "config": {"batch_size": 12},
    }  # fmt: skip


def _fvcore(blocks: Blocks, model: dict[str, Any]) -> dict[str, Any]:
    if blocks.chance(0.5):
        return {
            "model": model,
            "trainer": {"iteration": 7, "optimizer": blocks.optimizer(), "hooks": {}},
            "iteration": 7,
        }
    return {
        "model": model,
        "optimizer": blocks.optimizer(),
        "scheduler": blocks.scheduler(),
        "iteration": 7,
    }


def _torchtitan(blocks: Blocks, model: dict[str, Any]) -> dict[str, Any]:
    state = {"step": blocks.tensor(1), "ntokens_seen": blocks.tensor(1)}
    return {
        **model, "optimizer": blocks.optimizer(), "lr_scheduler": blocks.scheduler(),
        "train_state": state,
        "dataloader": {"dp_rank_0": b"\x80\x04N.", "world_size": 1},
    }  # fmt: skip


def _accelerate(blocks: Blocks, model: dict[str, Any]) -> dict[str, Any]:
    states = {
        "torch_manual_seed": blocks.random_bytes(),
        "step": 3,
        "torch_cuda_manual_seed": [blocks.random_bytes()],
    }
    made = {
        "model": model,
        "optimizer": blocks.optimizer(),
        "lr_scheduler": blocks.scheduler(),
        "step": 3,
    }
    return {**made, "random_states_0": states}


def _deepspeed(blocks: Blocks, model: dict[str, Any]) -> dict[str, Any]:
    return {
        "module": model, "buffer_names": [], "optimizer": blocks.pick(None, blocks.optimizer()),
        "lr_scheduler": None,
        "param_shapes": None, "frozen_param_shapes": None, "frozen_param_fragments": None,
        "shared_params": {},
        "skipped_steps": 0, "global_steps": 2, "global_samples": 8, "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {"train_batch_size": 4}, "ds_version": "0.17.5",
    }  # fmt: skip


_KINDS: dict[str, tuple[int, Callable[[Blocks], Any]]] = {
    "plain": (8, plain),
    "script": (30, script),
    "flat": (18, flat),
    "several": (14, several),
    "part in part": (7, part_in_part),
    "framework": (16, framework),
    "nothing": (4, nothing),
    "bare": (5, bare),
}
