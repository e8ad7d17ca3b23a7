"""What the hosts of a run must agree on, compared before they compute together."""

from __future__ import annotations

import hashlib

import jax
from etils import epath

import clusterjax
from clusterjax import config as config_lib
from clusterjax import datatypes, distributed
from clusterjax.models import checkpoints

_TAIL_BYTES = 2**20


def require_same_config(config: config_lib.Config) -> None:
    """Compares settings and versions.

    Raises:
      errors.DataError: names what differs, and on which processes.
    """
    distributed.require_equal(
        {
            "config": config_lib.fingerprint(config),
            "clusterjax": clusterjax.__version__,
            "jax": jax.__version__,
        }
    )


def require_same_inputs(
    config: config_lib.Config,
    corpus: datatypes.Corpus,
    eval_corpus: datatypes.Corpus | None,
) -> None:
    """Compares the corpora, and the files of the model.

    Raises:
      errors.DataError: names what differs, and on which processes.
    """
    if jax.process_count() == 1:
        return
    distributed.require_equal(
        {
            "corpus": corpus.fingerprint,
            "held-out corpus": eval_corpus.fingerprint if eval_corpus else "",
            "model": model_digest(checkpoints.directory_of(config.model.path)),
        }
    )


def model_digest(folder: epath.PathLike) -> str:
    """Hash of a model directory: names, sizes, and the last megabyte of every file.

    Reading all weights on every host would take longer than it is worth: weights that
    were trained further differ everywhere.
    """
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(epath.Path(folder).iterdir()):
        if not path.is_dir():
            size = path.stat().length
            digest.update(f"{path.name}:{size};".encode())
            with path.open("rb") as file:
                file.seek(max(size - _TAIL_BYTES, 0))
                digest.update(file.read())
    return digest.hexdigest()
