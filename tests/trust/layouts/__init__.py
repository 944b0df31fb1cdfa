"""Checkpoints as training scripts lay them out, made up by the thousand, and what
docs/state-dicts.md says of each.

    export PYTHONPATH=tests:tests/trust
    python -m layouts SEED [SEED …]     shows a layout, what the rule says and what ckptconv does
    python -m layouts --count 10000     tries the layouts 0 … 9999, and counts those that differ

`rule` is the page in plain Python, over Python's own dicts and torch's own tensors: nothing of
ckptconv is in it.
"""
