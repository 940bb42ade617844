"""One of two gloo ranks that train small Megatron models and save them as Megatron itself does.

`python megatron_ranks.py FOLDER RANK`; test_megatron_freshness.py starts two. FOLDER/SCENE-FORM/ then holds `old`,
`new`, trained on, and, like `new`:
    weight  but one bf16 weight has its old values
    shard   but what rank 1 owns of one first moment has its old values
    edge    the same, of a moment of which each rank owns a part (scene dp2)
The imports are inside of the functions: Megatron's writer starts a process that imports this file again.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

FORMS = ("fully_reshardable", "dp_reshardable")
SCENES: dict[str, dict[str, Any]] = {
    "dp2": {"frozen": ("embedding.", ".self_attention.")},
    "tp2": {"tensor_parallel": 2},
    "moe": {"experts": 4},
}
UNTOUCHED = 1  # of the experts
_HIDDEN, _VOCAB, _SEQUENCE = 24, 64, 8  # 24 is no multiple of 64: buckets get padding


class Run:
    """A bf16 GPT model with its distributed optimizer: fp32 gradients, master weights and moments."""

    def __init__(self, tensor_parallel: int = 1, experts: int | None = None, frozen: tuple[str, ...] = ()) -> None:
        import torch
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        self.data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.manual_seed(0)
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=_HIDDEN,
            ffn_hidden_size=2 * _HIDDEN,
            num_attention_heads=2,
            tensor_model_parallel_size=tensor_parallel,
            num_moe_experts=experts,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_ffn_hidden_size=2 * _HIDDEN if experts else None,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
        )
        spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm")
        model = GPTModel(config, spec, _VOCAB, _SEQUENCE, position_embedding_type="rope").bfloat16()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        for layer in model.decoder.layers if experts else ():
            _never_route_to(layer.mlp.router, UNTOUCHED)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, settings, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                weight_decay=0.01,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )
        self.steps = 0

    def train(self, steps: int = 1) -> None:
        import torch
        from megatron.core.distributed import finalize_model_grads

        for _ in range(steps):
            self.steps += 1
            generator = torch.Generator().manual_seed(100 * self.steps + self.data_parallel.rank())
            tokens = torch.randint(0, _VOCAB, (2, _SEQUENCE), generator=generator)
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.model(tokens, torch.arange(_SEQUENCE).expand(2, -1), None, labels=tokens.roll(-1, 1)).mean().backward()
            finalize_model_grads([self.model])
            done, norm, _ = self.optimizer.step()
            assert done
            assert norm > 0

    def save(self, folder: Path, form: str) -> None:
        """What Megatron's own training loop puts into a `torch_dist` checkpoint."""
        import torch
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import ShardedObject

        settings = {"distrib_optim_sharding_type": form, "dp_cp_group": self.data_parallel}
        weights = self.model.module.sharded_state_dict(metadata=settings)
        with _memory_that_nobody_wrote():
            optimizer = self.optimizer.sharded_state_dict(weights, metadata=settings)
        rank = torch.distributed.get_rank()
        state = {
            "args": Namespace(hidden_size=_HIDDEN, params_dtype=torch.bfloat16),
            "checkpoint_version": 3.0,
            "iteration": 100 + self.steps,  # not what the optimizer says
            "model": weights,
            "optimizer": optimizer,
            "rng_state": ShardedObject("rng_state", [{"torch": torch.get_rng_state()}], (2,), (rank,)),
        }
        if rank == 0:
            folder.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state, str(folder), content_metadata={"distrib_optim_sharding_type": form})

    def moments(self) -> dict[Any, Any]:
        """By parameter, the first moments of what this rank owns of it: flat, fp32."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return {
            parameter: one._get_main_param_and_optimizer_states(parameter)["exp_avg"]
            for one in optimizers
            for parameter in one.model_param_group_index_map
        }

    def a_weight(self) -> Any:
        return self.model.module.output_layer.weight


@contextmanager
def _memory_that_nobody_wrote() -> Iterator[None]:
    """Lets it hold the same numbers at each save; it may hold any."""
    import torch

    empty = torch.empty
    torch.empty = lambda *args, **options: empty(*args, **options).fill_(1)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.empty = empty


@contextmanager
def _going_back(tensor: Any, values: Any) -> Iterator[None]:
    """Lets a tensor hold old values, which have to differ."""
    import torch

    kept = tensor.detach().clone()
    assert not torch.equal(kept, values)
    with torch.no_grad():
        tensor.copy_(values)
        yield
        tensor.copy_(kept)


def _never_route_to(router: Any, expert: int) -> None:
    gating = router.gating

    def gate(hidden: Any) -> Any:
        import torch

        logits = gating(hidden)
        return logits.masked_fill(torch.arange(logits.shape[-1]) == expert, -1e4)

    router.gating = gate


def main(root: Path, rank: int) -> None:
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from headwater.engines.megatron import cpu

    cpu.enable()
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2, timeout=timeout)
    for name, options in SCENES.items():
        run = Run(**options)

        def save(folder: str, run: Run = run, name: str = name) -> None:
            for form in FORMS:
                run.save(root / f"{name}-{form}" / folder, form)

        run.train(2)
        save("old")
        moments = {parameter: moment.clone() for parameter, moment in run.moments().items()}
        weight = run.a_weight().detach().clone()
        run.train(2)
        save("new")
        with _going_back(run.a_weight(), weight):
            save("weight")
        of_both = {parameter: moment.numel() < parameter.numel() for parameter, moment in moments.items()}
        chosen = {"shard": max((p for p in moments if not of_both[p]), key=lambda parameter: parameter.numel())}
        if name == "dp2":
            (chosen["edge"],) = (parameter for parameter in moments if of_both[parameter])
        for folder, parameter in chosen.items():
            with _going_back(run.moments()[parameter], moments[parameter]) if rank == 1 else nullcontext():
                save(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]), int(sys.argv[2]))
