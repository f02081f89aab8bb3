"""`autopar profile`: a plan as it runs on local ranks, against what was predicted."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path

from autopar.cli.calibrating import check_output, write_cluster
from autopar.cli.console import progress, show, writable, write_json
from autopar.cli.rebuild import Rebuilt, rebuild
from autopar.cli.running import placed
from autopar.cluster import Cluster
from autopar.codegen.tables import Names
from autopar.plan import write_atomic
from autopar.problem.read_graph import read
from autopar.profile import Case, Profile, profile, refit
from autopar.profile.refit import check
from autopar.report.profile import profile as report
from autopar.runtime.scratch import Scratch


def profile_command(
    where: Path, steps: int, trace: Path | None, output: Path | None, rows: int, json: str | None
) -> None:
    """Run, compare, print, and write what was asked for. Raises PlanError where the trace cannot be written,
    ClusterError where the cluster cannot."""
    writable("--trace", trace, "the trace", folders=False, stdout=False)
    if output is not None:
        check_output(output)
    with progress(f"profiling {where}") as tell, Scratch() as beside:
        rebuilt = rebuild(where, tell, weights=True)
        planned = Cluster.from_dict(dict(rebuilt.plan.cluster))
        rebuilt = dataclasses.replace(rebuilt, plan=placed(rebuilt.plan))
        if output is not None:
            check(planned, rebuilt.plan.device_kind)
        captured, traced = rebuilt.captured, str(Path(beside) / "trace.json") if trace is not None else ""
        case = Case(captured.gm, rebuilt.plan, Names.of(captured), captured.constants, rebuilt.weights, rebuilt.batch)
        found = profile(case, steps, trace=traced, progress=tell)
        if trace is not None:
            write_atomic(trace, Path(traced).read_text(encoding="utf-8"))
    ratios = _refitted(rebuilt, found, output) if output is not None else {}
    if not write_json(json, {**found.to_dict(), **({"refit": ratios} if ratios else {})}):
        show(report(found, rows))
        show(
            *(
                [f"measured on {rebuilt.plan.device_kind} ranks, which are not what was planned for"]
                if rebuilt.plan.device_kind != planned.device.kind
                else []
            ),
            *(
                [
                    "",
                    f"refitted cluster written to {output}: "
                    f"{', '.join(f'{group} x {ratio:.2f}' for group, ratio in ratios.items())}",
                ]
                if ratios
                else []
            ),
            *(["", f"trace written to {trace}: open it at https://ui.perfetto.dev"] if trace is not None else []),
        )


def _refitted(rebuilt: Rebuilt, found: Profile, output: Path) -> Mapping[str, float]:
    plan = rebuilt.plan
    program = read(rebuilt.captured.gm, plan.hints, training=plan.mode == "train")
    cluster, ratios = refit(
        Cluster.from_dict(dict(plan.cluster)), plan, program, found, datetime.date.today().isoformat()
    )
    write_cluster(cluster, output, "profile")
    return ratios
