"""Edits of a safetensors file in its place; the safetensors library says what is there after."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model

from ckptconv import (
    CheckpointError,
    KeyConflict,
    MalformedCheckpoint,
    MissingFile,
    OptionRefused,
    OutputRefused,
    RefusedObject,
    UnsupportedCheckpoint,
    VerificationFailed,
    convert_checkpoint,
    edit,
    load_portable,
)
from ckptconv.convert import edit as editing
from ckptconv.io import in_place
from ckptconv.io.in_place import undo_unfinished, write_first_bytes
from ckptconv.io.journals import Journal, journal_path
from helpers.examples import examples
from helpers.program import assert_one_error, run

TENSORS = {
    "old.weight": torch.arange(600.0).reshape(20, 30),
    "old.bias": torch.arange(20),
    "norm": torch.ones(3, dtype=torch.bfloat16),
}
METADATA = {"format": "pt", "author": "me"}


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, METADATA)
    return path


def start_of(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="np") as opened:
        return opened.metadata() or {}


def names_in(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def assert_has(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[key], value) and found[key].dtype == value.dtype
        for key, value in tensors.items()
    )


def assert_untouched(path: Path, before: bytes, error: type[CheckpointError], **asked) -> str:
    """The edit is refused; the file is as it was, and nothing is beside it."""
    beside = sorted(path.parent.iterdir())
    with pytest.raises(error) as caught:
        edit(path, **asked)
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == beside
    return str(caught.value)


# ---------------------------------------------------------------------------------------- in place


def test_shorter_names_and_strings_are_written_over_the_old_header(model):
    before, node = model.read_bytes(), model.stat().st_ino
    result = edit(model, rename="old.=n.", metadata="author=you", verify=True)
    after = model.read_bytes()
    assert result.in_place and result.verified == 3
    assert set(result.renamed) == {("old.weight", "n.weight"), ("old.bias", "n.bias")}
    assert result.metadata == (("author", "you"),)
    assert model.stat().st_ino == node and len(after) == len(before)
    assert after[start_of(model) :] == before[start_of(model) :]
    assert metadata_of(model) == {"format": "pt", "author": "you"}
    new = {key.replace("old.", "n."): value for key, value in TENSORS.items()}
    assert_has(model, new)
    assert names_in(model.parent) == [model.name]


def test_what_does_not_fit_is_written_again_with_room_for_the_next_edit(model):
    before, start, mode = model.read_bytes(), start_of(model), 0o640
    model.chmod(mode)
    result = edit(model, add_prefix="a.very.long.prefix.", metadata="license=mit", verify=True)
    assert result.in_place is False and result.verified == 3
    assert start_of(model) % 4096 == 0 and model.read_bytes()[start_of(model) :] == before[start:]
    assert model.stat().st_mode & 0o777 == mode
    assert result.nbytes == model.stat().st_size
    assert_has(model, {f"a.very.long.prefix.{key}": value for key, value in TENSORS.items()})
    assert edit(model, metadata=f"more={'x' * 900}").in_place
    assert metadata_of(model) == {**METADATA, "license": "mit", "more": "x" * 900}


def test_an_edit_can_be_asked_to_write_the_whole_file(model):
    node = model.stat().st_ino
    assert edit(model, metadata="author=x", rewrite=True).in_place is False
    assert model.stat().st_ino != node and metadata_of(model)["author"] == "x"
    assert_has(model, TENSORS)


def test_strings_are_set_and_removed(model, tmp_path):
    (tmp_path / "more.json").write_text('{"license": "mit", "größe": "ja"}')
    result = edit(
        model,
        metadata=["format=mlx"],
        metadata_from=tmp_path / "more.json",
        remove_metadata="author",
        device="cuda:1",
    )
    assert result.removed == ("author",)
    assert metadata_of(model) == {
        "format": "mlx", "license": "mit", "größe": "ja", "device": "cuda:1",
    }  # fmt: skip
    assert_has(model, TENSORS)
    edit(model, remove_metadata=["format", "license", "größe", "device"])
    assert metadata_of(model) == {} and b"__metadata__" not in model.read_bytes()


def test_a_dry_run_writes_nothing_and_says_the_same(model):
    before = model.read_bytes()
    would = edit(model, rename="old.=n.", dry_run=True)
    assert model.read_bytes() == before
    done = edit(model, rename="old.=n.")
    assert (would.renamed, would.in_place, would.nbytes) == (
        done.renamed, done.in_place, done.nbytes,
    )  # fmt: skip


def test_nothing_is_written_where_nothing_changes(model):
    before, written = model.read_bytes(), model.stat().st_mtime_ns
    assert edit(model, keys="strip", metadata="author=me").in_place is None
    assert model.read_bytes() == before and model.stat().st_mtime_ns == written


def test_second_names_of_tensors_follow(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.head.weight = self.embed.weight

    path = tmp_path / "m.safetensors"
    save_model(Tied(), str(path))
    assert "head.weight" in metadata_of(path) or "embed.weight" in metadata_of(path)
    edit(path, rename=["embed.=e.", "head.=h."])
    found = load_portable(path)
    assert sorted(found) == ["e.bias", "e.weight", "h.bias", "h.weight"]
    assert found["e.weight"].data_ptr() == found["h.weight"].data_ptr()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"metadata": "head.bias=x"}, "head.bias is a second name of the tensor old.bias"),
        ({"remove_metadata": "head.bias"}, "head.bias is a second name of the tensor old.bias"),
        ({"rename": "head.bias=author"}, "author: a metadata entry has this name already"),
    ],
    ids=str,
)
def test_a_second_name_of_a_tensor_is_not_lost(asked, words, tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path, {**METADATA, "head.bias": "old.bias"})
    assert words in assert_untouched(path, path.read_bytes(), KeyConflict, **asked)


def test_a_mapping_undoes_the_names(model, tmp_path):
    edit(model, regex=r"old\.(.*)=>\1", save_mapping=tmp_path / "map.json")
    assert "weight" in load_file(model)
    edit(model, rules=tmp_path / "map.json", reverse=True)
    assert_has(model, TENSORS)


def test_who_has_another_name_of_the_file_keeps_the_old_one(model, tmp_path):
    os.link(model, tmp_path / "other.safetensors")
    assert edit(model, rename="old.=n.").in_place is False
    assert_has(tmp_path / "other.safetensors", TENSORS)
    assert "n.weight" in load_file(model)


NAMES = st.text('abc._ü"\\\n€', min_size=1, max_size=6).filter(lambda name: name != "__metadata__")


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    names=st.lists(NAMES, min_size=1, max_size=5, unique=True),
    strings=st.dictionaries(NAMES, st.text(max_size=12), max_size=3),
    prefix=NAMES,
    more=st.dictionaries(NAMES.filter(lambda name: "=" not in name), st.text(max_size=9)),
)
def test_any_names_and_strings_arrive_and_nothing_else_changes(
    names, strings, prefix, more, tmp_path
):
    path = tmp_path / "any.safetensors"
    tensors = {name: torch.full((3,), float(number)) for number, name in enumerate(names)}
    strings = {key: value for key, value in strings.items() if value not in names}
    save_file(tensors, path, strings)
    after = {f"{prefix}{name}": value for name, value in tensors.items()}
    if any(value in after for value in (*strings.values(), *more.values())):
        return
    edit(
        path, add_prefix=prefix, metadata=[f"{name}={value}" for name, value in more.items()],
        fsync=False,
    )  # fmt: skip
    assert_has(path, after)
    assert metadata_of(path) == {**strings, **more}


# ----------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"rename": "old.weight=norm"}, KeyConflict, "norm"),
        ({"rename": "old.weight=__metadata__"}, KeyConflict, "__metadata__"),
        ({"rename": "absent.=x."}, KeyConflict, "matches no key"),
        ({"metadata": "head.weight=old.weight"}, KeyConflict, "second name"),
        ({"metadata": "m.bias=n.bias", "rename": "old.=n."}, KeyConflict, "second name"),
        ({"remove_metadata": "license"}, OptionRefused, "it has author, format"),
        ({"remove_metadata": "author", "metadata": "author=x"}, OptionRefused, "both"),
        ({"metadata": "ckptconv.encodings=x"}, OptionRefused, "own"),
        ({"metadata": "device=x"}, OptionRefused, "own"),
        ({"metadata": "x"}, OptionRefused, "NAME=VALUE"),
        ({"metadata": "x=\udcff"}, OptionRefused, "UTF-8"),
        ({"include": "old.*"}, OptionRefused, "include"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(model, asked, error, words):
    assert words in assert_untouched(model, model.read_bytes(), error, **asked)


def test_rules_that_leave_tensors_out_are_refused(model, tmp_path):
    (tmp_path / "rules.json").write_text('{"rules": [{"exclude": "norm"}]}')
    told = assert_untouched(model, model.read_bytes(), OptionRefused, rules=tmp_path / "rules.json")
    assert "convert" in told


def test_what_is_no_safetensors_file_is_refused(tmp_path):
    torch.save(TENSORS, tmp_path / "m.pt")
    before = (tmp_path / "m.pt").read_bytes()
    told = assert_untouched(tmp_path / "m.pt", before, UnsupportedCheckpoint, metadata="a=b")
    assert "torch zip" in told and "ckptconv convert" in told
    with pytest.raises(OutputRefused, match="is a folder"):
        edit(tmp_path, metadata="a=b")
    with pytest.raises(MissingFile):
        edit(tmp_path / "absent.safetensors", metadata="a=b")


def test_a_link_is_refused(model, tmp_path):
    link = tmp_path / "link.safetensors"
    link.symlink_to(model)
    before = model.read_bytes()
    assert "is a link" in assert_untouched(link, before, OutputRefused, metadata="a=b")


def test_a_shard_keeps_the_names_that_an_index_has(model, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, model.name)}))
    told = assert_untouched(model, model.read_bytes(), OutputRefused, rename="old.=n.")
    assert index.name in told
    assert edit(model, metadata="author=x").in_place
    index.write_text(json.dumps({"weight_map": {"norm": "another.safetensors"}}))
    edit(model, rename="old.=n.")
    index.write_text(json.dumps({"weight_map": {"n.bias": f"./{model.name}"}}))
    assert_untouched(model, model.read_bytes(), OutputRefused, rename="n.=m.")
    index.unlink()
    variant = tmp_path / "model.safetensors.index.fp16.json"
    variant.write_text(json.dumps({"weight_map": {"n.bias": model.name}}))
    assert variant.name in assert_untouched(
        model, model.read_bytes(), OutputRefused, rename="n.=m."
    )
    variant.unlink()
    above = tmp_path.parent / f"{tmp_path.name}.safetensors.index.json"
    above.write_text(json.dumps({"weight_map": {"n.bias": f"{tmp_path.name}/{model.name}"}}))
    assert above.name in assert_untouched(model, model.read_bytes(), OutputRefused, rename="n.=m.")
    above.unlink()
    index.write_text("{")
    assert_untouched(model, model.read_bytes(), MalformedCheckpoint, rename="n.=m.")


def test_tensors_that_are_put_together_by_name_keep_their_names(tmp_path):
    torch.save({"s": torch.eye(3).to_sparse()}, tmp_path / "s.pt")
    path = tmp_path / "s.safetensors"
    convert_checkpoint(tmp_path / "s.pt", path)
    assert "put together" in assert_untouched(
        path, path.read_bytes(), RefusedObject, add_prefix="x."
    )
    edit(path, metadata="license=mit")
    assert load_portable(path)["s"].is_sparse
    told = assert_untouched(
        path, path.read_bytes(), OptionRefused, remove_metadata="ckptconv.encodings"
    )
    assert "says how tensors are put together, and stays" in told


def test_a_mapping_that_is_there_is_not_replaced(model, tmp_path):
    (tmp_path / "map.json").write_text("mine")
    told = assert_untouched(
        model, model.read_bytes(), OutputRefused, rename="old.=n.",
        save_mapping=tmp_path / "map.json",
    )  # fmt: skip
    assert "exists" in told and "name another file" in told and "--force" not in told


def test_a_header_that_the_library_reads_otherwise_is_taken_back(model, tmp_path, monkeypatch):
    monkeypatch.setattr(editing, "entries_seen", lambda *_: ({}, {}))
    for asked in ({"rename": "old.=n."}, {"add_prefix": "long." * 9}):
        assert_untouched(
            model, model.read_bytes(), VerificationFailed, verify=True,
            save_mapping=tmp_path / "map.json", **asked,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[:-1], r": has [\d.]+ kB$"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), r"differs in the \d+ bytes from 0 on"),
    ],
)
def test_data_that_are_not_copied_as_they_were_are_not_put_in_place(
    damage, words, model, monkeypatch
):
    real = editing.entries_seen

    def damaging(made, path):
        found = real(made, path)
        made.write_bytes(damage(made.read_bytes()))
        return found

    monkeypatch.setattr(editing, "entries_seen", damaging)
    told = assert_untouched(
        model, model.read_bytes(), VerificationFailed, verify=True, add_prefix="long." * 99
    )
    assert re.search(words, told)


@pytest.mark.parametrize("seen", ["tensors", "metadata"])
def test_either_part_of_the_header_that_the_library_reads_otherwise_is_told(
    model, monkeypatch, seen
):
    real = editing.entries_seen

    def other(*given):
        metadata, tensors = real(*given)
        return (metadata, {}) if seen == "tensors" else ({}, tensors)

    monkeypatch.setattr(editing, "entries_seen", other)
    assert_untouched(model, model.read_bytes(), VerificationFailed, verify=True, rename="old.=n.")


@pytest.mark.parametrize("rewrite", [False, True])
def test_a_file_that_changes_meanwhile_is_not_written(model, monkeypatch, rewrite):
    real = editing.changed_header

    def changing(*given):
        with model.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        os.utime(model, ns=(1, 1))
        return real(*given)

    monkeypatch.setattr(editing, "changed_header", changing)
    with pytest.raises(MalformedCheckpoint, match="was changed while it was read"):
        edit(model, rename="old.=n.", rewrite=rewrite)
    assert "old.bias" in load_file(model) and names_in(model.parent) == [model.name]


def test_of_edits_at_once_none_is_lost_that_was_done(model):
    import threading

    done, barrier = [], threading.Barrier(8)

    def one(number: int) -> None:
        barrier.wait()
        try:
            edit(model, metadata=f"e{number}=1", rewrite=number % 2 == 0, fsync=False)
        except (OutputRefused, MalformedCheckpoint):
            return
        done.append(f"e{number}")

    for round in range(5):
        done.clear()
        edit(model, metadata=f"room={'x' * 300}", rewrite=True, fsync=False)
        threads = [threading.Thread(target=one, args=(8 * round + at,)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done and set(done) <= metadata_of(model).keys()
    assert_has(model, TENSORS)


def test_a_header_of_the_very_size_fits(model):
    assert edit(model, rename="old.=new.", rewrite=True).in_place is False
    room = start_of(model) - 8 - len(model.read_bytes()[8 : start_of(model)].rstrip())
    entry = len(',"n":""')
    assert edit(model, metadata=f"n={'x' * (room - entry)}", dry_run=True).in_place is True
    assert edit(model, metadata=f"n={'x' * (room - entry + 1)}", dry_run=True).in_place is False
    assert edit(model, metadata=f"n={'x' * (room - entry)}", verify=True).in_place is True


def test_an_interrupt_that_waits_until_the_names_are_new_leaves_the_mapping(
    model, tmp_path, monkeypatch
):
    for asked in ({"rename": "old.=n."}, {"rename": "n.=o.", "rewrite": True}):
        for name in ("_write_in_place", "_write_again"):
            real = getattr(editing, name)

            def stopped(*given, real=real, **more):
                real(*given, **more)
                raise KeyboardInterrupt

            monkeypatch.setattr(editing, name, stopped)
        mapping = tmp_path / f"{len(asked)}.json"
        with pytest.raises(KeyboardInterrupt):
            edit(model, save_mapping=mapping, **asked)
        monkeypatch.undo()
        assert mapping.exists()
        edit(model, rules=mapping, reverse=True)
        edit(model, rename="old.=n.") if len(asked) == 1 else None


def test_a_mapping_of_an_earlier_edit_outlives_one_that_fails(model, tmp_path, monkeypatch):
    other = tmp_path / "other.safetensors"
    other.write_bytes(model.read_bytes())
    edit(other, rename="old.=n.", save_mapping=tmp_path / "map.json")
    before = (tmp_path / "map.json").read_bytes()

    def full(*_given, **_more):
        raise OutputRefused("cannot be written", path=model)

    monkeypatch.setattr(editing, "write_first_bytes", full)
    with pytest.raises(OutputRefused):
        edit(model, rename="old.=n.", save_mapping=tmp_path / "map.json")
    assert (tmp_path / "map.json").read_bytes() == before


@pytest.mark.parametrize("fails", ["once", "for good"])
def test_a_write_that_fails_is_put_back_at_once_or_by_its_journal(fails, tmp_path, monkeypatch):
    path, write, begun = tmp_path / "model.bin", in_place._write, []
    old, new = ((1016).to_bytes(8, "little") + fill * 1016 for fill in (b"a", b"b"))
    rest = b"the data"
    path.write_bytes(old + rest)

    def failing(file, raw, *, fsync):
        begun.append(raw)
        if len(begun) == 1:
            file.seek(0)
            file.write(raw[:512])
        if len(begun) == 1 or fails == "for good":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(file, raw, fsync=fsync)

    with monkeypatch.context() as patched:
        patched.setattr(in_place, "_write", failing)
        message = "nor put back as it was" if fails == "for good" else os.strerror(errno.EIO)
        with pytest.raises(OutputRefused, match=message):
            write_first_bytes(path, old, new, fsync=False)
    if fails == "for good":
        assert path.read_bytes() == new[:512] + old[512:] + rest
        assert undo_unfinished(path, fsync=False)
    assert path.read_bytes() == old + rest
    assert [item.name for item in tmp_path.iterdir()] == ["model.bin"]


def test_where_no_journal_can_be_written_the_file_is_not_touched(tmp_path, monkeypatch):
    path = tmp_path / "model.bin"
    path.write_bytes(b"old")

    def failing(folder):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(in_place, "fsync_folder", failing)
    with pytest.raises(OutputRefused, match=os.strerror(errno.EIO)):
        write_first_bytes(path, b"old", b"new", fsync=True)
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["model.bin"]


# -------------------------------------------------------------------------------------------- torn


def torn(path: Path, *, sectors: int) -> tuple[bytes, Journal]:
    """A file whose first sectors are those of an edit, and the rest of the header is the old one;
    its bytes before, and the journal of the edit.
    """
    names = {f"layer.{number:03}.weight": torch.full((2,), float(number)) for number in range(60)}
    save_file(names, path, METADATA)
    before = path.read_bytes()
    other = path.with_name("other.safetensors")
    other.write_bytes(before)
    edit(other, rename="layer.=other.")
    start = start_of(path)
    after = other.read_bytes()
    other.unlink()
    assert len(after) == len(before)
    journal = Journal(len(before), before[:start], after[:start])
    path.write_bytes(after[: 512 * sectors] + before[512 * sectors :])
    journal_path(path).write_bytes(journal.packed())
    return before, journal


def test_a_torn_file_is_refused_and_undone(tmp_path):
    path = tmp_path / "m.safetensors"
    before, _ = torn(path, sectors=3)
    mixed = load_file(path)  # for another reader it is a mixture
    assert {key.split(".")[0] for key in mixed} == {"layer", "other"}
    for command in (("inspect", path), ("convert", path, tmp_path / "out.pt")):
        done = run(*command, cwd=tmp_path)
        assert "ckptconv edit" in assert_one_error(done) and done.exit in (1, 2)
    done = run("edit", path, cwd=tmp_path)
    assert done.exit == 0 and "interrupted" in done.err
    assert path.read_bytes() == before and names_in(tmp_path) == [path.name]


def test_an_edit_undoes_the_one_before_it_first(tmp_path):
    path = tmp_path / "m.safetensors"
    torn(path, sectors=2)
    result = edit(path, rename="layer.=l.")
    assert result.undone and result.in_place
    assert len(load_file(path)) == 60 and all(key.startswith("l.") for key in load_file(path))


def test_a_journal_tells_old_new_torn_and_other_files_apart(tmp_path):
    path = tmp_path / "m.safetensors"
    before, journal = torn(path, sectors=3)
    after = journal.new + before[len(journal.old) :]
    states = {}
    for what, raw in {
        "old": before, "new": after, "torn": after[:512] + before[512:],
        "other": after[:700] + before[700:], "longer": before + b"x",
    }.items():  # fmt: skip
        path.write_bytes(raw)
        with path.open("rb", buffering=0) as file:
            states[what] = journal.state(file)
    assert states == {
        "old": "old", "new": "new", "torn": "torn", "other": "other", "longer": "other",
    }  # fmt: skip


@pytest.mark.parametrize("which", ["old", "new"])
def test_a_journal_beside_a_whole_file_does_no_harm(tmp_path, which):
    path = tmp_path / "m.safetensors"
    before, journal = torn(path, sectors=3)
    whole = getattr(journal, which) + before[len(journal.old) :]
    path.write_bytes(whole)
    assert len(load_portable(path)) == 60
    assert undo_unfinished(path, fsync=False) is False
    assert path.read_bytes() == whole and names_in(tmp_path) == [path.name]


def test_a_journal_of_another_file_is_not_believed(tmp_path):
    path = tmp_path / "m.safetensors"
    before, journal = torn(path, sectors=3)
    for other in (
        before + b"\0",  # another size
        before[:700] + bytes([before[700] ^ 1]) + before[701:],  # a sector of neither
    ):
        path.write_bytes(other)
        assert undo_unfinished(path, fsync=False) is False
        assert path.read_bytes() == other and not journal_path(path).exists()
        journal_path(path).write_bytes(journal.packed())


def test_a_journal_that_reaches_into_the_data_is_not_believed(model):
    raw = model.read_bytes()
    size = start_of(model) + 64
    forged = Journal(len(raw), raw[: size - 32] + bytes(32), raw[:size])
    journal_path(model).write_bytes(forged.packed())
    model.write_bytes(raw[: size - 32] + b"\1" * 16 + raw[size - 16 :])
    before = model.read_bytes()
    assert len(load_portable(model)) == 3
    assert undo_unfinished(model, fsync=False) is False and model.read_bytes() == before


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "folder"])
def test_a_damaged_journal_is_not_believed(tmp_path, damage):
    path = tmp_path / "m.safetensors"
    _, journal = torn(path, sectors=3)
    mixed, raw, where = path.read_bytes(), bytearray(journal.packed()), journal_path(path)
    raw[-1] ^= 1
    where.unlink()
    if damage == "folder":
        where.mkdir()
    else:
        where.write_bytes({"cut": journal.packed()[:-1], "flipped": raw, "empty": b""}[damage])
    assert len(load_portable(path)) == 60
    assert undo_unfinished(path, fsync=False) is False
    assert path.read_bytes() == mixed


def test_replacing_a_torn_file_removes_its_journal(tmp_path):
    path = tmp_path / "m.safetensors"
    torn(path, sectors=1)
    torch.save(TENSORS, tmp_path / "in.pt")
    convert_checkpoint(tmp_path / "in.pt", path, force=True)
    assert names_in(tmp_path) == ["in.pt", path.name]


def test_only_the_bytes_that_were_read_are_replaced(model):
    before = model.read_bytes()
    with pytest.raises(OutputRefused, match="changed in the meantime"):
        write_first_bytes(model, b"other bytes", b"newer bytes", fsync=True)
    assert model.read_bytes() == before and names_in(model.parent) == [model.name]


# ------------------------------------------------------------------------------------------ command


def test_the_command_says_what_it_did(model, tmp_path):
    done = run("edit", model, "--metadata", "license=mit", "--remove-metadata", "author",
               "--rename", "old.=n.", "--verify", cwd=tmp_path)  # fmt: skip
    assert done.exit == 0 and done.out == ""
    assert "only the header is written" in done.err
    assert "2 names changed, e.g. old.bias → n.bias" in done.err
    assert "license = mit" in done.err and "author is removed" in done.err
    assert metadata_of(model) == {"format": "pt", "license": "mit"}
    done = run("edit", model, "--metadata", "a=b\x1b[31m", "-n", "--json", cwd=tmp_path)
    assert done.json()["dry_run"] and done.json()["in_place"] is not None
    assert done.json()["metadata"] == {"a": "b\x1b[31m"} and "a" not in metadata_of(model)


def test_without_options_nothing_is_done(model, tmp_path):
    before = model.read_bytes()
    done = run("edit", model, cwd=tmp_path)
    assert done.exit == 0 and "nothing to change" in done.err
    assert model.read_bytes() == before
    done = run("edit", "absent.safetensors", cwd=tmp_path)
    assert "no such file" in assert_one_error(done)
