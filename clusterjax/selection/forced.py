"""Ids that must or must never be kept, and minima per source (METHOD §3).

Guarantees of `fill`:
  - every must-keep id is kept, no never-keep id is;
  - every cluster keeps exactly its quota;
  - every source keeps at least its minimum, whenever any choice can do that;
  - inside one (source, cluster) cell the kept ones are the best by rank.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from clusterjax import config, errors
from clusterjax import plan as plans
from clusterjax.selection import candidates


@dataclasses.dataclass(frozen=True)
class Forced:
    """bool [n] masks of the ids that must be kept and must never be kept."""

    must: np.ndarray
    never: np.ndarray


def resolve(rows: candidates.Candidates, cfg: config.SelectionConfig) -> Forced:
    """Finds the uids of the config among the candidates.

    Raises:
      errors.PlanError: a uid that is not a candidate, or stands in both lists.
    """
    both = set(cfg.must_keep) & set(cfg.never_keep)
    if both:
        raise errors.PlanError(
            f"uid {min(both)!r} stands in selection.must_keep and in never_keep"
        )
    return Forced(
        _mask(rows, cfg.must_keep, "must_keep"),
        _mask(rows, cfg.never_keep, "never_keep"),
    )


def _mask(rows: candidates.Candidates, uids: tuple[str, ...], name: str) -> np.ndarray:
    if not uids:
        return np.zeros(len(rows), bool)
    mask_n = np.isin(rows.uid, np.array(uids))
    if mask_n.sum() < len(set(uids)):
        missing = sorted(set(uids) - set(rows.uid[mask_n].tolist()))
        raise errors.PlanError(
            f"selection.{name} names {len(missing)} uid(s) that are no candidates, e.g."
            f" {missing[0]!r}; see the uids in data/ and the rejects with their reasons"
        )
    return mask_n


def fill(
    rows: candidates.Candidates,
    cfg: config.SelectionConfig,
    forced_n: Forced,
    rank_n: np.ndarray,
    quota_K: np.ndarray,
) -> np.ndarray:
    """Keeps the first q_c of each cluster by rank, moved only as far as minima need.

    Args:
      rank_n: int [n], rank inside the own cluster; must-keep ids rank first.
      quota_K: int [K].

    Returns:
      int8 [n], `plan.KEPT_BY_NAMES` index of each candidate.
    """
    kept_n = rank_n < quota_K[rows.cluster_id]
    kept_by_n = np.where(kept_n, plans.RULE, plans.PRUNED).astype(np.int8)
    if cfg.min_per_source:
        chosen_n = _meet_minima(rows, cfg, forced_n, rank_n, kept_n)
        kept_by_n[~chosen_n] = plans.PRUNED
        kept_by_n[chosen_n & ~kept_n] = plans.SOURCE_MINIMUM
        kept_n = chosen_n
    kept_by_n[forced_n.must & kept_n] = plans.MUST_KEEP
    return kept_by_n


def _meet_minima(
    rows: candidates.Candidates,
    cfg: config.SelectionConfig,
    forced_n: Forced,
    rank_n: np.ndarray,
    kept_n: np.ndarray,
) -> np.ndarray:
    """Moves kept places between sources, inside clusters, along shortest exchanges."""
    num_sources = int(rows.source_id.max()) + 1
    cell_n = rows.source_id.astype(np.int64) * rows.num_clusters + rows.cluster_id
    shape = (num_sources, rows.num_clusters)

    def table(mask_n: np.ndarray) -> np.ndarray:
        return np.bincount(cell_n[mask_n], minlength=shape[0] * shape[1]).reshape(shape)

    kept, room = table(kept_n), table(~forced_n.never)
    least = table(forced_n.must)
    minimum = np.minimum(cfg.min_per_source, room.sum(1))
    for source in range(num_sources):
        while kept[source].sum() < minimum[source]:
            if not _exchange(kept, room, least, minimum, source):
                name = rows.source_names[source] if rows.source_names else str(source)
                raise errors.PlanError(
                    f"selection.min_per_source={cfg.min_per_source} can't be met for"
                    f" source {name!r} within the clusters' quotas"
                    f" ({int(kept.sum()):,} places); lower it or keep more"
                )
    order = np.lexsort((rank_n, forced_n.never, cell_n))
    start = np.searchsorted(cell_n[order], np.arange(shape[0] * shape[1]))
    position = np.empty(len(rows), np.int64)
    position[order] = np.arange(len(rows)) - start[cell_n[order]]
    return position < kept.ravel()[cell_n]


def _exchange(
    kept: np.ndarray,
    room: np.ndarray,
    least: np.ndarray,
    minimum: np.ndarray,
    source: int,
) -> bool:
    """One more place for `source`: an augmenting path over (source, cluster) cells.

    In cluster c, a source with room takes the place of another one that may give it;
    that one may have to take a place elsewhere in turn, until a source has one to
    spare. Breadth first, so that as few places as possible change hands.
    """
    previous: dict[int, tuple[int, int]] = {}
    queue = collections.deque([source])
    seen = {source}
    while queue:
        taker = queue.popleft()
        for cluster in np.flatnonzero(kept[taker] < room[taker]):
            givers = np.flatnonzero(kept[:, cluster] > least[:, cluster])
            surplus = kept[givers].sum(1) - minimum[givers]
            for giver in givers[np.argsort(-surplus, kind="stable")].tolist():
                if giver in seen:
                    continue
                seen.add(giver)
                previous[giver] = (taker, int(cluster))
                if kept[giver].sum() > minimum[giver]:
                    _apply(kept, previous, giver, source)
                    return True
                queue.append(giver)
    return False


def _apply(
    kept: np.ndarray, previous: dict[int, tuple[int, int]], giver: int, source: int
) -> None:
    while giver != source:
        taker, cluster = previous[giver]
        kept[giver, cluster] -= 1
        kept[taker, cluster] += 1
        giver = taker
