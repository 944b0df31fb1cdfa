"""Make the folders of tests/data/deepspeed_parallel with deepspeed itself: pipelines of two stages
under ZeRO 1 and without ZeRO, with tied layers and with layers that are cut among two
tensor-parallel ranks; experts on two ranks each under ZeRO 2 and without ZeRO (plain; in fp16; in
fp16 with one flat tensor for each group), and two tensor-parallel ranks under ZeRO 1 and under
ZeRO 3; two or four processes each.

    DS_ACCELERATOR=cpu python tests/data/make_deepspeed_parallel.py [pipeline|experts|tensor ...]
    DS_ACCELERATOR=cpu python tests/data/make_deepspeed_parallel.py loaded UNIVERSAL STAGES

Needs what make_deepspeed.py needs. states.pt of a pipeline is what deepspeed gives of each
parameter, experts_*/states.pt what its optimizers of all ranks keep of each, that of tied, cut,
tensor and tensor3 what its ds_to_universal makes of the folder.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from make_deepspeed import free_port
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent / "deepspeed_parallel"
RANKS = 4
CONFIG = {"zero_allow_untested_optimizer": True, "bf16": {"enabled": True}}
KEPT = ("exp_avg", "exp_avg_sq")


def begin(rank: int, port: int, world: int = RANKS) -> None:
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)


def pipeline(rank: int, folder: Path, port: int) -> None:
    """Layers of which one has no parameters."""
    begin(rank, port)
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    layers = [
        LayerSpec(nn.Linear, 6, 8),
        nn.functional.relu,
        LayerSpec(nn.LayerNorm, 8),
        LayerSpec(nn.Linear, 8, 4),
    ]
    model = PipelineModule(
        layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    config = {
        **CONFIG,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        engine.train_batch(batches())
    engine.save_checkpoint(str(folder))
    found = {}
    for name, parameter in engine.module.named_parameters():
        states = {key: safe_get_full_optimizer_state(parameter, key) for key in KEPT}
        found[name] = {"fp32": safe_get_full_fp32_param(parameter), **states}
    every: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(RANKS)]
    torch.distributed.all_gather_object(every, found)
    if rank == 0:
        torch.save(
            {name: state for one in every for name, state in one.items()}, folder / "states.pt"
        )
    torch.distributed.destroy_process_group()


def batches(dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.randn(2, 6).to(dtype), torch.randn(2, 4).to(dtype)


def transposed(module: nn.Module, x: Tensor) -> Tensor:
    """What a tied layer does with a function of its own: no file has it."""
    return nn.functional.linear(x, module.weight.t())


def tied_model(stages: int) -> Any:
    """Two pairs of tied layers, the second layer of one with a function of its own."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    def word(**own: Any) -> Any:
        return TiedLayerSpec("word", nn.Linear, 6, 8, bias=False, **own)

    def norm() -> Any:
        return TiedLayerSpec("norm", nn.LayerNorm, 8, tied_weight_attr=["weight", "bias"])

    layers = [word(), norm(), LayerSpec(nn.Linear, 8, 8), norm(), word(forward_fn=transposed)]
    return PipelineModule(
        [*layers, LayerSpec(nn.Linear, 6, 4)],
        num_stages=stages,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )


def tied(rank: int, folder: Path, port: int, precision: str = "bf16", stage: int = 1) -> None:
    begin(rank, port, RANKS if precision == "bf16" else 2)
    train_stages(tied_model(2), folder, precision, stage)


def loaded(rank: int, folder: Path, port: int, stages: int) -> None:
    """Load a universal checkpoint of `tied` with two ranks, and save what each has then."""
    begin(rank, port, 2)
    torch.manual_seed(1)
    engine = engine_of(tied_model(stages), "bf16", 1, checkpoint={"load_universal": True})
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    torch.save(dict(states_of_stage(engine, "bf16")), folder / f"{stages}_{rank}.pt")
    torch.distributed.destroy_process_group()


def alone(rank: int, folder: Path, port: int, precision: str = "fp32") -> None:
    """Stages of one rank each, without ZeRO, and groups with and without weight decay."""
    begin(rank, port, 2)
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(nn.Linear, 6, 8), LayerSpec(nn.LayerNorm, 8), LayerSpec(nn.Linear, 8, 4)]
    model = PipelineModule(
        layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    train_stages(model, folder, precision, 0)


def engine_of(model: Any, precision: str, stage: int, **others: Any) -> Any:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch has the few operations on CPUs too
    config = {
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        **others,
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }
    if precision.startswith("fp16"):
        config["fp16"] = {"enabled": True, "initial_scale_power": 4}
    if precision == "fp16":  # what its own FusedAdam gets, which needs a GPU
        deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train_stages(model: Any, folder: Path, precision: str, stage: int) -> None:
    engine = engine_of(model, precision, stage)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = dtypes[precision[:4]]
    for _ in range(2):
        engine.train_batch(batches(dtype))
    engine.save_checkpoint(str(folder))
    found = dict(states_of_stage(engine, precision)) if stage == 0 else {}
    world = torch.distributed.get_world_size()
    every: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(world)]
    torch.distributed.all_gather_object(every, found)
    if torch.distributed.get_rank() == 0 and stage == 0:
        both: dict[str, dict[str, Tensor]] = {}
        for name, state in [item for one in every for item in one.items()]:
            both.setdefault(name, state)
        torch.save(both, folder / "states.pt")
    torch.distributed.destroy_process_group()


