"""docs/state-dicts.md in plain Python over a loaded tree: which state dict is meant, or which ones
an error must list.

Slow and simple on purpose, and nothing of ckptconv. Where the page leaves something open, it is
read so:

- A key looks like a module's where it has a dot and no slash, or a word of a module; one without
  tensors does not count.
- A tensor whose own key looks like a module's is never a number of the training, whatever it is in.
- All tensors that stand in a dict belong to its candidate; one with the label of a training state
  is missed by nobody.
- One and the same dict under two labels is one part, at its first place outside of training states.
- Tensors are counted by place: those that are tied count twice.
- Of the tensors that stand in a dict beside others only the keys of these tensors count for
  wrappers.
- A framework is known by what stands at the root.
- Tensors with the label of a training state do not count for wrappers, no more than numbers of
  the training do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

# -------------------------------------------------------------------------------------------- words


def _set(text: str) -> set[str]:
    return set(text.split())


TRAINING = _set(
    "optimizer optimizers optimiser optimisers optim optims scheduler schedulers rng rngs"
)
UNCOUNTED = _set(
    "state states dict dicts all list cpu cuda gpu mps xpu npu hpu xla torch numpy np python"
)
OF_MODULES = _set("weight bias running")
NUMBERS = _set(
    """
    loss losses nll elbo acc accuracy best metric metrics fitness score scores reward rewards err
    error errors mse rmse mae wer cer bleu dice iou miou map ap f1 auc prec precision recall top
    psnr ssim fid lpips perplexity ppl val epoch epochs step steps iter iters iteration iterations
    update updates n_averaged count decay lr time elapsed seed token tokens ntokens samples progress
    history hist grad amp
    """
)
GENERATORS = _set("generator generators random rng seed cpu cuda gpu mps xpu torch")
WHOLE = _set(
    """
    state_dict model_state_dict model model_state net network module weights params params_ema ema
    ema_state_dict model_ema ema_model state_dict_ema
    """
)
USUAL = WHOLE | _set(
    """
    generator discriminator netG netD G D encoder decoder backbone head teacher student actor critic
    policy
    """
)
"""The usual labels that the layouts use; the list in ckptconv may be longer."""


def words(label: Any) -> list[str]:
    """The words of a label, in small letters."""
    text = str(label)
    found = [""]
    for before, char, after in zip(" " + text, text, text[1:] + " ", strict=False):
        if not char.isalnum():
            found.append("")
            continue
        small_to_capital = before.islower() and char.isupper()
        last_capital = before.isupper() and char.isupper() and after.islower()
        if (
            small_to_capital
            or last_capital
            or (before.isalnum() and before.isdigit() != char.isdigit())
        ):
            found.append("")
        found[-1] += char.lower()
    return [word for word in found if word]


def names_training(label: Any) -> bool:
    """Whether a label names a training state."""
    found = words(label)
    if "." in str(label) or "and" in found:
        return False
    left = list(found)
    while left and (left[-1] in UNCOUNTED or left[-1].isdigit()):
        left.pop()
    if left and left[-1] == "random":
        return found == ["random"] or not {"state", "states"}.isdisjoint(found)
    return bool(left) and left[-1] in TRAINING


def names_number(label: Any) -> bool:
    """Whether a label names a number of the training."""
    if looks_like_a_module(label):
        return False
    return str(label).lower() in NUMBERS or not NUMBERS.isdisjoint(words(label))


def looks_like_a_module(key: Any) -> bool:
    """Whether a key is one that the state of a module has."""
    return ("." in str(key) and "/" not in str(key)) or not OF_MODULES.isdisjoint(words(key))


# -------------------------------------------------------------------------------------------- parts


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def is_training(label: Any, value: Any) -> bool:
    """Whether a part, by its label or as torch's own optimizer, is never the model."""
    return is_optimizer(value) or names_training(label)


def scales_gradients(label: Any, value: Any) -> bool:
    """Whether a part is a scaler of gradients, not one of the data."""
    named = {"scaler", "scalers"}.intersection(words(label))
    return bool(named) and isinstance(value, dict) and any("growth" in words(key) for key in value)


def _is_random_form(value: Any) -> bool:
    kind = str(value.dtype).rpartition(".")[2]
    return kind == "uint8" and tuple(value.shape) in ((5056,), (816,), (44,), (16,))


