"""What the labels of a checkpoint's parts say, compared by whole words: training states, numbers of
the training, models.

`upscaler`, `optimized_model` and `random_encoder` are names of networks. docs/state-dicts.md states
the rule.
"""

from __future__ import annotations

import re
from functools import lru_cache

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z_]+|\d+").findall
_LONGEST = 300  # characters of a label that is a name; a longer one names nothing


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STATES = _set("""
    optimizer optimizers optimiser optimisers optim optims scheduler schedulers rng rngs
""")
_HAS_STATES = re.compile("optim|schedul|rng|random", re.IGNORECASE).search
"""What each of `_STATES`, and "random", holds. Hardly any label does, and to look for it takes a
tenth of the time of splitting the label into words.
"""
_GENERATORS = _set("generator generators random rng seed cpu cuda gpu mps xpu torch")
_TRAILING = _set("""
    state states dict dicts all list cpu cuda gpu mps xpu npu hpu xla torch numpy np python
""")
_NUMBERS = _set("""
    loss losses nll elbo acc accuracy best metric metrics fitness score scores reward rewards err
    error errors mse rmse mae wer cer bleu dice iou miou map ap f1 auc prec precision recall top
    psnr ssim fid lpips perplexity ppl val epoch epochs step steps iter iters iteration iterations
    update updates n_averaged count decay lr time elapsed seed token tokens ntokens samples progress
    history hist grad amp
""")
_OF_RANKS = _set("loader loaders dataloader dataloaders sampler samplers")
_STATE = _set("state states")
_SCALERS = _set("scaler scalers")
_OF_MODULES = _set("weight bias running")
_HAS_MODULES = re.compile("weight|bias|running", re.IGNORECASE).search

WHOLE = _set("""
    state_dict model_state_dict model model_state net network module weights params params_ema ema
    ema_state_dict model_ema ema_model state_dict_ema
""")
"""Labels under which training scripts keep the state dict of a whole model."""

USUAL = WHOLE | _set("""
    generator discriminator netG netD G D encoder decoder backbone head teacher student actor critic
    policy
""")
"""Labels under which training scripts keep a state dict."""


def words(label: str) -> tuple[str, ...]:
    """The words of a label, in small letters: ``EMAModel_2`` is ema, model, 2."""
    return tuple(word.lower() for word in _WORD(label)) if len(label) <= _LONGEST else ()


def names_training_state(label: str) -> bool:
    """Whether a label names an optimizer, scheduler or random state, by its last telling word."""
    return _HAS_STATES(label) is not None and _ends_in_state(label)


@lru_cache(maxsize=4096)
def _ends_in_state(label: str) -> bool:
    found = words(label)
    if "and" in found:  # model_and_optimizer
        return False
    last = _last(found)
    return last in _STATES or (
        last == "random" and (len(found) == 1 or not _STATE.isdisjoint(found))
    )


def names_generator(label: str) -> bool:
    """Whether a label is one under which a random state may be kept: ``generator_state``, ``cuda``.
    It is that of networks too: the value tells.
    """
    return not _GENERATORS.isdisjoint(words(label))


def names_rank_state(label: str) -> bool:
    """Whether a label names what each rank has for itself: a random state, a data loader's."""
    return names_training_state(label) or _last(words(label)) in _OF_RANKS


def _last(found: tuple[str, ...]) -> str | None:
    """The last word that says anything."""
    return next(
        (word for word in reversed(found) if word not in _TRAILING and not word.isdigit()), None
    )


@lru_cache(maxsize=4096)
def names_number(label: str) -> bool:
    """Whether a label names a number of the training: a loss, an accuracy, a count of steps."""
    return label.lower() in _NUMBERS or not _NUMBERS.isdisjoint(words(label))


@lru_cache(maxsize=4096)
def names_scaler(label: str) -> bool:
    """Whether a label names a scaler: of gradients, or of the data."""
    return not _SCALERS.isdisjoint(words(label))


@lru_cache(maxsize=4096)
def names_average(label: str) -> bool:
    """Whether a label names an exponential moving average: ``state_dict_ema``, ``EMACallback``."""
    return "ema" in words(label)


_BOUNDS = _set("""
    mask masks masked causal alibi min max minimum maximum bound bounds limit limits
""")


def may_be_infinite(key: str) -> bool:
    """Whether a key of a state dict names a mask or a bound, in which infinity is meant:
    ``attn.mask``, ``min_val``.
    """
    return not _BOUNDS.isdisjoint(words(key.rpartition(".")[2]))


def looks_like_a_module(key: str) -> bool:
    """Whether a key is of a module: with a dot (no path), or with weight, bias or running."""
    if "." in key and "/" not in key:
        return True
    return _HAS_MODULES(key) is not None and not _OF_MODULES.isdisjoint(words(key))
