"""A picture of a parity report."""

from __future__ import annotations

from pathlib import Path

from brainpatch.errors import BackendNotAvailable
from brainpatch.verify.parity import AGREES, Report

_FLOOR = 1e-12


def save(report: Report, path: Path) -> None:
    """Write a chart: for each case and engine how far the cosine is from 1, on a logarithmic axis.

    The suffix says the kind of picture (png, svg, pdf). Errors: BackendNotAvailable (BP501) without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BackendNotAvailable(
            "BP501", "a plot needs matplotlib", "pip install 'brainpatch[plots]'"
        ) from None
    cases = list(dict.fromkeys(row.case for row in report.rows))
    engines = list(dict.fromkeys(row.engine for row in report.rows))
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(cases)), layout="constrained")
    axes = figure.add_subplot()
    for number, engine in enumerate(engines):
        found = {row.case: max(1 - row.cosine, _FLOOR) for row in report.rows if row.engine == engine}
        height = 0.8 / len(engines)
        places = [at + (number - (len(engines) - 1) / 2) * height for at in range(len(cases))]
        axes.barh(places, [found[case] for case in cases], height, left=_FLOOR, label=engine)
    axes.axvline(1 - AGREES, color="black", linestyle="--", label=f"least cosine {AGREES}")
    axes.set(xscale="log", xlabel=f"1 - cosine of log-probabilities with {report.reference}")
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path)
