"""Import of what megatron-core saved, and export that megatron-core loads; both byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dist_ranks import LAYOUTS, MODELS, fits
from families import MOE
from rank_outcomes import Outcomes, run_ranks
from safetensors.torch import load_file

from headwater.cli.main import main

pytest.importorskip("megatron.core", reason="needs the extra megatron, which make test-slow installs")
pytestmark = pytest.mark.slow
CASES = [(model, layout) for layouts in LAYOUTS.values() for layout in layouts for model in MODELS]
CASES = [case for case in CASES if fits(*case)]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("torch_dist")
    run_ranks(Path(__file__).with_name("dist_ranks.py"), folder)
    return Outcomes(folder)


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_what_megatron_saved_is_imported_byte_for_byte(
    model: str, layout: str, outcomes: Outcomes, tmp_path: Path
) -> None:
    assert outcomes.every(f"save {model} {layout}")[0]["norms"][1] > 0.01, "nothing trained"
    folder, output = outcomes.folder, tmp_path / "imported"
    saved, of = str(folder / f"megatron-{model}-{layout}"), str(folder / model)
    assert main(["ckpt", "import", saved, str(output), "--model", of]) == 0
    trained = load_file(folder / f"{model}-{layout}.safetensors")
    assert_equal(load_file(output / "model.safetensors"), trained)
    before = load_file(folder / model / "model.safetensors")
    assert any(not torch.equal(before[name].to(tensor.dtype), tensor) for name, tensor in trained.items())


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_what_is_exported_megatron_loads_at_every_layout(model: str, layout: str, outcomes: Outcomes) -> None:
    found = outcomes.every(f"load {model} {layout}")
    assert len(found) == (1 if layout == "one" else 2)
    for of_rank in found:
        assert of_rank["equal"]
        assert of_rank["missing"] == []
        assert of_rank["iteration"] == 5
        assert of_rank["equal before"] == 0, "the model had these weights before"
        assert of_rank["chained"] == (layout == "ep2")
        assert of_rank["differing"] == []  # weights, masters, moments and steps
        # What a model with Transformer Engine asks for, and this one not.
        if layout != "ep2":
            assert len(of_rank["unasked"]) == (4 if model in MOE else 0)
            assert all(name.endswith("layers.pre_mlp_layernorm.weight") for name in of_rank["unasked"])


@pytest.mark.parametrize("model", MODELS)
def test_an_export_is_imported_as_it_was(model: str, outcomes: Outcomes, tmp_path: Path) -> None:
    source = "ep2" if model in MOE else "tp2"
    folder, output = outcomes.folder, tmp_path / "imported"
    exported, of = str(folder / f"exported-{model}"), str(folder / model)
    assert main(["ckpt", "import", exported, str(output), "--model", of]) == 0
    assert_equal(load_file(output / "model.safetensors"), load_file(folder / f"{model}-{source}.safetensors"))
