"""The commands that prove what a checkpoint is: manifest and verify."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ckptconv.cli import terminal
from ckptconv.cli.commands import command, option
from ckptconv.cli.completion import offer_parts
from ckptconv.cli.options import ANSWER_ALONE, FILE, JSON, LIMIT, NEW_FILE, TAG
from ckptconv.cli.progress_display import READING, progress_shown

_ONLY = option(
    "--only PATH",
    "The part whose tensors are told, such as state_dict or ema.",
    section="Parts",
    shell_complete=offer_parts,
)


@command(
    """
  ckptconv manifest model.safetensors
  ckptconv manifest llama/ -o llama.sha256
  ckptconv manifest train.pt --only state_dict -o model.sha256
  ckptconv manifest hf://org/name -o name.sha256
  (cd llama && sha256sum -c ../llama.sha256)

Exit code: 0 written, 1 failed, and nothing is left behind, 2 wrong usage.""",
)
@click.argument("source", metavar="IN", type=FILE)
@option("-o --output FILE", "Write it to FILE, not to standard output.", NEW_FILE)
@_ONLY
@TAG
@option("-f --force", "With -o: replace FILE if it exists.", section="Safety")
@LIMIT
@JSON
def manifest(
    source: Path,
    output: Path | None,
    only: str | None,
    tag: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Print the SHA-256 of each file of checkpoint IN, in lines that sha256sum -c takes, and that
    of the values of each tensor, which is the same in every container.

    ckptconv verify holds a checkpoint against it. (The manifests of ckptconv batch are something
    else: lists of jobs.)
    """
    from ckptconv.proof.making import manifest_checkpoint
    from ckptconv.proof.manifest import MANIFEST, manifest_headline

    if force and output is None:
        raise click.UsageError("--force needs -o")
    shown = progress_shown(READING, silent=as_json)
    with terminal.errors_shown(as_json), shown as on_progress:
        made = manifest_checkpoint(
            source, output, only=only, tag=tag, force=force, on_progress=on_progress
        )
    if as_json:
        terminal.print_json(MANIFEST.of(made))
    elif output is not None:
        click.echo(manifest_headline(output, made), err=True)
    else:
        sys.stdout.write(made.text())


@command(
    """
  ckptconv verify model.pt model.sha256
  ckptconv verify llama/ llama.sha256 --files
  ckptconv verify llama/ llama/model.sig --public-key key.pub
  ckptconv verify model.safetensors pointer.txt
  ckptconv verify llama/ model-info.json

Exit code: 0 the same, 1 something differs or cannot be read, 2 wrong usage.""",
)
@click.argument("source", metavar="IN", type=FILE)
@click.argument("manifest", metavar="MANIFEST", type=FILE)
@option("--files", "Compare the bytes of the files, not the values of the tensors.")
@option(
    "--public-key FILE",
    "Of a model.sig: have model-signing verify the signature with this key.",
    FILE,
)
@option("--all", "Show all that differ, not the first 20 of a kind.", section="Output")
@_ONLY
@TAG
@LIMIT
@JSON
@ANSWER_ALONE
def verify(source: Path, manifest: Path, as_json: bool, quiet: bool, **given: Any) -> None:
    """Hold checkpoint IN against MANIFEST: a manifest of ckptconv, lines of sha256sum, an LFS
    pointer or a list of files of the Hub, or a model.sig of OpenSSF model signing.

    A manifest of ckptconv tells of tensors: their values are compared by name, in whatever
    container they are. The others tell of files, whose bytes are compared.
    """
    from ckptconv.proof import report
    from ckptconv.proof.verify import verify_checkpoint
    from ckptconv.support.report import LISTED

    most = None if given.pop("all") else LISTED
    shown = progress_shown(READING, silent=as_json or quiet)
    with terminal.errors_shown(as_json), shown as on_progress:
        found = verify_checkpoint(source, manifest, **given, on_progress=on_progress)
    if as_json:
        terminal.print_json(report.VERIFICATION.of(found))
    elif not quiet:
        headline = report.verification_headline(found)
        terminal.print_verdict(headline, good=found.same, otherwise="red")
        terminal.print_lines(report.verification_rows(found, most=most))
    sys.exit(int(not found.same))
