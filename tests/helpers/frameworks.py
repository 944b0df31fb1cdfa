"""Checkpoints as frameworks leave them: each trains a tiny model for a few steps and saves it in
its own way. `make families` installs them.

A case is a function of a folder that returns what was saved (`Saved`); `CASES` has all of them,
with the words of the table in docs/frameworks.md.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """What a framework wrote, and how it is read again.

    `weights` are those of the model that `forward` was asked for `logits`; `build` makes one with
    other weights. `tied` are names that the framework leaves out of its files, and ties again.
    `asked` is what ckptconv says where `options` (words of `convert`) are left out, `refused` what
    it says where safetensors can hold no such weights, and `said` tells of both in the table.
    `mismatch` is what `load_into` says of keys that are not the model's: where they are no options
    of key rules, the framework itself gives the keys other names when it saves.
    `reopen` is the framework's own way to load what `convert SOURCE INTO *into_options` wrote, and
    `loader` its name.
    """

    source: Path
    build: Callable[[], nn.Module]
    weights: Weights
    forward: Callable[[nn.Module], torch.Tensor]
    logits: torch.Tensor
    tied: tuple[str, ...] = ()
    refused: str | None = None
    said: str = "nothing"
    options: dict[str, str] = field(default_factory=dict)
    asked: str | None = None
    mismatch: str | None = None
    into: str | None = None
    into_options: tuple[str, ...] = ()
    loader: str = ""
    reopen: Callable[[Path], nn.Module] | None = None


@dataclass(frozen=True)
class Case:
    package: str
    saves: str
    make: Callable[[Path], Saved]

    @property
    def name(self) -> str:
        return self.make.__name__


CASES: list[Case] = []


def case(package: str, saves: str) -> Callable[[Callable[[Path], Saved]], Callable[[Path], Saved]]:
    def put(make: Callable[[Path], Saved]) -> Callable[[Path], Saved]:
        CASES.append(Case(package, saves, make))
        return make

    return put


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def other_net() -> nn.Module:
    return net(9)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(8, 4), torch.randint(0, 3, (8,))


def train(model: nn.Module, steps: int = 3, **after: Callable[[], None]) -> torch.optim.Optimizer:
    """Trains a model on one batch; `after` is called with each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs, labels = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        for call in after.values():
            call()
    return optimizer


@torch.no_grad()
def compute(model: nn.Module) -> torch.Tensor:
    return model.eval()(batch()[0])


def copied(model: nn.Module) -> Weights:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def saved(source: Path, model: nn.Module, **more: Any) -> Saved:
    """What was saved of a `net`."""
    given: dict[str, Any] = {"build": other_net, "forward": compute} | more
    return Saved(source, weights=copied(model), logits=given["forward"](model), **given)


def strictly(model: nn.Module, state_dict: Any) -> nn.Module:
    model.load_state_dict(state_dict, strict=True)
    return model


# torch


@case("torch", "`torch.save` of a training run under `DataParallel`, with its optimizer")
def data_parallel(folder: Path) -> Saved:
    model = nn.DataParallel(net())
    optimizer = train(model)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(tree, folder / "checkpoint.pt")

    def reopen(path: Path) -> nn.Module:
        found = torch.load(path, weights_only=True)
        again = other_net()
        torch.optim.AdamW(again.parameters()).load_state_dict(found["optimizer"])
        return strictly(again, found["model"])

    return saved(
        folder / "checkpoint.pt",
        model.module,
        into="again.pt",
        loader="`load_state_dict` of model and optimizer",
        reopen=reopen,
    )


@case("torch", "the `state_dict` of `DistributedDataParallel` around `torch.compile`")
def ddp_compiled(folder: Path) -> Saved:
    model = net()
    train(nn.parallel.DistributedDataParallel(model))
    wrapped = nn.parallel.DistributedDataParallel(torch.compile(model))
    torch.save(wrapped.state_dict(), folder / "ddp.pt")
    return saved(folder / "ddp.pt", model)


@case("torch", "a DCP folder of FSDP2 (`fully_shard`), with the optimizer's state")
def fsdp2_dcp(folder: Path) -> Saved:
    from torch.distributed import checkpoint, init_device_mesh
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (1,))
    model = fully_shard(net(), mesh=mesh)
    optimizer = train(model)
    parts = get_state_dict(model, optimizer)
    checkpoint.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder / "step-3")
    whole = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in model.state_dict().items()
    }

    def reopen(path: Path) -> nn.Module:
        again = fully_shard(other_net(), mesh=mesh)
        state = get_model_state_dict(again)
        checkpoint.load({"model": state}, checkpoint_id=path)
        return strictly(again, state)

    return Saved(
        folder / "step-3",
        other_net,
        whole,
        compute,
        compute(model),
        into="again",
        into_options=("--to", "dcp"),
        loader="`dcp.load`",
        reopen=reopen,
    )


