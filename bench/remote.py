"""Measure ckptconv over a network: against obstore on SeaweedFS on this machine, and by requests.

    make bench-remote

Prints markdown tables. The sides of a row run in turn, A B A B, each in a process of its own; the
ratio is the median of the ratios of neighbouring runs. It needs the servers of the tests (`make
servers`), torch, 12 GB of disk for the server, and ten minutes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# those with asyncio end by os._exit: obstore's threads may abort an interpreter that is ending
CODE = {
    "getput": """
import asyncio, obstore, os
from ckptconv.io.remote.place import remote_place
store = remote_place("s3://bucket/big.pt").site.store._store
async def main():
    got = await obstore.get_async(store, "big.pt")
    await obstore.put_async(store, "copy.bin", got.stream(8 << 20), chunk_size=8 << 20)
asyncio.run(main())
os._exit(0)
""",
    "threesteps": """
import asyncio, obstore, os, subprocess, sys
from ckptconv.io.remote.place import remote_place
store = remote_place("s3://bucket/big.pt").site.store._store
async def fetch():
    with open("big.pt", "wb") as file:
        async for piece in (await obstore.get_async(store, "big.pt")).stream(8 << 20):
            file.write(piece)
asyncio.run(fetch())
subprocess.run([sys.executable, "-m", "ckptconv", "convert", "big.pt", "out.safetensors", "-q",
                "-f", "--no-fsync"], check=True)
with open("out.safetensors", "rb") as file:
    obstore.put(store, "copy.safetensors", file, chunk_size=8 << 20)
os._exit(0)
""",
    "load": """
import ckptconv
loaded = ckptconv.load_portable("s3://bucket/big.pt")
""",
    "ranges": """
