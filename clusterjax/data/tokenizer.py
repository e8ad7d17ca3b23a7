"""A tokenizer in Hugging Face form: tokenizer.json, settings and chat template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from etils import epath

from clusterjax import errors, files

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """`tokenizers.Tokenizer` with the facts that training needs beside it.

    Attributes:
      backend: the tokenizer as its file describes it.
      settings: content of tokenizer_config.json.
      chat_template: jinja source, or None.
      bos_token, eos_token, pad_token: texts, '' when the tokenizer has none.
      bos_id, eos_id: ids, None when the tokenizer has none.
      pad_id: id that fills rows; the end token's or 0 when the tokenizer has none.
        Padding is masked by position, so the value never matters.
      vocab_size: number of ids (largest id + 1), added tokens included.
      added_ids: ids of the added tokens, which text never contains by chance.
      adds_bos: whether the tokenizer itself puts the begin token before a text.
      fingerprint: hash of all the above.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ):
        """Wraps `backend`; `settings` takes the form of tokenizer_config.json."""
        self.settings = dict(settings or {})
        self.chat_template = chat_template or _default_template(self.settings)
        self._text = backend.to_str()
        self.backend = backend
        # Files often keep the truncation and padding of their last use: examples
        # would be cut without a word.
        backend.no_truncation()
        backend.no_padding()
        # The post-processor adds tokens and trims blanks from the offsets, after
        # which a token that begins inside the prompt looks as if it did not.
        self._encoder = tokenizers.Tokenizer.from_str(backend.to_str())
        self._encoder.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
        self.bos_token, self.eos_token, self.pad_token = (
            _token_text(self.settings.get(name)) for name in _SPECIAL[:3]
        )
        self.bos_id = self._id("bos_token", self.bos_token)
        self.eos_id = self._id("eos_token", self.eos_token)
        pad = self._id("pad_token", self.pad_token)
        self.pad_id = next(i for i in (pad, self.eos_id, 0) if i is not None)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.added_ids = frozenset(backend.get_added_tokens_decoder())
        prefix = backend.encode("", add_special_tokens=True).ids[:1]
        self.adds_bos = self.bos_id is not None and (
            prefix == [self.bos_id] or self.settings.get("add_bos_token") is True
        )
        facts = [self.bos_id, self.eos_id, self.pad_id, self.adds_bos]
        self.fingerprint = files.hash_arrays(
            self._text, self.chat_template or "", json.dumps(facts)
        )

    @classmethod
    def load(cls, directory: epath.PathLike) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja.

        Args:
          directory: Hugging Face directory; only tokenizer.json must be there.

        Raises:
          errors.DataError: a file is missing or is not what its name says.
        """
        directory = epath.Path(directory)
        path = directory / "tokenizer.json"
        if not path.exists():
            raise errors.DataError(
                f"{path} does not exist: a model directory needs a tokenizer.json (the"
                " older tokenizer.model alone is not read; load it with transformers'"
                " AutoTokenizer and save_pretrained, which writes it)"
            )
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text())
        except Exception as error:  # the library raises bare Exception
            raise errors.DataError(f"{path} is not a tokenizer: {error}") from error
        settings = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            settings |= _read_object(directory / name)
        template = directory / "chat_template.jinja"
        text = template.read_text() if template.exists() else None
        return cls(backend, settings, text)

    def save(self, directory: epath.PathLike) -> None:
        """Writes the files that `load` and transformers read."""
        directory = epath.Path(directory)
        settings = dict(self.settings)
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        # One home for the template, so that two copies can't differ.
        settings.pop("chat_template", None)
        if self.chat_template is not None:
            files.write_text(directory / "chat_template.jinja", self.chat_template)
        files.write_text(directory / "tokenizer.json", self._text)
        files.write_json(directory / "tokenizer_config.json", settings)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens only where `text` spells them."""
        return self._encoder.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """Encodings (`ids`, `offsets` in characters) of many texts, on all cores.

        Special tokens appear only where the text spells them, nothing is cut, and the
        offsets are untrimmed: a token that holds a blank begins at the blank.
        """
        return self._encoder.encode_batch(texts, add_special_tokens=False)

    def split_token(self, token_id: int, parts: Sequence[str]) -> list[list[int]]:
        """Ids of each of the `parts` that a token's text is cut into.

        Works on the token's own spelling, so no blank is added at a cut. Empty when
        the model has no spelling for the parts.
        """
        token = self.backend.id_to_token(token_id) or ""
        rest = ["".join(parts[k:]) for k in range(1, len(parts))]
        # One sign of the spelling is a byte in one family of tokenizers, and a
        # character in the other, after a blank that the text may not show.
        ways = [[len(token) - len(text) for text in rest]]
        if len(token) == len("".join(parts).encode()):
            ways.insert(0, [len(token) - len(text.encode()) for text in rest])
        for cuts in ways:
            spelled = itertools.pairwise([0, *cuts, len(token)])
            ids = [
                [piece.id for piece in self.backend.model.tokenize(token[a:b])]
                for a, b in spelled
            ]
            if all(ids) and self._spells(ids, parts):
                return ids
        return []

    def _spells(self, ids: list[list[int]], parts: Sequence[str]) -> bool:
        # A decoder may strip a leading blank, which the text before the cut shows.
        first = self.decode(ids[0])
        if first not in (parts[0], parts[0].lstrip(" ")):
            return False
        ends = range(2, len(ids) + 1)
        return all(
            self.decode(list(itertools.chain(*ids[:k]))) == first + "".join(parts[1:k])
            for k in ends
        )

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special=False) -> str:
        """Text of `ids`; special tokens are written out unless `skip_special`."""
        return self.backend.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special
        )

    def _id(self, name: str, token: str) -> int | None:
        if not token:
            return None
        found = self.backend.token_to_id(token)
        if found is None:
            raise errors.DataError(
                f"tokenizer_config.json names {name}={token!r}, which tokenizer.json"
                " does not have"
            )
        return found


def _token_text(value: Any) -> str:
    """The text of a special token, stored as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _default_template(settings: dict[str, Any]) -> str | None:
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _read_object(path: epath.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise errors.DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise errors.DataError(f"{path} holds {type(value).__name__}, not an object")
    return value
