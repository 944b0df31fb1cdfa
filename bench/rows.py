"""What bench.py measures: the sizes, the two sides of each row, and what is promised of it."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

INPUTS = (
    "big", "many", "some", "huge", "legacy", "shards", "dcp_rows", "dcp_columns", "zero3", "twin",
    "third", "flat", "wide",
)  # fmt: skip
SUFFIXES = {
    "shards": "",
    "dcp_rows": "",
    "dcp_columns": "",
    "zero3": "",
    "flat": ".safetensors",
    "wide": ".safetensors",
}
"""Of the inputs whose names do not end in .pt."""
WarmUp = Literal["first", "memory", "none"]


@dataclass(frozen=True)
class Scale:
    """The inputs (bytes; for `many` and `some` tensors), the measured runs of each side, and the
    bytes of memory to fill before them.
    """

    name: str
    big: int
    many: int
    huge: int
    runs: int
    fill: int
    legacy: int
    shards: int
    dcp_rows: int
    dcp_columns: int
    zero3: int
    twin: int
    third: int
    flat: int
    wide: int
    some: int = 2_000


FULL = Scale(
    "full",
    big=2_000_000_000,
    many=100_000,
    huge=8_000_000_000,
    runs=5,
    fill=8_000_000_000,
    legacy=2_000_000_000,
    shards=2_000_000_000,
    dcp_rows=2_000_000_000,
    dcp_columns=2_000_000_000,
    zero3=2_000_000_000,
    twin=2_000_000_000,
    third=2_000_000_000,
    flat=2_000_000_000,
    wide=8_000_000_000,
)
QUICK = Scale(
    "quick",
    big=200_000_000,
    many=5_000,
    huge=800_000_000,
    runs=3,
    fill=1_000_000_000,
    legacy=200_000_000,
    shards=200_000_000,
    dcp_rows=200_000_000,
    dcp_columns=200_000_000,
    zero3=200_000_000,
    twin=200_000_000,
    third=200_000_000,
    flat=200_000_000,
    wide=800_000_000,
)


@dataclass(frozen=True)
class Side:
    """A command, with ``{big}`` or another of `INPUTS`, and ``{out}``, for paths, and its name in
    the table.

    With `own_seconds` the child prints the seconds that count. `tree` is a checkout whose ckptconv
    the child imports, instead of the one that is installed.
    """

    label: str
    argv: tuple[str, ...]
    own_seconds: bool = False
    tree: str = ""

    def reads(self, kind: str) -> bool:
        return f"{{{kind}}}" in self.argv


@dataclass(frozen=True)
class Goal:
    """What ckptconv promises of a row.

    ``times``: at most `bound` times the seconds of the other side; ``faster``: at least `bound`
    times faster; ``seconds``: at most so many; ``extra``: at most so many seconds more than the
    other side; ``peak``: at most so many MB; ``same``: peaks of the two sides at most so many MB
    apart; ``size``: an output of at most so many MB.
    """

    kind: Literal["times", "faster", "seconds", "extra", "peak", "same", "size"]
    bound: float


@dataclass(frozen=True)
class Row:
    """Two sides of one work.

    `warm_up` says what goes before the measured runs of a side: an unmeasured run before the
    ``first``; that and ``memory`` before each run; or ``none``, and then there is one run, for its
    memory. Rows that write gigabytes need ``memory``, a process that fills 8 GB and ends: a virtual
    machine gives free memory back to its host within seconds, and the next process to fill the page
    cache pays for getting it again (`cp` 0.5 or 2.4 s for 2 GB, ckptconv 0.4 or 3.5).

    A row is left out where the disk has less than `free_disk`, and where the program that it
    `needs` is not on the path.
    """

    name: str
    work: str
    ours: Side
    theirs: Side
    goals: tuple[Goal, ...]
    warm_up: WarmUp = "first"
    free_disk: int = 0  # bytes
    needs: str = ""


def against(row: Row, tree: str) -> Row:
    """The row with the ckptconv of this checkout on one side and that of `tree` on the other."""
    here = str(Path(__file__).resolve().parents[1])
    ours, theirs = replace(row.ours, tree=here), replace(row.ours, tree=tree, label=f"in {tree}")
    return replace(row, ours=ours, theirs=theirs, goals=(Goal("times", 1.03),))


def name_of(kind: str) -> str:
    """The name of an input's file or folder."""
    return kind + SUFFIXES.get(kind, ".pt")


def ckptconv(command: str, *, fsync: bool = True) -> Side:
    command += "" if fsync else " --no-fsync"
    named = command.format(out="out", **{kind: name_of(kind) for kind in INPUTS})
    return Side(
        f"`ckptconv {named}`", (f"{sysconfig.get_path('scripts')}/ckptconv", *command.split())
    )


