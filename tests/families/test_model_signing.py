"""Signatures that model-signing makes: their digests are compared, and it verifies them itself."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptconv import CheckpointError, verify_checkpoint

pytestmark = pytest.mark.families

pytest.importorskip("model_signing")
from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from model_signing import hashing, signing, verifying  # noqa: E402


@pytest.fixture
def model(tmp_path):
    """A folder, signed, the key of who signed it, and that of somebody else."""
    folder = tmp_path / "model"
    (folder / "below").mkdir(parents=True)
    save_file({"w": np.arange(5000, dtype="<f4")}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "below" / "vocab.txt").write_text("a b c")
    for name in ("own", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (tmp_path / name).write_bytes(private)
        (tmp_path / f"{name}.pub").write_bytes(public)
    signature = folder / "model.sig"
    hashed = hashing.Config().set_ignored_paths(paths=[signature], ignore_git_paths=True)
    signer = signing.Config().use_elliptic_key_signer(private_key=tmp_path / "own")
    signer.set_hashing_config(hashed).sign(folder, signature)
    return folder


def by_its_own_library(model) -> bool:
    try:
        own = verifying.Config().use_elliptic_key_verifier(public_key=model.parent / "own.pub")
        own.verify(model, model / "model.sig")
    except ValueError:
        return False
    return True


def test_a_signed_folder_is_the_same_and_the_signature_is_said_to_be_unverified(model):
    found = verify_checkpoint(model, model / "model.sig")
    assert (found.same, found.files, found.signature) == (True, 3, "unverified")
    found = verify_checkpoint(model, model / "model.sig", public_key=model.parent / "own.pub")
    assert (found.same, found.signature) == (True, "good")


@pytest.mark.parametrize("change", ["flip", "add", "remove", "nothing", "git"])
def test_ckptconv_and_model_signing_agree_on_what_was_changed(model, change):
    path = model / "model.safetensors"
    if change == "flip":
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    elif change == "add":
        (model / "modeling.py").touch()
    elif change == "remove":
        (model / "config.json").unlink()
    elif change == "git":
        (model / ".gitattributes").touch()
    is_same = verify_checkpoint(model, model / "model.sig").same
    assert is_same == by_its_own_library(model) == (change in ("nothing", "git"))


def test_a_signature_of_somebody_else_is_an_error(model):
    with pytest.raises(CheckpointError, match="model-signing does not verify it"):
        verify_checkpoint(model, model / "model.sig", public_key=model.parent / "other.pub")


def test_shards_of_files_are_refused(model):
    signature = model / "model.sig"
    hashed = hashing.Config().use_shard_serialization()
    hashed.set_ignored_paths(paths=[signature])
    signer = signing.Config().use_elliptic_key_signer(private_key=model.parent / "own")
    signer.set_hashing_config(hashed).sign(model, signature)
    with pytest.raises(CheckpointError, match="only whole files are compared"):
        verify_checkpoint(model, signature)
