"""Make the sample checkpoints of this folder, with torch alone: small files with the troubles that
real ones have.

    python sample_ckpts/make_samples.py [OUTDIR]

A sample that belongs on a CUDA device is made and saved there if this host has that device. If not,
it is made on the CPU, and torch's own `register_package` hook gives its storages the tag that they
would have had on the device. README.md says what is in each file. The same torch on the same host
writes the same tensors every time.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SEED = 20240229
CPU = torch.device("cpu")

Checkpoint = dict[str, Any]


class LinearStack(nn.Module):
    """Three linear layers in a ModuleList, then a BatchNorm1d: 8 features in, 4 out."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        for linear in self.linears:
            inputs = torch.relu(linear(inputs))
        return self.norm(inputs)


class ConvClassifier(nn.Module):
    """A convolution with BatchNorm2d and a linear head: images of 1x8x8 in, 3 classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.classifier = nn.Linear(4 * 6 * 6, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


class RNNClassifier(nn.Module):
    """A two-layer LSTM that classifies a sequence by its last output: (batch, time, 6) in, 5
    classes out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 12, num_layers=2, batch_first=True)
        self.fc = nn.Linear(12, 5)

    def forward(self, sequences: Tensor) -> Tensor:
        outputs, _ = self.rnn(sequences)
        return self.fc(outputs[:, -1])


class TiedLanguageModel(nn.Module):
    """A language model of 32 tokens whose output matrix is its embedding matrix, one tensor under
    two keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.embed(tokens)))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_function: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    steps: int = 5,
) -> float:
    """Take `steps` optimizer steps on one batch and return the last loss."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return loss.item()


@contextmanager
def one_process_group() -> Iterator[None]:
    """A gloo process group of this process alone; DistributedDataParallel insists on one."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder, "rendezvous").as_uri()
        dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def dp(device: torch.device) -> Checkpoint:
    """State dict of a model in nn.DataParallel, after one forward pass in training mode."""
    model = nn.DataParallel(LinearStack().to(device))
    model(torch.randn(10, 8).to(device))
    return model.state_dict()


def ddp_train(device: torch.device) -> Checkpoint:
    """Training checkpoint of a DistributedDataParallel run: model, AdamW, scheduler, counters."""
    images, labels = torch.randn(12, 1, 8, 8).to(device), torch.randint(0, 3, (12,)).to(device)
    with one_process_group():
        model = DistributedDataParallel(ConvClassifier().to(device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        loss = train(model, optimizer, nn.CrossEntropyLoss(), images, labels, scheduler)
        return {
            "epoch": 1,
            "step": 5,
            "loss": loss,
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }


def ddp(device: torch.device) -> Checkpoint:
    """The state dict alone of that DistributedDataParallel run."""
    return ddp_train(device)["state_dict"]


def compiled(device: torch.device) -> Checkpoint:
    """State dict of a torch.compile'd model, never called: the first call would compile."""
    return torch.compile(LinearStack().to(device)).state_dict()


def ddp_compiled(device: torch.device) -> Checkpoint:
    """State dict of DistributedDataParallel around a torch.compile'd model."""
    with one_process_group():
        return DistributedDataParallel(torch.compile(LinearStack().to(device))).state_dict()


def regression(device: torch.device) -> Checkpoint:
    """Training checkpoint of a linear regression of 13 features with Adam."""
    features = torch.randn(64, 13).to(device)
    targets = features @ torch.randn(13, 1).to(device)
    model = nn.Linear(13, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)
    loss = train(model, optimizer, nn.MSELoss(), features, targets, steps=20)
    return {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "epoch": 20,
        "loss": loss,
    }


def criterion(device: torch.device) -> Checkpoint:
    """State dict of a loss with class weights: its one buffer is named `weight`."""
    return nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 2.5])).to(device).state_dict()


def rnn_classifier(device: torch.device) -> Checkpoint:
    """State dict of an LSTM with a linear head."""
    return RNNClassifier().to(device).state_dict()


