"""Live tensors of a checkpoint: the only place where torch tensors are made.

torch is imported when `load_portable` is called. A tree's symbolic nodes become live values by a
closed list of types; no class or function is looked up by a name that a file holds, but for torch's
own rebuild functions and dtypes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from ckptconv.convert.casts import cast_rule
from ckptconv.convert.options import Options, Request
from ckptconv.convert.words import TensorWords
from ckptconv.devices.host import require_torch
from ckptconv.formats.registry import Named, open_certain
from ckptconv.formats.target_format import Tree
from ckptconv.io.files import refuse_changed
from ckptconv.io.source import CHUNK
from ckptconv.keys.key_map import Keys, refuse_idle
from ckptconv.keys.naming_metadata import followed, naming_entries
from ckptconv.live.storages import MapLocation, Restorer, Storages, is_read_once, lies_mappable
from ckptconv.objects.known_names import VALUELESS, WEIGHTS_ONLY
from ckptconv.objects.plain import tensor_form
from ckptconv.objects.torch_read import Window, window
from ckptconv.pickles.nodes import Call, Dict, Global, Node, attributes, ordered_dict
from ckptconv.support.choices import (
    UNKNOWN,
    F,
    refuse_no_flag,
    refuse_no_text,
    refuse_other,
    spelling_checked,
)
from ckptconv.support.errors import CheckpointError, RefusedObject, printable, too_deep, warn
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.settings import collector_paused
from ckptconv.tensors.ahead import read_soon
from ckptconv.tensors.compaction import CastRule
from ckptconv.tensors.computed import is_once_rounded
from ckptconv.tensors.dtypes import BY_NAME, UINT8
from ckptconv.tensors.refs import (
    Storage,
    TensorObject,
    TensorRef,
    contiguous_stride,
    refuse_packed,
)
from ckptconv.tree.checkpoint import Checkpoint, Edit, refuse_no_edits
from ckptconv.tree.modules import settle_strays
from ckptconv.tree.renaming import (
    apply_rules,
    refuse_codes_apart,
    refuse_nothing_left,
    rename_state_dicts,
    with_filled,
)
from ckptconv.tree.reshaping import with_config
from ckptconv.tree.settling import Settled, Unknown, has_more, settle_objects
from ckptconv.tree.state_dicts import find, find_state_dicts, is_all, renamed_state_dict
from ckptconv.tree.walk import tensors_of

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack


def words_checked(function: F) -> F:
    """As `spelling_checked`, of a function that takes `TensorWords` too."""
    return spelling_checked(function, tuple(TensorWords.__annotations__))


@overload
def load_portable(
    source: Named,
    map_location: MapLocation = "cpu",
    *,
    whole: Literal[False] = False,
    only: str | None = None,
    keys: Keys = "strip",
    mmap: bool = True,
    verify: bool = False,
    unknown: Unknown = "refuse",
    tag: str | None = None,
    edits: Sequence[Edit] = (),
    on_progress: OnProgress | None = None,
    **words: Unpack[TensorWords],
) -> OrderedDict[str, torch.Tensor]: ...
@overload
def load_portable(
    source: Named,
    map_location: MapLocation = "cpu",
    *,
    whole: bool,
    only: str | None = None,
    keys: Keys = "strip",
    mmap: bool = True,
    verify: bool = False,
    unknown: Unknown = "refuse",
    tag: str | None = None,
    edits: Sequence[Edit] = (),
    on_progress: OnProgress | None = None,
    **words: Unpack[TensorWords],
) -> Any: ...
@words_checked
def load_portable(
    source: Named,
    map_location: MapLocation = "cpu",
    *,
    whole: bool = False,
    only: str | None = None,
    keys: Keys = "strip",
    mmap: bool = True,
    verify: bool = False,
    unknown: Unknown = "refuse",
    tag: str | None = None,
    edits: Sequence[Edit] = (),
    on_progress: OnProgress | None = None,
    **words: Unpack[TensorWords],
) -> Any:
    """Load the state dict of a checkpoint as an `OrderedDict` of tensors under bare keys, or
    everything with `whole`.

    `map_location` means what it means in `torch.load`, with ``cpu`` as the default, ``auto`` for
    the best device here, and None for the devices that the file names. Several state dicts need
    `only`, the path of one. With `mmap` (the default) tensors on the CPU are mapped copy-on-write,
    as by `torch.load(mmap=True)`: nothing is read ahead, so damage in the file is not seen, and it
    must not be overwritten in place meanwhile (`save_portable` and ckptconv replace files, which is
    safe). `verify` first reads what is mapped and holds it against the CRC-32 that a zip file has
    of each tensor (safetensors has none). With ``mmap=False``, or where they cannot be mapped,
    tensors are read at once and checked so. `unknown` says what to do, with `whole`, about objects
    that `weights_only=True` refuses and that have no plain form, and in any case about what a whole
    module holds outside its state dict. A sequence of paths are the files of all ranks of one
    checkpoint; `tag` picks a step where `source` is a folder
    of several. `edits` are made to it first, such as ``Drop("optimizer")``; `keys` come after
    them. The words of `TensorWords` mean what they mean in `Options`: `drop` comes after `edits`,
    the rules of keys (`rename`, `include`, …) after `keys`, and `dtype`, `keep_dtype` and `cast`
    say which floating tensors of the state dict come in which type. `on_progress` is called with a
    `Progress` (phase ``read``, bytes), about once a MiB that is read; what is mapped is not without
    `verify`. Nothing in the file is executed.

    Warns with a `CheckpointWarning` where a framework's own rule chose the state dict (timm's
    average, say), or where the keys are not the file's own. Raises `CheckpointError`;
    `DeviceUnavailable` when a tag cannot be served here.

    >>> load_portable("ddp_cuda3.pt")["features.0.weight"].device  # doctest: +SKIP
    device(type='cpu')
    """
    request = Options(keys=keys, **words).request(None)
    refuse_other("unknown", unknown, UNKNOWN)
    refuse_no_edits(edits)
    edits = (*edits, *request.edits)
    if edits:
        from ckptconv.tree.dequantizing import with_rules  # seldom needed

        edits = tuple(with_rules(edits, request.keys))
    refuse_no_text(only=only)
    refuse_no_flag(whole=whole, mmap=mmap, verify=verify)
    torch = require_torch("making live tensors")
    is_whole_module = whole and unknown == "keep"
    with open_certain(source, tag=tag, whole_modules=is_whole_module, edits=edits) as checkpoint:
        checkpoint.refuse_part()
        try:
            with collector_paused():
                root, overlay, settled, cast = _selected(checkpoint, only, whole, request, unknown)
                meter = Meter("read", _bytes_to_read(settled, mmap, verify), on_progress)
                storages = Storages(Restorer(map_location), mmap, verify, meter)
                # else what is made here would be on the device of a `with torch.device("meta")`
                with torch._C.DisableTorchFunction(), _read_before(storages, settled):
                    loaded = _Live(storages, cast).tree(root, overlay)
                meter.finish()
                refuse_changed(checkpoint.sources)
                return loaded
        except CheckpointError as error:
            raise checkpoint.blamed(error) from error.__cause__


@contextmanager
def _read_before(storages: Storages, settled: Settled) -> Iterator[None]:
    """Within the block, what tensors are made of is on its way: large storages where they will be,
    the others as few requests.
    """
    wanted = [*_first_used(settled)]
    large = [item for item in wanted if isinstance(item, Storage)]
    kept = {id(item) for item in large if item.nbytes >= CHUNK}
    with storages.begun(large), read_soon([item for item in wanted if id(item) not in kept]):
        yield


def _selected(
    checkpoint: Checkpoint, only: str | None, whole: bool, request: Request, unknown: Unknown
) -> tuple[Node, dict[int, Node], Settled, CastRule]:
    """The node to bring to life, the overlay (keys, plain objects), the tensors, their types."""
    rules = with_config(request.keys, checkpoint)
    overlay: dict[int, Node] = {}
    if whole:
        root = checkpoint.root if only is None else find(checkpoint.root, only, checkpoint.path)
        settle_strays(checkpoint, root, unknown)
        # names in an optimizer follow the keys of its model, also where that is not loaded
        is_optimizer = only is not None and _is_optimizer(checkpoint.root, root)
        part, path = (checkpoint.root, None) if is_optimizer else (root, only)
        found = find_state_dicts(part, checkpoint.root, path)
        several, renamed, _ = rename_state_dicts(found, overlay, rules, checkpoint)
        is_changed = any(done.changed or done.made for done in renamed)
        if is_changed and not any(map(is_all, found)):
            from ckptconv.tree.optimizer_names import follow_names  # seldom needed

            follow_names(part, overlay, found, list(zip(found, renamed, strict=True)))
        if is_optimizer:
            several, renamed = [], ()
        else:
            _tell_metadata(checkpoint, {old: new for item in renamed for old, new in item.changed})
    else:
        chosen = checkpoint.state_dict(only)
        warn(chosen.notes)
        settle_strays(checkpoint, chosen.node, unknown)
        applied = apply_rules(chosen, rules, checkpoint)
        item, keys = applied.item, applied.keys
        refuse_nothing_left(sum(new is not None for new in keys.new), [keys], rules)
        refuse_idle([keys], rules)
        names = applied.names()
        several = [applied]
        refuse_codes_apart(applied)
        _tell_metadata(checkpoint, names)
        names_after, values = with_filled(item, keys)
        filled = replace(item, values=values)
        root = renamed_state_dict(filled, names_after, keys.renamed_modules)
        if type(root) is Dict:  # `state_dict()` gives an OrderedDict
            root = ordered_dict(root.pairs)
        # in a state dict, arrays and numbers of numpy are tensors
        forms = ((id(value), tensor_form(value)) for value in item.values)
        overlay.update((node, ref) for node, ref in forms if ref is not None)
    settled = settle_objects(root, overlay, unknown)
    if any(ref.dtype.is_packed for ref in settled.tensors):
        refuse_packed(tensors_of(root, overlay), "leave it out: keys=KeyRules(exclude=('KEY',))")
    for check in settled.checks:
        check()
    tree = Tree(root, overlay, settled.tensors, settled.storages)
    return root, overlay, settled, cast_rule(several, tree, request.casts)


def _is_optimizer(root: Node, part: Node) -> bool:
    from ckptconv.tree.optimizer_states import is_optimizer_state  # seldom needed

    return is_optimizer_state(root, part)


def _tell_metadata(checkpoint: Checkpoint, names: Mapping[str, str | None]) -> None:
    """Warn of codes that are read by metadata, which tensors do not have; refuse other names for
    them, which nobody could read by the metadata of the file.
    """
    needed = naming_entries(followed(checkpoint.metadata, names))
    if not needed:
        return
    where = next(iter(needed))
    what = "is metadata by which codes are read"
    if any(new not in (old, None) for old, new in names.items()):
        ways = "leave the keys as they are (keys='keep'), or rename them in the file"
        what = f"{what}, and names them as they are in the file"
        raise RefusedObject(what, where=where, hint=f"{ways}: ckptconv edit")
    warn([f"{where} {what}; it is in Checkpoint.metadata, not here"])


def _first_used(settled: Settled) -> Iterator[TensorRef | Storage]:
    """What is read of tensors and storages, in the order of the tree: a storage once."""
    seen: set[int] = set()
    for ref in settled.tensors:
        if not ref.is_view:
            yield from (piece.storage for piece in ref.pieces if piece.storage.crc32 is not None)
            yield ref
        elif id(ref.storage) not in seen:
            seen.add(id(ref.storage))
            yield ref.storage
    yield from (storage for storage in settled.storages if id(storage) not in seen)


def _bytes_to_read(settled: Settled, mmap: bool, verify: bool) -> int:
    """The bytes read when all tensors are made, at most. What is put together or turned around is
    read once more for its checksum.
    """
    views = [(ref.storage, ref.dtype) for ref in settled.tensors if ref.is_view]
    views += [(storage, storage.dtype or UINT8) for storage in settled.storages]
    sources = {id(storage.source): storage.source for storage, _ in views}
    mapped = {key for key, source in sources.items() if mmap and source.mappable_path() is not None}
    read = {
        id(storage): storage
        for storage, dtype in views
        if id(storage.source) not in mapped or not lies_mappable(storage, dtype)
    }
    gathered = [ref for ref in settled.tensors if not ref.is_view]
    pieces = [piece.storage for ref in gathered for piece in ref.pieces]
    turned = [storage for storage in read.values() if not is_read_once(storage)]
    turned += [storage for storage, _ in views if verify and id(storage) not in read]
    checked = {
        id(whole): whole
        for storage in (*turned, *pieces)
        if (whole := storage.whole).crc32 is not None
    }
    nbytes = sum(storage.nbytes for storage in (*read.values(), *checked.values()))
    return nbytes + sum(ref.nbytes for ref in gathered)


# ------------------------------------------------------------------------------ nodes → live values


def _layouts(torch: Any) -> dict[str, Any]:
    """torch's layouts by their names; nothing else of torch is to be had by a name in a file."""
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


