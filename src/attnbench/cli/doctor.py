"""`attnbench doctor`."""

from __future__ import annotations

from attnbench.cli.options import Json
from attnbench.cli.output import print_json, stderr_console, stdout_console


def doctor(*, json: Json = False) -> int:
    """Show the device, the libraries really loaded, and for every implementation whether it runs here, or why not."""
    from attnbench.report.environment import print_diagnosis
    from attnbench.report.progress import Silent
    from attnbench.run import launch as launcher

    diagnosis = launcher.diagnose(Silent(stderr_console()))
    if json:
        print_json(diagnosis)
    else:
        print_diagnosis(stdout_console(), diagnosis)
    return 0 if any(state.reason is None for state in diagnosis.implementations) else 3
