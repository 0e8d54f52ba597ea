"""`brainpatch doctor --parity`: do the engines that are installed here agree?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from brainpatch.cli.output import engine_prints_to_stderr, note, say, say_json, table


def compare_engines(
    model: str,
    gguf: Path | None,
    engines: Sequence[str],
    *,
    prompts: int,
    steps: int,
    plot: Path | None,
    as_json: bool,
) -> bool:
    """Compare, print what was found, and say whether all agree."""
    from brainpatch.verify import parity
    from brainpatch.verify.parity_engines import NAMES, contenders

    unknown = [name for name in engines if name not in NAMES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(NAMES)}", param_hint="--engine")
    chosen, left_out = contenders(model, None if gguf is None else str(gguf), engines)
    if len(chosen) < 2:
        note(*(f"{name}: {why}" for name, why in left_out.items()), "two engines are needed for a comparison")
        raise typer.Exit(3)
    reference = "transformers" if "transformers" in chosen else next(iter(chosen))
    with engine_prints_to_stderr():
        report = parity.compare(
            chosen,
            reference=reference,
            prompts=parity.PROMPTS[:prompts],
            steps=steps,
            progress=note,
        )
    report.skipped = {**left_out, **report.skipped}
    if plot is not None:
        from brainpatch.verify.parity_plot import save

        save(report, plot)
    if as_json:
        say_json(report.to_dict())
        return report.agrees
    say(
        f"against {report.reference}, float32, {report.prompts} prompts of {report.steps} steps; "
        f"all follow the tokens of {report.followed}",
        "",
        *table(
            ("engine", "case", "cosine", "difference", "other token", "effect"),
            [
                (
                    row.engine,
                    row.case,
                    f"{row.cosine:.8f}",
                    f"{row.difference:.1e}",
                    "-" if row.earliest is None else f"{row.differing} prompts, from step {row.earliest}",
                    "-" if row.effect is None else f"{row.effect:.6f}",
                )
                for row in report.rows
            ],
        ),
        "",
        *(f"{name}: left out: {why}" for name, why in report.skipped.items()),
        f"every cosine is at least {parity.AGREES}" if report.agrees else "the engines do not agree",
    )
    return report.agrees