import torch, obstore
from ckptconv.io.remote.place import remote_place
store = remote_place("s3://bucket/big.pt").site.store._store
size = obstore.head(store, "big.pt")["size"]
starts = list(range(0, size, 8 << 20))
ends = [min(size, start + (8 << 20)) for start in starts]
kept = obstore.get_ranges(store, "big.pt", starts=starts, ends=ends, coalesce=0)
""",
}
CONVERT = ["convert", "s3://bucket/big.pt", "s3://bucket/out.safetensors", "--force", "-q"]


def run(argv: list[str], folder: Path) -> tuple[float, float, int]:
    """Seconds, peak memory in MB, and blocks of 512 bytes that were written to the disk."""
    begin = time.perf_counter()
    pid = os.posix_spawn(argv[0], argv, {**os.environ, "PYTHONPATH": str(ROOT)})
    _, status, used = os.wait4(pid, 0)
    seconds = time.perf_counter() - begin
    if code := os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{argv[:4]} ended with {code}")
    for left in ("big.pt", "out.safetensors"):
        (folder / left).unlink(missing_ok=True)
    return seconds, used.ru_maxrss / 1024, used.ru_oublock


def rated(folder: Path, pairs: int) -> None:
    """The rows against obstore."""
    python = [sys.executable, "-c"]
    ours = [sys.executable, "-m", "ckptconv", *CONVERT]
    rows = [
        ("convert s3 → s3, 2 GB", ours, "obstore get + put", "getput", "≥ 0.9 ×"),
        ("convert s3 → s3, 2 GB", ours, "download, convert, upload", "threesteps", "≥ 1.5 ×"),
        ("load_portable s3, 2 GB", [*python, CODE["load"]], "raw ranges, kept", "ranges",
         "≥ 0.8 ×"),
    ]  # fmt: skip
    print("| work | against | ckptconv s | other s | speed (range) | goal | peak MB | disk |")
    print("|---|---|---|---|---|---|---|---|")
    for work, mine, against, code, goal in rows:
        runs = []
        for _ in range(pairs):
            runs.append((run(mine, folder), run([*python, CODE[code]], folder)))
            say(f"{work} {runs[-1]}")
        ratios = [other[0] / own[0] for own, other in runs]
        seconds = [
            statistics.median(side[0] for side in sides) for sides in zip(*runs, strict=True)
        ]
        peak = max(own[1] for own, _ in runs)
        disk = max(own[2] for own, _ in runs) * 512
        print(
            f"| {work} | {against} | {seconds[0]:.1f} | {seconds[1]:.1f} "
            f"| {statistics.median(ratios):.2f} × ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {goal} | {peak:.0f} | {disk / 1e6:.1f} MB |"
        )


def counted(folder: Path) -> None:
    """The requests of `inspect`, each answered 50 ms late."""
    import ckptconv
    from helpers.folder_store import place_in

    print("\n| checkpoint | requests | bytes | seconds | of the file |")
    print("|---|---|---|---|---|")
    for name in ("zip.pt", "flat.safetensors", "shards", "dcp"):
        place, store = place_in(folder, name, seconds=0.05)
        begin = time.perf_counter()
        found = ckptconv.inspect_checkpoint(place)
        seconds = time.perf_counter() - begin
        read = sum(min(nbytes, (folder / key).stat().st_size - first)
                   for what, key, first, nbytes in store.asked
                   if what == "get" and (folder / key).is_file())  # fmt: skip
        share = 100 * read / found.nbytes
        print(f"| {name} | {len(store.asked)} | {read:,} | {seconds:.2f} | {share:.1f} % |")


def inputs(folder: Path) -> None:
    """What is inspected: 300 tensors in a file, 100 shards, a DCP folder of 64 files."""
    import json

    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    tensors = {f"layers.{number}.weight": torch.randn(400, 400) for number in range(300)}
    torch.save(tensors, folder / "zip.pt")
    save_file(tensors, folder / "flat.safetensors")
    (folder / "shards").mkdir()
    weight_map = {}
    for shard in range(100):
        name = f"model-{shard + 1:05}-of-00100.safetensors"
        part = {f"layers.{shard}.{at}.weight": torch.randn(64, 64) for at in range(10)}
        save_file(part, folder / "shards" / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 16_384_000}, "weight_map": weight_map}
    (folder / "shards/model.safetensors.index.json").write_text(json.dumps(index))
    parts = {f"layers.{number}.weight": torch.randn(64, 64) for number in range(640)}
    writer = dcp.FileSystemWriter(folder / "dcp", thread_count=64)
    dcp.save(parts, storage_writer=writer, no_dist=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", choices=("rates", "requests"))
    given = parser.parse_args()
    from helpers.servers import seaweedfs

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.chdir(folder)
        if given.only != "requests":
            (folder / "server").mkdir()
            with seaweedfs(folder / "server") as server:
                os.environ.update(server.environment)
                # in a process of its own: its memory would count as that of the next to be started
                made_once = multiprocessing.get_context("spawn").Process(
                    target=upload, args=(server,)
                )
                made_once.start()
                made_once.join()
                rated(folder, given.pairs)
        if given.only != "rates":
            inputs(folder)
            counted(folder)


def upload(server: object) -> None:
    """2 GB in 300 tensors, under the key big.pt."""
    import torch

    from helpers.servers import s3_client

    client = s3_client(server)

    torch.manual_seed(0)
    torch.save({f"layers.{at}.weight": torch.randn(1330, 1316) for at in range(300)}, "big.pt")
    with open("big.pt", "rb") as file:
        of = {"Bucket": "bucket", "Key": "big.pt"}
        begun = {**of, "UploadId": client.create_multipart_upload(**of)["UploadId"]}
        parts = []
        while data := file.read(64 << 20):
            number = len(parts) + 1
            sent = client.upload_part(**begun, PartNumber=number, Body=data)
            parts.append({"PartNumber": number, "ETag": sent["ETag"]})
        client.complete_multipart_upload(**begun, MultipartUpload={"Parts": parts})
    Path("big.pt").unlink()


if __name__ == "__main__":
    main()
