"""From a model's name to its folder, and from the folder to tokenizer and module."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch

from headwater.errors import BlockedError, HeadwaterError, UserError
from headwater.models.builtin import PREFIX, find_builtin, nearest_builtin
from headwater.models.quiet import quiet_transformers

logger = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
CODE_KEYS = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
IDENTITY = {
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "vocab_size": "vocab",
}


def resolve(name: str, *, trust_remote_code: bool = False, offline: bool = False) -> Path:
    """The local folder of a model, fetched or made first if need be.

    name: `builtin:<name>`, a local folder, or a hub id `owner/name`.
    trust_remote_code: also fetch the code that ships with a hub model.
    offline: touch no network (HF_HUB_OFFLINE does the same for hub ids).

    Raises UserError for a name that is none of these or a folder without a model, BlockedError where
    the network or a permission is missing; each names the remedy.
    """
    if name.startswith(PREFIX):
        builtin = find_builtin(name)
        if offline and builtin.downloads and not builtin.cached:
            raise BlockedError(f"{name} is not in the cache: run `headwater models pull {name}` first")
        return builtin.ensure()
    folder = Path(name).expanduser()
    if folder.exists():
        check_folder(folder)
        return folder
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(f"no such model folder: {name}")
    if not HUB_ID.fullmatch(name):
        raise UserError(
            f"no model {name!r}: neither a folder nor a hub id (owner/name); did you mean {nearest_builtin(name)!r}?"
        )
    folder = _from_hub(name, trust_remote_code, offline)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raises UserError, saying what is missing, unless `folder` holds a configuration, weights and a tokenizer."""
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; a model is a folder with config.json, tokenizer and safetensors weights")
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / file).is_file() for file in WEIGHT_FILES):
        missing.append(" or ".join(WEIGHT_FILES))
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab.*")):
        missing.append("tokenizer.json")
    if missing:
        raise UserError(f"{folder} holds no model: it lacks {', '.join(missing)}")


def remote_code(folder: Path) -> list[str]:
    """The Python files in a model's folder that its configuration wants run; empty for models of transformers' own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = read_config(folder)
    if config.get("model_type") in CONFIG_MAPPING:
        return []
    tokenizer = folder / "tokenizer_config.json"
    maps = [config.get("auto_map"), _read_json(tokenizer).get("auto_map") if tokenizer.is_file() else None]
    files = set()
    for mapping in maps:
        references = [mapping.get(key) for key in CODE_KEYS] if isinstance(mapping, dict) else []
        for reference in references:
            # A tokenizer has a pair of classes, either of which may be null. "owner/name--module.Class" is allowed.
            for value in reference if isinstance(reference, list) else [reference]:
                if value:
                    files.add(value.rsplit(".", 1)[0].rsplit("--", 1)[-1] + ".py")
    return sorted(files)


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model's folder (a transformers `PreTrainedTokenizerBase`).

    Raises UserError if it cannot be loaded, or needs code from the folder without consent.
    """
    from transformers import AutoTokenizer

    _refuse_code(path, trust_remote_code)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _unloadable("tokenizer", path, error) from error


def load_model(
    path: Path, dtype: torch.dtype, attn_implementation: str = "sdpa", trust_remote_code: bool = False
) -> Any:
    """The causal language model of a folder, on the CPU, in evaluation mode, its weights cast to `dtype`.

    Raises UserError if it cannot be loaded, if weights are missing or misshapen (transformers would
    make them up at random), or if it needs code from the folder without consent.
    """
    model, report = load_with_report(path, dtype, attn_implementation, trust_remote_code)
    broken = {problem: names for problem, names in report.items() if names and problem != "unexpected"}
    if broken:
        problem, names = next(iter(broken.items()))
        raise UserError(f"{path} does not hold all weights of its model: {problem} {shorten(names)}")
    if report["unexpected"]:
        logger.warning("%s holds weights that its model does not have: %s", path, shorten(report["unexpected"]))
    return model


