"""The report of a W&B project: its runs by data set, setting and method, with curves, costs and options."""

from typing import TYPE_CHECKING, Any

from benchmark.errors import ConfigurationError
from benchmark.run.scores import logged_name

if TYPE_CHECKING:  # an extra
    from wandb_workspaces.reports.v2 import Report

#: What runs are grouped by, so that seeds of one thing are one line with its spread.
GROUPS = ("dataset", "setting", "method", "server")

#: Curves over rounds: title, metric, axis.
CURVES = (
    ("After aggregation", logged_name("server", "test", "accuracy"), "accuracy"),
    ("Right after local training", logged_name("local", "test", "accuracy"), "accuracy"),
    ("Worst client, after aggregation", logged_name("server", "test", "accuracy", "worst"), "accuracy"),
    ("Worst client, right after local training", logged_name("local", "test", "accuracy", "worst"), "accuracy"),
    ("Local training", "train/loss", "loss"),
    ("Sent up in a round", "communication/up_bytes", "bytes"),
    ("Sent down in a round", "communication/down_bytes", "bytes"),
    ("A round's local training", "seconds/training", "seconds"),
)

#: Final scores, of the record's summary.
SCORES = tuple(f"last/test/{point}/accuracy/{of}" for point in ("server", "local") for of in ("average", "worst"))


def project_report(entity: str, project: str) -> "Report":
    """The report, not yet saved.

    Args:
        entity: whose project.
        project: its name.

    Raises:
        ConfigurationError: the library that makes W&B's reports is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as error:
        raise ConfigurationError(
            "W&B's reports need wandb-workspaces: pip install 'federated-prompt-benchmark[wandb]'"
        ) from error
    # Of the report's own project.
    runs = wr.Runset(name="runs", groupby=[f"config.{name}" for name in GROUPS])
    curves: list[Any] = [
        wr.LinePlot(title=title, x="round", y=[metric], title_x="round", title_y=axis, groupby_rangefunc="stddev")
        for title, metric, axis in CURVES
    ]
    scores: list[Any] = [
        wr.BarPlot(
            title=name.removeprefix("last/test/").replace("/accuracy/", ", "),
            metrics=[wr.SummaryMetric(name)],
            groupby_rangefunc="stddev",
        )
        for name in SCORES
    ]
    compared: list[Any] = [
        wr.ScatterPlot(
            title="What a score costs", x=wr.SummaryMetric("communication/up_bytes"), y=wr.SummaryMetric(SCORES[0])
        ),
        wr.MediaBrowser(title="Who holds which classes", media_keys=["partition"]),
        wr.RunComparer(diff_only=True),
    ]
    return wr.Report(
        entity=entity,
        project=project,
        title="Federated prompts by data set, setting and method",
        description="Lines are means over seeds with their standard deviation; test images choose nothing.",
        blocks=[
            wr.H2(text="Rounds"),
            wr.PanelGrid(runsets=[runs], panels=curves),
            wr.H2(text="Final scores"),
            wr.PanelGrid(runsets=[runs], panels=scores),
            wr.H2(text="Costs, partitions, and the options that differ"),
            wr.PanelGrid(runsets=[runs], panels=compared),
        ],
        width="fluid",
    )


def save_report(entity: str, project: str) -> str:
    """Save the report in its project; return its address.

    Raises:
        ConfigurationError: W&B refuses it, or cannot be asked.
    """
    report = project_report(entity, project)
    try:
        report.save()
        return str(report.url)
    except Exception as error:  # of W&B, of the requests it makes, of its answers
        said = " ".join(str(error).split())[:300]
        raise ConfigurationError(
            f"the report was not saved ({said}); log in with `wandb login`, and try again"
        ) from error
