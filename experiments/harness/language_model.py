"""lm-evaluation-harness over `scoring.Scorer`. Needs the extra `eval`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api import instance, model

from clusterjax.data import chat
from experiments.harness import scoring

_MAX_NEW_TOKENS = 128


class ClusterjaxLM(model.LM):
    """A decoder that lm-evaluation-harness can question, without torch."""

    def __init__(self, scorer: scoring.Scorer, name: str = ""):
        """Args: the decoder's scorer, and the name that reports give it."""
        super().__init__()
        self._scorer = scorer
        self._name = name

    def loglikelihood(
        self, requests: list[instance.Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(Σ log p of the continuation, whether it is the greedy one) of each."""
        del disable_tqdm
        windows = [self._scorer.continuation(*r.args) for r in requests]
        scores = self._scorer.score(windows)
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: list[instance.Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Σ log p over all tokens of each text."""
        del disable_tqdm
        parts = [self._scorer.rolling(*r.args) for r in requests]
        scores = iter(self._scorer.score([w for windows in parts for w in windows]))
        return [sum(next(scores).log_likelihood for _ in windows) for windows in parts]

    def generate_until(
        self, requests: list[instance.Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """The answer to each prompt, cut before the first of its stop texts."""
        del disable_tqdm
        prompts = [r.args[0] for r in requests]
        return self._scorer.generate(prompts, [_stop(r.args[1]) for r in requests])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the tokenizer's own template writes it."""
        template = chat.load("auto", self._scorer.tokenizer)
        # A begun answer is part of the prompt: its end token is not written yet.
        if add_generation_prompt:
            return template.text(chat_history, add_generation_prompt=True)
        text = template.text(chat_history).rstrip("\n")
        return text.removesuffix(template.eos_token)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Source of the template, for the harness's report."""
        return chat.load("auto", self._scorer.tokenizer).source if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        return self._name


def _stop(settings: dict[str, Any]) -> scoring.Stop:
    """The harness's `generation_kwargs`."""
    until: str | Sequence[str] = settings.get("until") or ()
    texts = (until,) if isinstance(until, str) else tuple(until)
    count = settings.get("max_gen_toks", settings.get("max_new_tokens"))
    # Greedy decoding is asked for in either way.
    draws = settings.get("do_sample", float(settings.get("temperature", 0) or 0) > 0)
    temperature = float(settings.get("temperature", 1.0)) if draws else 0.0
    return scoring.Stop(int(count or _MAX_NEW_TOKENS), texts, temperature)
