"""Which library opens each kind of container without ckptconv, and whether on any host: what
`inspect` calls portable.

Any host means: without the devices and the ranks that wrote it, and without running what the file
names. What stands in the container (device tags, objects, wrappers) is not looked at here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Opening:
    """Who opens a container: the library `by`; `why_not` is empty if it does so on any host."""

    by: str
    why_not: str = ""

    @property
    def anywhere(self) -> bool:
        """Whether any host opens it that has the library."""
        return not self.why_not


UNKNOWN = Opening("", "no known library opens it")
TORCH = Opening("torch.load")
SAFETENSORS = Opening("safetensors")
DCP = Opening("torch.distributed.checkpoint")
DCP_SHARDS = Opening("torch.distributed.checkpoint.HuggingFaceStorageReader")
TORCH_TAR = Opening(
    "torch.load(weights_only=False)", "torch.load(weights_only=True) does not read tar files"
)
PICKLE = Opening("pickle.load", "only pickle.load opens it, which runs what it names")
TORCHSCRIPT = Opening("torch.jit.load", "only torch.jit.load opens it, which runs its code")
ZIP_MEMBERS = Opening("the program that wrote it", "only the program that packed it opens it")
RANKS = Opening(
    "torch.load", "each file opens only in a process group with the ranks that wrote them"
)
DEEPSPEED = Opening(
    "deepspeed", "only DeepSpeed opens it, with as many ranks as wrote it, or its zero_to_fp32.py"
)
MEGATRON = Opening("megatron", "only Megatron opens it")
ACCELERATE = Opening(
    "accelerate",
    "only accelerate's load_state opens it, in a program that has prepared the same objects",
)

_OF_INDEXES = (("diffusion_pytorch_model", "diffusers"), ("adapter_model", "peft"))


def of_shards(index: str, shard: Opening) -> Opening:
    """The opening of an index called `index` whose shards have the opening `shard`.

    >>> of_shards("model.safetensors.index.json", SAFETENSORS).by
    'transformers'
    >>> of_shards("model.bin.index.json", TORCHSCRIPT).anywhere
    False
    """
    by = next((library for stem, library in _OF_INDEXES if index.startswith(stem)), "transformers")
    return Opening(by, shard.why_not)