def states_of_stage(engine: Any, precision: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What the optimizer of a stage has of each parameter, and its fp32 weight."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    named = {parameter: name for name, parameter in engine.module.named_parameters()}
    if precision == "bf16":
        for parameter, name in named.items():
            states = {key: safe_get_full_optimizer_state(parameter, key) for key in KEPT}
            yield name, {"fp32": safe_get_full_fp32_param(parameter), **states}
    elif precision == "fp32":
        for parameter, name in named.items():
            states = engine.optimizer.state[parameter]
            yield name, {"fp32": parameter.detach(), **{key: states[key] for key in KEPT}}
    elif precision == "fp16_unfused":
        inner = engine.optimizer
        for group, masters in zip(inner.fp16_groups, inner.fp32_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                states = inner.optimizer.state[master]
                kept = {key: states[key] for key in KEPT}
                yield named[parameter], {"fp32": master.detach(), **kept}
    else:
        both = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups_flat, strict=True)
        for group, flat in both:
            states = engine.optimizer.optimizer.state[flat]
            rows = {"fp32": flat.detach(), **{key: states[key] for key in KEPT}}
            cut = {
                key: torch._utils._unflatten_dense_tensors(value, group)
                for key, value in rows.items()
            }
            for at, parameter in enumerate(group):
                yield named[parameter], {key: values[at].clone() for key, values in cut.items()}


class Mixture(nn.Module):
    """Four experts, two on each rank."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.a = nn.Linear(6, 6)
        expert = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
        self.m = MoE(6, expert, num_experts=4, ep_size=2, k=1, capacity_factor=4.0)
        self.b = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed, loss, _ = self.m(self.a(x))
        return self.b(mixed).float().pow(2).sum() + loss.float()


def experts(rank: int, folder: Path, port: int) -> None:
    begin(rank, port)
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = Mixture()
    torch.manual_seed(100 + rank)
    with torch.no_grad():  # deepspeed makes copies of one expert
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.copy_(torch.randn_like(parameter))
    everything = {"params": list(model.parameters()), "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(everything)
    config = {
        **CONFIG,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
    }
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        engine.backward(engine(torch.randn(8, 6).bfloat16()))
        engine.step()
    engine.save_checkpoint(str(folder))
    torch.distributed.destroy_process_group()


class Mixtures(nn.Module):
    """Two layers of experts of one shape, of which a rank has two of four and one of two, with a
    buffer, and a weight between them of the shape of an expert's.
    """

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        def expert() -> nn.Module:
            made = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
            made.register_buffer("scale", torch.tensor([1.5, 2.5]))
            return made

        self.a = nn.Linear(6, 6)
        self.m = MoE(6, expert(), num_experts=4, ep_size=2, k=1, capacity_factor=4.0)
        self.between = nn.Linear(6, 5)
        self.n = MoE(6, expert(), num_experts=2, ep_size=2, k=1, capacity_factor=4.0)
        self.b = nn.Linear(6, 2)
        self.register_buffer("scale", torch.tensor([1.5, 2.5]))

    def forward(self, x: Tensor) -> Tensor:
        mixed, first, _ = self.m(self.a(x))
        narrow = self.between(mixed).float().pow(2).sum()
        mixed, second, _ = self.n(mixed)
        return self.b(mixed).float().pow(2).sum() + narrow + first.float() + second.float()


def experts_without_zero(
    rank: int, folder: Path, port: int, fp16: bool = False, flat: bool = False
) -> None:
    begin(rank, port)
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.runtime import engine as engines

    torch.manual_seed(0)  # what all ranks have
    model = Mixtures()
    torch.manual_seed(100 + rank % 2)  # and what those of the same experts have
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.copy_(torch.randn_like(parameter))
    decayed = [value for value in model.parameters() if value.ndim > 1]
    others = [value for value in model.parameters() if value.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1, "name": "decayed"},
        {"params": others, "weight_decay": 0.0, "name": "others"},
    ]
    if fp16:  # torch computes it on a CPU
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    if flat:
        groups = [{"params": list(model.parameters()), "name": "all"}]
        engines.FusedAdam = torch.optim.AdamW  # the one that deepspeed makes flat
    optimizer = torch.optim.AdamW(
        split_params_into_different_moe_groups_for_optimizer(groups), lr=0.01
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": fp16, "initial_scale_power": 4, "loss_scale_window": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dtype = torch.float16 if fp16 else torch.float32
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        engine.backward(engine(torch.randn(8, 6).to(dtype)))
        engine.step()
    engine.save_checkpoint(str(folder))
    every: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(RANKS)]
    torch.distributed.all_gather_object(every, dict(kept_of_each(engine, rank % 2)))
    if rank == 0:
        torch.save(
            {name: state for one in every for name, state in one.items()}, folder / "states.pt"
        )
    torch.distributed.destroy_process_group()


def kept_of_each(engine: Any, experts: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What an optimizer keeps of each parameter, by the number of the expert among all."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    outer = engine.optimizer
    inner = getattr(outer, "optimizer", outer)
    groups = getattr(outer, "fp16_groups", [group["params"] for group in inner.param_groups])
    for number, (params, group) in enumerate(zip(groups, inner.param_groups, strict=True)):
        ends = iter(
            [group["params"][0]] * len(params) if hasattr(outer, "fp32_groups_flat") else []
        )
        at = 0
        for index, parameter in enumerate(params):
            first, inside, rest = names[id(parameter)].partition("deepspeed_experts.")
            local, dot, rest = rest.partition(".")
            count = 2 if first.startswith("m.") else 1
            local = f"{experts * count + int(local)}" if inside else local
            master = next(ends, None)
            if master is None:
                master = group["params"][index]
                kept = {"fp32": master.detach(), **inner.state[master]}
            else:
                part = slice(at, at := at + parameter.numel())
                flat = {"fp32": master.detach(), **inner.state[master]}
                kept = {
                    key: value[part].view(parameter.shape).clone() if value.ndim else value
                    for key, value in flat.items()
                }
            assert torch.equal(kept["fp32"].to(parameter.dtype), parameter), (number, index)
            yield f"{first}{inside}{local}{dot}{rest}", kept


# ------------------------------------------------------------------------- tensor parallelism

TENSOR = 2  # tensor-parallel ranks, neighbours of each other
ROWS, WORDS, PADDED = 4, 10, 12
HEADS = (8, 4, 4)  # rows of q, k and v
INFO = {
    "universal_checkpoint_version": 0.3,
    "original_vocab_size": WORDS,
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "tp_replicated_parameter_patterns": [r".*norm\.weight", r"dense\.bias"],
    "parameter_to_average_patterns": [r"router\.weight"],
    "parameter_with_row_parallelism_patterns": [r"dense\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"gated\.weight"],
    "parameter_with_sub_params": [
        {"patterns": [r"qkv\.weight"], "shape": (HEADS, ROWS), "partition_dim": 0}
    ],
}
"""How the parameters of `Cut` are cut, as Megatron-DeepSpeed says it of its own."""


class Piece(nn.Module):
    """Parameters whose loss goes by element, so that no rank needs what the others have."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        each = [value.float() for value in self.parameters(recurse=False)]
        return torch.stack([(value * x + 1).pow(2).sum() for value in each]).sum()


class Cut(nn.Module):
    """A rank's part of a model: of some parameters its own rows or columns, of others the same as
    all.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.frozen_norm = (Piece(weight=(ROWS,)) for _ in range(2))
        bias = Piece(bias=(ROWS,)).bias
        torch.manual_seed(1 + rank)
        self.dense = Piece(weight=(ROWS, 8 // TENSOR))
        self.dense.register_parameter("bias", bias)
        self.embed = Piece(weight=(PADDED // TENSOR, ROWS))
        self.qkv = Piece(weight=(sum(HEADS) // TENSOR, ROWS), bias=(sum(HEADS) // TENSOR,))
        self.gated, self.router = Piece(weight=(12 // TENSOR, ROWS)), Piece(weight=(3, ROWS))
        self.frozen_norm.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.5, 2.5]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([piece(x) for piece in self.children()]).sum()


class Parallel:
    """The groups of ranks, as Megatron-LM's `mpu` tells them."""

    def __init__(self, rank: int) -> None:
        groups = [
            [torch.distributed.new_group(ranks), ranks]
            for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])
        ]
        (self.tensor, _), (self.data, _) = [group for group in groups if rank in group[1]]

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(self.tensor)

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(self.data)