@case("torch", "the `state_dict` of `AveragedModel` (SWA, EMA)")
def averaged_model(folder: Path) -> Saved:
    from torch.optim.swa_utils import AveragedModel

    model = net()
    average = AveragedModel(model)
    train(model, average=lambda: average.update_parameters(model))
    torch.save(average.state_dict(), folder / "swa.pt")
    return saved(
        folder / "swa.pt",
        average.module,
        options={"preset": "swa"},
        mismatch="'swa'",
        said="`load_into` names the preset",
    )


@case("torch", "`torch.save` of the module itself")
def whole_module(folder: Path) -> Saved:
    model = net()
    train(model)
    torch.save(model, folder / "module.pt")
    return saved(folder / "module.pt", model)


@case("torch", "`torch.jit.save` of a traced module")
def torchscript(folder: Path) -> Saved:
    model = net()
    train(model)
    torch.jit.save(torch.jit.trace(model.eval(), batch()[0]), folder / "module.jit.pt")
    return saved(folder / "module.jit.pt", model)


@case("torch", "the same of a module with a buffer that its own `state_dict` has not")
def torchscript_buffer(folder: Path) -> Saved:
    class Shifted(nn.Module):
        def __init__(self, seed: int = 9) -> None:
            super().__init__()
            self.net = net(seed)
            self.register_buffer("shift", torch.arange(3.0), persistent=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs) + self.shift

    model = Shifted(0)
    train(model)
    torch.jit.save(torch.jit.trace(model.eval(), batch()[0]), folder / "module.jit.pt")
    return saved(folder / "module.jit.pt", model, build=Shifted, options={"exclude": "shift"})


# Lightning


def _lightning() -> Any:
    import lightning

    class Training(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = other_net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    return Training


def _fitted(folder: Path, *callbacks: Any) -> Any:
    import lightning

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=list(callbacks), default_root_dir=folder, **quiet
    )
    model = _lightning()()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch()), batch_size=8)
    trainer.fit(model, loader)
    trainer.save_checkpoint(folder / "last.ckpt")
    return model


@case("lightning", "`Trainer.save_checkpoint`")
def lightning_trainer(folder: Path) -> Saved:
    model = _fitted(folder)
    make = _lightning()
    return saved(
        folder / "last.ckpt",
        model,
        build=make,
        into="again.ckpt",
        loader="`load_from_checkpoint`",
        reopen=make.load_from_checkpoint,
    )


@case("lightning", "the same with `EMAWeightAveraging`, which saves the average as `state_dict`")
def lightning_average(folder: Path) -> Saved:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    _fitted(folder, EMAWeightAveraging(decay=0.5))
    average = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    make = _lightning()
    return saved(
        folder / "last.ckpt",
        strictly(make(), average),
        build=make,
        into="again.ckpt",
        loader="`load_from_checkpoint`",
        reopen=make.load_from_checkpoint,
    )


# Hugging Face


def _gpt2(seed: int = 0) -> Any:
    from helpers import families

    return families.build("gpt2", seed)


def _say(model: Any) -> torch.Tensor:
    from helpers import families

    with torch.no_grad():
        return families.forward("gpt2", model.eval())


def _taught(model: Any, steps: int = 2) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        optimizer.zero_grad()
        model.train()(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model.eval()


def _of_gpt2(source: Path, model: Any, **more: Any) -> Saved:
    from transformers import AutoModelForCausalLM

    given: dict[str, Any] = {
        "into": "again/",
        "into_options": ("--to", "safetensors", "--with-files"),
        "loader": "`from_pretrained`",
        "reopen": AutoModelForCausalLM.from_pretrained,
    } | more
    weights = copied(model)
    del weights["lm_head.weight"]
    tied = ("lm_head.weight",)
    return Saved(source, lambda: _gpt2(9), weights, _say, _say(model), tied, **given)


@case("transformers", "`save_pretrained`, with tied weights")
def transformers_single(folder: Path) -> Saved:
    model = _taught(_gpt2())
    model.save_pretrained(folder / "hf")
    return _of_gpt2(folder / "hf", model)


@case("transformers", "`save_pretrained`, sharded")
def transformers_sharded(folder: Path) -> Saved:
    model = _taught(_gpt2())
    model.save_pretrained(folder / "hf", max_shard_size="8kB")
    return _of_gpt2(
        folder / "hf",
        model,
        into_options=("--to", "safetensors", "--with-files", "--max-shard-size", "6kB"),
    )


@case("transformers", "`Trainer`: a folder of checkpoints with optimizer and random states")
def transformers_trainer(folder: Path) -> Saved:
    from transformers import Trainer, TrainingArguments

    model = _gpt2()
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 40, (6, 6))]
    settings = TrainingArguments(
        str(folder / "run"),
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model, settings, train_dataset=rows).train()
    return _of_gpt2(
        folder / "run",
        model,
        options={"tag": "checkpoint-2"},
        asked="checkpoint-1",
        said="which step: `--tag`",
    )