def fp16(device: torch.device) -> Checkpoint:
    """State dict of a half-precision model; the BatchNorm counter stays int64."""
    return LinearStack().half().to(device).state_dict()


def tied(device: torch.device) -> Checkpoint:
    """State dict with one storage under two keys."""
    return TiedLanguageModel().to(device).state_dict()


def namespace_train(device: torch.device) -> Checkpoint:
    """Training checkpoint with what `weights_only=True` refuses: a Namespace, a path in it, a numpy
    scalar.
    """
    args = argparse.Namespace(
        lr=0.05, momentum=0.9, layers=[8, 16, 16, 4], output=Path("runs/example"), resume=None
    )
    inputs, labels = torch.randn(16, 8).to(device), torch.randint(0, 4, (16,)).to(device)
    model = LinearStack().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    train(model, optimizer, nn.CrossEntropyLoss(), inputs, labels)
    correct = model(inputs).argmax(1) == labels
    return {
        "epoch": 5,
        "args": args,
        "best_acc": np.float64(correct.float().mean().item()),
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }


# File name -> its location tag, and the function that makes its content on the device it is given.
SAMPLES: dict[str, tuple[str, Callable[[torch.device], Checkpoint]]] = {
    "dp_cuda0.pt": ("cuda:0", dp),
    "ddp_cuda3_train.pt": ("cuda:3", ddp_train),
    "ddp_cuda3.pt": ("cuda:3", ddp),
    "compiled.pt": ("cpu", compiled),
    "ddp_compiled.pt": ("cpu", ddp_compiled),
    "regression.pt": ("cpu", regression),
    "criterion.pt": ("cpu", criterion),
    "rnn_classifier.pt": ("cpu", rnn_classifier),
    "fp16.pt": ("cuda:0", fp16),
    "tied.pt": ("cpu", tied),
    "namespace_train.pt": ("cpu", namespace_train),
}


def device_for(location: str) -> torch.device:
    """The device that `location` names if this host has it, else the CPU."""
    device = torch.device(location)
    present = device.type == "cuda" and device.index < torch.cuda.device_count()
    return device if present else CPU


def device_storages(tree: object) -> set[int]:
    """Addresses of the storages in `tree` that training on a device keeps there.

    That is every tensor (they all stand in dicts) but Adam's `step` counters: unless it is
    capturable or fused, Adam keeps them on the CPU.
    """
    if isinstance(tree, Tensor):
        return {tree.untyped_storage().data_ptr()}
    if isinstance(tree, dict):
        return {
            address
            for key, value in tree.items()
            if key != "step"
            for address in device_storages(value)
        }
    return set()


@contextmanager
def tagged(location: str, storages: set[int]) -> Iterator[None]:
    """Within this block torch.save tags the CPU storages at these addresses with `location`."""

    def tag(storage: torch.UntypedStorage) -> str | None:
        return location if storage.data_ptr() in storages else None

    def restore(storage: torch.UntypedStorage, location: str) -> None:
        return None

    # torch asks the taggers in the order of their priority, and its own first one, for the CPU, has
    # 10.
    torch.serialization.register_package(0, tag, restore)
    try:
        yield
    finally:
        # torch has no public way to undo it
        torch.serialization._package_registry.remove((0, tag, restore))


def write_sample(name: str, folder: Path) -> str:
    """Make the sample `name`, save it in `folder`, and say how it got its location tag."""
    location, make = SAMPLES[name]
    device = device_for(location)
    torch.manual_seed(SEED)
    checkpoint = make(device)
    if str(device) == location:
        torch.save(checkpoint, folder / name)
        return f"{name}: made on {device}"
    with tagged(location, device_storages(checkpoint)):
        torch.save(checkpoint, folder / name)
    return f"{name}: made on {device}, tagged {location} by register_package"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "outdir", nargs="?", type=Path, default=Path(__file__).parent, help="default: this folder"
    )
    folder = parser.parse_args().outdir
    folder.mkdir(parents=True, exist_ok=True)
    for name in SAMPLES:
        print(write_sample(name, folder))


if __name__ == "__main__":
    main()
