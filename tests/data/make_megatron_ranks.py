"""Make `megatron_ranks/`, the files of four ranks (2 tensor-parallel × 2 of a pipeline) of a model
of Megatron core, and `megatron_ranks.whole.pt`, the model as it is in one rank. Megatron itself has
cut it: the ranks load what one rank saved by its distributed checkpoints.

    pip install torch numpy psutil && pip install --no-deps megatron-core==0.16.1
    cd tests/data && export OMP_NUM_THREADS=1
    torchrun --nproc-per-node 1 make_megatron_ranks.py
    torchrun --nproc-per-node 4 make_megatron_ranks.py

It runs without a GPU: the few calls that ask for one are answered here.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
torch.cuda.Stream = MagicMock
torch.Tensor.cuda = lambda self, *_, **__: self

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2}
BETWEEN = Path(tempfile.gettempdir(), "make_megatron_ranks")


def model(tensor: int, pipeline: int) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor, pipeline)
    config = TransformerConfig(
        **SIZES,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        num_moe_experts=2,
        moe_ffn_hidden_size=8,
        moe_shared_expert_intermediate_size=8,
        moe_layer_freq=[0, 1],
        ffn_hidden_size=12,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(
        config,
        spec,
        vocab_size=16,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )


def save_whole() -> None:
    from megatron.core import dist_checkpointing

    whole = model(1, 1)
    for number, parameter in enumerate(whole.parameters()):
        torch.manual_seed(number)
        parameter.data.copy_(torch.randn(parameter.shape))
    state = {key: value for key, value in whole.state_dict().items() if value is not None}
    torch.save(state, "megatron_ranks.whole.pt")
    BETWEEN.mkdir()
    dist_checkpointing.save({"model": whole.sharded_state_dict()}, str(BETWEEN))


def save_ranks() -> None:
    from megatron.core import dist_checkpointing, parallel_state

    part = model(2, 2)
    state = {"model": part.sharded_state_dict()}
    part.load_state_dict(dist_checkpointing.load(state, str(BETWEEN))["model"])
    tensor, stage = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    args = Namespace(
        **SIZES,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=1,
        group_query_attention=True,
        swiglu=True,
        untie_embeddings_and_output_weights=False,
    )
    folder = Path(f"megatron_ranks/mp_rank_{tensor:02d}_{stage:03d}")
    folder.mkdir(parents=True)
    # the keys with which megatron/training/checkpointing.py saves
    held = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
    model_state = part.state_dict_for_save_checkpoint()
    torch.save({**held, "model": model_state}, folder / "model_optim_rng.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    save_whole() if dist.get_world_size() == 1 else save_ranks()
    dist.destroy_process_group()
