"""The command `bench`: what autokern is worth on this machine."""

from __future__ import annotations

import typer

from autokern.cli import bench, bench_tables, report, tables
from autokern.cli.console import (
    BUDGET,
    Full,
    Html,
    Json,
    Output,
    Quick,
    app,
    check_output,
    document,
    emit,
    level_of,
    message,
)
from autokern.cli.report import benchmark as page
from autokern.core.errors import AutokernError, SettingsError
from autokern.hooks import calibrate as measuring
from autokern.runtime import api, dispatch


@app.command("bench")
def benchmark(
    quick: Quick = False, full: Full = False, output: Output = None, html: Html = None, json: Json = False
) -> None:
    """Measure what autokern is worth on this machine."""
    level = level_of(quick, full)
    check_output(output)
    if html is not None:
        report.check(html, "--html")
    if not dispatch.session().settings.enabled:
        raise SettingsError("AUTOKERN=0 leaves nothing to compare with stock; unset it")
    if not api.profile().trials:
        message("nothing was measured here yet: measuring first, for 20 s")
        measuring.calibrate(budget=BUDGET["quick"])
    found = bench.everything(level == "full", (lambda part: None) if json else bench_tables.show)
    if output is not None:
        try:
            output.write_bytes(document(found) + b"\n")
        except OSError as error:
            raise AutokernError(f"asked to write {output}; found: {error.strerror}. Name another file") from None
    if html is not None:
        report.write(html, page.of_benchmark(found))
    if json:
        emit(found)
    wrong = sum(not cell.agrees for cell in found.kernel_matrices)
    if wrong:
        message(f"{tables.counted(wrong, 'result')} of kernel_matrix differ from stock: see the table")
    raise typer.Exit(1 if wrong else 0)