def tensor(rank: int, folder: Path, port: int, stage: int = 1) -> None:
    begin(rank, port)
    import deepspeed

    mpu = Parallel(rank)
    model = Cut(mpu.get_model_parallel_rank())
    model.universal_checkpoint_info = INFO  # type: ignore[assignment]
    config = {
        **CONFIG,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
    }
    decayed = [value for value in model.parameters() if value.requires_grad and value.ndim > 1]
    others = [value for value in model.parameters() if value.requires_grad and value.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    for step in range(2):
        x = torch.tensor(0.5 + step + mpu.get_data_parallel_rank())
        engine.backward(engine(x))
        engine.step()
    engine.save_checkpoint(str(folder))
    torch.distributed.destroy_process_group()


class CutLayer(Cut):
    """A layer whose inputs are a number that all ranks have, and the loss so far of this rank."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__(rank)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(seed)

    def forward(self, x: Tensor) -> Tensor:
        lost = super().forward(x[0, 0].float().detach()) / 100
        return torch.cat([x[:, :1], x[:, 1:] + lost.to(x.dtype)], 1)


class CutWords(CutLayer):
    """The embedding alone."""

    def __init__(self, rank: int) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(9 + rank)
        self.embed = Piece(weight=(PADDED // TENSOR, ROWS))


def cut(rank: int, folder: Path, port: int) -> None:
    """Two stages of two tensor-parallel ranks, and a tied layer in both stages."""
    begin(rank, port)
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    own = rank % TENSOR
    words = partial(TiedLayerSpec, "words", CutWords, own, tied_weight_attr="embed.weight")
    specs = [LayerSpec(CutLayer, own, seed) for seed in (0, 1)]
    model = PipelineModule(
        [words(), specs[0], specs[1], words()],
        topology=PipeModelDataParallelTopology(2, TENSOR, 1),
        loss_fn=lambda found, _: found[:, 1].float().mean(),
        partition_method="uniform",
    )
    before = r"\w+\."
    info = {
        key: [before + text for text in listed] if type(listed[0]) is str else listed
        for key, listed in INFO.items()
        if isinstance(listed, list)
    }
    info["vocabulary_parameter_patterns"].append(r"tied_modules\.words\.embed\.weight")
    info["tp_replicated_parameter_patterns"] = [before + r".*norm\.weight", before + r"dense\.bias"]
    (parts,) = INFO["parameter_with_sub_params"]  # type: ignore[misc]
    info["parameter_with_sub_params"] = [{**parts, "patterns": [before + r"qkv\.weight"]}]
    info["pipeline_replicated_parameter_patterns"] = [r"tied_modules\.words\.embed\.weight"]
    model.universal_checkpoint_info = {**INFO, **info}
    config = {
        **CONFIG,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(2):
        x = torch.tensor([[0.5 + step, 0.0]] * 2, dtype=torch.bfloat16, requires_grad=True)
        engine.train_batch(iter([(x, torch.zeros(2, 2, dtype=torch.bfloat16))] * 2))
    engine.save_checkpoint(str(folder))
    torch.distributed.destroy_process_group()


def universal_states(folder: Path) -> None:
    """Save what ds_to_universal makes of a step: of each parameter the weight and the states."""
    from deepspeed.checkpoint import ds_to_universal

    made = folder / "universal"
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(folder / "global_step2"),
            output_folder=str(made),
            strict=True,
            inject_missing_state=True,
            **options,
        )
    )
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(made.glob("zero/*/*.pt")):
        value = torch.load(file, weights_only=False)
        value = value["param"] if isinstance(value, dict) else value
        found.setdefault(file.parent.name, {})[file.stem] = value
    torch.save(found, folder / "states.pt")
    shutil.rmtree(made)
    (folder / "latest_universal").unlink()


def main() -> None:
    kinds: dict[str, Any] = {
        "pipeline": pipeline,
        "experts": experts,
        "experts_plain": experts_without_zero,
        "experts_fp16": partial(experts_without_zero, fp16=True),
        "experts_flat": partial(experts_without_zero, fp16=True, flat=True),
        "tensor": tensor,
        "tensor3": partial(tensor, stage=3),
        "tied": tied,
        "tied_bf16": partial(tied, stage=0),
        "tied_fp32": partial(tied, precision="fp32", stage=0),
        "fp32": alone,
        "fp16": partial(alone, precision="fp16"),
        "fp16_unfused": partial(alone, precision="fp16_unfused"),
        "cut": cut,
    }
    if sys.argv[1:2] == ["loaded"]:
        folder, stages = Path(sys.argv[2]), int(sys.argv[3])
        job = partial(loaded, stages=stages)
        torch.multiprocessing.spawn(job, (folder, free_port()), nprocs=2)
        return
    of_two = ("tied_fp32", "fp32", "fp16", "fp16_unfused")
    for name in sys.argv[1:] or kinds:
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        count = 2 if name in of_two else RANKS
        torch.multiprocessing.spawn(kinds[name], (folder, free_port()), nprocs=count)
        if name in ("tensor", "tensor3", "tied", "cut"):
            universal_states(folder)
        for script in folder.glob("*.py"):
            script.unlink()


if __name__ == "__main__":
    main()
