"""Real model families, built small from their configurations, and what training wraps around them.

Needs transformers, and peft and lightning for their wrappings. Run as a script it writes the key
lists that the tests use where these are not installed: ``python tests/helpers/families.py
tests/data/key_lists.json.gz``.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import library as operators
from torch import nn

_KEPT: list[operators.Library] = []  # what a library defines goes with the object


def stand_in_for_torchvision() -> None:
    """Lets torchvision be imported, which timm and fastai want: the build of the package index
    needs libraries of CUDA for its operators, of which nothing here uses any.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError:  # operator torchvision::nms does not exist
        library = operators.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        import torchvision  # noqa: F401


stand_in_for_torchvision()  # transformers wants it too, where it is installed

_SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
}
_DECODER = {**_SMALL, "num_key_value_heads": 1, "max_position_embeddings": 32}
_SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 60, "max_position_embeddings": 32,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50,
        "n_positions": 32}),
    "llama": ("LlamaForCausalLM", {**_DECODER, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**_DECODER, "num_local_experts": 3}),
    "bert": ("BertForSequenceClassification", {**_SMALL, "max_position_embeddings": 32}),
    "distilbert": ("DistilBertForMaskedLM", {"n_layers": 2, "dim": 16, "n_heads": 2,
        "hidden_dim": 24, "vocab_size": 50}),
    "t5": ("T5ForConditionalGeneration",
           {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_kv": 8, "d_ff": 24,
               "vocab_size": 50}),
    "bart": ("BartForConditionalGeneration", {**_SEQ2SEQ}),
    "vit": ("ViTForImageClassification", {**_SMALL, "image_size": 16, "patch_size": 8}),
    "resnet": ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16],
        "depths": [2, 1],
                                                "layer_type": "basic"}),
    "convnext": ("ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [2, 1],
        "num_stages": 2,
                                                    "image_size": 16}),
    "wav2vec2": ("Wav2Vec2ForCTC", {**_SMALL, "conv_dim": [8, 8], "conv_stride": [2, 2],
        "conv_kernel": [4, 3],
                                    "num_conv_pos_embeddings": 4,
                                    "num_conv_pos_embedding_groups": 2,
                                    "num_feat_extract_layers": 2}),
    "transformer": ("torch.nn.Transformer", {"d_model": 16, "nhead": 2, "num_encoder_layers": 2,
        "num_decoder_layers": 2,
                                             "dim_feedforward": 24, "batch_first": True}),
    "recurrent": ("torch.nn.LSTM", {"input_size": 5, "hidden_size": 6, "num_layers": 3,
        "bidirectional": True}),
}  # fmt: skip
"""Family → its class in transformers or torch, and a configuration of a few thousand parameters."""


def build(family: str, seed: int = 0) -> nn.Module:
    """A model of a family with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    name, settings = FAMILIES[family]
    if name.startswith("torch.nn."):
        return getattr(nn, name.removeprefix("torch.nn."))(**settings).eval()
    import transformers

    made = getattr(transformers, name)
    model: nn.Module = made(made.config_class(**settings))
    with torch.no_grad():
        for parameter in model.parameters():  # none zero or one, so that a swap of two would show
            parameter.normal_(std=0.2)
    return model.eval()


def forward(family: str, model: nn.Module) -> torch.Tensor:
    """What a model makes of a fixed input."""
    torch.manual_seed(7)
    tokens = torch.randint(3, 40, (2, 6))
    if family == "transformer":
        return model(torch.randn(2, 5, 16), torch.randn(2, 4, 16))
    if family == "recurrent":
        return model(torch.randn(4, 2, 5))[0]
    if family in ("vit", "resnet", "convnext"):
        return model(torch.randn(2, 3, 16, 16)).logits
    if family == "wav2vec2":
        return model(torch.randn(2, 200)).logits
    if family in ("t5", "bart"):
        return model(input_ids=tokens, decoder_input_ids=tokens).logits
    return model(input_ids=tokens).logits


class FsdpLike(nn.Module):
    """Holds a module under the name by which FSDP holds what it has wrapped."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def fsdp_like(model: nn.Module) -> nn.Module:
    """The model and every block of its lists wrapped."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for index, block in enumerate(module):
                module[index] = FsdpLike(block)
    return FsdpLike(model)


def lightning(model: nn.Module) -> nn.Module:
    from lightning import LightningModule

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

    return Training()


def lora(model: nn.Module) -> nn.Module:
    """The model with an adapter beside each of its linear layers (and GPT-2's, which are named for
    convolutions).
    """
    import peft

    names = sorted(
        {name.rpartition(".")[2] for name, module in model.named_modules() if _is_linear(module)}
    )
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=names))
    return adapted.eval()


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def wrappings() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """What training wraps around a model; none of them changes how many keys there are, or their
    order.
    """
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    ddp = DistributedDataParallel
    return {
        "DataParallel": DataParallel,
        "DDP": ddp,
        "compile": torch.compile,
        "DDP(compile)": lambda model: ddp(torch.compile(model)),
        "compile(DDP)": lambda model: torch.compile(ddp(model)),
        "FSDP": fsdp_like,
        "compile(FSDP)": lambda model: torch.compile(fsdp_like(model)),
        "Lightning": lightning,
        "Lightning(compile)": lambda model: lightning(torch.compile(model)),
        "DDP(Lightning(FSDP))": lambda model: ddp(lightning(fsdp_like(model))),
    }


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone, which DDP wants."""
    from torch import distributed

    with tempfile.TemporaryDirectory() as folder:
        store = distributed.FileStore(str(Path(folder) / "store"), 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            distributed.destroy_process_group()


def key_lists() -> dict[str, Any]:
    """Of every family the shapes by key, and its keys under each wrapping, in the same order; with
    adapters, both.
    """
    found = {}
    for family in FAMILIES:
        shapes = {key: list(value.shape) for key, value in build(family).state_dict().items()}
        wrapped = {
            name: list(wrap(build(family)).state_dict()) for name, wrap in wrappings().items()
        }
        found[family] = {"shapes": shapes, "wrapped": wrapped}
        if family in ADAPTED:
            found[family]["lora"] = {
                key: list(value.shape) for key, value in lora(build(family)).state_dict().items()
            }
    return found


ADAPTED = ("gpt2", "llama", "qwen2", "bert", "distilbert", "t5", "bart", "vit")
"""The families that peft is used with here."""

TIED = ("gpt2", "qwen2", "distilbert", "t5", "bart")
"""The families whose head is the embedding, and is not saved by `save_pretrained`."""


if __name__ == "__main__":
    with one_process():
        text = json.dumps(key_lists(), separators=(",", ":"))
    Path(sys.argv[1]).write_bytes(gzip.compress(text.encode(), mtime=0))