@case("transformers", "`rng_state.pth` of a `Trainer`, alone")
def transformers_random(folder: Path) -> Saved:
    made = transformers_trainer(folder)
    return replace(
        made,
        source=folder / "run/checkpoint-2/rng_state.pth",
        options={},
        asked=None,
        refused="holds only a training's state: no weights",
        said="that it holds no weights",
        reopen=None,
    )


def _renamed(folder: Path, family: str) -> Saved:
    """Of a family whose keys transformers renames when it saves: the weights are those in its
    file.
    """
    from safetensors.torch import load_file

    from helpers import families

    @torch.no_grad()
    def say(model: Any) -> torch.Tensor:
        return families.forward(family, model.eval())

    model: Any = families.build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        families.forward(family, model).square().mean().backward()
        optimizer.step()
    model.save_pretrained(folder / "hf")
    weights = load_file(folder / "hf/model.safetensors")
    assert weights.keys() != model.state_dict().keys()
    return Saved(
        folder / "hf",
        lambda: families.build(family, 9),
        weights,
        say,
        say(model),
        mismatch="from_pretrained",
        said="`load_into` names `from_pretrained`",
        into="again/",
        into_options=("--to", "safetensors", "--with-files"),
        loader="`from_pretrained`",
        reopen=type(model).from_pretrained,
    )


@case("transformers", "`save_pretrained` of Mixtral, whose keys it renames")
def transformers_mixtral(folder: Path) -> Saved:
    return _renamed(folder, "mixtral")


@case("transformers", "`save_pretrained` of ViT, whose keys it renames")
def transformers_vit(folder: Path) -> Saved:
    return _renamed(folder, "vit")


@case("peft", "`save_pretrained` of a LoRA adapter")
def peft_lora(folder: Path) -> Saved:
    import peft

    def adapted(seed: int) -> Any:
        torch.manual_seed(seed)
        settings = peft.LoraConfig(r=3, target_modules=["c_attn"], init_lora_weights=False)
        return peft.get_peft_model(_gpt2(), settings)

    model = _taught(adapted(1))
    model.save_pretrained(folder / "adapter")
    weights = peft.get_peft_model_state_dict(model)

    class Adapter(nn.Module):
        """The adapter's own tensors, under the names that peft saves."""

        def __init__(self, around: Any) -> None:
            super().__init__()
            self.around = [around]

        def state_dict(self, *args: Any, **options: Any) -> Any:
            return peft.get_peft_model_state_dict(self.around[0])

        def load_state_dict(self, found: Any, *args: Any, **options: Any) -> Any:
            return peft.set_peft_model_state_dict(self.around[0], found)

    def say(found: Any) -> torch.Tensor:
        return _say(found.around[0] if isinstance(found, Adapter) else found)

    return Saved(
        folder / "adapter",
        lambda: Adapter(adapted(8)),
        dict(weights),
        say,
        _say(model),
        into="again/",
        into_options=("--to", "safetensors", "--with-files"),
        loader="`PeftModel.from_pretrained`",
        reopen=lambda path: peft.PeftModel.from_pretrained(_gpt2(), str(path)),
    )


def _unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        norm_num_groups=2,
        block_out_channels=(4, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        add_attention=False,
    )


@torch.no_grad()
def _denoised(model: Any) -> torch.Tensor:
    image = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    return model.eval()(image, 3).sample


def _denoiser(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = _unet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(1, 1, 8, 8), 3).sample.square().mean().backward()
        optimizer.step()
    return model


