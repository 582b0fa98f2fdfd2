"""Results of a run: its folder, metrics, curve, findings and model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from relay.progress import is_notebook
from relay.push import find_model
from rl.observability.metrics import make_learning_curve, read_metrics
from rl.observability.run_folder import REPORT

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from rl.reporting.data import RunData
    from rl.reporting.evidence import Finding


class RunResult:
    """A run that has ended, or goes on: everything is read from its folder when it is asked for.

    Example:
        >>> run = relay.load("outputs/try-1")
        >>> run.metrics[["step", "reward/mean"]].tail(1)
        >>> run.model
        PosixPath('outputs/try-1/checkpoints/hf')
    """

    def __init__(self, folder: Path, *, config: Any = None) -> None:
        self.folder = folder
        self.config = config
        """Config that the run was started with; None for a folder that was loaded."""

    @property
    def metrics(self) -> DataFrame:
        """A row for each step, a column for each metric (docs/metrics.md)."""
        return self._make_table(of_evaluations=False)

    @property
    def evaluations(self) -> DataFrame:
        """A row for each evaluation."""
        return self._make_table(of_evaluations=True)

    def _make_table(self, *, of_evaluations: bool) -> DataFrame:
        from pandas import DataFrame

        records = read_metrics(self.folder / "metrics.jsonl")
        rows = [record for record in records if ("eval/correct" in record) == of_evaluations]
        return DataFrame(rows)

    @property
    def model(self) -> Path | None:
        """Hugging Face folder of the trained model; None if the run has written none."""
        return self._find_model(is_adapter=False)

    @property
    def adapter(self) -> Path | None:
        """PEFT folder of the trained adapter; None for a run without LoRA."""
        return self._find_model(is_adapter=True)

    def _find_model(self, *, is_adapter: bool) -> Path | None:
        try:
            return find_model(self.folder, is_adapter=is_adapter)
        except ValueError:
            return None

    @property
    def data(self) -> RunData:
        """Everything that the folder holds now: rollouts, events, spans (`rl.reporting.data`)."""
        from rl.reporting.data import read_run

        return read_run(self.folder)

    @property
    def findings(self) -> list[Finding]:
        """What looks wrong in the run (docs/troubleshooting.md)."""
        from rl.reporting.findings import find

        return find(self.data)

    def figure(self) -> Figure:
        """Return the learning curve as a figure of matplotlib."""
        return make_learning_curve(read_metrics(self.folder / "metrics.jsonl"))

    def plot(self) -> None:
        """Show the learning curve: in a notebook as a picture, elsewhere as a file."""
        path = self.folder / "learning_curve.png"
        # Drawn again: of a run that goes on the file is missing or old.
        self.figure().savefig(path, format="png")
        if is_notebook():
            from IPython.display import Image, display

            display(Image(filename=str(path), width=640))
        else:
            print(f"learning curve: {path}")

    def report(self) -> Path:
        """Write the report of the run and return its file."""
        import time

        from rl.reporting.html.page import write_report

        file = self.folder / REPORT
        write_report({self.folder.name: self.folder}, file, written_s=time.time())
        return file

    def show(self) -> None:
        """Show the curve at the end of a run in a notebook; elsewhere the run has said it all."""
        if is_notebook():
            self.plot()

    def __repr__(self) -> str:
        records = read_metrics(self.folder / "metrics.jsonl")
        num_steps = max((int(record["step"]) for record in records), default=0)
        return f"RunResult({str(self.folder)!r}, {num_steps} steps)"


def load(folder: str | Path) -> RunResult:
    """Return the results of a run's folder; raises ValueError for another folder."""
    path = Path(folder).expanduser().absolute()
    result = RunResult(path)
    _ = result.data  # refuses a folder that is not a run's
    return result
