#!/bin/sh
# The demo: a checkpoint saved under DDP on cuda:3 becomes a CPU file, then a safetensors file. Usage: demo.sh OUTDIR
set -eu
here=$(dirname "$0")
out=$1
mkdir -p "$out"

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

echo "1. A training checkpoint saved under DistributedDataParallel on cuda:3, as it is:"
run ckptconv inspect "$here/ddp_cuda3_train.pt"
printf '\n$ python: torch.load("ddp_cuda3_train.pt")\n'
python - "$here/ddp_cuda3_train.pt" <<'PY'
import sys, torch
try:
    torch.load(sys.argv[1])
    print("loads here: this host has a cuda:3")
except RuntimeError as error:
    print("RuntimeError:", str(error).split(". ")[0])
PY

echo
echo "2. Converted, for a host without CUDA:"
run ckptconv strip-module "$here/ddp_cuda3_train.pt" "$out/train_cpu.pt" --force --verify
run ckptconv convert "$here/ddp_cuda3_train.pt" "$out/model.safetensors" --force --verify

echo
echo "3. The results:"
run ckptconv inspect "$out/train_cpu.pt"
run ckptconv inspect "$out/model.safetensors"
printf '\n$ python: torch.load("train_cpu.pt"), safetensors.torch.load_file("model.safetensors")\n'
python - "$out" <<'PY'
import sys, torch
from safetensors.torch import load_file
plain = torch.load(f"{sys.argv[1]}/train_cpu.pt")["state_dict"]
safe = load_file(f"{sys.argv[1]}/model.safetensors")
assert plain.keys() == safe.keys() and all(torch.equal(plain[key], safe[key]) for key in safe)
print(f"both load, with {len(safe)} equal tensors: {', '.join(list(plain)[:2])}, ...")
PY
