"""The notes under a table: how its numbers were read, and where its runs took place."""

from collections.abc import Sequence

from benchmark.metrics import in_per_cent, listed_within
from benchmark.records.environment import threads_of
from benchmark.records.record import RunRecord
from benchmark.records.source_code import different_files
from benchmark.records.summary import clock_of
from benchmark.tables.layout import Preset, Table
from benchmark.tables.lines import SUMMARY_NOTES, Line, summaries

POINT_NOTES = {
    "server": "what the server holds after the round, with the client's own state",
    "local": "the client's state at the end of its local training, before aggregation",
}
PAIRED_NOTE = (
    "Paired: client by client and seed by seed on the same partition, method minus baseline; a t-interval whose "
    "variance is that over clients plus, with several seeds, that over seeds (quantile after Cochran and Cox)."
)


def code_notes(lines: Sequence[Line]) -> list[str]:
    """Name the rows whose seeds were made by different code, and the files that differ; empty if there are none."""
    rows: dict[str, list[str]] = {}  # by seeds and files
    for line in lines:
        groups = line.seeds_by_code
        if len(groups) > 1:
            codes = [line.records[seeds[0]].code for seeds in groups]
            files = different_files(code for code in codes if code is not None)
            files += ["older records, which do not know their code"] if None in codes else []
            seeds = " / ".join(", ".join(map(str, group)) for group in groups)
            rows.setdefault(f"(seeds {seeds}: {', '.join(files)})", []).append(line.name)
    if not rows:
        return []
    which = "; ".join(f"{'; '.join(dict.fromkeys(names))} {said}" for said, names in rows.items())
    said = f"Rows whose seeds were made by different code, and whose mean is hence of no one method: {which}."
    return [f"{said} benchmark table --rerun-changed makes them by the present code."]


def footnotes(table: Table, preset: Preset, lines: Sequence[Line], paired: bool) -> list[str]:
    unit = ", in per cent" if in_per_cent(table.metric) else ""
    seeds = f"one seed ({preset.seeds[0]}), hence no standard deviation"
    if len(preset.seeds) > 1:
        seeds = f"mean ± standard deviation over seeds {', '.join(map(str, preset.seeds))}"
    metric = table.metric.replace("_", " ").capitalize()
    notes = code_notes(lines)
    notes += [f"{metric} on the {table.split} split{unit}, of {SUMMARY_NOTES[table.summary]}; {seeds}."]
    for point in dict.fromkeys(line.point for line in lines):
        named = dict.fromkeys(line.name for line in lines if line.point == point)
        notes.append(f"Read at the point '{point}' ({POINT_NOTES[point]}): {'; '.join(named)}.")
    trained = dict.fromkeys(
        f"{line.name}: {count} of {len(record.client_names)}"
        for line in lines
        for record in line.records.values()
        if line.point == "local"
        and (count := summaries(record, "local", table.split, table.metric)["clients"])
        < summaries(record, "server", table.split, table.metric)["clients"]
    )
    if trained:
        notes.append(f"At the point 'local' are only clients that have trained: {'; '.join(trained)}.")
    servers = dict.fromkeys(
        f"{line.method}: {record.other_server} in place of {record.default_server}"
        for line in lines
        for record in line.records.values()
        if record.other_server
    )
    if servers:
        notes.append(f"Other servers than the methods' own: {'; '.join(servers)}.")
    between = dict.fromkeys(
        f"{line.name}: {record.delivery}" for line in lines for record in line.records.values() if record.delivery
    )
    if between:
        notes.append(f"Between clients and server: {'; '.join(between)}.")
    clocks = dict.fromkeys(
        f"{line.name}: {clock[max(clock)]:,.0f}"
        for line in lines
        for record in line.records.values()
        if (clock := clock_of(record))
    )
    if clocks:
        notes.append(f"Seconds of the virtual clock when the last round closed: {'; '.join(clocks)}.")
    early = dict.fromkeys(
        f"{line.name}: {last} of {record.rounds_trained}"
        for line in lines
        for record in line.records.values()
        if (last := summaries(record, line.point, table.split, table.metric)["last"]["round"]) < record.rounds_trained
    )
    if early:
        notes.append(f"The last round is the last evaluated one, which is not the run's last: {'; '.join(early)}.")
    notes.append(
        "Floats up: numbers one participating client sends in a round. MB and kB: 10^6 and 10^3 bytes, per "
        "participating client and round. Peak MB: of the GPU, or of the process on a CPU."
    )
    notes.append(
        f"{listed_within(explained=True)[0].upper()}{listed_within(explained=True)[1:]} are of "
        f"{SUMMARY_NOTES[table.summary]}. The best round is chosen on test data and hence optimistic."
    )
    over = dict.fromkeys(column.gains_over for line in lines for column in line.columns if column.gains_over)
    if over:
        notes.append(
            f"Gains over {' and '.join(over)}: each client's number minus its own in that row's run with the same seed "
            "and partition, turned round where less is better; the statistic is taken within a seed."
        )
    if paired:
        notes.append(PAIRED_NOTE)
    records = list({run.folder: run.record for line in lines for run in line.runs.values()}.values())
    if records:
        hardware = dict.fromkeys(map(_hardware_of, records))
        revisions = dict.fromkeys(
            f"{str(git.get('revision'))[:12]}{' with changes' if git.get('dirty') else ''}"
            for record in records
            if (git := record.environment.get("git", {})).get("revision")
        )
        total = sum(record.seconds["total"] for record in records)
        notes.append(f"Hardware: {'; '.join(hardware)}. {len(records)} runs, {total:.0f} s in all.")
        if revisions:
            notes.append(f"Code: {'; '.join(revisions)}.")
    return notes


def _hardware_of(record: RunRecord) -> str:
    """The device, its machine's cores, and on a CPU how many of them the run computed with, if it says so."""
    machine = record.environment.get("hardware", {})
    return f"{record.device} ({machine.get('cpu', 'unknown')}, {machine.get('cores', '?')} cores{threads_of(record)})"
