"""The files beside a model that belong to it, chosen by their names alone: configuration,
tokenizer, processors, texts for people. Nothing in them decides anything, nothing is executed.

The names are those that transformers, diffusers, peft, timm and sentence-transformers write
(``*_NAME`` in ``transformers.utils``, ``vocab_files_names`` of its tokenizers).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import PurePath, PurePosixPath

from ckptconv.convert.beside import Companion, FilesBeside, LeftFile
from ckptconv.formats.folders.alone import MODULES, module_folders
from ckptconv.io.destination import Destination
from ckptconv.io.location import Location, read_small
from ckptconv.io.places import place_of
from ckptconv.io.source import CHUNK, MemorySource, Source
from ckptconv.io.stream import OutputStream
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint, VerificationFailed
from ckptconv.support.json_text import read_object
from ckptconv.support.limits import refuse_beyond
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.schemes.base import QUANTIZATION_KEYS

NAMES = frozenset({
    "config.json", "generation_config.json", "adapter_config.json", "modelcard.json",
    "quantize_config.json", "quantization_config.json", "hf_quant_config.json",
    "model_index.json", "params.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "tokenizer.model.v3", "tekken.json", "normalizer.json",
    "vocab.json", "vocab.txt", "vocab.bpe", "vocab.model", "vocab-src.json", "vocab-tgt.json",
    "merges.txt", "bpe.codes", "dict.txt", "encoder.json", "emoji.json", "entity_vocab.json",
    "spiece.model", "spm.model", "sentencepiece.model", "sentencepiece.bpe.model",
    "sentencepiece.model.vocab", "source.spm", "target.spm", "bpe.model", "prophetnet.tokenizer",
    "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
    "image_processor.json", "video_preprocessor_config.json", "audio_tokenizer_config.json",
    "feature_extractor_config.json", "chat_template.json", "chat_template.jinja",
    MODULES, "config_sentence_transformers.json", "sentence_bert_config.json",
    "scheduler_config.json", "label_map.json", "id2label.json",
})  # fmt: skip
"""The names of the files that are copied."""

# texts for people: README.md, LICENSE, LICENSE-MODEL.txt, NOTICE, USE_POLICY.md
_PEOPLE = re.compile(
    r"(readme|license|licence|copying|notice|use_policy|model_card|authors|citation)"
    r"([-_.][a-z0-9]+){0,5}(\.(md|txt|rst|cff))?",
    re.I,
).fullmatch
_TIKTOKEN = re.compile(r"[\w.-]+\.tiktoken", re.A).fullmatch
TEMPLATES = "additional_chat_templates"
"""A folder that is looked into, for the ``.jinja`` files that transformers puts there. The others
are those of modules, of which every file is copied that is not code.
"""
_TEMPLATE = re.compile(r"[\w.-]+\.jinja", re.A).fullmatch

_CODE = frozenset({
    ".py", ".pyc", ".pyd", ".pyi", ".so", ".dll", ".dylib", ".sh", ".bat", ".ps1", ".js", ".ipynb",
    ".exe", ".jar", ".whl", ".wasm",
})  # fmt: skip
_WEIGHTS = frozenset({
    ".safetensors", ".bin", ".pt", ".pth", ".pt2", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf",
    ".ggml", ".npz", ".npy", ".pkl", ".pickle", ".distcp", ".tflite", ".ot", ".mlmodel", ".nemo",
    ".pdparams", ".zip", ".tar",
})  # fmt: skip


def is_companion(name: str) -> bool:
    """Whether a file of this name is copied.

    >>> [*filter(is_companion, ("config.json", "LICENSE-2.0.md", "model.py", "README.py"))]
    ['config.json', 'LICENSE-2.0.md']
    """
    if name in NAMES or _TIKTOKEN(name):
        return True
    return PurePosixPath(name).suffix.lower() not in _CODE | _WEIGHTS and bool(_PEOPLE(name))


def companions(home: Location, read: Sequence[PurePath]) -> FilesBeside:
    """The files of the folder `home` that belong to a model, by name; `read` are those of the
    checkpoint itself. Raises `LimitExceeded` for a file that is larger than such a file is.
    """
    own = {place_of(path).absolute.path for path in read}
    texts_too = _holds_model(home)
    modules = {folder.name for folder in module_folders(home)}
    copied: list[Companion] = []
    left: list[LeftFile] = []
    for name, place in _candidates(home):
        if place.path in own:
            continue
        is_named = _is_named(name) or name.partition("/")[0] in modules
        reason = _why_left(name, place, home, is_named=is_named)
        if reason is None and not texts_too and _PEOPLE(name):
            reason = "a text file without a model config beside it"
        if reason is None:
            copied.append(_companion(name, place))
        else:
            left.append(LeftFile(name, reason))
    return FilesBeside(tuple(copied), tuple(left))


def companion_places(home: Location) -> Iterator[Location]:
    """Where the files of the folder `home` lie that belong to a model, by name alone."""
    texts_too = _holds_model(home)
    for name, place in _candidates(home):
        if _is_named(name) and (texts_too or not _PEOPLE(name)):
            yield place


def _holds_model(home: Location) -> bool:
    """Whether a folder is that of a model, to which its texts belong too."""
    try:
        return any(name in NAMES or _TIKTOKEN(name) for name in home.names())
    except OSError:  # told of by who lists it for more
        return False


def _is_named(name: str) -> bool:
    _, slash, inner = name.partition("/")
    return bool(_TEMPLATE(inner)) if slash else is_companion(name)


def _candidates(home: Location) -> Iterator[tuple[str, Location]]:
    """The files of a folder with their names, and those of the folder of templates in it."""
    looked_into = {TEMPLATES, *(folder.name for folder in module_folders(home))}
    try:
        for name in home.names():
            place = home.child(name)
            if name in looked_into and place.is_folder() and place.stays_within(home):
                yield from ((f"{name}/{inner}", place.child(inner)) for inner in place.names())
            else:
                yield name, place
    except OSError as error:
        why = os.strerror(error.errno or 0)
        hint = "allow this user to read it, or leave --with-files out"
        raise CheckpointError(f"cannot be listed: {why}", path=home.path, hint=hint) from error


def _why_left(name: str, place: Location, home: Location, *, is_named: bool) -> str | None:
    """Why a file is not copied; None where it is."""
    suffix = PurePosixPath(name).suffix.lower()
    try:
        kind = place.kind()
    except OSError:
        return "cannot be looked at"
    if kind == "folder":
        return "a folder"
    if suffix in _CODE:
        return "code"
    if name.endswith(".index.json"):
        return "a shard index"
    if not is_named and suffix in _WEIGHTS:
        return "weights, or the state of a training"
    if not is_named:
        return "not a name of a model's companion files"
    if kind == "nothing":
        return "a broken link"
    if kind == "other":
        return "a pipe, socket or device"
    # what lies elsewhere may be anything that this user can read, under a harmless name
    return None if place.stays_within(home) else "a link that leads out of the folder"


def _companion(name: str, place: Location) -> Companion:
    with closing(place.open()) as source:
        what = f"has {source.size} bytes, too many for a file beside a model"
        refuse_beyond("companion_bytes", source.size, what, path=place.path)
        return Companion(place, name, source.size, source.fingerprint())


def copy_companion(
    item: Companion,
    output: Destination,
    on_progress: Callable[[int], None],
    *,
    verify: bool,
    watch: Callable[[OutputStream], object] = lambda _: None,
) -> None:
    """Draft a copy of a file; with `verify` it is read back and compared. `watch` is given the
    stream before it is written.

    Raises `MalformedCheckpoint` where it is not the file any more that was planned.
    """
    with closing(item.open()) as source:
        if source.fingerprint() != item.stamp:
            raise MalformedCheckpoint(
                "was changed while the checkpoint was read", path=source.path,
                hint="convert it again",
            )  # fmt: skip
        draft = output.draft(item.name, item.nbytes, on_progress)
        with draft:
            watch(draft.stream)
            write_companion(item, source, draft.stream)
            draft.stream.finish()
            draft.commit()
        if verify:
            _compare(item, draft.place)
        source.check_unchanged()


def write_companion(item: Companion, source: Source, stream: OutputStream) -> None:
    """Write what the copy of a file says, which `source` holds."""
    if item.raw is None:
        stream.copy(source, 0, item.nbytes)
    else:
        stream.write(item.raw)


def _compare(item: Companion, made: Location) -> None:
    with closing(item.open()) as source, closing(made.open()) as ours:
        theirs = source
        if item.raw is not None:
            theirs = MemorySource(item.raw, source.path)
        runs = ((at, min(CHUNK, ours.size - at)) for at in range(0, ours.size, CHUNK))
        is_same = ours.size == item.nbytes and all(
            theirs.read(*run) == ours.read(*run) for run in runs
        )
    if not is_same:
        raise VerificationFailed("its copy differs from it", path=theirs.path)


def home_of(path: PurePath, read: Sequence[PurePath]) -> Location:
    """The folder that a checkpoint lies in: itself, or that of the first file that is `read`."""
    place = place_of(path)
    return place.absolute if place.is_folder() else place_of(read[0]).absolute.parent


def name_notes(read: PurePath, output: PurePath) -> Iterator[str]:
    """Tell of weights whose name a program looks for, and that the output gives another name.
    `read` is the file that they were in.
    """
    for name, reader in (("adapter_model", "peft"), ("diffusion_pytorch_model", "diffusers")):
        if read.name.startswith(name) and output.suffix and not output.name.startswith(name):
            yield f"{reader} looks for {name}{output.suffix}, but the output is {output.name}"


def saying_dtype(found: FilesBeside, dtype: DType) -> FilesBeside:
    """The same files, of which ``config.json`` says that the weights have this dtype, where it says
    a dtype of weights; a config that is not JSON stays as it is.
    """
    return replace(found, copied=tuple(_saying(item, dtype) for item in found.copied))


def _saying(item: Companion, dtype: DType) -> Companion:
    if item.name != "config.json" or item.place is None:
        return item
    try:
        raw = item.raw or read_small(item.place, "index_bytes")
        read_object(raw, item.place.path, "config", of_python=True)
    except CheckpointError:
        return item
    said = _DTYPE.sub(rb"\1" + dtype.name.encode() + rb"\3", raw)
    return item if said == raw else replace(item, raw=said, nbytes=len(said))


def unquantized(found: FilesBeside) -> FilesBeside:
    """The same files for weights that are not quantised any more: ``config.json`` does not say that
    they are, and what says nothing else is not copied.
    """
    copied = [item for item in found.copied if item.name not in _OF_QUANTIZATION]
    left = [
        LeftFile(item.name, "it says how the weights were quantised")
        for item in found.copied
        if item.name in _OF_QUANTIZATION
    ]
    return FilesBeside(tuple(map(_unquantized, copied)), (*found.left, *left))


_OF_QUANTIZATION = ("hf_quant_config.json", "quantize_config.json", "quantization_config.json")


def _unquantized(item: Companion) -> Companion:
    if item.name != "config.json" or item.place is None:
        return item
    raw = read_small(item.place, "index_bytes")
    config = read_object(raw, item.place.path, "config", of_python=True)
    # also in parts: `text_config` of a model of several
    for part in (config, *config.values()):
        if isinstance(part, dict):
            for name in QUANTIZATION_KEYS:
                part.pop(name, None)
    try:
        raw = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can say
        raw = json.dumps(config, indent=2).encode() + b"\n"
    return replace(item, raw=raw, nbytes=len(raw))


# Where a config says the dtype of weights, its parts (``text_config``) too. In a JSON text no
# such run of bytes begins within a string, whose quotes have a backslash.
_DTYPE = re.compile(
    rb'("(?:torch_)?dtype"\s*:\s*"(?:torch\.)?)(float16|bfloat16|float32|float64)(")'
)


def dtype_notes(copied: Sequence[Companion], casts: Sequence[str]) -> Iterator[str]:
    """Say which dtype a config names after casts; `casts` are the dtypes that some were cast to."""
    config = next((item for item in copied if item.name == "config.json"), None)
    if config is None or not casts:
        return
    if config.raw is not None or config.place is None:
        yield f"config.json of the copy says dtype {', '.join(casts)}"
        return
    with suppress(CheckpointError):
        raw = read_small(config.place, "index_bytes")
        said = sorted({found[2].decode() for found in _DTYPE.finditer(raw)})
        if said and said != [*casts]:
            yield (
                f"config.json stays as it is and says dtype {', '.join(said)}, but tensors are "
                f"cast to {', '.join(casts)}"
            )