def is_optimizer(value: Any) -> bool:
    """Whether a part tells by its form that it is a training's state, numpy's random one too."""
    if not isinstance(value, dict):
        return False
    if "bit_generator" in value:
        return isinstance(value.get("state"), dict)
    torchs = isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)
    fastais = isinstance(value.get("state"), list) and isinstance(value.get("hypers"), list)
    return torchs or fastais


def belongs(key: Any, value: Any) -> bool:
    """Whether what stands under a key of a dict belongs to the state dict that the key is in; a
    list of optimizers does not.
    """
    dotted = isinstance(key, str) and "." in key and isinstance(value, (list, tuple))
    return is_packed(key) or (dotted and not any(map(is_optimizer, value)))


def is_packed(key: Any) -> bool:
    return isinstance(key, str) and key.rpartition(".")[2] in ("_extra_state", "_packed_params")


@dataclass
class Leaf:
    """A tensor outside of training states: its labels from the root on, and the containers that it
    is in, outermost first.

    `owner` is the dict whose state dict it belongs to, None for one in a list of its own.
    """

    labels: tuple[Any, ...]
    value: Any
    holders: tuple[Any, ...]
    owner: dict[Any, Any] | None

    @property
    def is_number(self) -> bool:
        if numel(self.value) != 1 or looks_like_a_module(self.labels[-1]):
            return False
        inside = zip(self.labels, self.holders[1:], strict=False)
        scaled = any(scales_gradients(label, part) for label, part in inside)
        return scaled or any(map(names_number, self.labels))

    @property
    def is_missed_by_nobody(self) -> bool:
        """Whether it is a number of the training, a random state, or has the label of a training
        state.
        """
        return self.is_number or self.is_random or names_training(self.labels[-1])

    @property
    def is_random(self) -> bool:
        """Whether it is what a random generator gives, by its form and its labels."""
        home = self.stands_in
        if isinstance(home, (list, tuple)) and isinstance(home[0], str) and home[0] == "MT19937":
            return True
        texts = [label for label in self.labels[-2:] if isinstance(label, str)]
        if not _is_random_form(self.value):
            return False
        if not isinstance(self.labels[-1], str) and len(self.labels) == 1:
            return numel(self.value) > 100
        named = bool(texts) and not GENERATORS.isdisjoint(words(texts[-1]))
        own = isinstance(self.labels[-1], str) or isinstance(self.labels[-2], str)
        return (own and named) or any(map(names_number, self.labels[:-1]))

    @property
    def stands_in(self) -> Any:
        return self.holders[-1]


