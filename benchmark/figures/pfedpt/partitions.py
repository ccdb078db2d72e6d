"""Fig. 8: who holds how many images of each class."""

from benchmark.drawing import new_figure
from benchmark.figures.pfedpt.sources import Drawing, Sources
from benchmark.run.reload import data_of_run
from datamodules.heatmap import draw_counts


def partitions_figure(sources: Sources) -> Drawing:
    """Fig. 8: who holds how many images of each class, for every setting of the paper and both readings of it."""
    import pandas as pd

    given = sources.partitions
    figure = new_figure(12.5, 3.3 * -(-len(given) // 2))
    grid = figure.subplots(-(-len(given) // 2), 2, squeeze=False).ravel()
    parts, said = [], []
    for axes, (label, arguments) in zip(grid, given.items(), strict=False):
        data = data_of_run(arguments)
        counts = data.class_counts.numpy()
        draw_counts(axes, counts, data.class_names)
        axes.set_title(label, fontsize=11)
        index = pd.MultiIndex.from_product(
            [[label], range(len(counts)), data.class_names], names=["partition", "client", "class"]
        )
        parts.append(pd.Series(counts.ravel(), index=index, name="training_images").reset_index())
        sizes = counts.sum(axis=1)
        said.append(f"{label} {sizes.min():,} to {sizes.max():,}")
    for axes in grid[len(given) :]:
        axes.set_visible(False)
    return Drawing(
        figure,
        pd.concat(parts, ignore_index=True),
        "Fig. 8 of pFedPT: training images of each class (rows) at each client (columns), for each setting in two "
        f"readings; white: none. {type(data.source).__name__}. Training images of a client: {'; '.join(said)}.",
    )
