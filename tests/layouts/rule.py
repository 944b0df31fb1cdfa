"""docs/state-dicts.md in plain Python over a loaded tree: which state dict is meant, or which ones an error must list.

Slow and simple on purpose, and nothing of ckptconv. Where the page leaves something open, it is read so:

- A tensor in a list has the labels of the list for its own: the losses in ``{"train_losses": [tensor, …]}`` are numbers.
- A tensor under a key with a dot is never a training state, whatever its last word; a dict or list under such a key may be.
- A tensor stands above a part when a dict that the part is in has it directly as a value.
- One and the same dict under two labels is one part, at its first place outside of training states.
- Tensors are counted by place: those that are tied count twice.
- A key that looks like a module's is one under which a tensor stands.
- A framework is known by what stands at the root. Training states above its part do not keep it from being taken.
- Wrapper prefixes are looked for on the keys under which tensors or extra states stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

# --------------------------------------------------------------------------------------------------------------- words


def _set(text: str) -> set[str]:
    return set(text.split())


TRAINING = _set("optimizer optimizers optimiser optimisers optim optims opt scheduler schedulers sched rng rngs random")
UNCOUNTED = _set("state states dict dicts all list")
NUMBERS = _set(
    """
    loss losses acc acc1 accuracy best metric metrics epoch epochs step steps iter iters iteration
    iterations lr score scores psnr ssim fid miou perplexity ppl top prec precision recall auc time
    elapsed seed token tokens ntokens samples progress
    """
)
USUAL = _set(
    """
    state_dict model_state_dict model model_state net network module weights params params_ema ema
    ema_state_dict model_ema ema_model state_dict_ema generator discriminator netG netD G D encoder
    decoder backbone head teacher student actor critic policy
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
        if small_to_capital or last_capital or (before.isalnum() and before.isdigit() != char.isdigit()):
            found.append("")
        found[-1] += char.lower()
    return [word for word in found if word]


def names_training(label: Any) -> bool:
    """Whether a label names a training state."""
    left = words(label)
    while left and (left[-1] in UNCOUNTED or left[-1].isdigit()):
        left.pop()
    return bool(left) and left[-1] in TRAINING


def names_number(label: Any) -> bool:
    """Whether a label names a number of the training."""
    return not NUMBERS.isdisjoint(words(label))


# ---------------------------------------------------------------------------------------------------------------- parts


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def is_training(label: Any, value: Any) -> bool:
    """Whether a part, by its label or as torch's own optimizer, is never the model."""
    if is_optimizer(value):
        return True
    weight = is_tensor(value) and "." in str(label)
    return names_training(label) and not weight


def is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)


def belongs(key: Any, value: Any) -> bool:
    """Whether what stands under a key of a dict belongs to the state dict that the key is in."""
    return is_packed(key) or (isinstance(key, str) and "." in key and not isinstance(value, dict))


def is_packed(key: Any) -> bool:
    return isinstance(key, str) and key.endswith(("_extra_state", "_packed_params"))


@dataclass
class Leaf:
    """A tensor outside of training states: its labels from the root on, and the containers that it is in, outermost first.

    `owner` is the dict whose state dict it belongs to, None for one in a list of its own.
    """

    labels: tuple[Any, ...]
    value: Any
    holders: tuple[Any, ...]
    owner: dict[Any, Any] | None

    @property
    def is_number(self) -> bool:
        return numel(self.value) == 1 and any(map(names_number, self.labels))

    @property
    def stands_in(self) -> Any:
        return self.holders[-1]


