"""The conversion of a checkpoint in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from ckptconv.convert.execute import ConversionResult
from ckptconv.convert.job import Job
from ckptconv.convert.options import Options, Tied, Words
from ckptconv.formats.registry import Named
from ckptconv.formats.target_format import Target
from ckptconv.keys.key_map import KeyRules
from ckptconv.support.choices import refuse_no_flag, refuse_no_path, spelling_checked
from ckptconv.support.progress import OnProgress
from ckptconv.tree.settling import Unknown


@spelling_checked
def convert_checkpoint(
    source: Named,
    output: str | os.PathLike[str],
    *,
    to: Target | None = None,
    keys: Literal["strip", "keep"] | KeyRules = "strip",
    rules: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | tuple[str, str]] = (),
    reverse: bool = False,
    preset: Words = (),
    strip_prefix: Words = (),
    rename: Words = (),
    regex: Words = (),
    add_prefix: Words = (),
    include: Words = (),
    exclude: Words = (),
    like: str | os.PathLike[str] | None = None,
    model: str | None = None,
    drop_unexpected: bool = False,
    device: str | None = None,
    map_location: Mapping[str, str] | None = None,
    dtype: str | None = None,
    keep_dtype: Words = (),
    cast: Words = (),
    drop: Words = (),
    metadata: Words | Mapping[str, str] = (),
    metadata_from: str | os.PathLike[str] | None = None,
    only: str | None = None,
    tied: Tied = "alias",
    unknown: Unknown = "refuse",
    max_shard_size: int | str | None = None,
    with_files: bool = False,
    save_mapping: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
) -> ConversionResult:
    """Convert the checkpoint `source` into the file `output`, without importing torch (except for
    `to="dcp"`, a folder).

    `source` is a file, the folder of a checkpoint of many files, or a sequence of the files of all
    ranks; `tag` picks a step where it is a folder of several. `Options` says what all the others
    mean, from `to` to `save_mapping`; a sharded output is named after `output` or, in a folder, as
    Hugging Face libraries do. The output is written to a temporary sibling and renamed; an existing
    one is replaced only with `force`, and without `fsync` the disk is not waited for. `verify`
    counts what the source names, reads the output back and compares every tensor first.
    `on_progress` is called with a `Progress` (bytes), about once a MiB. Raises `CheckpointError`.

    >>> convert_checkpoint("in.pt", "out.safetensors", device="cuda:1")  # doctest: +SKIP
    """
    given = locals()
    refuse_no_path(output=output)
    refuse_no_flag(force=force, fsync=fsync, verify=verify)
    options = Options(**{name: given[name] for name in Options.__dataclass_fields__})
    job = Job(source, output, options, tag=tag, force=force, fsync=fsync, verify=verify)
    return job.run(on_progress)
