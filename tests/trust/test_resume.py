"""Training that was converted goes on as if it had not been: FSDP2 on gloo at other world sizes,
and plain torch. The oracle is the framework's own resume from its own checkpoint at that size.
"""

from __future__ import annotations

import pytest

from ckptconv import convert_checkpoint
from helpers.resumed import STEPS
from helpers.training_runs import Runs

pytestmark = [pytest.mark.trust, pytest.mark.filterwarnings("ignore")]

MODEL = "helpers.resumed:model"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Ten steps of FSDP2 at two ranks, and of plain torch."""
    folder = tmp_path_factory.mktemp("resumed")
    made = Runs(folder)
    made.add("fsdp", world=2, save="dcp")
    made.add("plain", way="plain", save="plain.pt")
    made.go()
    for source, out, options in (
        ("dcp", "whole.pt", {}),
        ("whole.pt", "again", {"to": "dcp"}),
        ("whole.pt", "flat", {"to": "dcp", "optimizer": "flat"}),
        ("whole.pt", "torchtitan", {"to": "dcp", "optimizer": "torchtitan"}),
        ("dcp", "numbers.pt", {"optimizer": "numbers", "model": MODEL}),
        ("plain.pt", "named.pt", {"optimizer": "names"}),
        ("plain.pt", "from_plain", {"to": "dcp", "optimizer": "names"}),
        ("from_plain", "plain_again.pt", {"optimizer": "numbers", "model": MODEL}),
    ):
        convert_checkpoint(folder / source, folder / out, **options)
    return made


@pytest.mark.parametrize("world", [1, 4])
def test_fsdp2_goes_on_from_what_was_a_dcp_folder(runs, world):
    how = {"world": world, "first": STEPS, "steps": 5}
    own = runs.add(f"own{world}", load="dcp", **how)
    ours = [
        runs.add(f"again{world}", load="again", **how),
        runs.add(f"flat{world}", load="flat", way="flat", **how),
        runs.add(f"titan{world}", load="torchtitan", way="torchtitan", **how),
        runs.add(f"full{world}", load="whole.pt", way="full", **how),
    ]
    fresh = runs.add(f"fresh{world}", **how)
    losses = runs.go()
    assert [losses[name] for name in ours] == [losses[own]] * len(ours)
    assert losses[fresh] != losses[own]


@pytest.mark.parametrize("world", [1, 4])
def test_fsdp2_goes_on_from_what_was_plain_torch(runs, world):
    """Beside torch's own way: `set_state_dict` of the whole states at each rank."""
    how = {"world": world, "first": STEPS, "steps": 5}
    own = runs.add(f"own_plain{world}", load="named.pt", way="full", **how)
    ours = runs.add(f"from_plain{world}", load="from_plain", **how)
    losses = runs.go()
    assert losses[ours] == losses[own]


def test_plain_torch_goes_on_from_what_was_a_dcp_folder(runs):
    how = {"first": STEPS, "steps": 5}
    own = runs.add("own_alone", load="dcp", **how)
    ours = runs.add("numbers", load="numbers.pt", way="plain", **how)
    plain = runs.add("own_torch", load="plain.pt", way="plain", **how)
    again = runs.add("torch_again", load="plain_again.pt", way="plain", **how)
    losses = runs.go()
    assert losses[ours] == losses[own]
    assert losses[again] == losses[plain]