def child(label: str, call: str, *, fsync: bool = False) -> Side:
    script = str(Path(__file__).with_name("children.py"))
    argv = (sys.executable, script, *call.split(), *(["--fsync"] if fsync else []))
    return Side(label + ", fsync" * fsync, argv, own_seconds=call.startswith("time_"))


def cp(*, fsync: bool) -> Side:
    if fsync:
        return Side(
            "cp, then sync FILE", ("/bin/sh", "-c", 'cp "$0" "$1" && sync "$1"', "{big}", "{out}")
        )
    return Side("cp", ("cp", "{big}", "{out}"))


def copies(prefix: str, *, fsync: bool) -> tuple[Row, ...]:
    """The rows that are measured twice: without fsync on either side, and with it on both."""
    to_pt = ckptconv("strip-module {big} {out}.pt", fsync=fsync)
    to_safetensors = ckptconv("strip-module {big} {out}.safetensors", fsync=fsync)
    load_save = child("torch.load, strip, torch.save", "load_save {big} {out}", fsync=fsync)
    load_save_file = child(
        "torch.load, strip, save_file", "load_save_file {big} {out}", fsync=fsync
    )
    small, as_cp, six = Goal("peak", 60), Goal("times", 1), Goal("faster", 6)
    return (
        Row(f"{prefix}pt-cp", "big .pt → .pt", to_pt, cp(fsync=fsync), (as_cp, small), "memory"),
        Row(
            f"{prefix}safetensors-cp",
            "big .pt → .safetensors",
            to_safetensors,
            cp(fsync=fsync),
            (as_cp, small),
            "memory",
        ),
        Row(f"{prefix}pt-torch", "big .pt → .pt", to_pt, load_save, (six,), "memory"),
        Row(
            f"{prefix}safetensors-torch",
            "big .pt → .safetensors",
            to_safetensors,
            load_save_file,
            (six,),
            "memory",
        ),
    )


READ = str(Path(__file__).with_name("read_file.py"))
IMPORT_TORCH = Side("`python -c 'import torch'`", (sys.executable, "-c", "import torch"))
MMAP_SAVE = child("torch.load(mmap=True), strip, save_file", "mmap_save_file {big} {out}")