@dataclass(eq=False)
class Candidate:
    """A dict, or just the tensors that stand in it, and the labels that lead to it; `leaves` are
    those that it keeps.
    """

    home: dict[Any, Any]
    labels: tuple[Any, ...]
    above: tuple[Any, ...]
    leaves: list[Leaf]
    whole: bool
    bare: bool = False

    @property
    def name(self) -> str:
        path = path_of(self.labels)
        return path if self.whole and path else path + "."

    @property
    def keys(self) -> list[Any]:
        """Its keys under which tensors stand, in order."""
        depth = len(self.labels)
        return list(dict.fromkeys(leaf.labels[depth] for leaf in self.leaves))

    @property
    def looks_like_a_module(self) -> bool:
        return any(map(looks_like_a_module, self.keys))

    @property
    def rank(self) -> tuple[int, bool]:
        usual = not self.labels or self.labels[-1] in USUAL or hasattr(self.home, "_metadata")
        tensors = any(isinstance(leaf.value, torch.Tensor) for leaf in self.leaves)
        return 2 if usual else 1 if self.looks_like_a_module else 0, tensors

    @property
    def is_missed_by_nobody(self) -> bool:
        return all(leaf.is_missed_by_nobody for leaf in self.leaves)

    def bare_keys(self) -> dict[Any, str]:
        """All its keys and what they are called without wrappers."""
        own = {
            leaf.labels[-1]
            for leaf in self.leaves
            if leaf.stands_in is self.home and not leaf.is_missed_by_nobody
        }
        keys = list(self.home) if self.whole else self.keys
        deciding = [key in own or ("." in str(key) and key in keys) for key in self.home]
        return dict(
            zip(
                self.home,
                bare_keys([str(key) for key in self.home], deciding, self.bare),
                strict=True,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Its tensors under bare keys, and extra states without tensors too."""
        bare = self.bare_keys()
        return {
            bare[key]: value
            for key, value in self.home.items()
            if key in self.keys or is_packed(key)
        }


def path_of(labels: tuple[Any, ...]) -> str:
    return ".".join(map(str, labels))


def numel(value: Any) -> int:
    return int(value.numel() if isinstance(value, torch.Tensor) else value.size)


_PLAIN = (str, int, float, bool, bytes, complex, type(None))


@dataclass
class Parts:
    """What there is in a tree outside of training states: tensors, and dicts with the places at
    which they stand first.
    """

    bare: Any = None  # the dict of which the framework itself takes DDP's wrapper off
    leaves: list[Leaf] = field(default_factory=list)
    dicts: list[tuple[dict[Any, Any], tuple[Any, ...], tuple[Any, ...]]] = field(
        default_factory=list
    )

    def walk(
        self, value: Any, labels: tuple[Any, ...], holders: tuple[Any, ...], owner: Any, owned: bool
    ) -> None:
        if is_tensor(value):
            self.leaves.append(Leaf(labels, value, holders, owner))
            return
        if not isinstance(value, (dict, list, tuple)):
            return
        if isinstance(value, dict) and not owned:
            if any(value is home for home, _, _ in self.dicts):
                return
            self.dicts.append((value, labels, holders))
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            if owned:
                self.walk(child, (*labels, key), (*holders, value), owner, True)
            elif is_tensor(child) or not is_training(key, child):
                home = value if isinstance(value, dict) else None
                inside = home is not None and belongs(key, child)
                self.walk(
                    child,
                    (*labels, key),
                    (*holders, value),
                    home if inside or is_tensor(child) else None,
                    inside,
                )

    def candidates(self) -> list[Candidate]:
        found = []
        for home, labels, above in self.dicts:
            own = [leaf for leaf in self.leaves if leaf.owner is home]
            if own and all(isinstance(key, _PLAIN) for key in home):
                whole = not any(holds_others(key, child) for key, child in home.items())
                found.append(Candidate(home, labels, above, own, whole, home is self.bare))
        wanted = [item for item in found if not item.is_missed_by_nobody]
        return wanted or [item for item in found if not all(leaf.is_random for leaf in item.leaves)]


def holds_others(key: Any, value: Any) -> bool:
    """Whether what stands under a key holds tensors that do not belong to the state dict that the
    key is in.
    """
    return not is_tensor(value) and not belongs(key, value) and any(True for _ in leaves_of(value))


def parts_of(root: Any, above: Any = None) -> Parts:
    """What there is in a tree, or in a part of the tree `above`, outside of training states."""
    top = root if above is None else above
    parts = Parts(top.get("state_dict") if framework_of(top) == "lightning" else None)
    if not is_optimizer(root):
        parts.walk(root, (), (), None, False)
    return parts


def named(root: Any) -> dict[str, dict[str, Any]]:
    """Every candidate by the name that `--only` takes it by; labels above it do not count then."""
    return {
        item.name: _by_itself(item).state_dict()
        for item in parts_of(root).candidates()
        if not item.whole or nested(item.home) is None
    }


def _by_itself(item: Candidate) -> Candidate:
    depth = len(item.labels)
    leaves = [replace(leaf, labels=leaf.labels[depth:]) for leaf in item.leaves]
    return replace(item, labels=(), leaves=leaves)


# ------------------------------------------------------------------------------------------- choice


@dataclass
class Taken:
    """The state dict that is meant: its name, tensors and arrays by bare key (lists and dicts where
    they belong to it).
    """

    name: str
    state_dict: dict[str, Any]
    left_out: list[str]


@dataclass
class Refused:
    """An error that lists these state dicts, by their names; none where there is no state dict at
    all.
    """

    choices: dict[str, dict[str, Any]]


def nested(part: Any) -> dict[str, Any] | None:
    """The tensors of a dict of dicts of nothing but tensors, by their keys joined with dots; None
    for anything else, and where one of them is missed by nobody or a label names a whole model.
    """
    if not isinstance(part, dict) or not any(isinstance(child, dict) for child in part.values()):
        return None
    found: dict[str, Any] = {}
    if not _nest(part, "", found) or any(
        leaf.is_missed_by_nobody for leaf in parts_of(part).leaves
    ):
        return None
    if not found or len(parts_of(part).leaves) < len(found):
        return None
    bare = bare_keys(list(found), ["." in key for key in found])
    return dict(zip(bare, found.values(), strict=True))


def _nest(value: dict[Any, Any], before: str, found: dict[str, Any]) -> bool:
    for label, child in value.items():
        if not isinstance(label, _PLAIN):
            return False
        if is_tensor(child):
            if before + str(label) in found:
                return False
            found[before + str(label)] = child
            continue
        if not isinstance(child, dict) or is_optimizer(child):
            return False
        if label in WHOLE or "ema" in words(label):
            return False
        if not _nest(child, f"{before}{label}.", found):
            return False
    return True


def nested_parts(root: Any) -> dict[str, dict[str, Any]]:
    """The children of a dict, and itself, that are dicts of dicts of tensors, by their names."""
    if not isinstance(root, dict):
        return {}
    parts = {str(label): child for label, child in root.items() if not names_training(label)}
    if not any(map(is_tensor, root.values())):
        parts["."] = root
    found = {name: nested(part) for name, part in parts.items()}
    return {name: joined for name, joined in found.items() if joined is not None}


def decide_part(part: Any, root: Any) -> Taken | Refused:
    """The same of a part of a tree that was asked for."""
    joined = nested(part)
    return decide(part, root) if joined is None else Taken("", joined, [])


def decide(root: Any, above: Any = None) -> Taken | Refused:
    """What docs/state-dicts.md says of a tree."""
    bare = [root] if is_tensor(root) else root if isinstance(root, (list, tuple)) else []
    if bare and all(is_tensor(value) and _tells_random(value) for value in bare):
        return Refused({})
    if is_tensor(root):
        return Taken("", {"tensor": root}, [])
    if isinstance(root, (list, tuple)) and root and all(map(is_tensor, root)):
        return Taken("", {str(number): value for number, value in enumerate(root)}, [])
    parts = parts_of(root, above)
    candidates = parts.candidates()
    if not candidates:
        return Refused({})
    if (known := _of_a_framework(root, candidates)) is not None:
        beside = FRAMEWORKS[framework_of(root)][1]
        others = [leaf for leaf in parts.leaves if leaf.labels[0] not in beside]
        lost = _is_a_loss(known, others)
        return _refused(candidates, root) if lost else _taken(known, root)
    best = max(item.rank for item in candidates)
    first = [item for item in candidates if item.rank == best]
    if len(first) > 1:
        others = [item for item in candidates if item not in first and item.looks_like_a_module]
        return _refused([*first, *others], root)
    if _is_a_loss(first[0], parts.leaves):
        return _refused(candidates, root)
    return _taken(first[0], root)


def _tells_random(value: Any) -> bool:
    return _is_random_form(value) and numel(value) > 100


def _is_a_loss(chosen: Candidate, leaves: list[Leaf]) -> bool:
    """Whether something is left out that somebody may want: whatever it is, unless the very same
    tensor stays under another key.
    """
    kept = {_view(leaf.value) for leaf in chosen.leaves}
    return any(
        leaf.owner is not chosen.home
        and not leaf.is_missed_by_nobody
        and (isinstance(leaf.value, np.ndarray) or _view(leaf.value) not in kept)
        for leaf in leaves
    )


def _view(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return id(value)
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype


def _refused(choices: list[Candidate], root: Any) -> Refused:
    listed = {item.name: _by_itself(item).state_dict() for item in choices}
    return Refused(listed | nested_parts(root))


def _taken(chosen: Candidate, root: Any) -> Taken:
    kept = {id(leaf.value) for leaf in chosen.leaves}
    rest = [path for path, value in leaves_of(root) if id(value) not in kept]
    return Taken(chosen.name, chosen.state_dict(), rest)


def _of_a_framework(root: Any, candidates: list[Candidate]) -> Candidate | None:
    """The part that a known framework itself loads for inference, if it is one state dict."""
    name = framework_of(root)
    for label in FRAMEWORKS[name][0] if name else ():
        home = root.get(label) if label else root
        for item in candidates:
            if item.home is home and (item.whole or home is root):
                return item
    return None


FRAMEWORKS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "lightning": (
        ("state_dict",),
        _set(
            "callbacks loops current_model_state averaging_state hyper_parameters "
            "datamodule_hyper_parameters"
        ),
    ),
    "deepspeed": (
        ("module",),
        _set("frozen_param_fragments frozen_param_shapes param_shapes"),
    ),
    "mmengine": (("state_dict",), _set("ema_state_dict message_hub meta")),
    "timm": (("state_dict_ema", "state_dict"), {"state_dict"}),
    "accelerate": (("model",), set()),
    "torchtitan": (("",), set()),
}
"""Where each keeps its model, the first that is there, "" for the root; and the labels under which
it writes further tensors itself.
"""


def framework_of(root: Any) -> str:
    """The framework that wrote a tree, by what it alone writes at the root; "" for none."""
    if not isinstance(root, dict):
        return ""
    meta = root.get("meta")
    if "pytorch-lightning_version" in root:
        return "lightning"
    if "ds_version" in root:
        return "deepspeed"
    if isinstance(meta, dict) and "mmengine_version" in meta and "state_dict" in root:
        return "mmengine"
    if {"state_dict", "arch", "version", "epoch"} <= root.keys():
        return "timm"
    if {"train_state", "lr_scheduler", "optimizer", "dataloader"} <= root.keys():
        return "torchtitan"
    if "model" in root and any(re.fullmatch(r"random_states_\d+", str(label)) for label in root):
        return "accelerate"
    return ""


def averages(root: Any) -> dict[str, Any]:
    """What `--only ema` may mean, by the paths: one part, or several that an error must list."""
    if isinstance(root, dict) and "ema" in root:
        return {"ema": root["ema"]}
    if (
        framework_of(root) in ("lightning", "mmengine")
        and {"averaging_state", "ema_state_dict"} & root.keys()
    ):
        return {"state_dict": root["state_dict"]}
    found: dict[tuple[Any, ...], Any] = {}
    for leaf in parts_of(root).leaves:
        for depth, label in enumerate(leaf.labels[:-1]):
            if "ema" in words(label) and not leaf.is_number:
                found[leaf.labels[: depth + 1]] = leaf.holders[depth + 1]
                break
    nearest = min(map(len, found), default=0)
    return {path_of(labels): part for labels, part in found.items() if len(labels) == nearest}


def parts_by_path(root: Any, labels: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The dicts with tensors in dicts of plain text labels, outside of training states, by what
    `--only` takes them by.
    """
    for label, value in root.items() if isinstance(root, dict) else ():
        plain = isinstance(label, str) and "." not in label and label != "ema"
        if (
            plain
            and isinstance(value, dict)
            and not is_training(label, value)
            and any(True for _ in leaves_of(value))
        ):
            yield path_of((*labels, label)), value
            yield from parts_by_path(value, (*labels, label))


# --------------------------------------------------------------------------------------------- keys

_SURE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def bare_keys(keys: list[str], deciding: list[bool], bare: bool = False) -> list[str]:
    """The keys without wrappers: `module` where each that decides starts with it and DDP is not
    taken off already, the others wherever a key goes on.
    """
    before: list[str] = []
    while any(deciding) and keys != before:
        before = keys
        keys = [
            ".".join(
                [*(part for part in key.split(".")[:-1] if part not in _SURE), key.split(".")[-1]]
            )
            for key in keys
        ]
        if bare:
            continue
        wrapped = [key.startswith("module.") and key != "module." for key in keys]
        if all(yes for yes, counts in zip(wrapped, deciding, strict=True) if counts):
            keys = [key.removeprefix("module.") for key in keys]
    return keys


def rewritten(root: Any) -> Any:
    """The tree as a torch output must hold it: that of the source, with bare keys in what is the
    state of a module.
    """
    renamed: dict[int, dict[Any, str]] = {}
    candidates = parts_of(root).candidates()
    best = max((item.rank for item in candidates), default=None)
    for item in candidates:
        if item.rank == best or item.looks_like_a_module:
            renamed[id(item.home)] = {
                key: bare for key, bare in item.bare_keys().items() if "." in str(key)
            }
    return _with(root, renamed)


def _with(value: Any, renamed: dict[int, dict[Any, str]]) -> Any:
    if isinstance(value, dict):
        names = renamed.get(id(value), {})
        return {names.get(key, key): _with(child, renamed) for key, child in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_with(child, renamed) for child in value)
    return value


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor of a tree, training states too."""
    if is_tensor(value):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves_of(child, f"{path}.{key}" if path else str(key))
