import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from headwater.cli import models
from headwater.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*words):
    parser = argparse.ArgumentParser()
    models.add_parser(parser.add_subparsers())
    args = parser.parse_args(["models", *map(str, words)])
    return args.run(args)


def test_ls_says_which_builtins_are_in_the_cache(capsys, cache):
    assert run("ls") == 0
    smollm2, tiny = capsys.readouterr().out.splitlines()
    assert smollm2.split()[0] == "builtin:smollm2-135m"
    assert "not cached" in smollm2
    assert "not cached" in tiny
    run("pull", "builtin:tiny")
    capsys.readouterr()
    run("ls")
    _, tiny = capsys.readouterr().out.splitlines()
    assert tiny.split()[:3] == ["builtin:tiny", "4", "MB"]
    assert tiny.endswith(str(cache / "models" / "tiny-1"))


def test_pull_prints_the_folder(capsys, cache):
    assert run("pull", "builtin:tiny") == 0
    assert Path(capsys.readouterr().out.strip()) == cache / "models" / "tiny-1"


def test_check_prints_what_the_model_is(capsys, cache):
    assert run("check", "builtin:tiny") == 0
    rows = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:6])
    assert rows.pop("tokenizer")
    assert rows == {
        "class": "LlamaForCausalLM",
        "model_type": "llama",
        "vocab size": "259",
        "parameters": "1,017,344",
    }
    run("check", cache / "models" / "tiny-1")
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "chat template  yes",
        "remote code    not needed",
        "weights        complete",
    ]


def test_check_returns_1_for_weights_that_are_not_the_models(capsys, cache):
    run("pull", "builtin:tiny")
    folder = cache / "models" / "tiny-1"
    weights = load_file(folder / "model.safetensors")
    weights["extra"] = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert run("check", folder) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "weights        INCOMPLETE",
        "missing model.norm.weight",
        "unexpected extra",
    ]


def test_check_of_a_folder_without_a_model_is_bad_input(tmp_path):
    with pytest.raises(UserError, match="holds no model") as caught:
        run("check", tmp_path)
    assert caught.value.exit_code == 2


def test_check_of_a_model_with_code_prints_what_is_known_and_cannot_tell(capsys, cache, tmp_path):
    run("pull", "builtin:tiny")
    folder = Path(shutil.copytree(cache / "models" / "tiny-1", tmp_path / "mystery"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mystery", "auto_map": {"AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('ran')")
    capsys.readouterr()
    with pytest.raises(UserError, match=r"none was run: read code\.py, then add --trust-remote-code"):
        run("check", folder)
    assert "remote code    needed: code.py" in capsys.readouterr().out


def test_adding_the_parser_imports_no_heavy_package():
    code = (
        "import argparse, sys; from headwater.cli import models;"
        "models.add_parser(argparse.ArgumentParser().add_subparsers());"
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
