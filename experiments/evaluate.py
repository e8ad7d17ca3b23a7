"""Benchmarks of lm-evaluation-harness on a model directory, without torch models.

    python -m experiments.evaluate --model runs/a/model --tasks skills_choice
    python -m experiments.evaluate --model DIR --tasks hellaswag --num_fewshot 5

The tasks `skills_*` need no network (run from the root of the repository); all others
are the harness's own and load their data from the hub. Needs the extra `eval`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from clusterjax import errors, files, models
from experiments.harness import scoring, skill_tasks


def parser() -> argparse.ArgumentParser:
    """Arguments of `evaluate`."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--model", required=True, help="Hugging Face directory, or builtin"
    )
    found.add_argument("--tasks", required=True, help="names, by commas")
    found.add_argument("--include_path", help="folder of more task files")
    found.add_argument("--num_fewshot", type=int, help="examples before the question")
    found.add_argument("--limit", type=float, help="documents, or a share of them")
    found.add_argument("--batch_size", type=int, default=16, help="rows")
    found.add_argument("--max_length", type=int, help="tokens; default: the model's")
    found.add_argument("--dtype", default="float32", help="of parameters and products")
    found.add_argument(
        "--chat", action="store_true", help="use the tokenizer's chat template"
    )
    found.add_argument("--output", type=pathlib.Path, help="JSON file for the results")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        results = evaluate(options)
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.output:
        files.write_json(options.output, results)
    return 0


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the harness; prints its table and returns task → metrics.

    Raises:
      errors.UserError: the harness is missing, or a task is unknown.
    """
    try:
        import lm_eval
        from lm_eval import tasks, utils

        from experiments.harness import language_model
    except ImportError as error:
        raise errors.UserError(
            f"this needs lm-evaluation-harness ({error}): pip install --editable"
            " '.[eval]'"
        ) from error
    folders = [str(skill_tasks.FOLDER), options.include_path]
    manager = tasks.TaskManager(include_path=[f for f in folders if f])
    names = options.tasks.split(",")
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise errors.UserError(
            f"--tasks {unknown[0]}: no such task; ours are skills_bits, skills_choice,"
            " skills_exact, and those of the harness are listed by `lm_eval ls tasks`"
        )
    tokenizer, model = models.load(options.model, dtype=options.dtype)
    scorer = scoring.Scorer(
        tokenizer,
        model,
        batch_size=options.batch_size,
        max_length=options.max_length,
    )
    found = lm_eval.simple_evaluate(
        model=language_model.ClusterjaxLM(scorer, name=options.model),
        tasks=names,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.chat,
        task_manager=manager,
        log_samples=False,
    )
    assert found is not None
    print(utils.make_table(found))
    return found["results"]


if __name__ == "__main__":
    sys.exit(main())
