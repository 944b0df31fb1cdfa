"""Archives of checkpoints: every member that is one is found under its name, whatever its container
and its packing.
"""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from ckptconv import CheckpointError, convert_checkpoint, open_checkpoint
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint, UnsupportedCheckpoint
from ckptconv.tensors.stream import iter_chunks
from helpers.old_torch import write


def test_a_pickle_inside_an_archive_is_found_under_its_name(tmp_path):
    torch.save({"v": torch.zeros(2)}, tmp_path / "new.pt")
    torch.save({"u": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "all.zip", "w", compression) as archive:
            archive.writestr("raw.pkl", pickle.dumps({"w": torch.arange(4.0)}))
            archive.write(tmp_path / "new.pt", "deep/new.pt")
            archive.write(tmp_path / "old.pt", "old.pth")
            archive.writestr("notes.txt", "epoch 3")
        with open_checkpoint(tmp_path / "all.zip") as checkpoint:
            found = {
                path: b"".join(map(bytes, iter_chunks(ref))) for path, ref in checkpoint.tensors()
            }
            *bare, left = checkpoint.notes
            assert left == "1 member left out as no checkpoint: notes.txt"
            stored = compression == zipfile.ZIP_STORED
            assert bare == (
                ["raw.pkl, old.pth: without checksums inside, so damage cannot be detected"]
                if stored
                else []
            )
        assert found == {
            "raw.pkl.w": torch.arange(4.0).numpy().tobytes(),
            "deep/new.pt.v": bytes(8),
            "old.pth.u": torch.ones(1).numpy().tobytes(),
        }
        output = tmp_path / "out.safetensors"
        convert_checkpoint(
            tmp_path / "all.zip", output, only="old.pth", fsync=False, force=True, verify=True
        )
        assert load_file(output)["u"].tolist() == [1]


def test_a_flipped_bit_of_a_checkpoint_in_an_archive_fails_the_conversion(tmp_path):
    torch.save({"w": torch.arange(64.0)}, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "new.pt", "new.pt")
    damaged = bytearray((tmp_path / "all.zip").read_bytes())
    damaged[damaged.index(torch.arange(64.0).numpy().tobytes()) + 9] ^= 1
    with pytest.raises(CheckpointError, match="CRC-32"):
        convert_checkpoint(
            write(tmp_path / "all.zip", bytes(damaged)), tmp_path / "out.pt", fsync=False
        )


def test_a_flipped_bit_of_a_deflated_member_is_noticed_when_opening(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("raw.pkl", pickle.dumps({"w": torch.randn(100)}))
    damaged = bytearray((tmp_path / "all.zip").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(MalformedCheckpoint, match=r"raw\.pkl"):
        open_checkpoint(write(tmp_path / "all.zip", bytes(damaged)))


def test_archives_within_archives_have_an_end(tmp_path):
    content = pickle.dumps({"w": torch.ones(1)})
    for depth in range(5):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("inner.zip", content)
        content = out.getvalue()
        source = write(tmp_path / "all.zip", content)
        if depth < 2:
            with open_checkpoint(source) as checkpoint:
                assert len(list(checkpoint.tensors())) == 1
        else:
            with pytest.raises(LimitExceeded, match="files within files"):
                open_checkpoint(source)


def test_members_that_inflate_without_end_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for index in range(20):
            archive.writestr(f"{index}.pkl", bytes(1 << 20))
    with pytest.raises(
        LimitExceeded, match=r"records claim to inflate from \d+ to 20971520 bytes in total"
    ):
        open_checkpoint(tmp_path / "bomb.zip")


def test_an_archive_without_checkpoints_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("numbers.pkl", pickle.dumps([1, 2]))
        archive.writestr("notes.txt", "epoch 3")
    with pytest.raises(UnsupportedCheckpoint, match="without a checkpoint in it"):
        open_checkpoint(tmp_path / "all.zip")