@case("diffusers", "`save_pretrained` of a UNet")
def diffusers_unet(folder: Path) -> Saved:
    from diffusers import UNet2DModel

    model = _denoiser()
    model.save_pretrained(folder / "unet")
    return Saved(
        folder / "unet",
        _unet,
        copied(model),
        _denoised,
        _denoised(model),
        into="again/",
        into_options=("--to", "safetensors", "--with-files"),
        loader="`from_pretrained`",
        reopen=UNet2DModel.from_pretrained,
    )


@case("diffusers", "the same, sharded, with the variant `fp16` in its names")
def diffusers_variant(folder: Path) -> Saved:
    from diffusers import UNet2DModel

    model = _denoiser()
    model.save_pretrained(folder / "unet", variant="fp16", max_shard_size="20KB")
    return Saved(
        folder / "unet",
        _unet,
        copied(model),
        _denoised,
        _denoised(model),
        into="again/",
        into_options=("--to", "safetensors", "--with-files"),
        loader="`from_pretrained(variant='fp16')`",
        reopen=lambda path: UNet2DModel.from_pretrained(path, variant="fp16"),
    )


@case("sentence-transformers", "`save` of a transformer with pooling and a dense layer")
def sentence_transformers(folder: Path) -> Saved:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Pooling, Transformer
    from transformers import BertTokenizer

    from helpers import families

    bert = folder / "bert"
    families.build("bert").bert.save_pretrained(bert)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (bert / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(bert / "vocab.txt")).save_pretrained(bert)

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        reader = Transformer(str(bert))
        width = reader.get_word_embedding_dimension()
        model = SentenceTransformer(modules=[reader, Pooling(width), Dense(width, 5)], device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
        return model.eval()

    def embed(model: Any) -> torch.Tensor:
        return model.encode(["a b", "c d e"], convert_to_tensor=True)

    model = build(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        found = model(model.tokenize(["a b", "c d e"]))
        found["sentence_embedding"].square().mean().backward()
        optimizer.step()
    model.save(str(folder / "st"))
    return Saved(
        folder / "st",
        lambda: build(2),
        copied(model),
        embed,
        embed(model),
        refused="2_Dense hold weights too; copy all with --with-files",
        said="that more folders hold weights: `--with-files`",
        into="again/",
        into_options=("--to", "safetensors", "--with-files"),
        loader="`SentenceTransformer(…)`",
        reopen=lambda path: SentenceTransformer(str(path), device="cpu"),
    )


@case("accelerate", "`save_state`: model, optimizer and random states in one folder")
def accelerate_state(folder: Path) -> Saved:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = train(model)
    accelerator.prepare(model, optimizer)
    accelerator.save_state(str(folder / "state"))

    def reopen(path: Path) -> nn.Module:
        again = other_net()
        alone = Accelerator(cpu=True)
        alone.prepare(again)
        alone.load_state(str(path))
        return again

    return saved(
        folder / "state",
        model,
        into="again/",
        into_options=("--to", "safetensors"),
        loader="`load_state`, of the model alone,",
        reopen=reopen,
    )


@case("accelerate", "a project folder: `checkpoints/` with a state for each `save_state`")
def accelerate_project(folder: Path) -> Saved:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    settings = ProjectConfiguration(str(folder / "run"), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=settings)
    model = net()
    accelerator.prepare(model, train(model))
    for _ in range(2):
        accelerator.save_state()
        train(model)
    accelerator.load_state(str(folder / "run/checkpoints/checkpoint_1"))
    return saved(
        folder / "run",
        model,
        refused="without a checkpoint in it; name .*checkpoints",
        said="that `checkpoints/` is to be named",
    )


@case("accelerate", "the `checkpoints/` of a project folder")
def accelerate_checkpoints(folder: Path) -> Saved:
    made = accelerate_project(folder)
    return replace(
        made,
        source=folder / "run/checkpoints",
        refused=None,
        options={"tag": "checkpoint_1"},
        asked="checkpoint_0",
        said="which step: `--tag`",
    )


# timm


@case(
    "timm", "`CheckpointSaver` with `ModelEmaV3`: model and average, of which timm loads the latter"
)
def timm_ema(folder: Path) -> Saved:
    from timm.models import load_checkpoint
    from timm.utils import CheckpointSaver, ModelEmaV3

    model = net()
    average = ModelEmaV3(model, decay=0.5)
    optimizer = train(model, average=lambda: average.update(model))
    saver = CheckpointSaver(model, optimizer, model_ema=average, checkpoint_dir=folder)
    saver.save_checkpoint(3, metric=0.5)

    def reopen(path: Path) -> nn.Module:
        again = other_net()
        load_checkpoint(again, str(path))
        return again

    # what timm itself loads says which weights are meant
    return saved(
        folder / "last.pth.tar",
        reopen(folder / "last.pth.tar"),
        into="again.pth.tar",
        loader="`timm.models.load_checkpoint`",
        reopen=reopen,
        said="a note: the average is taken, as timm does",
    )


@case("accelerate", "`save_model`: weights alone, in shards")
def accelerate_model(folder: Path) -> Saved:
    from accelerate import Accelerator, load_checkpoint_in_model

    model = net()
    train(model)
    Accelerator(cpu=True).save_model(model, str(folder / "model"), max_shard_size=100)

    def reopen(path: Path) -> nn.Module:
        again = other_net()
        load_checkpoint_in_model(again, str(path), strict=True)
        return again

    return saved(
        folder / "model",
        model,
        into="again/",
        into_options=("--to", "safetensors", "--max-shard-size", "100B"),
        loader="`load_checkpoint_in_model`",
        reopen=reopen,
    )


@case("huggingface_hub", "`PyTorchModelHubMixin.save_pretrained`")
def hub_mixin(folder: Path) -> Saved:
    from huggingface_hub import PyTorchModelHubMixin

    class Mixed(nn.Module, PyTorchModelHubMixin):
        def __init__(self, width: int = 6) -> None:
            super().__init__()
            self.layer = nn.Linear(4, width)
            self.head = nn.Linear(width, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(inputs))

    model = Mixed(width=7)
    train(model)
    model.save_pretrained(folder / "mixed")
    return saved(
        folder / "mixed",
        model,
        build=lambda: Mixed(width=7),
        into="again/",
        into_options=("--to", "safetensors", "--with-files"),
        loader="`from_pretrained`",
        reopen=Mixed.from_pretrained,
    )


# others


def _skorch() -> Any:
    import numpy
    import skorch

    torch.manual_seed(1)
    model = skorch.NeuralNetClassifier(
        other_net(),
        criterion=nn.CrossEntropyLoss,
        max_epochs=2,
        lr=0.1,
        verbose=0,
        train_split=None,
        callbacks=[],
    )
    inputs, labels = batch()
    return model, inputs.numpy(), labels.numpy().astype(numpy.int64)


@case("skorch", "`Checkpoint` callback: a folder of params, optimizer, criterion and history")
def skorch_folder(folder: Path) -> Saved:
    import skorch
    from skorch.callbacks import Checkpoint

    model, inputs, labels = _skorch()
    model.set_params(callbacks=[("kept", Checkpoint(monitor=None, dirname=str(folder / "skorch")))])
    model.fit(inputs, labels)
    assert isinstance(model, skorch.NeuralNet)

    def reopen(path: Path) -> nn.Module:
        again = _skorch()[0].initialize()
        again.load_params(f_params=path)
        return again.module_

    return saved(
        folder / "skorch",
        model.module_,
        into="again.pt",
        loader="`load_params`",
        reopen=reopen,
    )


@case("skorch", "`pickle.dump` of the fitted net")
def skorch_pickle(folder: Path) -> Saved:
    import pickle

    model, inputs, labels = _skorch()
    model.fit(inputs, labels)
    (folder / "net.pkl").write_bytes(pickle.dumps(model))
    return saved(
        folder / "net.pkl",
        model.module_,
        refused="is a checkpoint in bytes.*net.save_params\\(f_params=OUT\\)",
        said="`net.save_params` is the way",
    )


@case("fastai", "`Learner.save`, with the optimizer")
def fastai_learner(folder: Path) -> Saved:
    import fastai.callback.progress  # noqa: F401 (gives a learner `no_bar`)
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner

    dataset = torch.utils.data.TensorDataset(*batch())
    loader = torch.utils.data.DataLoader(dataset, batch_size=8)
    model = net()

    def learner(model: nn.Module) -> Any:
        loss = nn.CrossEntropyLoss()
        return Learner(DataLoaders(loader, loader), model, loss_func=loss, path=folder)

    teaching = learner(model)
    with teaching.no_bar(), teaching.no_logging():
        teaching.fit(2)
    teaching.save("stage-1")

    def reopen(path: Path) -> nn.Module:
        again = learner(other_net())
        again.model_dir = path.parent
        return again.load(path.stem, with_opt=True).model

    return saved(
        folder / "models/stage-1.pth",
        model,
        into="again.pth",
        loader="`Learner.load`, with the optimizer",
        reopen=reopen,
    )


@case("stable-baselines3", "`PPO.save`: a zip of state dicts")
def stable_baselines(folder: Path) -> Saved:
    from stable_baselines3 import PPO

    def agent(seed: int) -> Any:
        sizes = {"net_arch": [6]}
        return PPO(
            "MlpPolicy",
            "CartPole-v1",
            n_steps=16,
            batch_size=8,
            seed=seed,
            policy_kwargs=sizes,
            device="cpu",
        )

    model = agent(0)
    model.learn(32)
    model.save(folder / "ppo")
    inputs = batch()[0]

    @torch.no_grad()
    def act(policy: Any) -> torch.Tensor:
        return policy.get_distribution(inputs).distribution.logits

    return saved(folder / "ppo.zip", model.policy, build=lambda: agent(5).policy, forward=act)


@case("stable-baselines3", "`DQN.save_replay_buffer`")
def stable_baselines_buffer(folder: Path) -> Saved:
    from stable_baselines3 import DQN

    def agent(seed: int) -> Any:
        settings: dict[str, Any] = {"buffer_size": 64, "learning_starts": 8, "device": "cpu"}
        return DQN("MlpPolicy", "CartPole-v1", seed=seed, **settings)

    model = agent(0)
    model.learn(32)
    model.save_replay_buffer(folder / "buffer")
    inputs = batch()[0]

    @torch.no_grad()
    def value(policy: Any) -> torch.Tensor:
        return policy.q_net(inputs)

    return saved(
        folder / "buffer.pkl",
        model.policy,
        build=lambda: agent(5).policy,
        forward=value,
        refused="holds only a replay buffer's state: no weights",
        said="that it holds no weights",
    )


@case("mmengine", "`Runner` with `EMAHook`: a work_dir with `last_checkpoint`")
def mmengine_runner(folder: Path) -> Saved:
    from mmengine.model import BaseModel
    from mmengine.optim import OptimWrapper
    from mmengine.runner import Runner, load_checkpoint

    class Model(BaseModel):
        def __init__(self, seed: int = 0) -> None:
            super().__init__()
            self.net = net(seed)

        def forward(self, inputs: Any, labels: Any = None, mode: str = "tensor") -> Any:
            found = self.net(inputs)
            return (
                {"loss": nn.functional.cross_entropy(found, labels)}
                if labels is not None
                else found
            )

    loader = {
        "batch_size": 8,
        "dataset": torch.utils.data.TensorDataset(*batch()),
        "sampler": {"type": "DefaultSampler", "shuffle": False},
        "collate_fn": torch.utils.data.default_collate,
    }
    model = Model()
    runner = Runner(
        model,
        str(folder / "work"),
        train_dataloader=loader,
        train_cfg={"by_epoch": True, "max_epochs": 2},
        optim_wrapper=OptimWrapper(torch.optim.AdamW(model.parameters(), lr=0.05)),
        custom_hooks=[{"type": "EMAHook", "momentum": 0.5}],
        log_level="ERROR",
    )
    runner.train()

    def reopen(path: Path) -> nn.Module:
        again = Model(9)
        load_checkpoint(again, str(path))
        return again

    # mmengine's own loader wants `weights_only=False` for this file, not for what is made of it
    average = torch.load(folder / "work/epoch_2.pth", weights_only=False)["state_dict"]
    return saved(
        folder / "work",
        strictly(Model(9), average),
        build=lambda: Model(9),
        into="again.pth",
        loader="`mmengine.runner.load_checkpoint`",
        reopen=reopen,
    )


@case("ema-pytorch", "the `state_dict` of `EMA`: both models and counters")
def ema_pytorch(folder: Path) -> Saved:
    from ema_pytorch import EMA

    model = net()
    average = EMA(model, beta=0.5, update_every=1, update_after_step=0)
    train(model, average=average.update)
    torch.save(average.state_dict(), folder / "ema.pt")
    return saved(
        folder / "ema.pt",
        average.ema_model,
        options={"preset": "ema-pytorch"},
        mismatch="'ema-pytorch'",
        said="`load_into` names the preset",
    )


@case("speechbrain", "`Checkpointer`: a folder `CKPT+…`")
def speechbrain_checkpointer(folder: Path) -> Saved:
    _stand_in_for_torchaudio()
    from speechbrain.utils.checkpoints import Checkpointer

    model = net()
    optimizer = train(model)
    keeper = Checkpointer(folder / "save", {"model": model, "optimizer": optimizer})
    with patch.dict(os.environ, RANK="0", LOCAL_RANK="0"):
        kept = keeper.save_checkpoint(meta={"WER": 3.0}, name="epoch-3")
    return saved(Path(kept.path), model)


@case("deepspeed", "`save_checkpoint` of ZeRO stage 2")
def deepspeed_zero(folder: Path) -> Saved:
    import deepspeed

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    with patch.dict(os.environ, LOCAL_RANK="0"):
        engine = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=settings,
            dist_init_required=False,
        )[0]
    inputs, labels = batch()
    for _ in range(2):
        engine.backward(nn.functional.cross_entropy(engine(inputs.bfloat16()).float(), labels))
        engine.step()
    engine.save_checkpoint(str(folder / "zero"))
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    def build(seed: int = 9) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    # what deepspeed's own tool makes of it
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder / "zero"))
    return saved(folder / "zero", strictly(build(), weights), build=build)