_DICTS: dict[str, Callable[[], Any]] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
}


def _bytearray(value: Any = b"", encoding: Any = None, *_: Any) -> bytearray:
    """A bytearray as pickle writes one: of bytes, or of a text, which means latin-1."""
    return bytearray(value if encoding is None else value.encode("latin1"))


class _Live:
    """Makes live values of nodes, one for each node, so that what was shared stays shared."""

    def __init__(self, storages: Storages, cast: CastRule) -> None:
        import torch

        self._torch = torch
        self._storages = storages
        self._cast = cast
        self._casts: dict[tuple[int, str, str], Any] = {}
        self._made: dict[int, Any] = {}
        self._overlay: Mapping[int, Node] = {}
        # an older torch has not all of them
        self._dtypes = {name: getattr(torch, name) for name in BY_NAME if hasattr(torch, name)}
        self._forms: dict[type, Callable[[Any], Any]] = {
            TensorRef: self._tensor,
            TensorObject: self._tensor_object,
            Dict: self._dict,
            Call: self._call,
            Global: self._global,
            Storage: lambda storage: self._typed_storage(window(storage)),
            Window: self._typed_storage,
            list: self._list,
            tuple: lambda node: tuple(map(self._value, node)),
        }

    def tree(self, root: Node, overlay: Mapping[int, Node]) -> Any:
        """The live value of `root`, nodes in `overlay` replaced."""
        self._overlay = overlay
        try:
            value = self._value(root)
        except RecursionError:
            raise too_deep("nests too many containers to be loaded") from None
        self._torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]
        return value

    def _value(self, node: Node) -> Any:
        while id(node) in self._overlay:
            node = self._overlay[id(node)]
        form = self._forms.get(type(node))
        if form is None:
            return node
        made = self._made.get(id(node), self)
        if made is self:
            made = self._made[id(node)] = form(node)
        return made

    def _list(self, node: list[Node]) -> list[Any]:
        made = self._made[id(node)] = []
        made.extend(map(self._value, node))
        return made

    def _dict(self, node: Dict) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self._made[id(node)] = made
        self._fill(made, node.pairs)
        return made

    def _fill(self, made: Any, pairs: Any) -> Any:
        for key, value in pairs:
            name, item = self._value(key), self._value(value)
            try:
                made[name] = item
            except TypeError:
                raise RefusedObject("a dict has a key that Python does not allow") from None
        return made

    def _call(self, node: Call) -> Any:
        if node.name not in WEIGHTS_ONLY or node.name in VALUELESS or has_more(node):
            return node  # kept symbolically, because the caller asked for it
        if node.name in _DICTS:
            made = self._made[id(node)] = _DICTS[node.name]()
            made.__dict__.update((name, self._value(value)) for name, value in attributes(node))
            return self._fill(made, node.pairs)
        return self._known_call(node.name, [self._value(argument) for argument in node.args])

    def _known_call(self, name: str, args: list[Any]) -> Any:
        torch = self._torch
        module, _, function = name.rpartition(".")
        makers: dict[str, Callable[..., Any]] = {
            "_codecs.encode": lambda text, encoding="utf-8": text.encode(encoding),
            "builtins.set": set,
            "builtins.bytearray": _bytearray,
            "builtins.complex": complex,
            "torch.Size": torch.Size,
            "torch.device": torch.device,
            "torch.serialization._get_layout": lambda layout: _layouts(torch)[layout],
        }
        make = makers.get(name)
        if module == "torch._utils":
            make = getattr(torch._utils, function, None)
        if make is None:
            what = f"{printable(name)} cannot be loaded yet"
            raise RefusedObject(what, hint="only='PATH' takes one part")
        try:
            return make(*args)
        except Exception as error:  # torch's functions raise anything for what a file gives them
            raise RefusedObject(f"{printable(name)} refuses its arguments: {error}") from error

    def _global(self, node: Global) -> Any:
        if node.path not in WEIGHTS_ONLY:
            return node
        module, _, name = node.path.rpartition(".")
        return getattr(self._torch, name, node) if module == "torch" else node

    # tensors

    def _tensor(self, ref: TensorRef, *, detached: bool = False) -> torch.Tensor:
        dtype = self._dtypes.get(ref.dtype.name)
        if dtype is None:
            raise RefusedObject(f"this torch has no dtype {ref.dtype.name}", hint="upgrade torch")
        offset, target = 0, self._cast(ref)
        # what is cast is negated before: torch cannot negate 8-bit floats
        is_negated = ref.neg and target is not ref.dtype
        if ref.is_view and not is_negated:
            offset = ref.storage_offset
            if target is not ref.dtype and is_once_rounded(ref.storage):
                storage = self._storages.cast(ref.storage, ref.dtype, target)
                dtype = self._dtypes[target.name]
            else:
                storage = self._storages.of(ref.storage, ref.dtype)
        else:
            for piece in ref.pieces:
                self._storages.check_read(piece.storage)
            values = ref._replace(conj=False, neg=is_negated)
            storage = self._storages.filled(values, ref.location)
            ref = ref._replace(stride=contiguous_stride(ref.shape), neg=ref.neg and not is_negated)
        if target is not ref.dtype and dtype is not self._dtypes[target.name]:
            storage, dtype = self._cast_storage(storage, dtype, self._dtypes[target.name])
        # set on the storage, not copied: tensors that shared one in the file share one again
        tensor = self._torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage, offset, ref.shape, ref.stride)
        if ref.conj:
            tensor = tensor.conj()
        if ref.neg:
            tensor = self._torch._neg_view(tensor)
        return tensor.requires_grad_() if ref.requires_grad and not detached else tensor

    def _cast_storage(self, storage: Any, dtype: Any, target: Any) -> tuple[Any, Any]:
        """A storage whose values of `dtype` became `target`, once: what was shared stays so."""
        known = (storage._cdata, str(dtype), str(target))
        if known not in self._casts:
            values = self._torch.empty(0, dtype=dtype, device=storage.device)
            values.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
            # kept with it: were the storage freed, another one could get its address
            self._casts[known] = storage, values.to(target).untyped_storage()
        return self._casts[known][1], target

    def _tensor_object(self, node: TensorObject) -> torch.Tensor:
        tensor = self._tensor(node.tensor, detached=True)
        if node.cls is None:
            tensor = self._torch.nn.Parameter(tensor, node.tensor.requires_grad)
        elif node.tensor.requires_grad:
            tensor.requires_grad_()
        state = node.state[0] if type(node.state) is tuple and node.state else node.state
        if type(state) is Dict:
            tensor.__dict__.update(self._dict(state))
        return tensor

    def _typed_storage(self, part: Window) -> Any:
        dtype = part.dtype or BY_NAME["uint8"]
        whole = self._storages.of(part.storage, dtype)
        start, stop = part.start * dtype.itemsize, part.stop * dtype.itemsize
        return self._torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=whole if stop - start == whole.nbytes() else whole[start:stop],
            dtype=self._dtypes[dtype.name],
            _internal=True,
        )
