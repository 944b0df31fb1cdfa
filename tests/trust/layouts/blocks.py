"""The parts of layouts: state dicts, optimizers, averages, random states, numbers, statistics,
configs, and their labels.

Every tensor of one `Blocks` has values that no other has, so that it is known by them wherever it
goes.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.int32)


def _names(text: str) -> list[str]:
    return text.split()


MODULE_KEYS = _names(
    """
    conv1.weight conv1.bias bn1.running_mean bn1.running_var bn1.num_batches_tracked fc.weight
    fc.bias blocks.0.attn.qkv.weight layers.11.mlp.down_proj.weight transformer.wte.weight
    lm_head.weight encoder.layer.0.output.LayerNorm.weight head.cls_token opt.decoder.embed.weight
    optimizer_net.fc.weight rng_encoder.0.bias module_list.0.w größe.w blocks.0.scale
    time_embed.0.weight
    """
)
TRAPS = _names(
    "net.rng diffusion.scheduler blocks.0.optim attn.random layers.opt.0 vq.ema_w vq.ema_count"
)
"""Keys with dots that have words of training states, averages, or numbers: they are weights all the
same.
"""
BARE_KEYS = _names("weight bias weight_ih_l0 bias_hh_l0 running_mean in_proj_weight")
ODD_KEYS = _names("kernel embedding A B w1 b1 gamma beta pos_embed cls_token scale_tril codebook")
WRAPPERS = (
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "module.module.",
)

NETWORKS = _names(
    """
    upscaler optimized_model random_encoder resampler upsampler scheduler_net optimus optical
    strings ring warmup_net sampler text_encoder vae unet fc_net model_a second_stage refiner shadow
    predictor target_params averaged rngnet steppe_net lossy_net best_model stopwatch timer topology
    optic_flow optimal_policy model_opt_in schedule_net projector aligner current_model_state
    """
)
"""Names of networks, many with the letters of training states and numbers in them, none of them
usual.
"""
USUAL = _names(
    """
    state_dict model_state_dict model model_state net network module weights params ema generator
    discriminator netG netD encoder decoder backbone head teacher student actor critic policy
    """
)
AVERAGES = _names("ema ema_state_dict model_ema ema_model state_dict_ema params_ema")

_OPTIMIZERS = (
    "optimizer|optim|optims|optimizers|optimizer state dict|model optimizer|adam "
    "optimiser|optimizer cpu|sgd optim"
)
_SCHEDULERS = (
    "scheduler|lr scheduler|lr schedulers|lr scheduler state|warmup scheduler|scheduler state dict"
)
_RANDOM = (
    "rng|rng state|torch rng state|rng state cuda|cuda rng state all|random states|python random "
    "state|rng states|rngs np"
)
OTHER_OPTIMIZERS = _names(
    "optimizer_G optimizer_D optim_g optimG gan_opt_d opt optimizer_gen model_and_optimizer "
    "net.optim"
)
"""Labels of optimizers that do not end in such a word: only what is below them says so."""

NEARLY = _names(
    "opt sched opt_state lr_sched random_2 random_all random_tensors net.optimizer model_and_rng "
    "optim_and_sched"
)
"""Labels that name no training state, though they look like it."""

NUMBER_LABELS = _names(
    """
    best_acc1 best_loss val_loss epoch global_step step iter best_score top1 acc val_accuracy
    train_time lr seed best_metric fid psnr ssim perplexity elapsed n_tokens tokens_seen num_samples
    recall_at_5 mean_precision auc progress best_prec1 bestPsnr epochLoss trainSteps f1 mAP val_f1
    val/acc@0.5 weight_decay num_updates loss.avg loss_weight running_loss n_averaged wer reward
    """
)
METRIC_DICTS = _names(
    "metrics losses best scores val_metrics train_losses best_metrics progress val/losses history"
)
ONE_ELEMENT = _names(
    "logit_scale temperature threshold sigma alpha bottom stepsize_ratio net.scale map_scale_f1x "
    "ema"
)
STATISTICS = _names("normalization stats data_stats scaler latents_stats constants extras")
LISTS = _names("anchors prototypes samples replay codes queue embeddings")
CONFIGS = _names("config args cfg hparams opts meta_info run_settings")


class Blocks:
    """Draws parts with a random generator of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._count = 0

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    # -------------------------------------------------------------------------------------- tensors

    def tensor(self, numel: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of one to six elements that no other has; of a dimension or two, or none."""
        numel = numel or self.random.randint(1, 6)
        self._count += 1
        values = torch.arange(numel) + 10 * self._count
        made = values.to(dtype or self.pick(*DTYPES))
        if numel == 1 and self.chance(0.6):
            return made.reshape(())
        return made.reshape(-1, 2) if numel % 2 == 0 and self.chance(0.5) else made

    def weight(self) -> torch.Tensor:
        """A tensor of more than one element."""
        return self.tensor(self.random.randint(2, 6))

    def scalar(self) -> torch.Tensor:
        return self.tensor(1)

    def array(self, numel: int | None = None) -> np.ndarray[Any, Any]:
        made: np.ndarray[Any, Any] = self.tensor(numel or self.random.randint(2, 5)).numpy().copy()
        return made

    def random_bytes(self) -> torch.Tensor:
        """What `torch.get_rng_state` gives, in small."""
        self._count += 1
        return torch.tensor(list(self._count.to_bytes(16, "little")), dtype=torch.uint8)

    def any_size(self) -> torch.Tensor:
        """A tensor of one element, of a few, or of more bytes than all that is beside it."""
        self._count += 1
        large = torch.full((512, 64), float(self._count))
        return self.pick(self.scalar, self.weight, self.weight, lambda: large)()

    def moments(self, *names: str) -> dict[str, Any]:
        """Statistics of the data: of one value, or of several, or as arrays."""
        made = self.pick(self.scalar, self.weight, self.array)
        return {name: self.scalar() if name == "count" else made() for name in names}

    def tensors(self, least: int, most: int) -> list[torch.Tensor]:
        return [self.weight() for _ in range(self.random.randint(least, most))]

    # ---------------------------------------------------------------------------------- state dicts

    def state_dict(self) -> dict[str, Any]:
        """The state of a module: with dotted keys, bare ones, or ones that say nothing; wrapped,
        tied, with `_metadata`.
        """
        keys = self.pick(MODULE_KEYS, MODULE_KEYS, MODULE_KEYS, BARE_KEYS, ODD_KEYS)
        chosen = self.random.sample(keys, self.random.randint(1, 6))
        if keys is MODULE_KEYS and self.chance(0.15):
            chosen.append(self.pick(*TRAPS))
        made: dict[str, Any] = {key: self._value(key) for key in chosen}
        if keys is MODULE_KEYS:
            self._dress(made)
        if self.chance(0.15):
            made["tied." + chosen[0] if keys is MODULE_KEYS else "tied_" + chosen[0]] = made[
                chosen[0]
            ]
        if self.chance(0.3) and keys is not ODD_KEYS:
            made = {
                self._wrapped(key, wrapper): value
                for wrapper in [self.pick(*WRAPPERS)]
                for key, value in made.items()
            }
        return self._with_metadata(made)

    def module(self) -> dict[str, Any]:
        """A state dict that looks like one: with a dot in its keys."""
        while True:
            made = self.state_dict()
            if any("." in key for key in made):
                return made

    def _value(self, key: str) -> torch.Tensor:
        return self.tensor(1, torch.int64) if key.endswith("tracked") else self.weight()

    def _dress(self, made: dict[str, Any]) -> None:
        """What modules keep in their state dicts besides tensors."""
        if self.chance(0.08):
            made["quant._packed_params"] = (self.weight(), None, self.weight())
        if self.chance(0.08):
            made["attn._extra_state"] = self.pick(
                {"scale": self.weight(), "recipe": "hybrid"}, self.random_bytes(), None
            )
        if self.chance(0.06):
            made["attn.masks"] = self.tensors(1, 2)

    def _wrapped(self, key: str, wrapper: str) -> str:
        if "." in key and self.chance(0.2):
            head, _, tail = key.partition(".")
            key = f"{head}.{self.pick('_checkpoint_wrapped_module', '_fsdp_wrapped_module')}.{tail}"
        return wrapper + key

    def _with_metadata(self, made: dict[str, Any]) -> dict[str, Any]:
        form = self.random.random()
        if form < 0.55:
            return made
        ordered = OrderedDict(made)
        if form > 0.85:
            ordered._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
        return ordered

    def copy(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict of the same keys with values of its own, as an average has them."""
        return {key: self.weight() for key in state_dict}

    # ------------------------------------------------------------------------------ training states

    def optimizer(self) -> dict[str, Any]:
        """As torch, FSDP (by names) or SGD (without state) write one."""
        names = self.pick(range(3), ["module.layer1.weight", "fc.bias"], ["layers.0.weight"])
        state: dict[Any, Any] = {
            name: {"step": self.scalar(), "exp_avg": self.weight(), "exp_avg_sq": self.weight()}
            for name in names
        }
        if self.chance(0.2):
            state = {}
        return {
            "state": state,
            "param_groups": [{"lr": self.pick(0.1, self.scalar()), "params": list(names)}],
        }

    def optimizer_by_label(self) -> Any:
        """What only its label tells to be an optimizer's."""
        return self.pick(
            {"m": {"layer.weight": self.weight()}, "v": {"layer.weight": self.weight()}},
            {
                "fp32_from_fp16": [self.tensors(1, 3)],
                "loss_scaler": {"cur_scale": 65536.0},
                "model": {"fc.weight": self.weight()},
            },
            [self.optimizer(), self.optimizer()],
            {"layer.weight": self.weight(), "layer.bias": self.weight(), "weight": self.weight()},
            self.tensors(1, 9),
            {"generator": self.optimizer(), "discriminator": {"state": {0: self.weight()}}},
        )

    def scheduler(self) -> Any:
        plain = {"last_epoch": 7, "_last_lr": [0.1], "base_lrs": [0.1]}
        return self.pick(
            plain,
            [plain],
            {**plain, "base_lrs": [self.scalar()]},
            {"weight": self.weight(), **plain},
        )

    def random_states(self) -> Any:
        """As torch, CUDA, numpy and Python tell them."""
        numpy = ("MT19937", np.arange(6, dtype=np.uint32) + 7 * self._count, 3, 0, 0.0)
        return self.pick(
            self.random_bytes(),
            [self.random_bytes(), self.random_bytes()],
            {
                "torch": self.random_bytes(),
                "cuda": [self.random_bytes()],
                "numpy": numpy,
                "python": (3, (1, 2, 3), None),
            },
            numpy,
        )

    def training_label(self, texts: str) -> str:
        """One of the labels, with numbers or not, in the case of some script."""
        words = self.pick(*texts.split("|")).split()
        if self.chance(0.2):
            words = [*words, str(self.random.randint(0, 12))]
        if self.chance(0.1):
            words = [*words, self.pick("state", "list", "all", "states")]
        return self.cased(words)

    def cased(self, words: list[str]) -> str:
        """The words in snake case mostly, or camel, Pascal, kebab case, capitals, with spaces."""
        pascal = "".join(word.capitalize() for word in words)
        camel = pascal[0].lower() + pascal[1:]
        others = [pascal, camel, "-".join(words), "_".join(words).upper(), " ".join(words)]
        return self.random.choice([*["_".join(words)] * 5, *others])

    def training_state(self) -> tuple[str, Any]:
        """A labelled part that is never the model."""
        kind = self.random.randint(0, 7)
        if kind <= 2:
            return self.training_label(_OPTIMIZERS), self.pick(
                self.optimizer, self.optimizer, self.optimizer_by_label
            )()
        if kind == 3:
            return self.pick(*OTHER_OPTIMIZERS, "trainer_part", "inner"), self.optimizer()
        if kind == 4:
            return self.training_label(_SCHEDULERS), self.scheduler()
        if kind == 7:
            return self.pick("random", "Random", "RANDOM"), self.random_states()
        return self.training_label(_RANDOM), self.random_states()

    def nearly(self) -> tuple[str, Any]:
        """What is in a training state, under a label that does not name one."""
        return self.pick(*NEARLY), self.pick(
            self.optimizer_by_label, self.scheduler, self.random_states, self.weight
        )()

    # --------------------------------------------------------------------------------- all the rest

    def number(self) -> tuple[str, Any]:
        """A labelled number of the training: plain, a tensor, or an array."""
        label = self.pick(*NUMBER_LABELS)
        return label, self.pick(3, 0.25, self.scalar(), self.scalar(), self.scalar(), self.array(1))

    def metrics(self) -> tuple[str, Any]:
        """A dict or a list of numbers, nested or not; or of what has a key as a module has it,
        which is none.
        """
        plain = {"value": self.scalar(), "other": 0.5}
        return self.pick(*METRIC_DICTS), self.pick(
            {"loss": self.scalar(), "acc": self.scalar()},
            {"epoch=1.ckpt": self.scalar(), "0/1": self.scalar()},
            plain,
            {"val": plain, "train": {"x": self.scalar()}},
            [self.scalar() for _ in range(self.random.randint(1, 8))],
            {"history": [self.scalar(), 0.5, self.scalar()]},
        )

    def statistics(self) -> tuple[str, Any]:
        """Values of the data, in a dict of their own."""
        made = {
            "mean": self.pick(self.weight(), self.array()),
            "std": self.pick(self.weight(), self.array()),
        }
        return self.pick(*STATISTICS), self.pick(
            made, made, {"image": made, "action": {"mean": self.weight()}}
        )

    def listed(self) -> tuple[str, Any]:
        """A list or tuple of tensors: few of them, or more than any model here has."""
        made = self.pick(self.tensors(1, 2), self.tensors(2, 5), self.tensors(9, 16))
        return self.pick(*LISTS), self.pick(
            made, tuple(made), {"0": made}, [made, {"x": self.weight()}]
        )

    def config(self) -> tuple[str, Any]:
        """Settings, without tensors."""
        network = {"depth": 3, "state_dict": {}}
        made = {
            "lr": np.float64(0.1),
            "name": "r50",
            "betas": (0.9, 0.99),
            "model": network,
            "optimizer": None,
        }
        others = [argparse.Namespace(lr=0.1), {"weight": 0.1, "a.b": 2}, {}, [], "r50", None, 7]
        return self.pick(*CONFIGS), self.random.choice([made, *others])

    def average(self, state_dict: dict[str, Any]) -> tuple[str, Any]:
        """An average of the model, in one of the ways in which libraries write one."""
        copy = self.copy(state_dict)
        form = self.random.randint(0, 5)
        if form == 5:  # not one of the usual labels, and not what a module has for keys
            return self.pick("EMAHelper", "net_ema", "emaWeights", "cinema"), {
                "params": self.tensors(1, 2),
                "w": self.weight(),
            }
        if form == 0:
            return "ema", {
                "decay": 0.999,
                "num_updates": self.pick(7, self.scalar()),
                "shadow_params": list(copy.values()),
            }
        if form == 1:
            return self.pick(*AVERAGES, "averager"), {"decay": 0.999, "shadow": copy}
        if form == 2:
            return "ema", {"module": copy, "updates": 7}
        return self.pick(
            *AVERAGES, *AVERAGES, "shadow", "average", "swa_model", "ema_weights"
        ), copy