@case("bitsandbytes", "the `state_dict` of a model with `Linear8bitLt`")
def bitsandbytes_int8(folder: Path) -> Saved:
    from bitsandbytes.nn import Linear8bitLt

    def build(seed: int = 9) -> nn.Module:
        torch.manual_seed(seed)
        trained = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        train(trained)
        made = nn.Sequential(Linear8bitLt(4, 8, has_fp16_weights=False), nn.Linear(8, 3))
        return strictly(made, trained.state_dict()).to("cpu")  # makes the codes

    model = build(0)
    torch.save(model.state_dict(), folder / "int8.pt")
    return saved(folder / "int8.pt", model, build=build)


@case("optimum-quanto", "the `state_dict` of a frozen int8 model")
def quanto_int8(folder: Path) -> Saved:
    from optimum.quanto import freeze, qint8, quantize

    def build(seed: int = 9) -> nn.Module:
        made = net(seed)
        train(made)
        quantize(made.eval(), weights=qint8)
        freeze(made)
        return made

    model = build(0)
    torch.save(model.state_dict(), folder / "int8.pt")
    return saved(folder / "int8.pt", model, build=build)


@case("torchao", "`torch.save` of the `state_dict` after `quantize_` (int8 weights)")
def torchao_torch(folder: Path) -> Saved:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = net()
    train(model)
    quantize_(model.eval(), Int8WeightOnlyConfig())
    torch.save(model.state_dict(), folder / "int8.pt")

    def reopen(path: Path) -> nn.Module:
        again = other_net()
        again.load_state_dict(torch.load(path, weights_only=True), assign=True)
        return again

    return saved(
        folder / "int8.pt",
        model,
        refused="safetensors cannot hold.*--dequantize",
        into="again.pt",
        into_options=("--unknown", "keep"),
        loader="`torch.load` with torchao imported",
        reopen=reopen,
        said="what safetensors cannot hold: `--to torch --unknown keep`",
    )


