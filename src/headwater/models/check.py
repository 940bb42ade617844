"""Whether a model's folder loads, without a network, and what is in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headwater.models.resolve import load_tokenizer, load_with_report, read_config, remote_code


@dataclass(frozen=True)
class ModelReport:
    """What `headwater models check` prints.

    parameters: how many numbers, a tied weight once. remote_code: the files that must be run to load the
    model; where they were not, the fields that need them are None. The last three: names of weights.
    """

    path: Path
    model_class: str | None
    model_type: str | None
    remote_code: list[str]
    tokenizer_class: str | None = None
    vocab_size: int | None = None
    parameters: int | None = None
    chat_template: bool | None = None
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @property
    def loaded(self) -> bool:
        """Whether tokenizer and weights were loaded; False only where code was needed and not trusted."""
        return self.parameters is not None

    @property
    def complete(self) -> bool:
        """Whether the folder's weights are exactly the model's."""
        return self.loaded and not (self.missing or self.misshapen or self.unexpected)


def check_model(path: Path, *, trust_remote_code: bool = False) -> ModelReport:
    """Load configuration, tokenizer and weights of a folder, from the folder alone.

    Raises UserError where one of them cannot be read. Code in the folder is run only if trusted.
    """
    config = read_config(path)
    code = remote_code(path)
    if code and not trust_remote_code:
        return ModelReport(path, next(iter(config.get("architectures") or []), None), config.get("model_type"), code)
    tokenizer = load_tokenizer(path, trust_remote_code)
    model, weights = load_with_report(path, "auto", trust_remote_code=trust_remote_code)
    return ModelReport(
        path=path,
        model_class=type(model).__name__,
        model_type=model.config.model_type,
        remote_code=code,
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=len(tokenizer),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        chat_template=tokenizer.chat_template is not None,
        **weights,
    )
