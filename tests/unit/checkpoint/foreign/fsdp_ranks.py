"""One of two gloo ranks that train two FSDP2 models and save them with torch.distributed.checkpoint.

`python fsdp_ranks.py FOLDER RANK`; test_fsdp.py starts two. The policy is fp32, the value model bf16. FOLDER then holds
    old, new  both trained in between, the policy's expert and its frozen layer not
    waiting   only the value model trained since `old`
    weight    like `new`, but one bf16 weight has its old values
    shard     like `new`, but rank 1's shard of one first moment has its old values
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.body = nn.Linear(16, 16)
        self.expert = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, expert: bool) -> torch.Tensor:
        x = self.body(self.frozen(x)).tanh()
        return x + self.expert(x) if expert else x


class Run:
    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = Model().to(dtype)
        for layer in self.model.children():
            fully_shard(layer)
        fully_shard(self.model)
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, expert: bool) -> None:
        x = torch.randn(4, 16, dtype=self.model.body.weight.dtype)
        self.model(x, expert).float().square().mean().backward()
        self.adam.step()
        self.adam.zero_grad()

    def state(self) -> dict:
        return {"model": get_model_state_dict(self.model), "optim": get_optimizer_state_dict(self.model, self.adam)}

    def weight(self) -> torch.Tensor:
        return self.model.body.weight.to_local()  # pyright: ignore[reportCallIssue]

    def moment(self) -> torch.Tensor:
        return self.adam.state[self.model.body.weight]["exp_avg"].to_local()


@contextmanager
def going_back(tensor: torch.Tensor, values: torch.Tensor) -> Iterator[None]:
    kept = tensor.clone()
    assert not torch.equal(kept, values)
    with torch.no_grad():
        tensor.copy_(values)
        yield
        tensor.copy_(kept)


def main(root: Path, rank: int) -> None:
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2, timeout=timeout)
    policy, value = Run(torch.float32), Run(torch.bfloat16)

    def save(name: str) -> None:
        state = {"policy": policy.state(), "value": value.state(), "rng": torch.get_rng_state()}
        dcp.save(state, checkpoint_id=root / name)

    torch.manual_seed(rank)
    for run in (policy, value):
        run.train(expert=True)
    save("old")
    weight, moment = value.weight().clone(), policy.moment().clone()
    value.train(expert=True)
    save("waiting")
    policy.train(expert=False)
    save("new")
    with going_back(value.weight(), weight):
        save("weight")
    with going_back(policy.moment(), moment) if rank == 1 else nullcontext():
        save("shard")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