UNSYNCED = (
    *copies("", fsync=False),
    Row(
        "pt-mmap",
        "big .pt → .pt",
        ckptconv("strip-module {big} {out}.pt", fsync=False),
        MMAP_SAVE,
        (Goal("faster", 2),),
        warm_up="memory",
    ),
    Row(
        "safetensors-mmap",
        "big .pt → .safetensors",
        ckptconv("strip-module {big} {out}.safetensors", fsync=False),
        MMAP_SAVE,
        (Goal("faster", 2),),
        warm_up="memory",
    ),
    Row(
        "bf16-mmap",
        "big .pt → bf16 .safetensors",
        ckptconv("convert {big} {out}.safetensors --dtype bf16", fsync=False),
        child("torch.load(mmap=True), .to(bfloat16), save_file", "mmap_bf16_save_file {big} {out}"),
        (Goal("faster", 2), Goal("peak", 250)),
        warm_up="memory",
    ),
    Row(
        "many-torch",
        "many .pt → .pt",
        ckptconv("strip-module {many} {out}.pt", fsync=False),
        child("torch.load, strip, torch.save", "load_save {many} {out}"),
        (Goal("faster", 4),),
    ),
    Row(
        "zero3",
        "ZeRO-3 folder of 4 ranks → .safetensors",
        ckptconv("convert {zero3} {out}.safetensors", fsync=False),
        child(
            "zero_to_fp32 (without deepspeed: the same steps by torch)",
            "zero_to_fp32 {zero3} {out}",
        ),
        (Goal("faster", 3), Goal("peak", 100)),
        warm_up="memory",
    ),
    Row(
        "legacy-cp",
        "legacy .pt → .safetensors",
        ckptconv("strip-module {legacy} {out}.safetensors", fsync=False),
        Side("cp", ("cp", "{legacy}", "{out}")),
        (Goal("times", 1), Goal("peak", 60)),
        warm_up="memory",
    ),
    Row(
        "shards-join",
        "HF folder of 8 shards → one .safetensors",
        ckptconv("convert {shards} {out}.safetensors", fsync=False),
        Side("cp -r", ("cp", "-r", "{shards}", "{out}")),
        (Goal("times", 1), Goal("peak", 60)),
        warm_up="memory",
    ),
    Row(
        "shards-split",
        "big .pt → HF folder of 8 shards",
        ckptconv("convert {big} {out} --max-shard-size 255MB", fsync=False),
        Side("cp -r", ("cp", "-r", "{shards}", "{out}")),
        (Goal("times", 1), Goal("peak", 60)),
        warm_up="memory",
    ),
    Row(
        "diff",
        "diff of big and its copy",
        ckptconv("diff {big} {twin}"),
        child("torch.load(mmap=True) of both, torch.equal", "mmap_equal {big} {twin}"),
        (Goal("faster", 2), Goal("peak", 100)),
        free_disk=4_000_000_000,
    ),
    Row(
        "stats-sft",
        "statistics of flat",
        ckptconv("stats {flat}"),
        Side("sft-cli: `sft stat flat.safetensors`", ("sft", "stat", "{flat}")),
        (Goal("faster", 5), Goal("peak", 100)),
        needs="sft",
    ),
    Row(
        "stats-read",
        "statistics of big",
        ckptconv("stats {big}"),
        Side("reading, zlib.crc32", (sys.executable, READ, "{big}")),
        (Goal("times", 2), Goal("peak", 100)),
    ),
    Row(
        "stats-many",
        "statistics of many",
        ckptconv("stats {many} --top 5"),
        child("torch.load, each tensor in float64", "statistics {many}"),
        (Goal("faster", 1),),
    ),
    Row(
        "report-some",
        "page of 2,000 tensors",
        ckptconv("report {some} -o {out}.html"),
        child("torch.load alone", "load {some}"),
        (Goal("times", 1), Goal("size", 0.5)),
    ),
    Row(
        "report-many",
        "page of many",
        ckptconv("report {many} -o {out}.html"),
        child("torch.load alone", "load {many}"),
        (Goal("times", 1), Goal("size", 10)),
    ),
    Row(
        "report-values",
        "page of many, with statistics",
        ckptconv("report {many} -o {out}.html --values"),
        child("torch.load alone", "load {many}"),
        (Goal("times", 2), Goal("size", 10)),
    ),
    Row(
        "average",
        "mean of three files",
        ckptconv("average {big} {twin} {third} {out}.pt", fsync=False),
        child(
            "torch.load(mmap=True), mean in float64, torch.save",
            "average {big} {twin} {third} {out}",
        ),
        (Goal("faster", 1), Goal("peak", 100)),
        free_disk=8_000_000_000,
    ),
    Row(
        "edit",
        "set a string in wide, imports made before",
        child("ckptconv.edit", "time_edit {wide}"),
        child("safetensors: load_file, save_file", "time_save_again {wide} {out}"),
        (Goal("seconds", 0.1), Goal("faster", 20)),
        free_disk=9_000_000_000,
    ),
    Row("version", "start-up", ckptconv("--version"), IMPORT_TORCH, (Goal("seconds", 0.1),)),
    Row("inspect", "inspect big", ckptconv("inspect {big}"), IMPORT_TORCH, (Goal("seconds", 0.2),)),
    Row(
        "load-big",
        "load big, imports made before",
        child("load_portable", "time_load_portable {big}"),
        child("torch.load(mmap=True)", "time_load_mmap {big}"),
        (Goal("extra", 0.020),),
    ),
    Row(
        "load-many",
        "load many, imports made before",
        child("load_portable", "time_load_portable {many}"),
        child("torch.load", "time_load {many}"),
        (Goal("faster", 2),),
    ),
    Row(
        "memory-huge",
        "memory: huge beside big",
        ckptconv("strip-module {huge} {out}.pt", fsync=False),
        ckptconv("strip-module {big} {out}.pt", fsync=False),
        (Goal("peak", 60), Goal("same", 10)),
        warm_up="none",
        free_disk=20_000_000_000,
    ),
)
UNSYNCED += tuple(
    Row(
        f"dcp-{split}",
        f"DCP of 4 ranks, split by {split} → .safetensors",
        ckptconv(f"convert {{dcp_{split}}} {{out}}.safetensors", fsync=False),
        child(
            "dcp_to_torch_save, torch.load(mmap=True), save_file",
            f"dcp_save_file {{dcp_{split}}} {{out}}",
        ),
        (Goal("faster", times), Goal("peak", 100)),
        warm_up="memory",
        free_disk=10_000_000_000,
    )
    for split, times in (("rows", 3), ("columns", 1.5))
)
UNSYNCED += (
    Row(
        "manifest",
        "big .pt → .safetensors, with a manifest",
        ckptconv("convert {big} {out}.safetensors --manifest {out}.sha256", fsync=False),
        ckptconv("convert {big} {out}.safetensors", fsync=False),
        (Goal("times", 1.25), Goal("peak", 60)),
        warm_up="memory",
    ),
)
SYNCED = (
    *copies("fsync-", fsync=True),
    Row(
        "fsync-manifest",
        "big .pt → .safetensors, with a manifest",
        ckptconv("convert {big} {out}.safetensors --manifest {out}.sha256"),
        ckptconv("convert {big} {out}.safetensors"),
        (Goal("times", 1.25), Goal("peak", 60)),
        warm_up="memory",
    ),
)