@case("torchao", "its own safetensors (`flatten_tensor_state_dict`), renamed")
def torchao_safetensors(folder: Path) -> Saved:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
        unflatten_tensor_state_dict,
    )
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.ModuleDict({"net": net()})
    train(model["net"])
    quantize_(model.eval(), Int8WeightOnlyConfig())
    flat, metadata = flatten_tensor_state_dict(model.state_dict())
    save_file(flat, folder / "int8.safetensors", metadata=metadata)

    def reopen(path: Path) -> nn.Module:
        with safe_open(path, "pt") as file:
            found, left = unflatten_tensor_state_dict(load_file(path), file.metadata())
        assert not left
        again = other_net()
        again.load_state_dict(found, assign=True)
        return again

    # the flat tensors are no module's own: torchao's rebuilt model is what is compared
    return Saved(
        folder / "int8.safetensors",
        other_net,
        {},
        compute,
        compute(model["net"]),
        into="again.safetensors",
        into_options=("--rename", "net.="),
        loader="`unflatten_tensor_state_dict`",
        reopen=reopen,
    )


@case("torchtune", "`FullModelHFCheckpointer`: an epoch in parts, under transformers' names")
def torchtune_parts(folder: Path) -> Saved:
    from helpers import families

    with _stood_in_for(
        "torchao", "torchdata", "datasets", "omegaconf", "sentencepiece", "tiktoken"
    ):
        from torchtune.models.convert_weights import tune_to_hf
        from torchtune.models.llama3 import llama3
        from torchtune.training import FullModelHFCheckpointer

    base: Any = families.build("llama")
    base.save_pretrained(folder / "base", max_shard_size="8kB")

    def checkpointer(path: Path) -> Any:
        files = sorted(file.name for file in path.glob("*.safetensors"))
        return FullModelHFCheckpointer(str(path), files, "LLAMA3", str(folder / "out"))

    def loaded(path: Path) -> nn.Module:
        model = llama3(
            vocab_size=50,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            embed_dim=16,
            intermediate_dim=24,
            max_seq_len=32,
        )
        return strictly(model, checkpointer(path).load_checkpoint()["model"])

    def renamed(model: nn.Module) -> Weights:
        return tune_to_hf(copied(model), num_heads=2, num_kv_heads=1, dim=16)

    @torch.no_grad()
    def say(model: nn.Module) -> torch.Tensor:
        return families.forward("llama", model.eval())

    def build() -> nn.Module:
        return families.build("llama", 9)

    saver = checkpointer(folder / "base")
    saver.load_checkpoint()
    model = loaded(folder / "base")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(3, 40, (2, 6))).square().mean().backward()
        optimizer.step()
    weights = renamed(model)
    saver.save_checkpoint({"model": model.state_dict()}, epoch=0)
    return Saved(
        folder / "out/epoch_0",
        build,
        weights,
        say,
        say(strictly(build(), weights)),
        into="again/",
        into_options=("--to", "safetensors", "--with-files", "--max-shard-size", "6kB"),
        loader="its `load_checkpoint`",
        reopen=lambda path: strictly(build(), renamed(loaded(path))),
    )


