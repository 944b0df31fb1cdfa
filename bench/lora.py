"""What merging an adapter costs: `merge-lora` against peft's `merge_and_unload` between
`from_pretrained` and `save_pretrained`, in one run, with the peak of memory of both. The outputs
are compared bit for bit. `make bench-lora`; it needs peft and transformers.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from timed_command import timed

LAYERS = int(os.environ.get("BENCH_LORA_LAYERS", "22"))
"""Of a model of the width of TinyLlama: 22 are 2 GB in bfloat16."""
ROUNDS = 3

MAKE = """
import sys, torch, peft
from transformers import LlamaConfig, LlamaForCausalLM
folder, layers = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
sizes = dict(hidden_size=2048, intermediate_size=5632, num_attention_heads=32, vocab_size=16000)
config = LlamaConfig(**sizes, num_key_value_heads=4, num_hidden_layers=layers)
model = LlamaForCausalLM(config)
model.save_pretrained(folder + "/base", max_shard_size="50GB")
torch.set_default_dtype(torch.float32)
lora = peft.LoraConfig(target_modules="all-linear", r=16, lora_alpha=32)
model = peft.get_peft_model(model, lora)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape) * 0.02)
model.save_pretrained(folder + "/adapter")
"""
MERGE = """
import sys, peft
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder + "/base")
model = peft.PeftModel.from_pretrained(model, folder + "/adapter").merge_and_unload()
model.save_pretrained(folder + "/peft", max_shard_size="50GB")
"""


def main() -> None:
    python = sys.executable
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR")))
    program = [python, "-m", "ckptconv"]
    try:
        timed([python, "-c", MAKE, str(folder), str(LAYERS)])
        base, adapter, out = folder / "base", folder / "adapter", folder / "out.safetensors"
        merge = [*program, "merge-lora", str(base), str(adapter), str(out)]
        size = (base / "model.safetensors").stat().st_size / 1e9
        sides: dict[str, list[tuple[float, float, int]]] = {"ckptconv": [], "peft": []}
        for _ in range(ROUNDS):
            sides["ckptconv"].append(timed([*merge, "-q", "--force", "--no-fsync"]))
            sides["peft"].append(timed([python, "-c", MERGE, str(folder)]))
        timed([*program, "diff", str(out), str(folder / "peft"), "-q"])
    finally:
        shutil.rmtree(folder)
    best = {
        name: [min(column) for column in zip(*runs, strict=True)] for name, runs in sides.items()
    }
    print("| a base of | side | seconds | of all cores | peak |")
    print("|---|---|---|---|---|")
    for name, (seconds, cores, peak) in best.items():
        line = f"{seconds:.1f} s | {cores:.1f} s | {peak / 1000:.0f} MB |"
        print(f"| {size:.1f} GB, rank 16 on all linear layers | {name} | {line}")
    ratio = [theirs / ours for ours, theirs in zip(best["ckptconv"], best["peft"], strict=True)]
    print(
        f"ratio: {ratio[0]:.1f}, of all cores {ratio[1]:.1f}, of memory {ratio[2]:.0f}; same bits"
    )


if __name__ == "__main__":
    main()
