"""Signatures of models, verified by the library that makes them (OpenSSF model signing)."""

from __future__ import annotations

from pathlib import Path

from ckptconv.support.errors import MissingDependency, VerificationFailed


def verify_signature(model: Path, signature: Path, public_key: Path) -> None:
    """Have model-signing verify that the owner of a key signed a model as it is now.

    It hashes the files itself. Raises `VerificationFailed` where it says no, and
    `MissingDependency` without it.
    """
    try:
        from model_signing import verifying
    except ImportError as error:
        what = "verifying a signature needs model-signing, which is not installed"
        hint = "pip install 'ckptconv[signing]'; without --public-key the digests are compared"
        raise MissingDependency(what, hint=hint) from error
    config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    try:
        config.verify(model, signature)
    except Exception as error:  # it raises errors of many libraries, a ValueError mostly
        first = str(error).partition("\n")[0] or type(error).__name__
        what = f"model-signing does not verify it ({first[:300]})"
        hint = "do not trust the model; or this is not the key that signed it"
        raise VerificationFailed(what, path=signature, hint=hint) from error