def _keras(folder: Path) -> tuple[Any, Callable[[], Any]]:
    with patch.dict(os.environ, KERAS_BACKEND="torch"):
        import keras

    def build(seed: int = 9) -> Any:
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Dense(6, name="first"), keras.layers.Dense(3, name="last")]
        model = keras.Sequential([keras.Input((4,)), *layers], name="net")
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = build(0)
    inputs, labels = batch()
    model.fit(inputs, labels, epochs=2, verbose=0)
    return model, build


@case("keras", "`torch.save` of the `state_dict` of a model of the torch backend")
def keras_torch(folder: Path) -> Saved:
    model, build = _keras(folder)
    torch.save(model.state_dict(), folder / "keras.pt")
    return saved(folder / "keras.pt", model, build=build)


@case("keras", "`save_weights` (HDF5)")
def keras_weights(folder: Path) -> Saved:
    model, build = _keras(folder)
    model.save_weights(folder / "net.weights.h5")
    return saved(
        folder / "net.weights.h5", model, build=build, refused="HDF5", said="that HDF5 is not read"
    )


class _StandIns(MetaPathFinder, Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        known = name.partition(".")[0] in self.packages
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __path__=[], __name__=spec.name)

    def exec_module(self, module: Any) -> None: ...


@contextmanager
def _stood_in_for(*packages: str) -> Iterator[None]:
    """Lets torchtune be imported without what reads its data, and beside a torchao that lost what
    it imports for quantizing: its checkpoints need neither.
    """

    def taken() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in packages]
        return {name: sys.modules.pop(name) for name in names}

    kept, finder = taken(), _StandIns(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        taken()
        sys.modules.update(kept)


def _stand_in_for_torchaudio() -> None:
    made = ModuleType("torchaudio")
    made.__version__ = "2.13.0"  # type: ignore[attr-defined]
    made.__spec__ = ModuleSpec("torchaudio", None)
    sys.modules.setdefault("torchaudio", made)


HEAD = (
    "| framework | what it saves | to safetensors, `load_portable`, `load_into` | what is said"
    " | what its own loader opens |\n|---|---|---|---|---|"
)


def row(case: Case, made: Saved) -> str:
    """The row of docs/frameworks.md."""
    words = " ".join(word for name, value in made.options.items() for word in (f"--{name}", value))
    plain = f"with `{words}`" if words else "as it is"
    if made.refused:
        plain = "refused"
    into = " ".join((made.into or "", *made.into_options))
    opened = f"{made.loader} of `{into}`" if made.reopen else "—"
    cells = (f"{case.package} {version(case.package)}", case.saves, plain, made.said, opened)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """The table is written into the page that is named."""
    from helpers import families

    page, rows = Path(sys.argv[1]), [HEAD]
    with families.one_process():
        for each in CASES:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row(each, each.make(Path(folder))))
    text = page.read_text("utf-8")
    table = re.compile(r"\| framework \|.*?\n(?=\n|\Z)", re.DOTALL)
    page.write_text(table.sub(lambda _: "\n".join(rows) + "\n", text), "utf-8")


if __name__ == "__main__":
    main()
