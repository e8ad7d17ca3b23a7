"""How many clusters? Inertia and silhouette over a range of K, as table and plot.

    python -m experiments.choose_k runs/a [--clusters 2,4,8,16,32,64] [--sample 4096]

Reads the gradient features of a run folder (`--config.stages=features` makes them
alone) and writes `choose_k.html` and `choose_k.json` into it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import jax
from bokeh import models, plotting
from etils import epath

from clusterjax import clustering, errors, files
from experiments import artifacts
from experiments.report import page as page_lib
from experiments.report import plots, style

HEADS = ("K", "inertia per row", "silhouette", "smallest cluster", "largest cluster")
_NOTE = (
    "Inertia falls with every K: look for the K after which it falls slowly, and for a"
    " high silhouette. A cluster smaller than 1 / K of the data by far limits what"
    " quota=min keeps."
)


def table(choices: Sequence[clustering.KChoice]) -> list[tuple[str, ...]]:
    """One row of texts for every K."""
    return [
        (
            str(choice.num_clusters),
            f"{choice.inertia:.4f}",
            f"{choice.silhouette:+.3f}",
            style.percent(choice.smallest),
            style.percent(choice.largest),
        )
        for choice in choices
    ]


def write(choices: Sequence[clustering.KChoice], path: epath.Path) -> None:
    """Writes table and plot as one self-contained HTML file."""
    page = page_lib.Page()
    body = page.figure("choose_k", _plot(choices))
    body += style.table(HEADS, table(choices), numeric=range(len(HEADS)))
    page.add("choose_k", "Number of clusters", _NOTE, body)
    title = "Number of clusters"
    header = f'<header><div><div class="top"><h1>{title}</h1></div></div></header>'
    files.write_text(path, page.render(header, title, ""))


def _plot(choices: Sequence[clustering.KChoice]) -> models.LayoutDOM:
    clusters = [choice.num_clusters for choice in choices]
    panels = []
    for label, values in (
        ("Inertia per row", [choice.inertia for choice in choices]),
        ("Mean silhouette", [choice.silhouette for choice in choices]),
    ):
        plot = plotting.figure(
            height=300,
            sizing_mode="stretch_width",
            tools="reset,save",
            x_axis_type="log",
            x_axis_label="K",
            y_axis_label=label,
        )
        plots.dress(plot)
        plot.xaxis.ticker = models.FixedTicker(ticks=clusters)
        color = style.color(len(panels))
        plot.line(clusters, values, line_width=2, color=color)
        plot.scatter(clusters, values, size=9, color=color)
        panels.append(plot)
    return models.Row(*panels, sizing_mode="stretch_width")


def choose(
    folder: epath.PathLike, clusters: Sequence[int], sample: int, seed: int
) -> list[clustering.KChoice]:
    """Clusters a sample of a run's features for every K, and writes the results.

    Raises:
      errors.WorkdirError: the run folder holds no features.
    """
    folder = epath.Path(folder)
    if not (folder / "features" / "features.npz").exists():
        raise errors.WorkdirError(
            f"{folder} holds no features; make them by experiments.run --workdir"
            f" {folder} --config.stages=features"
        )
    values_ND = artifacts.load_features(folder / "features").values
    choices = clustering.choose_k(
        values_ND, clusters, key=jax.random.key(seed), sample=sample
    )
    found = [dataclasses.asdict(choice) for choice in choices]
    files.write_json(folder / "choose_k.json", found)
    write(choices, folder / "choose_k.html")
    return choices


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdir", help="run folder with features")
    parser.add_argument("--clusters", default="2,4,8,16,32,64", help="values of K")
    parser.add_argument("--sample", type=int, default=4096, help="rows looked at")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        clusters = [int(text) for text in options.clusters.split(",")]
        choices = choose(options.workdir, clusters, options.sample, options.seed)
    except (errors.UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in (HEADS, *table(choices)):
        print("  ".join(f"{text:>16}" for text in row))
    print(f"Written: {options.workdir}/choose_k.html, choose_k.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
