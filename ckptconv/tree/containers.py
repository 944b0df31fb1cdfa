"""What a checkpoint lies in: its name, who opens it without ckptconv, and what it can hold.

Each module of `formats` defines the containers that it reads, so that no other one has to know
them by their names. Any host means: without the devices and the ranks that wrote it, and without
running what the file names. What stands in the container (device tags, objects, wrappers) is not
looked at here.
"""

from __future__ import annotations

from dataclasses import replace

from ckptconv.support.records import dataclass

TORCH_LOAD = "torch.load"
SAFETENSORS_LIBRARY = "safetensors"
USUAL = (TORCH_LOAD, SAFETENSORS_LIBRARY)
"""The libraries that every program with torch has, so that they go without saying."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container and what can be said of any checkpoint in it; `name` is what users are shown.

    `by` is the library or call that opens it, `why_not` says why not on any host (empty: on any);
    `torch_says` are the words of ``torch.load(weights_only=True)`` about it (empty: it opens it, or
    says something else each time).

    `suffix` is that of a fixed file of the same kind, as far as that is written.

    `weights_only`: ``torch.load(weights_only=True)`` opens it. `is_torch`: `torch.save` wrote it,
    of whatever version. `is_legacy`: from before torch 1.6, so that its storages have types and it
    cannot be mapped. `has_version`: it says which version of its kind it is, and torch reads only
    some. `is_script`: a program, whose objects are those of its own classes. `is_index`: an index
    of shards. `is_folder`: many files that are opened as one folder. `is_delta`: it holds changes
    of tensors, not weights. `has_checksums`: damage shows.
    `shares`: several tensors in it may share bytes that are there once. `names_storages`: what it
    names can be counted without the reader.
    """

    name: str
    by: str = ""
    why_not: str = ""
    torch_says: str = ""
    suffix: str = ".pt"
    weights_only: bool = False
    is_torch: bool = False
    is_legacy: bool = False
    has_version: bool = False
    is_script: bool = False
    is_index: bool = False
    is_folder: bool = False
    is_delta: bool = False
    has_checksums: bool = False
    shares: bool = True
    names_storages: bool = False

    @property
    def anywhere(self) -> bool:
        """Whether any host opens it that has the library."""
        return not self.why_not

    @property
    def is_usual(self) -> bool:
        """Whether every program with torch opens it, as it is."""
        return self.anywhere and self.by in USUAL

    def called(self, name: str) -> Container:
        """The same under another name."""
        return replace(self, name=name)


UNKNOWN = Container("unknown", why_not="no known library opens it")
MEMORY = UNKNOWN.called("memory")
"""What was never in a file."""
