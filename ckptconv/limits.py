"""The most that a file may claim before it is refused, in one place.

A limit is not a taste: each is far beyond what training writes, and small enough that a file which lies about its
sizes is answered in a second and in little memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that every reader holds a file against; the defaults are the values below (bytes or counts)."""

    pickle_bytes: int = 1 << 30
    """Size of one pickle (100,000 tensors take 15 MB)."""
    small_record_bytes: int = 4096
    """Size of a record that holds one word, as ``version`` or ``byteorder`` do."""
    archive_records: int = 4_000_000
    """Records in one zip archive."""
    depth: int = 1000
    """Containers within containers (Python's own pickler stops at about 500)."""
    inflated_ratio: int = 100
    """Inflated bytes per deflated byte, above `inflated_free`."""
    inflated_free: int = 16 << 20
    """Inflated size of a record that is never questioned."""
    pickle_ratio: int = 50
    """Inflated bytes of a pickle per deflated byte, above `pickle_free`: nodes take ten times the bytes they come from."""
    pickle_free: int = 1 << 20
    """Inflated size of a pickle that is never questioned."""
    stack: int = 500_000
    """Containers side by side on a pickle's stack."""
    view_ratio: int = 64
    """Bytes that a tensor claims per byte of its storage (expanded views), above `view_free`."""
    view_free: int = 1 << 30
    """Size of a tensor that is never questioned."""
    modules: int = 500_000
    """Modules of one state dict, a shared one counted wherever it stands (nested sharing doubles them at each level)."""
    names: int = 1 << 28
    """Characters of all names of one state dict that is walked out of modules."""
    text_bytes: int = 100_000_000
    """Size of a text that is parsed: the code of a TorchScript class, a ``model.json``."""
    large_int_keys: int = 1000
    """Ints beyond 61 bits among the keys of one dict: all may have the same hash."""
    key_tuple: int = 64
    """Parts of a tuple that is a dict key."""
    files_in_files: int = 3
    """Checkpoints within checkpoints: an archive of archives of pickles with torch streams inside."""
    dimensions: int = 64
    """Dimensions of one tensor, as in torch and numpy."""
    open_files: int = 128
    """Files of one checkpoint that are open at a time (a process may often open 1,024)."""
    sharded_dimensions: int = 8
    """Dimensions along which one tensor is split into chunks (real meshes split two)."""
    list_gaps: int = 100_000
    """Places in the lists of a DCP checkpoint under which nothing was saved."""
    safetensors_header_bytes: int = 100_000_000
    """Size of a safetensors header, the same as in the safetensors library."""
    index_bytes: int = 100_000_000
    """Size of the JSON index of a sharded checkpoint."""
    shards: int = 100_000
    """Files of one sharded checkpoint."""
    rules_bytes: int = 100_000_000
    """Size of a file of key rules, or of a mapping."""
    regex_seconds: float = 10
    """Time that one pattern may take with all keys of a state dict."""


LIMITS = Limits()
