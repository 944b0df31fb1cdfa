"""The fuzzer led by coverage: atheris keeps the inputs that reach new lines of ckptconv, and
changes those further.

atheris (https://github.com/google/atheris) is not among the requirements; where it has wheels,
``pip install atheris`` brings it. An input is one byte that says what the rest of it is: a whole
file, or the one part of a file that a reader takes apart.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

from fuzzing.inputs import Seed, Trial
from fuzzing.mutations import damaged

_LONGEST = 64_000


def _index(content: bytes) -> Trial:
    from fuzzing.structures import flat_file

    shard = flat_file({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"abcd")
    return Trial({"model.safetensors.index.json": content, "a.safetensors": shard}, (".",))


def _record(name: str) -> Callable[[bytes], Trial]:
    """A TorchScript archive, or one of before torch 1.4, of which one record is given."""

    def trial(content: bytes) -> Trial:
        from fuzzing.structures import STORAGE, zipped

        root = b"\x80\x02c__torch__\nM\n)\x81}b."
        records = {
            "a/data.pkl": root,
            "a/constants.pkl": b"\x80\x02).",
            "a/code/__torch__.py": b"",
            "a/data/0": STORAGE,
        }
        if name == "a/model.json":
            records = {
                "a/version": b"1\n",
                "a/attributes.pkl": b"\x80\x02).",
                "a/tensors/0": STORAGE,
            }
        records[name] = content
        return Trial(
            {"in.pt": zipped([(file, record, 0) for file, record in records.items()])}, ("in.pt",)
        )

    return trial


def _torch_zip(content: bytes) -> Trial:
    from fuzzing.structures import torch_zip

    return Trial({"in.pt": torch_zip(content)}, ("in.pt",))


def _flat(content: bytes) -> Trial:
    return Trial(
        {"in.safetensors": len(content).to_bytes(8, "little") + content + bytes(64)},
        ("in.safetensors",),
    )


KINDS: tuple[tuple[str, Callable[[bytes], Trial]], ...] = (
    ("", lambda content: Trial({"in.pt": content}, ("in.pt",))),
    ("data.pkl", _torch_zip),
    (".metadata", lambda content: Trial({".metadata": content, "__0_0.distcp": bytes(64)}, (".",))),
    ("header", _flat),
    (".index.json", _index),
    ("__torch__.py", _record("a/code/__torch__.py")),
    ("model.json", _record("a/model.json")),
)
"""What an input may be, by its first byte: the name of the part that is given, and the files around
it.
"""


def corpus(seeds: Sequence[Seed]) -> Iterator[bytes]:
    """The inputs that the seeds are, whole and in parts."""
    for seed in seeds:
        for name, content in seed.trial.files.items():
            yield b"\0" + content
            if content[:2] == b"PK" and seed.target != "hostile":
                with zipfile.ZipFile(BytesIO(content)) as archive:
                    parts = [
                        (item, archive.read(item))
                        for item in archive.namelist()
                        if not item.endswith("/data")
                    ]
                yield from (made for item, part in parts for made in _as_part(item, part))
            elif content[8:9] == b"{":
                yield b"\3" + content[8 : 8 + int.from_bytes(content[:8], "little")]
            else:
                yield from _as_part(name, content)


def _as_part(name: str, content: bytes) -> Iterator[bytes]:
    return (
        bytes([index]) + content
        for index, (ending, _) in enumerate(KINDS)
        if ending and name.endswith(ending)
    )


def trial_of(data: bytes) -> Trial:
    """The trial that an input stands for."""
    kind = data[0] % len(KINDS) if data else 0
    return KINDS[kind][1](data[1:])


def hunt_by_coverage(
    atheris: Any, seeds: Sequence[Seed], work: Path, finds: Path, *, seed: int, seconds: float
) -> None:
    """Run until the time is over; ends the process with 1 when anything was found."""
    from fuzzing.trial import limit_address_space

    limit_address_space()
    hunt = _Hunt(atheris, seeds, work, finds, seed, seconds)
    options = [
        f"-seed={seed % (1 << 32) or 1}",
        f"-max_len={_LONGEST}",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
    ]
    atheris.Setup(
        [sys.argv[0], *options, str(hunt.inputs)], hunt.try_one, custom_mutator=hunt.change
    )
    atheris.Fuzz()


class _Hunt:
    """What atheris calls: one trial, and one change of an input."""

    def __init__(
        self,
        atheris: Any,
        seeds: Sequence[Seed],
        work: Path,
        finds: Path,
        seed: int,
        seconds: float,
    ) -> None:
        from fuzzing.hunt import Tally

        self.tally, self.begin = Tally(), time.monotonic()
        self.atheris, self.work, self.finds, self.seed, self.seconds = (
            atheris,
            work,
            finds,
            seed,
            seconds,
        )
        self.folder, self.inputs = work / "trial", work / "corpus"
        self.folder.mkdir()
        self.inputs.mkdir()
        self.lenders = [one for one in corpus(seeds) if len(one) <= _LONGEST]
        for index, one in enumerate(self.lenders):
            (self.inputs / str(index)).write_bytes(one)

    def try_one(self, data: bytes) -> None:
        from fuzzing.hunt import save_find
        from fuzzing.trial import run

        verdict = run(trial_of(data), self.folder)
        target = "covered " + (KINDS[data[0] % len(KINDS)][0] if data else "")
        self.tally.count(target, verdict)
        for find in verdict.finds:
            if self.tally.is_new(target, find):
                name = f"coverage-{self.seed}-{sum(self.tally.executions.values())}"
                place = save_find(self.finds, name, trial_of(data), find)
                print(
                    f"found: {find.signature}: {find.step}: {find.what[:200]} → {place}", flush=True
                )
        if time.monotonic() - self.begin > self.seconds:
            self.end()

    def end(self) -> None:
        """Tell what was found and end the process: atheris knows no other end."""
        print("\n".join(self.tally.lines(time.monotonic() - self.begin)), flush=True)
        shutil.rmtree(self.work, ignore_errors=True)
        os._exit(1 if self.tally.signatures else 0)

    def change(self, data: bytes, largest: int, number: int) -> bytes:
        chance = random.Random(number)
        if chance.random() < 0.5:
            return bytes(self.atheris.Mutate(data, largest))
        return (data[:1] + damaged(data[1:], chance.choice(self.lenders)[1:], chance))[:largest]


def instrumented() -> ModuleType:
    """atheris, with every module of ckptconv imported under its eyes."""
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed here: pip install atheris")
    with atheris.instrument_imports(include=["ckptconv"]):
        import pkgutil
        from importlib import import_module

        import ckptconv

        for module in pkgutil.walk_packages(ckptconv.__path__, "ckptconv."):
            if not module.name.endswith("__main__"):
                import_module(module.name)
    found: ModuleType = atheris
    return found
