"""What the shell offers for the values of options: quick, without torch, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from helpers.program import ROOT, SAMPLES, environment, run

W = torch.ones(2)
START = "import sys; sys.argv = ['ckptconv']; import ckptconv.__main__ as program; program.main()"


@pytest.fixture
def room(tmp_path: Path) -> Path:
    torch.save({"netG": {"a.w": W, "b.w": W}, "netD": {"a.w": W}, "epoch": 1}, tmp_path / "gan.pt")
    (tmp_path / "bad.pt").write_bytes(b"PK\3\4 not much of an archive")
    for step in (500, 1000):
        dcp.save({"w": W}, checkpoint_id=tmp_path / "run" / f"step-{step}", no_dist=True)
    (tmp_path / "run" / "logs").mkdir()
    return tmp_path


def offered(words: str, room: Path) -> list[str]:
    """What bash would offer for the last of these words."""
    variables = {
        "_CKPTCONV_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = run(cwd=room, env=variables)
    assert done.err == "", done.err
    return [offer.partition(",")[2] for offer in done.out.splitlines() if offer]


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        ("convert gan.pt o.pt --dtype ", ["f32", "f16", "bf16", "f64", "f8_e4m3", "f8_e5m2"]),
        ("convert gan.pt o.pt --dtype f8", ["f8_e4m3", "f8_e5m2"]),
        ("convert gan.pt o.pt --device c", ["cpu", "cuda", "cuda:0", "cuda:1"]),
        ("convert gan.pt o.pt --keys s", ["strip"]),
        ("convert gan.pt o.pt --preset f", ["fsdp"]),
        ("convert gan.pt o.pt --to d", ["dcp"]),
        ("convert gan.pt o.pt --only ", ["netG", "netD"]),
        ("convert gan.pt --only netG", ["netG"]),
        ("strip-module gan.pt o.pt --only net", ["netG", "netD"]),
        ("diff gan.pt o.pt --only netD", ["netD"]),
        ("diff o.pt gan.pt --only-b ", ["netG", "netD"]),
        ("convert run o.pt --tag ", ["step-1000", "step-500"]),
        ("inspect run --tag step-5", ["step-500"]),
        ("doctor gan.pt --device m", ["mps"]),
    ],
)
def test_values_are_offered(words, offers, room):
    assert offered(f"ckptconv {words}", room) == offers


def test_the_tags_in_the_file_are_offered_for_the_map(room):
    train = SAMPLES / "ddp_cuda3_train.pt"
    assert "cuda:3=" in offered(f"ckptconv convert {train} o.pt --map-location cuda", room)
    assert (
        offered(f"ckptconv convert {train} o.pt --map-location cuda:3=c", room)[0] == "cuda:3=cpu"
    )


@pytest.mark.parametrize("typed", ["bad.pt", "gone.pt", "run", "https://host/a.pt", "''"])
def test_where_there_is_nothing_to_offer_nothing_is_said(typed, room):
    for option in ("--only", "--map-location", "--tag"):
        found = offered(f"ckptconv convert {typed} o.pt {option} zzz", room)
        assert found == []


def test_names_that_a_shell_would_take_for_more_are_not_offered(room):
    torch.save({"a\nb": {"x.w": W}, "good": {"x.w": W}}, room / "odd.pt")
    assert offered("ckptconv convert odd.pt o.pt --only ", room) == ["good"]


@pytest.mark.trust
def test_it_is_quick_and_runs_no_torch(room):
    """The limit is that of an idle machine, doubled; what an import of torch takes is far more."""
    (room / "sitecustomize.py").write_text(
        "import sys\nclass No:\n    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] == 'torch': raise SystemExit('torch was "
        "imported')\nsys.meta_path.insert(0, No())\n"
    )
    words = {
        "_CKPTCONV_COMPLETE": "bash_complete",
        "COMP_WORDS": "ckptconv convert gan.pt o.pt --only ",
        "COMP_CWORD": "5",
    }
    env = environment(**words, PYTHONPATH=f"{room}{os.pathsep}{ROOT}")
    spent = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run(
            [sys.executable, "-c", START],
            cwd=room,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        after = os.times()
        spent.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
        assert done.stdout == "plain,netG\nplain,netD\n"
    assert min(spent) < 0.6
