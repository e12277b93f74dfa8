"""python -m vramfit data PATH [--model FOLDER]: what a data set holds and what the model will see of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vramfit.config import RunConfig
from vramfit.data.read import ReadOptions
from vramfit.data.report import check_dropped, data_report
from vramfit.data.rows import BadRow
from vramfit.errors import ConfigError, Problem
from vramfit.places import cache_folder, default_data_folder, open_data_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `data`."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files or folders")
    parser.add_argument("--model", metavar="FOLDER", help="count tokens and show examples as this model sees them")
    parser.add_argument("--max-length", default="2048", help="tokens per sequence (default 2048)")
    parser.add_argument("--encoding", default="auto", help="text encoding (default: detected)")
    parser.add_argument("--bad-rows", choices=("stop", "skip"), default="skip", help="what to do with unreadable rows")
    parser.add_argument("--most-bad-rows", metavar="N", help="refuse the data when more rows than that are unreadable")
    parser.add_argument(
        "--most-dropped-share",
        metavar="SHARE",
        help="refuse the data when more than this share of the rows, 0 to 1, would be left out of a training",
    )
    parser.add_argument(
        "--documents",
        default="auto",
        metavar="WHERE",
        help='where text files are split: auto, whole, "blank lines", lines, or the mark between documents',
    )
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="PART=COLUMN",
        help="which column is what, such as prompt=question; may be given several times",
    )
    parser.add_argument("--trained-on", choices=("auto", "everything", "assistant", "last"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> None:
    """Print what was found as text or JSON. Raises DataError or ModelError."""
    values: dict[str, Any] = {
        "paths": options.paths,
        "columns": _columns(options.column),
        "encoding": options.encoding,
        "bad_rows": options.bad_rows,
        "most_bad_rows": options.most_bad_rows,
        "documents": options.documents,
        "max_length": options.max_length,
        "trained_on": options.trained_on,
    }
    if options.most_dropped_share is not None:
        values["most_dropped_share"] = options.most_dropped_share
    model = {} if options.model is None else {"model": {"source": options.model}}
    config = RunConfig.parse({"data": values, **model})
    chosen = None if options.model is None else config.model
    report = data_report(config.data, model=chosen, cache=cache_folder(open_data_folder(default_data_folder())))
    if report["bad_row_count"]:
        refused = ReadOptions.of(config.data).refusal(report["bad_row_count"], _first_bad(report))
        if refused is not None:
            raise refused
    if options.most_dropped_share is not None:
        check_dropped(report["dropped"], rows=report["readable_rows"], choice=config.data)
    print(json.dumps(report, ensure_ascii=False, indent=1) if options.json else describe(report))


def _columns(assignments: list[str]) -> dict[str, str]:
    """Part to column. Raises ConfigError."""
    columns = {}
    for assignment in assignments:
        part, sign, column = assignment.partition("=")
        if not sign or not part or not column:
            what = f"--column {assignment[:60]} does not say which part a column is"
            raise ConfigError([Problem(field="", what=what, remedy="Write it as --column prompt=question.")])
        columns[part] = column
    return columns


def _first_bad(report: dict[str, Any]) -> BadRow:
    row = report["bad_rows"][0]
    return BadRow(Path(row["file"]), row["line"], row["column"], row["reason"])


def describe(report: dict[str, Any]) -> str:
    """The report in a few lines of text."""
    lines = [
        f"{report['format']}, {report['encoding']}, {report['shape']}: {report['rows']} rows, "
        f"{report['duplicates']} duplicates"
    ]
    for row in report["bad_rows"][:20]:
        column = f", column {row['column']}" if row["column"] else ""
        lines.append(f"bad row: {row['file']}, line {row['line']}{column}: {row['reason']}")
    tokens = report.get("tokens")
    if tokens:
        lines.append(
            f"tokens a row: {tokens['min']} to {tokens['max']}, median {tokens['median']}, 90 % under {tokens['p90']}; "
            f"{report['trained_tokens']} trained tokens, {report['truncated_share']:.1%} of the rows are cut"
        )
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    return "\n".join(lines)