@dataclass
class Candidate:
    """A dict, or just the tensors that stand in it, and the labels that lead to it; `leaves` are those that it keeps."""

    home: dict[Any, Any]
    labels: tuple[Any, ...]
    above: tuple[Any, ...]
    leaves: list[Leaf]
    whole: bool

    @property
    def name(self) -> str:
        path = ".".join(map(str, self.labels))
        return path if self.whole and path else path + "."

    @property
    def keys(self) -> list[Any]:
        """Its keys under which tensors stand, in order."""
        depth = len(self.labels)
        return list(dict.fromkeys(leaf.labels[depth] for leaf in self.leaves))

    @property
    def looks_like_a_module(self) -> bool:
        return any("." in str(key) or {"weight", "bias", "running"} & set(words(key)) for key in self.keys)

    @property
    def rank(self) -> tuple[int, bool]:
        usual = not self.labels or self.labels[-1] in USUAL or hasattr(self.home, "_metadata")
        tensors = any(isinstance(leaf.value, torch.Tensor) for leaf in self.leaves)
        return 2 if usual else 1 if self.looks_like_a_module else 0, tensors

    @property
    def numbers_only(self) -> bool:
        return all(leaf.is_number for leaf in self.leaves)

    def bare_keys(self) -> dict[Any, str]:
        """Its keys and what they are called without wrappers, those of extra states without tensors too."""
        keys = [key for key in self.home if key in self.keys or is_packed(key)]
        return dict(zip(keys, bare_keys([str(key) for key in keys]), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Its tensors under bare keys."""
        bare = self.bare_keys()
        return {bare[key]: self.home[key] for key in self.keys}


def numel(value: Any) -> int:
    return int(value.numel() if isinstance(value, torch.Tensor) else value.size)


_PLAIN = (str, int, float, bool, bytes, complex, type(None))


@dataclass
class Parts:
    """What there is in a tree outside of training states: tensors, and dicts with the places at which they stand first."""

    leaves: list[Leaf] = field(default_factory=list)
    dicts: list[tuple[dict[Any, Any], tuple[Any, ...], tuple[Any, ...]]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def walk(self, value: Any, labels: tuple[Any, ...], holders: tuple[Any, ...], owner: Any, owned: bool) -> None:
        if is_tensor(value):
            self.leaves.append(Leaf(labels, value, holders, owner))
            return
        if not isinstance(value, (dict, list, tuple)) or id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, dict) and not owned:
            self.dicts.append((value, labels, holders))
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            if owned:
                self.walk(child, (*labels, key), (*holders, value), owner, True)
            elif not is_training(key, child):
                home = value if isinstance(value, dict) else None
                inside = home is not None and belongs(key, child)
                self.walk(child, (*labels, key), (*holders, value), home if inside or is_tensor(child) else None, inside)

    def candidates(self) -> list[Candidate]:
        found = []
        for home, labels, above in self.dicts:
            own = [leaf for leaf in self.leaves if leaf.owner is home]
            stands = any(leaf.stands_in is home for leaf in own)
            if stands and all(isinstance(key, _PLAIN) for key in home):
                below = [leaf for leaf in self.leaves if any(holder is home for holder in leaf.holders)]
                found.append(Candidate(home, labels, above, own, whole=len(below) == len(own)))
        return [item for item in found if not item.numbers_only] or found


def parts_of(root: Any) -> Parts:
    """What there is in a tree outside of training states."""
    parts = Parts()
    if not is_optimizer(root):
        parts.walk(root, (), (), None, False)
    return parts


def named(root: Any) -> dict[str, dict[str, Any]]:
    """Every candidate by the name that `--only` takes it by."""
    return {item.name: item.state_dict() for item in parts_of(root).candidates()}


# --------------------------------------------------------------------------------------------------------------- choice


@dataclass
class Taken:
    """The state dict that is meant: its name, tensors and arrays by bare key (lists and dicts where they belong to it)."""

    name: str
    state_dict: dict[str, Any]
    left_out: list[str]


@dataclass
class Refused:
    """An error that lists these state dicts, by their names; none where there is no state dict at all."""

    choices: dict[str, dict[str, Any]]


def decide(root: Any) -> Taken | Refused:
    """What docs/state-dicts.md says of a tree."""
    if is_tensor(root):
        return Taken("", {"tensor": root}, [])
    if isinstance(root, (list, tuple)) and root and all(map(is_tensor, root)):
        return Taken("", {str(number): value for number, value in enumerate(root)}, [])
    parts = parts_of(root)
    candidates = parts.candidates()
    if not candidates:
        return Refused({})
    if (known := _of_a_framework(root, candidates, parts.leaves)) is not None:
        return _taken(known, parts.leaves)
    best = max(item.rank for item in candidates)
    first = [item for item in candidates if item.rank == best]
    if len(first) > 1:
        return Refused({item.name: item.state_dict() for item in first})
    chosen = first[0]
    if _is_a_loss(chosen, candidates, parts.leaves):
        return Refused({item.name: item.state_dict() for item in candidates})
    return _taken(chosen, parts.leaves)


def _is_a_loss(chosen: Candidate, candidates: list[Candidate], leaves: list[Leaf]) -> bool:
    """Whether something is left out that somebody may want."""
    rest = [leaf for leaf in leaves if leaf.owner is not chosen.home and not leaf.is_number]
    above = any(leaf.stands_in is holder for leaf in rest for holder in chosen.above if isinstance(holder, dict))
    more = len(rest) > len(chosen.leaves)
    return above or more or any(item.looks_like_a_module for item in candidates if item is not chosen)


def _taken(chosen: Candidate, leaves: list[Leaf]) -> Taken:
    rest = [".".join(map(str, leaf.labels)) for leaf in leaves if leaf.owner is not chosen.home]
    return Taken(chosen.name, chosen.state_dict(), rest)


def _of_a_framework(root: Any, candidates: list[Candidate], leaves: list[Leaf]) -> Candidate | None:
    """The part that a known framework itself loads, if it is one state dict and no weights stand above it."""
    label = framework_label(root)
    if label is None:
        return None
    above = [leaf for leaf in leaves if leaf.stands_in is root and not leaf.is_number]
    part = next((item for item in candidates if item.home is root[label] and item.whole), None)
    return None if above else part


def framework_label(root: Any) -> str | None:
    """Where a known framework keeps its model, by what it alone writes; torchtitan's and accelerate's need no help."""
    if not isinstance(root, dict):
        return None
    meta = root.get("meta")
    if "pytorch-lightning_version" in root and "state_dict" in root:
        return "state_dict"
    if "ds_version" in root and "module" in root:
        return "module"
    if isinstance(meta, dict) and "mmengine_version" in meta and "state_dict" in root:
        return "state_dict"
    if {"state_dict", "arch", "version", "epoch"} <= root.keys():
        return "state_dict"
    if {"model", "model_args", "iter_num"} <= root.keys() or {"model", "optimizer", "iteration"} <= root.keys():
        return "model"
    return None


# ----------------------------------------------------------------------------------------------------------------- keys

_SURE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def bare_keys(keys: list[str]) -> list[str]:
    """The keys without wrappers: `module` where each key starts with it, the others wherever a key goes on behind them."""
    before: list[str] = []
    while keys != before:
        before = keys
        keys = [".".join([*(part for part in key.split(".")[:-1] if part not in _SURE), key.split(".")[-1]]) for key in keys]
        if keys and all(key.startswith("module.") and key != "module." for key in keys):
            keys = [key.removeprefix("module.") for key in keys]
    return keys


def rewritten(root: Any) -> Any:
    """The tree as a torch output must hold it: that of the source, with bare keys in what is the state of a module."""
    renamed: dict[int, dict[Any, str]] = {}
    candidates = parts_of(root).candidates()
    best = max((item.rank for item in candidates), default=None)
    for item in candidates:
        if item.rank == best or item.looks_like_a_module:
            renamed[id(item.home)] = {key: bare for key, bare in item.bare_keys().items() if "." in str(key)}
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
