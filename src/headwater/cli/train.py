"""`headwater train`: run a recipe, resuming by itself from its checkpoint folder."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from headwater.errors import HeadwaterError, UserError


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `train` to the command line."""
    parser = subparsers.add_parser(
        "train",
        help="train a model with a recipe",
        description="Train with a recipe; resumes by itself from checkpointing.checkpoint_dir.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="RECIPE | KEY=VALUE", help="recipe name or file (default: grpo), overrides"
    )
    parser.add_argument("--print-config", action="store_true", help="show the resolved configuration and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the run has all its steps or its time to save by came, 130 or 143 when interrupted and saved."""
    from headwater.config.load import load_config

    recipe, overrides = split_words(args.words)
    loaded = load_config(recipe, overrides)
    if args.print_config:
        print(loaded.resolved_yaml, end="")
        print(f"# differs from recipe {recipe}:" if loaded.difference else f"# as recipe {recipe}")
        for line in loaded.difference:
            print(f"#   {line}")
        return 0

    from headwater.controller.build import build
    from headwater.controller.interrupt import StopRequest
    from headwater.controller.loop import run_rl
    from headwater.workers.train_rank import TrainRank

    checkpointing = loaded.config.checkpointing
    with StopRequest(checkpointing.must_save_by_s) as stop, ExitStack() as closing:
        try:
            runtime = closing.enter_context(build(loaded))
        except HeadwaterError:
            if stop.requested:  # Ctrl-C reaches a download as well, and what that says is not the reason
                return stop.exit_code
            raise
        run_rl(runtime, stop)
        if runtime.state.step >= loaded.config.algorithm.max_num_steps:
            return 0
        how = "; resume with the same command" if runtime.call(TrainRank.has_checkpoint) else ", and nothing is saved"
        why = "interrupted"
        if stop.signum is None:
            why = f"checkpointing.checkpoint_must_save_by={checkpointing.checkpoint_must_save_by} has come: ended"
        runtime.progress.note(f"{why} at step {runtime.state.step}{how}")
    return stop.exit_code


def split_words(words: list[str]) -> tuple[str, list[str]]:
    """The recipe, which comes first if at all, and the overrides."""
    if words and "=" not in words[0]:
        recipe, overrides = words[0], words[1:]
    else:
        recipe, overrides = "grpo", words
    require_overrides(overrides, "recipe")
    return recipe, overrides


def require_overrides(words: list[str], first: str) -> None:
    """Raise UserError for a word that is none. first: what stands before them."""
    for word in words:
        if "=" not in word:
            raise UserError(f"'{word}' is neither a {first}, which comes first, nor an override such as grpo.seed=1")
