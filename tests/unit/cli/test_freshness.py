import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.manager import CheckpointManager
from headwater.cli import ckpt, main
from headwater.config.schema import CheckpointingConfig
from headwater.engines.torch.engine import TorchEngine
from headwater.errors import UserError

Save = Callable[..., Path]


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    ckpt.add_parser(parser.add_subparsers())
    args = parser.parse_args(["ckpt", "freshness", *map(str, arguments)])
    return args.run(args)


def train(engine: TorchEngine) -> None:
    """One real step of the optimizer, over gradients that every parameter gets."""
    sum(param.float().square().sum() for param in engine.model.parameters()).backward()  # type: ignore[union-attr]
    engine.optim_step()


@pytest.fixture
def save(tmp_path: Path) -> Iterator[Save]:
    manager = CheckpointManager(
        CheckpointingConfig(checkpoint_dir=str(tmp_path / "checkpoints"), keep_latest_k=None, strategy="sync"),
        "run-1",
        "model-a",
    )

    def run(step: int, **components: TorchEngine | list[Chunk]) -> Path:
        chunks = {
            name: part if isinstance(part, list) else list(part.state_chunks()) for name, part in components.items()
        }
        return manager.save(step, chunks, {"step": step}, "", None, step)

    yield run
    manager.close()


@pytest.fixture
def engine(make_engine: Callable[..., TorchEngine]) -> TorchEngine:
    return make_engine("policy.precision=bfloat16")


def test_two_saves_of_a_training_run_are_fresh(engine: TorchEngine, save: Save, capsys: pytest.CaptureFixture[str]):
    train(engine)
    old = save(1, policy=engine)
    train(engine)
    assert run(old, save(2, policy=engine)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fresh"
    assert lines[1].startswith("policy: advanced; step 1 -> 2; ")


def test_a_checkpoint_against_itself_names_each_kind_of_evidence(
    engine: TorchEngine, save: Save, capsys: pytest.CaptureFixture[str]
):
    train(engine)
    folder = save(1, policy=engine)
    assert run(folder, folder) == 1
    out = capsys.readouterr().out
    assert out.startswith("stale\n  nothing advanced")
    assert all(f"policy: {name} repeated" in out for name in ("exp_avg", "exp_avg_sq", "param", "weight"))


@pytest.mark.parametrize("kept", ["exp_avg.", "exp_avg_sq.", "param."])
def test_one_tensor_of_the_optimizer_that_was_kept_back_is_named(
    kept: str, engine: TorchEngine, save: Save, capsys: pytest.CaptureFixture[str]
):
    train(engine)
    before = [Chunk(c.name, c.tensor.clone(), c.global_shape, c.offset) for c in engine.state_chunks()]
    old = save(1, policy=before)
    train(engine)
    index = next(i for i, c in enumerate(before) if c.name.startswith(f"optimizer.state.{kept}"))
    after = list(engine.state_chunks())
    after[index] = before[index]
    assert run(old, save(2, policy=after), "--json") == 1
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"] == "stale"
    assert [chunk["key"] for chunk in content["stale"]] == [before[index].name]


def halves(chunk: Chunk) -> list[Chunk]:
    """A chunk as two ranks would save it."""
    rows = len(chunk.tensor) // 2
    return [
        Chunk(chunk.name, part.clone(), chunk.global_shape, (at, *chunk.offset[1:]))
        for at, part in ((chunk.offset[0], chunk.tensor[:rows]), (chunk.offset[0] + rows, chunk.tensor[rows:]))
    ]


@pytest.mark.parametrize("gathered", [False, True])
def test_the_shard_of_a_moment_that_one_rank_kept_back_is_found(
    gathered: bool, engine: TorchEngine, save: Save, capsys: pytest.CaptureFixture[str]
):
    def state() -> list[Chunk]:
        return [half for chunk in engine.state_chunks() for half in (halves(chunk) if chunk.name == name else [chunk])]

    train(engine)
    name = next(chunk.name for chunk in engine.state_chunks() if chunk.name.startswith("optimizer.state.exp_avg."))
    before = state()
    old = save(1, policy=list(engine.state_chunks()) if gathered else before)
    train(engine)
    after = state()
    index = next(index for index, chunk in enumerate(after) if chunk.name == name)
    assert not torch.equal(after[index + 1].tensor, before[index + 1].tensor)
    after[index + 1] = before[index + 1]
    if gathered:
        whole = torch.cat([after[index].tensor, after[index + 1].tensor])
        after[index : index + 2] = [Chunk.whole(name, whole)]
    assert run(old, save(2, policy=after), "--json") == 1
    (chunk,) = json.loads(capsys.readouterr().out)["stale"]
    assert chunk["key"] == name
    assert any(chunk["offset"]) != gathered
    assert ("in part" in chunk["reason"]) == gathered


def test_a_reference_model_beside_the_policy_is_idle(
    engine: TorchEngine, make_engine: Callable[..., TorchEngine], save: Save
):
    reference = make_engine(trainable=False)
    train(engine)
    old = save(1, policy=engine, reference=reference)
    train(engine)
    assert run(old, save(2, policy=engine, reference=reference)) == 0


def test_one_unchanged_bf16_weight_is_no_fault(engine: TorchEngine, save: Save):
    train(engine)
    before = [Chunk(c.name, c.tensor.clone(), c.global_shape, c.offset) for c in engine.state_chunks()]
    old = save(1, policy=before)
    train(engine)
    assert run(old, save(2, policy=[before[0], *list(engine.state_chunks())[1:]])) == 0


def test_a_policy_that_waits_for_its_critic_is_idle(
    make_engine: Callable[..., TorchEngine], save: Save, capsys: pytest.CaptureFixture[str]
):
    policy, value = make_engine(), make_engine()
    train(policy)
    train(value)
    old = save(1, policy=policy, value=value)
    train(value)
    assert run(old, save(2, policy=policy, value=value)) == 0
    assert "policy: idle; step 1 -> 1" in capsys.readouterr().out


def test_a_folder_of_a_run_stands_for_its_newest_checkpoint(
    engine: TorchEngine, save: Save, capsys: pytest.CaptureFixture[str]
):
    train(engine)
    old = save(1, policy=engine)
    train(engine)
    new = save(2, policy=engine)
    assert run(old, new.parent) == 0
    assert f"its newest committed checkpoint is {new.name}" in capsys.readouterr().out


def test_unrelated_folders_answer_2_in_one_line(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a = save(1, policy=[Chunk.whole("w", torch.ones(3))])
    b = save(2, value=[Chunk.whole("w", torch.ones(3))])
    assert run(a, b) == 2
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "uncommitted", "megatron run", "distcp"])
def test_a_folder_that_is_no_checkpoint_answers_2_in_one_line(
    kind: str, save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    good = save(1, policy=[Chunk.whole("w", torch.ones(3))])
    bad = tmp_path / ("step_000003-0123abcd" if kind == "uncommitted" else "bad")
    if kind == "file":
        bad.write_text("")
    elif kind != "missing":
        bad.mkdir()
    if kind == "megatron run":
        (bad / "latest_checkpointed_iteration.txt").write_text("7")
    if kind == "distcp":
        (bad / "__0_0.distcp").write_text("")
    with pytest.raises(UserError):
        run(good, bad)
    assert main.main(["ckpt", "freshness", str(good), str(bad)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert str(bad) in printed.err