def load_with_report(
    path: Path, dtype: torch.dtype | str, attn_implementation: str = "sdpa", trust_remote_code: bool = False
) -> tuple[Any, dict[str, list[str]]]:
    """The model as `load_model` gives it, and the names of its weights that are missing, misshapen or unexpected."""
    from transformers import AutoModelForCausalLM

    _refuse_code(path, trust_remote_code)
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attn_implementation,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:
        raise _unloadable("model", path, error) from error
    model, info = loaded
    mismatched = [entry if isinstance(entry, str) else entry[0] for entry in info["mismatched_keys"]]
    return model, {
        "missing": sorted(info["missing_keys"]),
        "misshapen": sorted(mismatched),
        "unexpected": sorted(info["unexpected_keys"]),
    }


def model_identity(path: Path) -> str:
    """The architecture and its sizes in one short line; models whose weights fit each other have the same.

    From config.json alone, so that it does not depend on the version of transformers.
    """
    config = read_config(path)
    sizes = config.get("text_config") or config
    parts = [str(config.get("model_type", "unknown")), *(config.get("architectures") or [])]
    parts += [f"{label}={sizes[key]}" for key, label in IDENTITY.items() if sizes.get(key) is not None]
    if config.get("tie_word_embeddings", sizes.get("tie_word_embeddings")):
        parts.append("tied")
    return " ".join(parts)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model's folder. Raises UserError if it is absent or unreadable."""
    return _read_json(path / "config.json")


def shorten(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"cannot read {file}: not a JSON object")
    return content


def _refuse_code(path: Path, trusted: bool) -> None:
    files = remote_code(path)
    if files and not trusted:
        raise UserError(
            f"{path} needs code that ships with it ({shorten(files)}), and none was run: read it, then set "
            "policy.trust_remote_code=true (train; value.trust_remote_code for a value model) or --trust-remote-code "
            "(models check)"
        )


def _unloadable(what: str, path: Path, error: Exception) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        return error
    return UserError(f"cannot load the {what} in {path}: {type(error).__name__}: {one_line(error)}")


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's text on one line, cut at `limit` characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[:limit] + "..."


def _from_hub(name: str, trust_remote_code: bool, offline: bool) -> Path:
    """Fetch a hub model, or take it from the hub's cache. A failure becomes one line with the remedy."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = [*HUB_FILES, "*.py"] if trust_remote_code else HUB_FILES
    # Sub-folders hold other formats of the same weights.
    wanted: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ["*/*"]}
    try:
        return Path(snapshot_download(name, local_files_only=offline, **wanted))
    except HFValidationError as error:
        raise UserError(f"{name!r} is not a hub id: {one_line(error)}") from error
    except GatedRepoError as error:
        raise BlockedError(f"{name} is gated: accept its terms on the hub, then log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"no model {name} on the hub (if it is private: `hf auth login`)") from error
    except LocalEntryNotFoundError as error:
        raise _not_cached(name, error) from error
    except HfHubHTTPError as error:
        raise _refused(name, error) from error
    except OSError as error:
        raise BlockedError(
            f"cannot fetch {name}: {one_line(error)}; HF_HOME moves the hub's cache to a folder with room"
        ) from error
    except Exception as error:
        # The HTTP client's own errors (proxy, TLS) derive from no class of the hub's.
        raise BlockedError(f"cannot fetch {name}: {type(error).__name__}: {one_line(error)}") from error


def _not_cached(name: str, error: Exception) -> BlockedError:
    """Nothing usable in the cache, and the hub was not asked, not reached, or refused."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error.__cause__, HfHubHTTPError):
        return _refused(name, error.__cause__)
    return BlockedError(
        f"{name} is not complete in the hub's cache and the hub is not reached (no network, or HF_HUB_OFFLINE is set): "
        "fetch it once where there is a network, or give a local folder"
    )


def _refused(name: str, error: Exception) -> BlockedError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 429:
        return BlockedError(
            f"the hub's rate limit was hit fetching {name}: wait or log in with `hf auth login`; if a copy is cached, "
            "set policy.model_name and policy.tokenizer.name to its snapshot folder and HF_HUB_OFFLINE=1"
        )
    return BlockedError(f"the hub refused {name} (HTTP {status}): {one_line(error)}")
