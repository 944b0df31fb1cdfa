"""The files in the folder of a step of DeepSpeed, by what ranks saved them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import field, replace

from ckptconv.formats.folders.alone import (
    EXPERTS,
    MODEL_STATES,
    NOT_READ,
    OPTIMIZER_STATES,
    PIPELINE,
)
from ckptconv.io.location import Location
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text

FETCH = "fetch the whole folder again"
UNIVERSAL = "deepspeed's ds_to_universal makes a universal checkpoint of it, which is read"
"""What can be done about layouts of which that program can tell more."""
_MODEL_RANK = re.compile(r"-model_([0-9]{1,6})").fullmatch
_EXPERT = re.compile(
    r"layer_([0-9]{1,6})_expert_([0-9]{1,6})_mp_rank_0+_model_states\.pt"
).fullmatch
_STATES_OF_EXPERTS = re.compile(r"expp_rank_([0-9]{1,6})_mp_rank_0+_optim_states\.pt").fullmatch


@dataclass(frozen=True, slots=True)
class StepFiles:
    """The files of a step: the model states of all ranks (`whole`), or of each (`model`), and the
    optimizer states of each.

    Of a pipeline, `layers` by their numbers, the model states of its `stages`, and the optimizer
    states of the ranks of each stage. `experts` go by layer and expert; `sets` are the optimizer
    states of each set of experts, without ZeRO. `of_tensor_ranks` are the files of each of the
    `tensor_ranks`, which `is_tensor_rank` then.
    """

    whole: Location | None = None
    model: Mapping[int, Location] = field(default_factory=dict)
    optim: Mapping[int, Location] = field(default_factory=dict)
    tensor_ranks: int = 1
    layers: Mapping[int, Location] = field(default_factory=dict)
    stages: Sequence[Location] = ()
    ranks_of_stages: Sequence[Mapping[int, Location]] = ()
    experts: Mapping[tuple[int, int], Location] = field(default_factory=dict)
    sets: Mapping[int, Location] = field(default_factory=dict)
    of_tensor_ranks: Sequence[StepFiles] = ()
    is_tensor_rank: bool = False

    @property
    def count(self) -> int:
        """How many files there are at most."""
        own: list[Sized] = [self.model, self.optim, self.layers, self.experts, self.sets]
        of_ranks = sum(each.count + 1 for each in self.of_tensor_ranks)
        return sum(map(len, [*own, *self.ranks_of_stages])) + of_ranks


def names_in(folder: Location) -> Sequence[str]:
    """The names in a folder."""
    try:
        return folder.names()
    except OSError as error:
        raise UnsupportedCheckpoint(f"cannot be listed: {error.strerror}", path=folder) from error


def step_files(folder: Location, *, is_universal: bool = False) -> StepFiles:
    """Sort a step's files by rank; refuse layouts that are not read by name. Of a universal
    checkpoint those of the first tensor-parallel rank are enough.
    """
    names = names_in(folder)
    model = [(found, folder.child(name)) for name in names if (found := MODEL_STATES(name))]
    optim = [(found, folder.child(name)) for name in names if (found := OPTIMIZER_STATES(name))]
    tensor_ranks = {int(found[2]) for found, _ in (*model, *optim)}
    if is_universal:
        model = [item for item in model if int(item[0][2]) == 0]
    elif any(map(PIPELINE, names)):
        return _pipeline_files(folder, names, model, optim)
    elif tensor_ranks != {0} and not any(map(EXPERTS, names)):  # both together are refused below
        return StepFiles(of_tensor_ranks=_tensor_ranks(folder, model, optim))
    files = replace(_of_data_ranks(model, optim), tensor_ranks=len(tensor_ranks))
    if is_universal:
        return files
    experts, sets = _expert_files(folder, names, tensor_ranks)
    return replace(files, experts=experts, sets=sets)


Matched = Sequence[tuple[re.Match[str], Location]]


def _of_data_ranks(model: Matched, optim: Matched) -> StepFiles:
    return StepFiles(
        next((file for found, file in model if found[1] is None), None),
        _by_rank((int(found[1]), file) for found, file in model if found[1] is not None),
        _by_rank((int(found[1]), file) for found, file in optim),
    )


def _pipeline_files(
    folder: Location, names: Sequence[str], model: Matched, optim: Matched
) -> StepFiles:
    """The files of a pipeline. Where its layers are cut, those of each tensor-parallel rank: of T
    such ranks, rank R of stage S is ``mp_rank_`` S x T + R.
    """
    layers = _layers(folder, names)
    every = sorted({rank for of_layer in layers.values() for rank in of_layer})
    for number, of_layer in layers.items():
        if every != list(range(len(every))) or len(of_layer) < len(every):
            what = f"does not have the files of all {len(every)} tensor-parallel ranks"
            raise MalformedCheckpoint(what, path=folder, where=f"layer {number}", hint=FETCH)
    stages = _by_rank((int(found[2]), file) for found, file in model if found[1] is None)
    if list(stages) != list(range(len(stages))) or not stages or len(stages) % len(every):
        what = f"has the model states of {len(stages)} stages, and not of the first {len(stages)}"
        raise MalformedCheckpoint(what, path=folder, hint=FETCH)
    ranks: list[list[tuple[int, Location]]] = [[] for _ in stages]
    for found, file in optim:
        if int(found[2]) >= len(stages):
            what = f"{printable(file.name)} is of a stage without model states"
            raise MalformedCheckpoint(what, path=folder, hint=FETCH)
        ranks[int(found[2])].append((int(found[1]), file))
    if len({bool(each) for each in ranks}) > 1:
        what = "some stages have optimizer states, and others have none"
        raise MalformedCheckpoint(what, path=folder, hint=FETCH)
    found_ranks = [
        StepFiles(
            layers={number: of_layer[rank] for number, of_layer in layers.items()},
            stages=list(stages.values())[rank :: len(every)],
            ranks_of_stages=list(map(_by_rank, ranks))[rank :: len(every)],
            tensor_ranks=len(every),
            is_tensor_rank=len(every) > 1,
        )
        for rank in every
    ]
    return found_ranks[0] if len(every) == 1 else StepFiles(of_tensor_ranks=found_ranks)


def _layers(folder: Location, names: Sequence[str]) -> dict[int, dict[int, Location]]:
    """The files of each layer, by its number and that of the tensor-parallel rank."""
    layers: dict[int, dict[int, Location]] = {}
    for name in sorted(names):
        if (found := PIPELINE(name)) is None:
            continue
        rank = _MODEL_RANK(found[2] or "-model_0")
        of_layer = layers.setdefault(int(found[1]), {})
        if rank is None or int(rank[1]) in of_layer:
            what = "a pipeline-parallel checkpoint whose layers are cut in more than one way"
            raise _not_read(folder, what, UNIVERSAL)
        of_layer[int(rank[1])] = folder.child(name)
    return dict(sorted(layers.items()))


def _tensor_ranks(folder: Location, model: Matched, optim: Matched) -> list[StepFiles]:
    every = {int(found[2]) for found, _ in (*model, *optim)}
    missing = [rank for rank in range(max(every)) if rank not in every]
    if missing:
        what = f"has no files of the tensor-parallel rank {missing[0]} (mp_rank_XX)"
        raise MalformedCheckpoint(what, path=folder, hint=FETCH)
    ranks = []
    for rank in sorted(every):
        own = ([item for item in each if int(item[0][2]) == rank] for each in (model, optim))
        ranks.append(replace(_of_data_ranks(*own), is_tensor_rank=True))
    return ranks


def _expert_files(
    folder: Location, names: Sequence[str], tensor_ranks: set[int]
) -> tuple[dict[tuple[int, int], Location], dict[int, Location]]:
    """The files of the experts by layer and number, and the optimizer states of their sets."""
    found: dict[tuple[int, int], Location] = {}
    sets: list[tuple[int, Location]] = []
    for name in filter(EXPERTS, names):
        expert, of_set = _EXPERT(name), _STATES_OF_EXPERTS(name)
        if expert is not None and tensor_ranks == {0}:
            found[int(expert[1]), int(expert[2])] = folder.child(name)
        elif of_set is not None:
            sets.append((int(of_set[1]), folder.child(name)))
        else:
            what = "an expert-parallel checkpoint (expert files) of older releases or with tensor"
            raise _not_read(folder, f"{what} parallelism")
    return dict(sorted(found.items())), _by_rank(sets)


def not_universal(files: StepFiles) -> UnsupportedCheckpoint:
    """The refusal of what has a universal checkpoint in it, and is something else too."""
    if files.optim:
        what = f"holds a universal checkpoint (zero) and the states of {len(files.optim)} ranks"
        return UnsupportedCheckpoint(what, hint="move one of them to a folder of its own")
    what = "is the folder of the parameters of a universal checkpoint, which is more than that"
    return UnsupportedCheckpoint(what, hint="name the folder that it is in")


def _not_read(folder: Location, what: str, hint: str = NOT_READ) -> UnsupportedCheckpoint:
    what = f"is {what} of DeepSpeed, which is not read"
    return UnsupportedCheckpoint(what, path=folder, hint=hint)


def _by_rank(found: Iterable[tuple[int, Location]]) -> dict[int, Location]:
    ranks: dict[int, Location] = {}
    for rank, file in sorted(found, key=lambda item: (item[0], item[1].name)):
        if rank in ranks:
            both = f"{printable(ranks[rank].name)} and {printable(file.name)}"
            hint = "one is from another run; move it away"
            what = f"two files are of rank {rank}: {both}"
            raise MalformedCheckpoint(what, path=file.parent, hint=hint)
        ranks[rank] = file
    return ranks


def require_ranks(files: Mapping[int, Location], count: int, kind: str) -> None:
    """Raise unless the files are those of the ranks 0 to `count` - 1."""
    there = count_text(len(files), "rank")
    what = f"has the {kind} states of {there}, but {count} wrote it"
    # if any rank is missing, one of the first len(files) + 1 is; `count` is what a file claims
    missing = [rank for rank in range(min(count, len(files) + 1)) if rank not in files]
    if missing:
        raise MalformedCheckpoint(f"{what}; those of rank {missing[0]} are missing", hint=FETCH)
    if len(files) > count:
        raise MalformedCheckpoint(what, hint="some are from another run; move them away")
